"""What is written out or computed before the integer conversion: Einsum, reductions, networks of constants."""

import numpy as np
import onnx
import pytest
import torch
from integer_comparison import compare, grid, noise
from integer_models import INT8, UINT8, Net, run, simulate
from onnx import TensorProto, helper
from qdq_models import make_model
from torch import nn

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.decompose.prepare import prepare
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.proto.inputs import with_shapes
from qsdk import IntegerError

# --- Einsum ----------------------------------------------------------------------------------------------------------

EINSUMS = {
    "rows and columns": ("ik,kj->ij", (5, 6), (6, 7)),
    "attention scores": ("bhid,bhjd->bhij", (2, 3, 5, 4), (2, 3, 6, 4)),
    "attention of channels": ("bij,bcj->bci", (2, 5, 6), (2, 4, 6)),
    "interleaved heads": ("bnhd,bmhd->bhnm", (2, 5, 3, 4), (2, 6, 3, 4)),
    "several axes summed and kept": ("bchw,dchw->bd", (2, 3, 4, 5), (6, 3, 4, 5)),
    "rows of several axes": ("bcxy,bcz->bxyz", (2, 3, 4, 5), (2, 3, 6)),
    "the result turned": ("bik,bkj->jbi", (2, 5, 6), (2, 6, 7)),
    "no rows": ("bk,bkj->bj", (2, 6), (2, 6, 7)),
    "nothing summed": ("bc,bcd->bdc", (2, 5), (2, 5, 4)),
    "an outer product": ("bi,bj->bij", (2, 5), (2, 4)),
    "an ellipsis": ("...ik,kj->...ij", (2, 3, 5, 6), (6, 7)),
    "two ellipses": ("...ik,...kj->...ij", (2, 3, 5, 6), (2, 3, 6, 7)),
    "no arrow": ("ik,kj", (5, 6), (6, 7)),
    "no arrow, an ellipsis": ("...k,kz", (2, 5, 6), (6, 7)),
}


def einsum(equation, *shapes):
    net, rng = Net(), np.random.default_rng(0)
    names = [net.qdq(net.input(shape, f"x{i}"), 0.031, 117 + i) for i, shape in enumerate(shapes)]
    feeds = {f"x{i}": rng.uniform(-3, 3, shape).astype(np.float32) for i, shape in enumerate(shapes)}
    found = np.einsum(equation, *feeds.values()).shape
    net.output(net.qdq(net.op("Einsum", *names, equation=equation), 0.21, 121), found)
    return net.model(), feeds


@pytest.mark.parametrize("name", EINSUMS)
def test_einsum_of_two_tensors(name, tmp_path):
    model, feeds = einsum(*EINSUMS[name])
    written = prepare(model)
    assert "Einsum" not in {node.op_type for node in written.graph.node}
    np.testing.assert_array_equal(simulate(written, feeds)["y"], simulate(model, feeds)["y"])
    report = qsdk.to_integer(model, tmp_path / "int.onnx", data=[feeds])
    assert (report.summary["float_tensors"], report.summary["operations_max_lsb"]) == (0, 0)


@pytest.mark.parametrize("equation", ["bij->bji", "bij->ib", "bij->j"])
def test_einsum_of_one_tensor(equation):
    model, feeds = einsum(equation, (2, 3, 4))
    np.testing.assert_allclose(simulate(prepare(model), feeds)["y"], simulate(model, feeds)["y"], atol=0.22)
    compare(prepare(model), feeds, 0.01)


def test_einsum_with_a_stored_weight_per_channel_keeps_it_a_layer():
    net = Net()
    x = net.qdq(net.input(["n", 5, 8]), 0.031, 117)
    w, _ = net.weight((12, 8), 0)
    net.output(net.qdq(net.op("Einsum", x, w, equation="bld,ed->ble"), 0.21, 121), ["n", 5, 12])
    written = prepare(net.model())
    assert "Reshape" not in {node.op_type for node in written.graph.node}
    compare(written, {"x": noise((3, 5, 8))}, 0.01)


def test_einsum_leaves_a_dynamic_batch_dynamic(tmp_path):
    net = Net()
    a, b = (net.qdq(net.input(["n", 4, 2, 6], name), 0.031, 117) for name in "ab")
    net.output(net.qdq(net.op("Einsum", a, b, equation="bchw,bdhw->bcd"), 0.21, 121), ["n", 4, 4])
    qsdk.to_integer(net.model(), tmp_path / "int.onnx")
    made = onnx.load(tmp_path / "int.onnx")
    feeds = {name: noise((3, 4, 2, 6), seed=i) for i, name in enumerate("ab")}
    np.testing.assert_array_equal(run(made, feeds)["y"], simulate(net.model(), feeds)["y"])


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]), ("ii->i", [(3, 3)]), ("ijk,kl->il", [(2, 3, 4), (4, 5)])],
)
def test_an_einsum_without_a_form_is_refused(equation, shapes, tmp_path):
    model, _ = einsum(equation, *shapes)
    with pytest.raises(IntegerError, match=r"Einsum 'node_einsum_.*: it has more than two factors"):
        qsdk.to_integer(model, tmp_path / "int.onnx")


def test_an_einsum_may_stay_float(tmp_path):
    model, feeds = einsum("ik,kj->ij", (5, 6), (6, 7))
    report = qsdk.to_integer(model, tmp_path / "int.onnx", data=[feeds], allow_float=["Einsum"])
    assert report.summary["operations_max_lsb"] == 0


# --- reductions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp"])
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_norms_and_logarithms_of_sums(op, opset, keepdims, tmp_path):
    net = Net()
    x = net.qdq(net.input([3, 4, 6]), 0.031, 117)
    axes = {"axes": [1, 2]} if opset == 13 else {}
    inputs = [] if opset == 13 else [net.const(np.array([1, 2]))]
    scale = 1.31 if op == "ReduceSumSquare" else 0.23
    y = net.op(op, x, *inputs, keepdims=keepdims, **axes)
    net.output(net.qdq(y, scale, 7), [3, 1, 1] if keepdims else [3])
    report = qsdk.to_integer(net.model(opset), tmp_path / "int.onnx", data=[noise((3, 4, 6))])
    assert (report.summary["float_tensors"], report.summary["operations_max_lsb"]) == (0, 0)


# --- networks of constants -------------------------------------------------------------------------------------------


def test_what_a_network_computes_of_stored_tensors_alone_is_computed_at_conversion_time():
    """Learned queries pass a layer, a norm and a Softmax before they meet the activation, as in a detector."""
    net = Net(3)
    queries = net.weight((4, 8))[0]
    y = net.qdq(net.op("MatMul", queries, net.weight((8, 8), 1)[0]), 0.0021, 131)
    y = net.op("LayerNormalization", y, net.const(np.ones(8, np.float32)), axis=-1)
    y = net.qdq(net.op("Softmax", net.qdq(y, 0.017, 120)), 0.0039, 0)
    x = net.qdq(net.input(["n", 8, 5]), 0.031, 117)
    net.output(net.qdq(net.op("MatMul", y, x), 0.011, 121), ["n", 4, 5])
    result = compare(net.model(), {"x": noise((3, 8, 5))})
    assert [row["op_type"] for row in result.certificate["requantizations"]] == ["MatMul"]


def test_a_stored_float_tensor_may_become_integers():
    """Buckets of relative positions are logarithms of constants, cast to indices."""
    net = Net()
    places = net.op("Cast", net.op("Log", net.const(np.array([1.0, 3.0, 30.0], np.float32))), to=TensorProto.INT64)
    x = net.qdq(net.input([4, 5]), 0.031, 117)
    net.output(net.qdq(net.op("Gather", x, places), 0.031, 117), [3, 5])
    compare(net.model(), {"x": noise((4, 5))}, 0.0)


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_sizes_behind_a_group_normalization_are_known(tmp_path):
    net = Net()
    gain, bias = (net.const(np.linspace(0.5, 1.5, 4, dtype=np.float32)) for _ in range(2))
    x = net.qdq(net.input(["n", 4, 6]), 0.031, 117)
    for _ in range(2):
        x = net.qdq(net.op("GroupNormalization", x, gain, bias, num_groups=2), 0.024, 119)
    net.output(x, ["n", 4, 6])
    report = qsdk.to_integer(net.model(), tmp_path / "int.onnx", shapes={"x": (2, 4, 6)})
    assert report.summary["operations_max_lsb"] <= 1


def test_given_sizes_reach_tensors_that_the_model_declares_with_the_same_name():
    """An exporter computes a shape that ONNX does not follow, but declares the sizes of what it makes."""
    net = Net()
    x = net.qdq(net.input(["batch", "length", 6]), 0.031, 117)
    net.output(net.op("Relu", x), ["batch", "length", 6])
    model = net.model()
    declared = helper.make_tensor_value_info(x, TensorProto.FLOAT, ["batch", "other", 6])
    model.graph.value_info.append(declared)
    dims = with_shapes(model, {"x": (2, 5, 6)}).graph.value_info[-1].type.tensor_type.shape.dim
    assert [dim.dim_value or None for dim in dims] == [2, None, 6]
    assert not any(dim.dim_param for dim in dims)


def test_a_name_that_two_given_sizes_share_says_nothing():
    net = Net()
    x = net.qdq(net.input(["n", "n"]), 0.031, 117)
    net.output(net.op("Relu", x), ["n", "n"])
    dims = with_shapes(net.model(), {"x": (2, 5)}).graph.output[0].type.tensor_type.shape.dim
    assert not any(dim.dim_value for dim in dims)


# --- weights and tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["standard", "onnxruntime"])
def test_a_constant_on_the_left_may_have_a_scale_per_row(target):
    net = Net()
    left, _ = net.weight((7, 50), 0)
    x = net.qdq(net.input(["n", 50, 12]), 0.031, 119)
    net.output(net.qdq(net.op("MatMul", left, x), 0.2, 130), ["n", 7, 12])
    result = convert(net.model(), target=target)
    feeds = {"x": noise((2, 50, 12))}
    np.testing.assert_allclose(run(result.model, feeds)["y"], simulate(net.model(), feeds)["y"], atol=1e-6)


@pytest.mark.parametrize("zero", [0, 145, 255])
def test_rows_of_a_table_with_any_zero_point(zero):
    net, rng = Net(), np.random.default_rng(0)
    ids = net.input([6], "ids", TensorProto.INT64)
    points = net.const(np.uint8(zero))
    table = net.op("DequantizeLinear", net.const(rng.integers(0, 256, (9, 5)).astype(np.uint8)),
                   net.const(np.float32(0.02)), points)  # fmt: skip
    net.output(net.qdq(net.op("Gather", table, ids), 0.021, 130), [6, 5])
    feeds = {"ids": rng.integers(0, 9, 6)}
    found = run_reference(convert(net.model()).model, feeds)["y"]
    np.testing.assert_array_equal(found, simulate(net.model(), feeds)["y"])


ENDLESS = {
    "Reciprocal": (["x"], 0.031, 0), "Log": (["x"], 0.031, 0), "Exp": (["x"], 7.0, 100), "Pow": (["x", -0.5], 0.031, 0),
    "Pow of 2": ([2.0, "x"], 0.031, 119),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_an_infinity_is_quantized_to_the_end_of_the_grid(name, dtype):
    inputs, scale, zero = ENDLESS[name]
    shift = 128 if dtype == INT8 else 0
    net = Net()
    x = net.qdq(net.input(["n"]), scale, zero - shift, dtype)
    y = net.op(name.split()[0], *(x if entry == "x" else net.const(np.float32(entry)) for entry in inputs))
    net.output(net.qdq(y, 0.11, 60 - shift, dtype), ["n"])
    compare(net.model(), {"x": grid(scale, zero - shift, dtype)}, 0.0)


def test_what_is_not_a_number_is_refused():
    net = Net()
    x = net.qdq(net.input(["n"]), 0.031, 119)
    net.output(net.qdq(net.op("Div", x, net.op("Abs", x)), 0.01, 119), ["n"])
    with pytest.raises(IntegerError, match=r"not a number for some value.*clip the input to where it is defined"):
        convert(net.model())


def test_a_weight_behind_a_sum_of_one_operand_stays_a_layers():
    net = Net()
    x = net.qdq(net.input(["n", 8]), 0.031, 117)
    w = net.op("Sum", net.weight((8, 12), 1)[0])
    net.output(net.qdq(net.op("MatMul", x, w), 0.21, 121), ["n", 12])
    compare(net.model(), {"x": noise((6, 8))}, 0.01)


def test_random_numbers_are_not_computed_at_conversion_time(tmp_path):
    net = Net()
    x = net.qdq(net.input([4]), 0.031, 117)
    random = net.op("RandomUniformLike", net.const(np.ones(4, np.float32)))
    net.output(net.qdq(net.op("Add", x, random), 0.031, 117), [4])
    with pytest.raises(IntegerError, match="RandomUniformLike has no integer form"):
        qsdk.to_integer(net.model(), tmp_path / "int.onnx")


@pytest.mark.parametrize("op", ["Selu", "Celu", "Elu"])
def test_activations_behind_a_layer_far_from_zero(op):
    net = Net()
    x = net.qdq(net.input(["n", 8]), 0.031, 117)
    w, scale = net.weight((12, 8), 0)
    y = net.op("Mul", net.op("Gemm", x, w, net.bias(12, 0.031, scale), transB=1), net.const(np.float32(1000)))
    net.output(net.qdq(net.op(op, y), 91.0, 21), ["n", 12])
    compare(net.model(), {"x": noise((60, 8))}, 0.01)


# --- a tensor over its own norm ---------------------------------------------------------------------------------------


def over_norm(form, op, *, least=1e-12, other=False):
    """x / max(norm(x), least), one row of it zeros; as the exporters of torch write it, or shorter."""
    net = Net()
    x = net.qdq(net.input([5, 24]), 0.05, 117)
    of = net.qdq(net.op("Relu", x), 0.05, 0) if other else x
    norm = net.op(op, of, net.const([-1]), keepdims=1)
    bound = net.const(np.float32(least))
    norm = net.op("Max", bound, norm) if form == "max" else net.op("Clip", norm, bound)
    norm = net.op("Expand", norm, net.const([5, 24])) if form == "expand" else norm
    net.output(net.qdq(net.op("Div", x, norm), 2 / 255, 128), [5, 24])
    feeds = {"x": noise((5, 24), 2.0)}
    feeds["x"][2] = 0.0
    return net.model(), feeds


@pytest.mark.parametrize("op", ["ReduceL1", "ReduceL2"])
@pytest.mark.parametrize("form", ["expand", "clip", "max"])
def test_a_tensor_over_its_own_norm_is_one_normalization(form, op, tmp_path):
    model, feeds = over_norm(form, op)
    written = prepare(model)
    assert {node.op_type for node in written.graph.node} == {"QuantizeLinear", "DequantizeLinear", "LpNormalization"}
    report = qsdk.to_integer(model, tmp_path / "int.onnx", data=[feeds])
    assert (report.summary["float_tensors"], report.summary["max_lsb"]) == (0, 0)
    assert not run(onnx.load(tmp_path / "int.onnx"), feeds)["y"][2].any()


@pytest.mark.parametrize("options", [{"least": 0.1}, {"other": True, "least": 0.1}])
def test_a_norm_that_is_bounded_by_more_than_a_step_or_another_s_is_a_quotient(options, tmp_path):
    model, feeds = over_norm("expand", "ReduceL2", **options)
    assert "LpNormalization" not in {node.op_type for node in prepare(model).graph.node}
    report = qsdk.to_integer(model, tmp_path / "int.onnx", data=[feeds])
    assert (report.summary["float_tensors"], report.summary["max_lsb"]) == (0, 0)


def test_a_number_over_the_guard_of_another_s_norm_saturates(tmp_path):
    model, feeds = over_norm("clip", "ReduceL2", other=True)
    feeds["x"][2], feeds["x"][3] = [-1.0] * 12 + [0.0] * 12, -2.0
    report = qsdk.to_integer(model, tmp_path / "int.onnx", data=[feeds])
    assert (report.summary["float_tensors"], report.summary["max_lsb"]) == (0, 0)
    found = np.rint(run(onnx.load(tmp_path / "int.onnx"), feeds)["y"] * 255 / 2)
    np.testing.assert_array_equal(found[2:4], [[-128] * 12 + [0] * 12, [-128] * 24])


# --- values assigned by index ----------------------------------------------------------------------------------------


class Biased(nn.Module):
    """Scores of which all but the first row and column get a bias, before a Softmax."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.bias = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.randn(3, 3))

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        scores[:, 1:, 1:] = scores[:, 1:, 1:] + self.bias
        return scores.softmax(-1) @ x


class Columns(nn.Module):
    """Two columns that are divided before a Linear reads them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        y = self.first(x).clone()
        y[..., 0] = y[..., 0] / 7.0
        y[..., 1] = y[..., 1] / 8.0
        return self.last(y)


@pytest.mark.parametrize("network", [Biased, Columns])
def test_what_a_module_assigns_by_index_converts(network, tmp_path):
    torch.manual_seed(0)
    model, x = network().eval(), torch.randn(2, 4, 8)
    sim = qsdk.quantize(model, x, qsdk.w8a8())
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    assert qsdk.check_parity(sim, tmp_path / "q.onnx", [x], progress=False).summary["passed"]
    report = qsdk.to_integer(tmp_path / "q.onnx", tmp_path / "i.onnx", data=[x], progress=False)
    assert (report.summary["float_tensors"], report.summary["max_lsb"] <= 1) == (0, True)


def test_a_tensor_that_is_written_part_by_part_is_rounded_once(tmp_path):
    rng, stored = np.random.default_rng(0), {"zeros": np.zeros((6, 8), np.float32)}
    parts = [(f"p{i}", np.float32(rng.normal(size=(8, 8)) * (i + 1))) for i in range(3)]
    nodes, y = [], "zeros"
    for i, (name, weight) in enumerate(parts):
        stored |= {f"w{i}": weight, f"at{i}": np.array([[2 * i], [2 * i + 1]])}
        nodes.append(helper.make_node("MatMul", [f"x{i}", f"w{i}"], [name], f"m{i}"))
        nodes.append(helper.make_node("ScatterND", [y, f"at{i}", name], [f"s{i}"], f"s{i}"))
        y = f"s{i}"
    model = make_model(nodes, {f"x{i}": (2, 8) for i in range(3)}, {"s2": None}, stored)
    sim = qsdk.quantize(model, None, qsdk.w8a8())
    homes = {sim.plan.decisions[f"{name}:output"].encoding_site for name in ("m0", "m1", "m2", "s0", "s1", "s2")}
    assert homes == {"m0:output"}
    data = {f"x{i}": rng.normal(size=(2, 8)).astype(np.float32) for i in range(3)}
    qsdk.calibrate(sim, [data], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    assert qsdk.to_integer(tmp_path / "q.onnx", tmp_path / "i.onnx", progress=False).summary["float_tensors"] == 0
