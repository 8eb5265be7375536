"""What the exporter writes around the ops that a user wrote is taken away before planning."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsdk
from onnx_backend.passes.simplify import simplify


class Pieces(nn.Module):
    """A convolution without bias or BatchNorm, chunk and split."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, bias=False, groups=2)

    def forward(self, x):
        a, b = self.conv(x).chunk(2, 1)
        c, d = torch.split(b, [1, 1], 1)
        return torch.cat([b, a.relu(), d, c], 1)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    torch.manual_seed(0)
    batch = torch.randn(2, 4, 6, 6)
    sim = qsdk.quantize(Pieces().eval(), batch, qsdk.w8a8())
    qsdk.calibrate(sim, [batch], progress=False)
    path = tmp_path_factory.mktemp("pieces") / "model.onnx"
    qsdk.export(sim, path)
    return sim, batch, path


@pytest.mark.slow
def test_no_helper_op_of_the_exporter_is_left(pieces):
    sim, _, _ = pieces
    rows = {row["op_type"] for row in sim.coverage().rows}
    assert rows == {"Input", "Conv", "Split", "Relu", "Concat"}
    assert not any(row["kind"] == "bias" for row in sim.coverage().rows)


def test_pieces_share_the_encoding_of_what_they_are_cut_from(pieces):
    sim, _, _ = pieces
    states = {row["site"]: row["state"] for row in sim.coverage().rows}
    for site in ("chunk.0:output", "chunk.0:output1", "split.0:output", "split.0:output1"):
        assert states[site] == "tied"


def test_pieces_go_to_integers_at_parity(pieces, tmp_path):
    sim, batch, path = pieces
    assert qsdk.check_parity(sim, path, [batch], progress=False).summary["passed"]
    assert qsdk.to_integer(path, tmp_path / "int.onnx").summary["float_tensors"] == 0


def model_of(nodes, constants, output_shape):
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, output_shape)
    known = [helper.make_tensor_value_info("r", TensorProto.FLOAT, ["batch", 5])]
    graph = helper.make_graph(nodes, "g", [x], [y], stored, value_info=known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(model):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": np.arange(10, dtype=np.float32).reshape(2, 5)})[0]


@pytest.mark.parametrize(("sizes", "place"), [(2, 0), (2, 2), (2, -1), ([1, 3, 1], 1), ([4, 1], -1)])
def test_a_split_with_constant_sizes_gives_the_same_piece(sizes, place):
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("SplitToSequence", ["r", "sizes"], ["s"], axis=1),
        helper.make_node("SequenceAt", ["s", "place"], ["y"]),
    ]
    constants = {"sizes": np.asarray(sizes, np.int64), "place": np.int64(place)}
    model = model_of(nodes, constants, ["batch", None])
    simplified = simplify(model)
    assert [node.op_type for node in simplified.graph.node] == ["Relu", "Split"]
    np.testing.assert_array_equal(run(simplified), run(model))


def test_a_split_along_a_dynamic_axis_is_left_alone():
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("SplitToSequence", ["r", "sizes"], ["s"], axis=0),
        helper.make_node("SequenceAt", ["s", "place"], ["y"]),
    ]
    model = model_of(nodes, {"sizes": np.int64(1), "place": np.int64(1)}, [None, 5])
    simplified = simplify(model)
    assert [node.op_type for node in simplified.graph.node] == ["Relu", "SplitToSequence", "SequenceAt"]
    np.testing.assert_array_equal(run(simplified), run(model))


@pytest.mark.parametrize("place", [0, 1])
def test_a_split_into_parts_of_a_computed_size_becomes_slices(place):
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Size", ["x"], ["elements"]),
        helper.make_node("Div", ["elements", "ten"], ["size"]),
        helper.make_node("SplitToSequence", ["r", "size"], ["s"], axis=0),
        helper.make_node("SequenceAt", ["s", "place"], ["y"]),
    ]
    model = model_of(nodes, {"ten": np.int64(10), "place": np.int64(place)}, ["batch", 5])
    model.graph.value_info.append(helper.make_tensor_value_info("size", TensorProto.INT64, []))
    simplified = simplify(model)
    assert {node.op_type for node in simplified.graph.node} == {"Relu", "Size", "Div", "Mul", "Slice"}
    np.testing.assert_array_equal(run(simplified), run(model))


def test_only_the_static_part_of_a_shape_is_folded():
    nodes = [
        helper.make_node("Shape", ["x"], ["columns"], start=1),
        helper.make_node("Shape", ["x"], ["rows"], end=1),
        helper.make_node("Concat", ["rows", "columns"], ["shape"], axis=0),
        helper.make_node("Reshape", ["x", "shape"], ["y"]),
    ]
    model = model_of(nodes, {}, ["batch", 5])
    simplified = simplify(model)
    assert [node.op_type for node in simplified.graph.node] == ["Shape", "Concat", "Reshape"]
    np.testing.assert_array_equal(run(simplified), run(model))


class Regrouped(nn.Module):
    """Splits and joins axes, and enlarges an image by 2, and by a factor that float32 does not hold."""

    def forward(self, x):
        n, t, _ = x.shape
        y = x.view(n, t, 3, 4).transpose(1, 2).reshape(n * 3, t, 4).view(n, 3, t, 4)
        y = nn.functional.interpolate(y, size=(12, 8), mode="bilinear")
        return nn.functional.interpolate(y, size=(28, 20), mode="nearest").flatten(2)


def test_shapes_with_one_open_size_are_stored(tmp_path):
    """Nothing is left in the file that computes them, but for the sizes of what is enlarged by 7 / 3."""
    torch.manual_seed(0)
    batch, other = torch.randn(2, 6, 12), torch.randn(5, 6, 12)
    sim = qsdk.quantize(Regrouped(), batch)
    qsdk.calibrate(sim, [batch, other], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    model = onnx.load(tmp_path / "model.onnx")
    shapes = [numpy_helper.to_array(t).tolist() for t in model.graph.initializer if t.data_type == TensorProto.INT64]
    assert [0, 6, 3, 4] in shapes
    assert [-1, 6, 4] in shapes
    scales = [numpy_helper.to_array(t).tolist() for t in model.graph.initializer]
    assert [1, 1, 2, 2] in scales
    assert [node.op_type for node in model.graph.node].count("Shape") == 1
    session = qsdk.session(tmp_path / "model.onnx")
    for given in (batch, other):
        with torch.no_grad():
            wanted = sim(given).numpy()
        np.testing.assert_allclose(session.run(None, {"x": given.numpy()})[0], wanted, atol=0.03)
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [other], progress=False).summary["passed"]
