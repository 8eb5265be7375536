"""LSTM and GRU of open length: a Scan on integers, against unrolled steps, and what has no Scan."""

import numpy as np
import onnxruntime as ort
import pytest
import torch
from integer_comparison import compare, refused
from integer_models import run, simulate
from onnx import TensorProto, helper
from recurrent_models import CELL, LENGTH, OUT, feeds, growing_cell, network
from torch import nn

import onnx_backend
import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.files import write_integer
from onnx_backend.integer.firmware.files import firmware_file
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings
from qsdk import IntegerError


@pytest.mark.spread(3)
@pytest.mark.parametrize("op", ["LSTM", "GRU", "GRU behind"])
@pytest.mark.parametrize(
    ("direction", "initial", "granularity"),
    [("forward", None, "tensor"), ("reverse", "constants", "row"), ("bidirectional", "quantized", "direction")],
)
def test_open_lengths_are_the_same_steps_as_fixed_ones(op, direction, initial, granularity):
    attrs = {"linear_before_reset": 1} if op == "GRU behind" else {}
    attrs |= {"direction": direction, "initial": initial, "granularity": granularity}
    op = op.split()[0]
    attrs |= {"outputs": (0, 1, 2) if op == "LSTM" else (0, 1)}
    result = compare(network(op, length="t", **attrs), feeds(initial, direction, op), tolerance=0.02)
    scans = [node for node in result.model.graph.node if node.op_type == "Scan"]
    assert len(scans) == 1 + (direction == "bidirectional")
    for length in (1, 9):
        given = feeds(initial, direction, op, length=length)
        open_length, fixed = (run(convert(network(op, length=n, **attrs)).model, given) for n in ("t", length))
        for name, found in fixed.items():
            steps = np.abs(open_length[name] - found) / (CELL if name == "y2" else OUT)[0]
            assert steps.max() < 1.01  # a cell whose bound is unknown has fewer fraction bits
            assert (steps > 0.5).mean() <= 0.02


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_the_certificate_states_the_error_of_lengths(op):
    row = convert(network(op, length="t")).certificate["requantizations"][0]
    by_length = {int(n): error for n, error in row["state_error_by_length"].items()}
    assert list(by_length) == [1 << i for i in range(13)]
    assert sorted(by_length.values()) == list(by_length.values())
    assert max(by_length.values()) / OUT[0] <= row["error_bound"]
    fixed = convert(network(op, length=4)).certificate["requantizations"][0]
    assert fixed["error_bound"] / 2 < by_length[4] / OUT[0] < 4 * fixed["error_bound"]  # its cells have 4 bits less


def test_a_long_sequence_of_open_length():
    model = network("LSTM", length="t", size=3.0)
    found = run(convert(model).model, feeds(length=300))["y0"]
    steps = np.abs(found - simulate(model, feeds(length=300))["y0"]) / OUT[0]
    assert steps.max() < 1.01
    assert (steps > 0.5).mean() < 0.01


def test_a_cell_that_grows_in_a_sequence_of_open_length():
    model = growing_cell("t")
    result = convert(model)
    assert any("at most 4096 steps" in note for note in result.certificate["assumed"])
    found = run(result.model, {"x": np.full((20, 1, 1), 200, np.float32)})["y"]
    np.testing.assert_allclose(found, 20.0, atol=0.11)


@pytest.mark.parametrize("length", [4000, 6000])
def test_a_cell_saturates_where_no_error_is_stated(length):
    """Without that, products of the cell would leave 62 bits in much longer sequences, in silence."""
    found = run(convert(growing_cell("t", scale=20.0)).model, {"x": np.full((length, 1, 1), 200, np.float32)})["y"]
    np.testing.assert_allclose(found, min(length, 4096), atol=11.0)


def test_a_sequence_without_steps_in_the_reference():
    """The first state is the last one; ONNX Runtime refuses a Scan without steps."""
    given = feeds(initial="quantized", op="GRU", length=0)
    model = convert(network("GRU", length="t", initial="quantized", outputs=(0, 1))).model
    found = run_reference(model, given)
    assert found["y0"].size == 0
    low, high = ((end - OUT[1]) * OUT[0] for end in (0, 255))
    np.testing.assert_allclose(found["y1"], given["s0"].clip(low, high), atol=0.02)


def test_a_float_in_the_body_of_a_scan_is_found():
    model = convert(network("GRU", length="t")).model
    assert integer_findings(model) == []
    body = next(n for n in model.graph.node if n.op_type == "Scan").attribute[0].g
    body.node.append(helper.make_node("Cast", [body.input[0].name], ["astray"], name="astray", to=TensorProto.FLOAT))
    assert [(f.kind, f.where) for f in integer_findings(model)] == [("float tensor", "astray")]


def test_a_sequence_of_open_length_is_refused_by_the_portable_target():
    refused(network("GRU", length="t"), "GRU 'node_gru", "give them: shapes=", target="portable")


@pytest.mark.parametrize("length", [LENGTH, "t"])
def test_the_onnx_backend_runs_it(length):
    model = convert(network("GRU", length=length)).model
    (found,) = onnx_backend.prepare(model).run([feeds()["x"]])
    np.testing.assert_array_equal(found, run(model, feeds())["y0"])


def test_firmware_has_no_scan(tmp_path):
    model = network("GRU", length="t")
    with pytest.raises(IntegerError, match="firmware has no loops, and the length of the sequence of 'node_gru"):
        firmware_file(convert(model), tmp_path / "program.npz")
    out = tmp_path / "model.onnx"
    report = write_integer(model, out, data=[feeds()], firmware=tmp_path / "program.npz", progress=False)
    assert report.summary["fixed_shapes"]["x"][0] == LENGTH  # of the data, as nothing else will do
    assert (tmp_path / "program.npz").exists()


class Tagger(nn.Module):
    """A class for every step of a sequence."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        return self.head(self.layer(x)[0])


@pytest.mark.slow
def test_from_a_module_to_integers_of_any_length(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, 6, 8) for _ in range(4)]
    sim = qsdk.quantize(Tagger().eval(), batches[0], dynamic_shapes={"x": {0: "batch", 1: "length"}})
    qsdk.calibrate(sim, batches, progress=False)
    paths = tmp_path / "qdq.onnx", tmp_path / "integer.onnx"
    qsdk.export(sim, paths[0])
    report = qsdk.to_integer(*paths, progress=False)
    assert "fixed_shapes" not in report.summary
    step = float(sim.encodings["head:output"].scale[0])
    for shape in ((2, 6, 8), (3, 1, 8), (1, 40, 8)):
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        found, wanted = (ort.InferenceSession(path).run(None, {"x": x})[0] for path in paths[::-1])
        assert found.shape == (*shape[:2], 5)
        steps = np.abs(found - wanted) / step
        assert steps.max() < 1.01
        assert (steps > 0.5).mean() < 0.02
