"""Convolutions and pools over windows in one to three axes: padding rules, ceil_mode, dilation, groups."""

from itertools import product

import numpy as np
import pytest
from integer_comparison import compare, noise, refused
from integer_models import INT8, LEVELS, UINT8, Net, run

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.measure import measured_inputs

CONVS = {
    "1d dilated groups": ((2, 4, 20), (6, 2, 3), {"dilations": [3], "group": 2, "pads": [2, 3]}),
    "1d depthwise stride": ((2, 4, 21), (8, 1, 4), {"strides": [3], "group": 4, "pads": [1, 2]}),
    "1d same upper": ((2, 3, 11), (4, 3, 4), {"auto_pad": "SAME_UPPER", "strides": [3]}),
    "1d same lower": ((2, 3, 11), (4, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2]}),
    "2d depthwise dilated": ((2, 4, 9, 8), (4, 1, 3, 3), {"group": 4, "dilations": [2, 3], "pads": [2, 3, 2, 3]}),
    "2d same upper groups": ((2, 4, 9, 8), (4, 2, 2, 3), {"group": 2, "auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "3d": ((2, 3, 5, 6, 4), (4, 3, 3, 2, 3), {"pads": [1, 0, 1, 1, 1, 1], "strides": [2, 1, 2]}),
    "3d groups dilated": ((1, 4, 7, 6, 8), (6, 2, 3, 2, 3), {"group": 2, "dilations": [2, 1, 3]}),
    "3d depthwise": ((1, 4, 5, 6, 4), (4, 1, 3, 3, 3), {"group": 4, "pads": [1] * 6}),
    "3d same lower": ((1, 3, 5, 6, 4), (4, 3, 2, 3, 4), {"auto_pad": "SAME_LOWER", "strides": [2, 2, 1]}),
    "3d valid": ((1, 3, 5, 6, 4), (4, 3, 2, 3, 4), {"auto_pad": "VALID"}),
}


@pytest.mark.parametrize("geometry", CONVS)
@pytest.mark.parametrize("encoding", [(0.031, 119, UINT8), (0.031, -9, INT8)])
@pytest.mark.parametrize("dynamic", [True, False])
def test_convolutions(geometry, encoding, dynamic):
    x_shape, w_shape, attrs = CONVS[geometry]
    net = Net()
    shape = ["n", x_shape[1], *("hwd"[: len(x_shape) - 2] if dynamic else x_shape[2:])]
    x = net.qdq(net.input(shape), *encoding)
    w, scale = net.weight(w_shape, 0)
    y = net.op("Conv", x, w, net.bias(w_shape[0], 0.031, scale), **attrs)
    net.output(net.qdq(y, 0.04, 121), [None] * len(x_shape))
    compare(net.model(), {"x": noise(x_shape)}, tolerance=0.005)


POOLS = {
    "1d": ([9], {"kernel_shape": [3], "strides": [2]}),
    "1d padded": ([9], {"kernel_shape": [4], "strides": [3], "pads": [2, 1]}),
    "1d same lower": ([9], {"kernel_shape": [4], "strides": [2], "auto_pad": "SAME_LOWER"}),
    "3d": ([5, 6, 4], {"kernel_shape": [3, 2, 2], "strides": [2, 2, 1], "pads": [1, 0, 1, 0, 1, 1]}),
    "3d same upper": ([5, 6, 4], {"kernel_shape": [3, 2, 2], "strides": [2, 1, 2], "auto_pad": "SAME_UPPER"}),
    "3d dilated": ([5, 6, 8], {"kernel_shape": [2, 2, 3], "dilations": [2, 1, 3], "pads": [1] * 6}),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("counted", [0, 1])
def test_average_pools(name, counted):
    sizes, attrs = POOLS[name]
    net = Net()
    x = net.qdq(net.input(["n", 3, *sizes]), 0.031, 119)
    y = net.op("AveragePool", x, count_include_pad=counted, **attrs)
    net.output(net.qdq(y, 0.0222, 111), [None] * (2 + len(sizes)))
    compare(net.model(), {"x": noise((3, 3, *sizes))}, tolerance=0.01)


@pytest.mark.spread(36)
@pytest.mark.parametrize("counted", [0, 1])
@pytest.mark.parametrize("opset", [17, 21, 22])
@pytest.mark.parametrize(
    ("kernel", "stride", "pads"), list(product((2, 3, 4), (2, 3), ((0, 0), (1, 1), (0, 1), (1, 0))))
)
def test_windows_that_overhang_with_ceil_mode(counted, opset, kernel, stride, pads):
    net = Net()
    sizes = (6, 7) if (kernel, stride, pads) == (2, 2, (1, 1)) else (6, 7, 9)  # there ONNX Runtime fails on its own
    for size in sizes:
        x = net.qdq(net.input([2, 3, size], f"x{size}"), 0.031, 119)
        attrs = {"kernel_shape": [kernel], "strides": [stride], "pads": list(pads)}
        y = net.op("AveragePool", x, ceil_mode=1, count_include_pad=counted, **attrs)
        net.output(net.qdq(y, 0.0222, 111), [None] * 3, f"y{size}")
    compare(net.model(opset), {f"x{size}": noise((2, 3, size)) for size in sizes}, tolerance=0.03)


def test_ceil_mode_in_two_axes():
    net = Net()
    x = net.qdq(net.input(["n", 3, 8, 7]), 0.031, -9, INT8)
    y = net.op("AveragePool", x, kernel_shape=[3, 2], strides=[2, 3], pads=[1, 0, 0, 1], ceil_mode=1)
    net.output(net.qdq(y, 0.0222, 11, INT8), [None] * 4)
    compare(net.model(), {"x": noise((4, 3, 8, 7))}, tolerance=0.01)


@pytest.mark.parametrize("counted", [0, 1])
def test_a_window_far_larger_than_the_image_holds_the_image(counted):
    net = Net()
    x = net.qdq(net.input(["n", 3, 8, 7]), 0.031, 119)
    attrs = {"kernel_shape": [2560, 2560], "strides": [2560, 2560], "pads": [0, 1, 1, 0]}
    y = net.op("AveragePool", x, ceil_mode=1, count_include_pad=counted, **attrs)
    net.output(net.qdq(y, 0.0222, 111), [None] * 4)
    compare(net.model(), {"x": noise((4, 3, 8, 7))}, tolerance=0.01)


@pytest.mark.parametrize("op", ["GlobalMaxPool", "GlobalAveragePool"])
@pytest.mark.parametrize("sizes", [[9], [4, 5], [3, 4, 2]])
def test_global_pools(op, sizes):
    net = Net()
    x = net.qdq(net.input(["n", 3, *sizes]), 0.031, 119)
    net.output(net.qdq(net.op(op, x), 0.0213, 100), [None, 3, *[1] * len(sizes)])
    compare(net.model(), {"x": noise((20, 3, *sizes))}, tolerance=0.01)


@pytest.mark.parametrize("sizes", [[9], [5, 4, 6]])
def test_max_pools(sizes):
    net = Net()
    x = net.qdq(net.input(["n", 3, *sizes]), 0.031, 119)
    rank = len(sizes)
    y = net.op("MaxPool", x, kernel_shape=[3] * rank, strides=[2] * rank, pads=[1] * 2 * rank, ceil_mode=1)
    net.output(net.qdq(y, 0.031, 119), [None] * (2 + rank))
    compare(net.model(), {"x": noise((2, 3, *sizes))}, tolerance=0.0)


def test_ceil_mode_of_dynamic_sizes_is_refused():
    net = Net()
    x = net.qdq(net.input([1, 3, "w"]), 0.031, 119)
    y = net.op("AveragePool", x, kernel_shape=[2], strides=[2], ceil_mode=1)
    net.output(net.qdq(y, 0.031, 119), [1, 3, None])
    refused(net, "AveragePool 'node_averagepool", "are not static")


@pytest.mark.parametrize("op", ["GlobalAveragePool", "ReduceMean", "ReduceMean keepdims"])
@pytest.mark.parametrize("encoding", [(0.031, 119, UINT8), (0.031, -9, INT8)])
def test_means_of_dynamic_sizes(op, encoding):
    net = Net()
    x = net.qdq(net.input(["n", 3, "h", "w"]), *encoding)
    if op == "GlobalAveragePool":
        y = net.op(op, x)
    else:
        axes = net.const(np.array([2, -1], np.int64))
        y = net.op("ReduceMean", x, axes, keepdims=int("keepdims" in op))
    net.output(net.qdq(y, 0.0113, 100), [None, 3, *([] if op == "ReduceMean" else [None, None])])
    model = net.model()
    for sizes in ((20, 3, 5, 7), (30, 3, 1, 2), (2, 3, 64, 65)):
        result = compare(model, {"x": noise(sizes, 1.0)}, tolerance=0.01)
        assert result.certificate["requantizations"][0]["error_bound"] < 1e-6


def test_means_of_extreme_codes_are_right_to_half_a_unit():
    net = Net()
    x = net.qdq(net.input(["n", 1, "w"]), 1.0, 0)
    net.output(net.qdq(net.op("GlobalAveragePool", x), 1.0, 0), ["n", 1, 1])
    model = convert(net.model()).model
    for count in (1, 2, 3, 7, 255, 4099):
        rows = np.zeros((3, 1, count), np.float32)
        rows[1], rows[2, 0, : count // 2] = 255, 255
        found = run_reference(model, {"x": rows}, every_tensor=True)
        (name,) = [tensor for tensor in found if tensor.endswith(".accumulator")]
        wanted = [round_half_up(int(row.sum()) << 22, count) for row in rows]
        assert found[name].reshape(-1).tolist() == wanted
        np.testing.assert_array_equal(run(model, {"x": rows})["y"], found["y"])


def round_half_up(total, count):
    return (2 * total + count) // (2 * count)


def test_a_mean_of_so_many_codes_that_their_sum_leaves_int32():
    net = Net()
    x = net.qdq(net.input([1, 1, 3000, 3000]), 0.031, 0)
    net.output(net.qdq(net.op("GlobalAveragePool", x), 0.031, 0), [1, 1, 1, 1])
    model = convert(net.model()).model
    found = run(model, {"x": np.full((1, 1, 3000, 3000), 0.031 * 255, np.float32)})["y"]
    np.testing.assert_allclose(found, 0.031 * 255, rtol=1e-6)


def test_sizes_that_an_exporter_writes_as_minus_one_are_dynamic():
    net = Net()
    x = net.qdq(net.input(["n", 3, "h", "w"]), 0.031, 119)
    net.output(net.qdq(net.op("GlobalAveragePool", x), 0.0113, 100), [None, 3, 1, 1])
    model = net.model()
    for axis in (0, 2, 3):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = -1
    integer = convert(model).model
    found = run(integer, {"x": noise((2, 3, 5, 4))})["y"]
    np.testing.assert_array_equal(found, run_reference(integer, {"x": noise((2, 3, 5, 4))})["y"])
    assert measured_inputs(model, integer, None)["x"].shape == (2, 3, 2, 2)


@pytest.mark.parametrize("fill", [0.0, 0.62])
def test_zeros_around_the_input_of_a_convolution_are_its_own(fill):
    net, encoding = Net(), (0.031, 119)
    x = net.qdq(net.input(["n", 3, 6, 5]), *encoding)
    padded = net.op("Pad", x, net.const(np.array([0, 0, 1, 0, 0, 0, 2, 3])), net.const(np.float32(fill)))
    weight, _ = net.weight((4, 3, 3, 3), 0)
    y = net.op("Conv", net.qdq(padded, *encoding), weight, pads=[1, 1, 0, 0])
    net.output(net.qdq(y, 0.04, 121), [None] * 4)
    compare(net.model(), {"x": noise((2, 3, 6, 5))}, tolerance=0.005)
    assert ("Pad" in {node.op_type for node in convert(net.model()).model.graph.node}) == bool(fill)


def max_pooled(net, x):
    pooled = net.op("MaxPool", net.qdq(x, 0.031, 119), kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 1, 1])
    return net.qdq(pooled, 0.031, 119)


def padded(net, x):
    return net.op("Pad", x, net.const(np.array([1, 0, 2, 1])), "", net.const(np.array([2, -1])))


def reflected(net, x):
    return net.op("Pad", x, net.const(np.array([0, 1, 1, 2])), "", net.const(np.array([3, 2])), mode="reflect")


@pytest.mark.parametrize("between", [max_pooled, padded, reflected])
@pytest.mark.parametrize("target", ["standard", "portable", "onnxruntime"])
def test_what_pads_between_transposes_runs_in_an_ordinary_session(between, target):
    net = Net()
    x = net.op("Transpose", net.qdq(net.input([2, 6, 5, 3]), 0.031, 119), perm=[0, 3, 1, 2])
    net.output(net.op("Transpose", between(net, x), perm=[0, 2, 3, 1]), [None] * 4)
    feeds = {"x": noise((2, 6, 5, 3))}
    result = convert(net.model(), target=target)
    wanted = run(net.model(), feeds, "ORT_DISABLE_ALL")["y"]
    for level in LEVELS:
        np.testing.assert_array_equal(run(result.model, feeds, level)["y"], wanted)
