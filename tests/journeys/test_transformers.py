"""Architectures of transformers and of torch.nn through the whole road: quantize, calibrate, export, parity, back."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from architectures import ARCHITECTURES, Inputs, model_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

import qsdk
from qsdk import w8a8

# one by default, one in CI, the others every night
MARKS = {"convnext": (), "llama": pytest.mark.slow}
EVERY = [pytest.param(name, marks=MARKS.get(name, pytest.mark.nightly)) for name in ARCHITECTURES]
# what moves values, or is followed by nothing but what does, inside one function of torch
MOVES = {"Transpose", "Reshape", "Slice", "Squeeze", "Unsqueeze", "Expand", "GatherND", "Gather", "Concat", "Split"}


def calibrated(name: str, *, length: int = 9) -> tuple[Any, list[Inputs]]:
    """A sim at W8A8, as a user makes it, and the data it is calibrated with."""
    architecture = ARCHITECTURES[name]
    data = [architecture.inputs(seed, 2, length) for seed in range(2)]
    sim = qsdk.quantize(model_of(name), data[0], w8a8(), dynamic_shapes=architecture.dynamic_shapes())
    qsdk.calibrate(sim, data, progress=False)
    return sim, data


def tensors(result: Any) -> list[np.ndarray]:
    """The tensors of a result, in order."""
    values = result.to_tuple() if hasattr(result, "to_tuple") else result
    return [leaf.detach().numpy() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def run_file(path: Path, inputs: Inputs) -> list[np.ndarray]:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    known = {info.name for info in session.get_inputs()}
    return session.run(None, {name: x.numpy() for name, x in inputs.items() if name in known})


def require_explained(sim: Any) -> None:
    """Every tensor is quantized, tied to a quantized one, or float for a reason; no arithmetic hides in a function."""
    rows = sim.coverage().rows
    assert all(row["reason"] for row in rows)
    hidden = {row["op_type"] for row in rows if row["reason"].startswith("inside a module or function")}
    assert hidden <= MOVES | {"ReduceMean"}, hidden
    linear = {row["op_type"] for row in rows if row["kind"] == "weight" and row["state"] in ("quantized", "tied")}
    assert linear & {"MatMul", "Gemm", "Conv", "LSTM", "GRU", "RNN"}
    left = [
        row["site"]
        for row in rows
        if row["op_type"] in ("MatMul", "Gemm", "Conv", "Softmax", "Add")
        and row["state"] == "float"
        and not row["reason"].startswith(("inside ", "a view of", "an angle", "a part of", "a mask", "a scalar"))
        and "no integer form" not in row["reason"]
    ]
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_the_whole_road(name: str, tmp_path: Path):
    architecture = ARCHITECTURES[name]
    sim, data = calibrated(name)
    require_explained(sim)
    first, again = tmp_path / "model.onnx", tmp_path / "again.onnx"
    qsdk.export(sim, first)
    # another batch size and another length than the example's
    other = architecture.inputs(7, 3, 13)
    report = qsdk.check_parity(sim, first, [data[0], other], progress=False)
    assert report.summary["weights_max_lsb"] == 0
    assert report.summary["activations_max_lsb"] <= 1
    assert report.summary["passed"]
    for mine, theirs in zip(tensors(sim(**other)), run_file(first, other), strict=True):
        assert mine.shape == theirs.shape
    reopened = qsdk.quantize(str(first), None, None)
    qsdk.export(reopened, again)
    for one, two in zip(run_file(first, other), run_file(again, other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert len(onnx.load(first).graph.node) == len(onnx.load(again).graph.node)


@pytest.mark.parametrize(
    "name", [pytest.param("llama", marks=pytest.mark.slow), pytest.param("bert", marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("first", ["padded", "ones"])
def test_padded_and_full_masks_are_the_same_model(name: str, first: str, tmp_path: Path):
    """Models leave a mask of ones out in eager mode, and let torch repeat the heads then: the sites are the same."""
    architecture = ARCHITECTURES[name]
    padded = architecture.inputs(0, 2, 9)
    full = {**padded, "attention_mask": torch.ones_like(padded["attention_mask"])}
    example, other = (padded, full) if first == "padded" else (full, padded)
    sim = qsdk.quantize(model_of(name), example, w8a8())
    qsdk.calibrate(sim, [example], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", [example, other], progress=False)
    assert report.summary["passed"], [row for row in report.rows if (row["max_lsb"] or 0) > 1]
