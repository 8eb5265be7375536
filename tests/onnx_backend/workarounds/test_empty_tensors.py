"""Tensors that hold nothing on some data: a file runs on them in the runtime's own session."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from onnx import helper
from qdq_models import make_model
from torch import Tensor, nn
from torch.export import Dim

import qsdk
from onnx_backend.workarounds.onnxruntime_barriers import of_data_dependent_size

RNG = np.random.default_rng(0)
BOXES = RNG.uniform(0, 2, size=(6, 4)).astype(np.float32)
node = helper.make_node
RUN = """
import sys, numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1])
print([value.shape for value in session.run(None, {"x": numpy.zeros((6, 4), numpy.float32)})])
"""


def detector(op):
    """The boxes whose first number is above 1, each moved by a number of its own."""
    nodes = [
        node("Slice", ["x", "zero", "first", "last"], ["score"], "score"),
        node("Squeeze", ["score", "last"], ["scores"], "flat"),
        node("Greater", ["scores", "one"], ["hit"], "hit"),
        node("NonZero", ["hit"], ["place"], "place"),
        node("Transpose", ["place"], ["places"], "places"),
        node("GatherND", ["x", "places"], ["boxes"], "boxes"),
        node("Relu", ["boxes"], ["kept"], "kept"),
        node("Slice", ["boxes", "zero", "first", "last"], ["moves"], "moves"),
        node("Sigmoid", ["moves"], ["gates"], "gates"),
        node(op, ["kept", "gates"], ["y"], "result"),
    ]
    stored = {"zero": np.array([0]), "first": np.array([1]), "last": np.array([1]), "one": np.float32(1)}
    return make_model(nodes, {"x": [6, 4]}, {"y": [None, 4]}, stored)


def ran(path):
    """What a session of its own process gives on data without a hit."""
    return subprocess.run([sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["Add", "Mul"])
def test_a_detector_without_a_hit_runs_in_the_default_session(op, tmp_path):
    sim = qsdk.quantize(detector(op), None, qsdk.w8a8())
    qsdk.calibrate(sim, [BOXES], progress=False)
    path = tmp_path / "m.onnx"
    qsdk.export(sim, path)
    states = {row["site"]: row["state"] for row in sim.coverage().rows}
    assert states["result:output"] == "quantized"
    found = ran(path)
    assert (found.returncode, found.stdout) == (0, "[(0, 4)]\n"), found
    assert qsdk.check_parity(sim, path, [BOXES], progress=False).summary["passed"]


class Selecting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 1] > 1]
        return torch.relu(kept) * torch.sigmoid(kept[:, 1:2])


@pytest.mark.slow
def test_a_module_that_selects_by_value_runs_where_nothing_is_selected(tmp_path):
    sim = qsdk.quantize(Selecting().eval(), torch.from_numpy(BOXES), qsdk.w8a8(), dynamic_shapes={})
    qsdk.calibrate(sim, [torch.from_numpy(BOXES)], progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    found = ran(tmp_path / "m.onnx")
    assert (found.returncode, found.stdout) == (0, "[(0, 4)]\n"), found


def test_what_follows_a_selection_has_a_size_of_the_data():
    model = detector("Mul")
    assert of_data_dependent_size(model.graph) == {"place", "places", "boxes", "kept", "moves", "gates", "y"}
    nodes = [
        node("TopK", ["x", "k"], ["best", "at"], "best", axis=0),
        node("ScatterND", ["x", "at", "best"], ["same"], "same"),
    ]
    assert of_data_dependent_size(helper.make_graph(nodes, "g", [], [])) == {"best", "at"}


@pytest.mark.parametrize("sizes", [(0, 5), (3, 0), (2, 7)])
def test_shapes_of_two_open_axes_hold_where_one_is_empty(sizes, tmp_path):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Flatten(1)).eval()
    x = torch.randn(3, 5, 8)
    sim = qsdk.quantize(layers, x, dynamic_shapes=({0: Dim("n"), 1: Dim("length")},))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    session = qsdk.session(tmp_path / "model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: np.ones((*sizes, 8), np.float32)})[0]
    assert found.shape == (sizes[0], 4 * sizes[1])
