"""`compare` in every precision: nothing is off between the forms of a network, and a fault still is."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from compared_nets import transformer, with_stored

import qsdk
from qsdk import w4a8, w8a8, w8a16

SLOW = pytest.mark.slow
FLOAT8 = w8a8().override("*", activation="float8e4m3fn", weight="float8e4m3fn")
CONFIGS = {
    "4 bits": w4a8(),
    "blocks": w4a8(block_size=16),
    "16 bits": w8a16(),
    "float8": FLOAT8,
    "islands": w8a8().skip("norm*", dtype=qsdk.float16),
    "half of it float": w8a8().skip("0.*"),
    "weights alone": qsdk.weight_only("int4"),
}


@pytest.mark.slow
@pytest.mark.parametrize("config", [name if name == "4 bits" else pytest.param(name, marks=SLOW) for name in CONFIGS])
def test_nothing_is_off_between_module_sim_and_file(config: str, tmp_path: Path) -> None:
    module, x = transformer()
    sim = qsdk.quantize(module, x, CONFIGS[config])
    qsdk.calibrate(sim, [x], progress=False)
    path = str(tmp_path / "model.onnx")
    qsdk.export(sim, path)
    for a, b in ((module, sim), (sim, path), (path, module)):
        report = qsdk.compare(a, b, [x], progress=False)
        assert report.summary["first_off"] is None, report.summary["why"]
        assert report.summary["matched"] >= 13
    bias = next(tensor.name for tensor in onnx.load(path).graph.initializer if tensor.name.startswith("1.down.bias"))
    faulty = with_stored(onnx.load(path), bias, np.zeros_like)
    assert qsdk.compare(sim, faulty, [x], progress=False).summary["first_off"] == "1.down:output"


@SLOW
def test_half_precision(tmp_path: Path) -> None:
    module, x = transformer()
    half, x16 = transformer()[0].half(), x.half()
    sim = qsdk.quantize(half, x16)
    qsdk.calibrate(sim, [x16], progress=False)
    path = str(tmp_path / "model.onnx")
    qsdk.export(sim, path)

    def call(model: Any, batch: torch.Tensor) -> Any:
        return model(batch.to(next(model.parameters()).dtype))

    assert qsdk.compare(half, sim, [x16], progress=False).summary["first_off"] is None
    assert qsdk.compare(sim, path, [x16], progress=False).summary["first_off"] is None
    assert qsdk.compare(module, half, [x], forward=call, progress=False).summary["first_off"] is None
    with torch.no_grad():
        half[1].norm1.bias.add_(0.1)
    assert qsdk.compare(module, half, [x], forward=call, progress=False).summary["first_off"] == "1.norm1"


@SLOW
def test_sims_that_were_calibrated_apart_are_not_judged_by_their_grids() -> None:
    module, x = transformer()
    first, second = (qsdk.quantize(module, x) for _ in range(2))
    qsdk.calibrate(first, [x], progress=False)
    qsdk.calibrate(second, [x * 1.01], progress=False)
    report = qsdk.compare(first, second, [x], progress=False)
    assert not (report.summary["why"] or "").startswith("its grid differs")
    changed = qsdk.quantize(module, x)
    qsdk.calibrate(changed, [x], progress=False)
    encoding = changed.encodings["1.act:output"]
    coarser = qsdk.Encoding(encoding.dtype, encoding.scale * 1.25, encoding.zero_point)
    changed.quantizers["1.act:output"].set_encoding(coarser)
    report = qsdk.compare(first, changed, [x], progress=False)
    assert report.summary["first_off"] == "1.act:output"
    assert report.summary["why"].startswith("its grid differs: uint8 of scale ")
