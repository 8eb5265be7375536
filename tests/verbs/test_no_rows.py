"""Batches of no rows: left out by the verbs that learn from data, and refused where no batch has any."""

import numpy as np
import pytest
import torch
from qdq_models import convnet
from torch import nn

import qsdk

DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]
EMPTY = torch.zeros(0, 3, 8, 8)
VERBS = {
    "seq_mse": lambda sim, data: qsdk.seq_mse(sim, data, candidates=4, progress=False),
    "adaround": lambda sim, data: qsdk.adaround(sim, data, iterations=1, starts=1, progress=False),
    "gptq": lambda sim, data: qsdk.gptq(sim, data, progress=False),
    "smooth_quant": lambda sim, data: qsdk.smooth_quant(sim, data, progress=False),
    "awq": lambda sim, data: qsdk.awq(sim, data, grid=2, progress=False),
    "correct_bias": lambda sim, data: qsdk.correct_bias(sim, data, progress=False),
    "advise": lambda sim, data: qsdk.analysis.advise(sim, data, progress=False),
    "mixed_precision": lambda sim, data: qsdk.mixed_precision(sim, data, lambda s: 1.0, max_drop=1.0, progress=False),
}
MODULES = {
    "tune_blocks": lambda sim, data: qsdk.tune_blocks(sim, data, iterations=1, progress=False),
    "tune_ranges": lambda sim, data: qsdk.train.tune_ranges(sim, data, steps=1, progress=False),
    "reestimate_batch_norm": lambda sim, data: qsdk.reestimate_batch_norm(sim, data, progress=False),
}


@pytest.fixture(scope="module")
def sims() -> dict:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).eval()
    made = {
        "torch": qsdk.quantize(module, DATA[0], qsdk.w8a8(), fold_batch_norm=False),
        "onnx": qsdk.quantize(convnet(), None, qsdk.w8a8()),
    }
    for door, sim in made.items():
        qsdk.calibrate(sim, of(door, DATA), progress=False)
    return made


def of(door: str, data: list) -> list:
    return data if door == "torch" else [np.asarray(batch) for batch in data]


@pytest.mark.spread(18)
@pytest.mark.parametrize(
    ("door", "verb"), [*(("torch", v) for v in {**VERBS, **MODULES}), *(("onnx", v) for v in VERBS)]
)
def test_no_batch_has_rows(sims: dict, door: str, verb: str):
    sim = sims[door]
    before = sim.snapshot(weights=True)
    with pytest.raises(qsdk.DataError, match=r"no batch has rows \(1 batches of 0 samples\); give batches of one"):
        {**VERBS, **MODULES}[verb](sim, of(door, [EMPTY]))
    assert sim.encodings == dict(before.own) | sim.encodings


@pytest.mark.parametrize("door", ["torch", "onnx"])
def test_one_batch_of_no_rows_among_others_changes_nothing(sims: dict, door: str):
    sim = sims[door]
    before = sim.snapshot(weights=True)
    found = []
    for data in (DATA, [EMPTY, *DATA, EMPTY]):
        VERBS["seq_mse"](sim, of(door, data))
        found.append(sim.encodings)
        sim.restore(before)
    assert found[0] == found[1]
