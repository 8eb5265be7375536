"""What TensorRT's documents say of Q/DQ files: types and blocks that it lacks, and pairs that keep it from fusing."""

import numpy as np
import onnx
import pytest
import torch
from integer_models import INT4, INT8, Net
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsdk
from onnx_backend.runtimes.validate import validate


def pair(net, x, scale=0.03):
    return net.qdq(x, scale, 0, INT8)


def stored(net, dtype, shape, *, block=0, axis=0):
    """Weights behind a DequantizeLinear with a zero point, as this dialect writes them."""
    name, sizes = net.name("weight"), list(shape)
    if block:
        sizes[axis] //= block
    scales = np.full(sizes if block else (), 0.01, np.float32)
    net.initializers.append(helper.make_tensor(name, dtype, shape, [1] * int(np.prod(shape))))
    zeros = net.name("zeros")
    net.initializers.append(helper.make_tensor(zeros, dtype, scales.shape, [0] * scales.size))
    options = {"block_size": block, "axis": axis} if block else {}
    return net.op("DequantizeLinear", name, net.const(scales, "scale"), zeros, **options)


def findings(net, y, shape=(2, 256)):
    net.output(y, list(shape))
    report = validate(net.model(), dialect="tensorrt")
    return [(row["severity"], row["rule"], row["problem"]) for row in report.rows]


def product(dtype, **options):
    net = Net()
    y = net.op("MatMul", net.input([2, 256]), stored(net, dtype, (256, 256), **options))
    return findings(net, y)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("block", [64, 128])
def test_int4_weights_in_blocks_are_taken(block, axis):
    assert product(INT4, block=block, axis=axis) == []


@pytest.mark.parametrize(("block", "has"), [(32, "has blocks of 32"), (0, "has none")])
def test_int4_weights_in_other_blocks_or_none_are_refused(block, has):
    problem = f"TensorRT takes int4 weights in blocks of 64 or 128, and this one {has}"
    assert product(INT4, block=block) == [("error", "dialect", problem)]


def test_blocks_of_int4_lie_along_one_of_the_last_two_axes():
    net = Net()
    y = net.op("Conv", net.input([1, 64, 5, 5]), stored(net, INT4, (4, 64, 3, 3), block=64, axis=1))
    problem = "TensorRT takes blocks of int4 along one of the last two axes alone"
    assert findings(net, y, (1, 4, 3, 3)) == [("error", "dialect", problem)]


@pytest.mark.parametrize(("dtype", "name"), [(INT8, "int8"), (TensorProto.FLOAT8E4M3FN, "float8e4m3fn")])
def test_types_of_8_bits_have_no_blocks(dtype, name):
    assert ("error", "dialect", f"TensorRT has no scales per block of {name}") in product(dtype, block=64)


def test_float8_is_e4m3fn_alone():
    for dtype, count in ((TensorProto.FLOAT8E4M3FN, 0), (TensorProto.FLOAT8E5M2, 1)):
        found = [problem for severity, _, problem in product(dtype) if severity == "error"]
        assert found == ["TensorRT has no quantized type float8e5m2"] * count


def layer(net, x):
    return net.op("MatMul", x, stored(net, INT8, (256, 256)))


@pytest.mark.parametrize("quantized", [True, False])
def test_a_layer_with_one_quantized_operand_computes_in_floats(quantized):
    net = Net()
    x = net.input([2, 256])
    found = findings(net, layer(net, pair(net, x) if quantized else x))
    wanted = "one of its two operands is quantized, and the other is float, so TensorRT computes it in floats"
    assert found == ([] if quantized else [("warning", "placement", wanted)])


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("reader", ["Relu", "Add", "Sigmoid"])
def test_a_pair_between_a_layer_and_what_is_fused_with_it_is_named(reader, between):
    net = Net()
    x = pair(net, net.input([2, 256]))
    y = layer(net, x)
    y = pair(net, y) if between else y
    y = net.op(reader, y, x) if reader == "Add" else net.op(reader, y)
    found = findings(net, pair(net, y))
    if not between or reader == "Sigmoid":
        assert found == []
    else:
        (row,) = found
        assert row[:2] == ("warning", "placement")
        assert row[2].startswith(f"the pair between it and the {reader} 'node_")


def test_a_pair_that_something_else_reads_separates_nothing():
    net = Net()
    y = pair(net, layer(net, pair(net, net.input([2, 256]))))
    assert findings(net, net.op("Add", net.op("Relu", y), layer(net, y))) == [
        ("warning", "placement", "its residual input is float, so TensorRT computes the layer in front of it with a "
         "float result")
    ]  # fmt: skip


@pytest.mark.parametrize("quantized", [True, False])
def test_a_float_residual_input_is_named(quantized):
    net = Net()
    x = net.input([2, 256])
    residual = net.op("Sigmoid", x)
    residual = pair(net, residual) if quantized else residual
    found = findings(net, pair(net, net.op("Add", layer(net, pair(net, x)), residual)))
    assert [row[1] for row in found] == ([] if quantized else ["placement"])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x) + x)


@pytest.mark.slow
def test_the_export_names_the_pairs_and_the_remedy_removes_them(tmp_path):
    x = torch.randn(2, 4, 8, 8)
    config = qsdk.w8a8().for_dialect("tensorrt")
    named = {}
    for name, chosen in (("as it is", config), ("remedied", config.override("conv", activation="float32"))):
        sim = qsdk.quantize(Residual().eval(), x, chosen)
        qsdk.calibrate(sim, [x], progress=False)
        summary = qsdk.export(sim, tmp_path / "m.onnx", dialect="tensorrt").summary
        named[name] = summary.get("placement", [])
        assert "computed_otherwise" not in summary
        assert qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]
    (row,) = named["as it is"]
    assert "keeps TensorRT from fusing them" in row
    assert named["remedied"] == []
    model = onnx.load(tmp_path / "m.onnx")
    assert [n.op_type for n in model.graph.node if n.op_type == "Conv"]
    assert not any(numpy_helper.to_array(t).any() for t in model.graph.initializer if "zero_point" in t.name)
