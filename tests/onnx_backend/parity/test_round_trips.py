"""Export, open, export: the same bytes; save, load: the same sim. On random networks, configs, dialects and opsets."""

import json
import random
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from foreign_models import integers
from qdq_models import convnet, mlp
from quiet import quiet  # noqa: F401  # a fixture
from random_networks import random_network
from torch import nn

from onnx_backend.runtime.session import simulation_session
from qsdk import QuantConfig, calibrate, export, load, quantize, save, w4a8, w4a16, w8a8, w8a16

QUICK, SLOW = range(1), range(1, 40)
CONFIGS = {
    "w8a8": w8a8(),
    "w4a8": w4a8(),
    "w8a16": w8a16(),
    "w4a16 in blocks": w4a16(block_size=2),
    "signed": w8a8(symmetric_activations=True),
    "strict": w8a8().override("*", weight="int8_strict"),
    "narrow": w8a8().override("*", weight="int3", activation="uint5"),
    "float8": w8a8().override("*", weight="float8e4m3fn", activation="float8e4m3fn"),
    "an island": w8a8().skip("*", dtype="float16", op_type="Gemm", optional=True).skip("mm2", "float16", optional=True),
}
FORMS = [("onnxruntime", 21), ("onnxruntime", 23), ("onnx", 21), ("onnx", 25)]


def require_stable(sim, folder: Path, dialect="onnxruntime", opset=21) -> Path:
    """Export, open and export again, twice over: no byte differs, of the model and of its encodings file."""
    export(sim, folder / "first.onnx", dialect=dialect, opset=opset)
    wanted = (folder / "first.onnx").read_bytes(), (folder / "first.encodings.json").read_bytes()
    source = folder / "first.onnx"
    for name in ("second", "third"):
        opened = quantize(source, None, None)
        assert opened.encodings == {site: sim.encodings[site] for site in opened.encodings}
        assert set(opened.encodings) == set(sim.encodings)
        source = folder / f"{name}.onnx"
        export(opened, source, dialect=dialect, opset=opset)
        different = _different(folder / "first.onnx", source)
        assert not different, different
        assert (source.read_bytes(), source.with_suffix(".encodings.json").read_bytes()) == wanted
    return folder / "first.onnx"


def _different(left: Path, right: Path) -> list[str]:
    """The fields of two models that differ, for the message."""
    one, other = onnx.load(left), onnx.load(right)
    found = [entry.key for entry, twin in zip(one.metadata_props, other.metadata_props, strict=True) if entry != twin]
    for kind in ("node", "initializer", "input", "output", "value_info"):
        pairs = zip(getattr(one.graph, kind), getattr(other.graph, kind), strict=False)
        found += [f"{kind} {item.name} | {twin.name}" for item, twin in pairs if item != twin]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "opset"), FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_an_exported_file_opens_and_exports_to_the_same_bytes(name, dialect, opset, tmp_path):
    rng = np.random.default_rng(0)
    for model, shape in ((mlp(), (4, 6)), (convnet(), (2, 3, 8, 8))):
        sim = quantize(model, None, CONFIGS[name])
        calibrate(sim, [rng.normal(size=shape).astype(np.float32)], progress=False)
        require_stable(sim, tmp_path, dialect, opset)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in SLOW)])
def test_a_random_network_exports_to_the_same_bytes_from_both_doors(seed, tmp_path):
    rng = random.Random(seed)
    config: QuantConfig = rng.choice(list(CONFIGS.values())[:5])
    net, example = random_network(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns about itself
        sim = quantize(net, example, config.layer("Own", "own"))
        calibrate(sim, [example], progress=False)
        dialect, opset = rng.choice(FORMS)
        first = require_stable(sim, tmp_path, dialect, opset)
    opened = quantize(first, None, None)
    save(opened, tmp_path / "sim.qsdk")
    again = load(tmp_path / "sim.qsdk")
    assert again.encodings == opened.encodings
    export(again, tmp_path / "saved.onnx", dialect=dialect, opset=opset)
    assert (tmp_path / "saved.onnx").read_bytes() == first.read_bytes()


def without_zeros(found):
    """Codes or scale of each site, and its zero point unless that is 0, which not every dialect writes."""
    return {site: [value for value in values[:2] if value[1] != 0] for site, values in found.items()}


@pytest.mark.slow
def test_a_change_of_dialect_or_opset_and_back_leaves_the_integers(tmp_path):
    sim = quantize(convnet(), None, w8a8())
    calibrate(sim, [np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)], progress=False)
    export(sim, tmp_path / "0.onnx")
    first = integers(onnx.load(tmp_path / "0.onnx"))
    for step, (dialect, opset) in enumerate([*FORMS[1:], ("onnxruntime", 21)], 1):
        export(
            quantize(tmp_path / f"{step - 1}.onnx", None, None), tmp_path / f"{step}.onnx", dialect=dialect, opset=opset
        )
        found = integers(onnx.load(tmp_path / f"{step}.onnx"))
        assert without_zeros(found) == without_zeros(first)
    assert found == first


def test_an_opened_file_keeps_saying_what_it_was_made_of(tmp_path):
    sim = quantize(mlp(), None, w4a8())
    batch = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    calibrate(sim, [batch], progress=False)
    export(sim, tmp_path / "model.onnx")
    opened = quantize(tmp_path / "model.onnx", None, None)
    calibrate(opened, [batch * 2], progress=False)
    export(opened, tmp_path / "again.onnx")
    before, after = (json.loads((tmp_path / f"{n}.encodings.json").read_text()) for n in ("model", "again"))
    assert after["provenance"] == before["provenance"]
    assert after["provenance"]["config"]["weight"] == "int4"
    assert after["encodings"] != before["encodings"]


class LargeBias(nn.Module):
    """A layer whose int32 bias has codes beyond 2^24."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 64)
        with torch.no_grad():
            self.fc.weight.mul_(1e-3)
            self.fc.bias.copy_(torch.linspace(900.0, 1000.0, 64))

    def forward(self, x):
        return self.fc(x)


@pytest.mark.slow
def test_large_biases_keep_their_codes(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim = quantize(LargeBias(), x, w8a8())
        calibrate(sim, [x], progress=False)
        first = require_stable(sim, tmp_path)
    codes = np.array(integers(onnx.load(first))["fc:bias"][0][1])
    assert (np.abs(codes) > 2**24).any()
    opened = quantize(first, None, None)
    values = opened.run(x.numpy())[0]
    np.testing.assert_array_equal(values, simulation_session(onnx.load(first)).run(None, {"x": x.numpy()})[0])
