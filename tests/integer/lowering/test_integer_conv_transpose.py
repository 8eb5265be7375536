"""ConvTranspose on integers: geometries, groups, weight forms, exact accumulators, dynamic sizes, refusals."""

import numpy as np
import pytest
from integer_comparison import compare, noise, refused
from integer_models import INT4, INT8, UINT8, UINT16, Net, run, simulate

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference

GEOMETRIES = {
    "plain": ((2, 3, 5, 4), (3, 4, 3, 3), {}),
    "stride 2": ((2, 3, 5, 4), (3, 4, 2, 2), {"strides": [2, 2]}),
    "kernel 4 stride 2": ((2, 3, 5, 4), (3, 4, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "kernel 3 stride 2": (
        (2, 3, 5, 4),
        (3, 4, 3, 3),
        {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
    ),
    "kernel smaller than stride": ((2, 3, 5, 4), (3, 4, 2, 1), {"strides": [3, 3]}),
    "uneven": ((2, 3, 5, 4), (3, 4, 5, 2), {"strides": [3, 1], "pads": [2, 0, 1, 1]}),
    "output padding": ((2, 3, 5, 4), (3, 4, 1, 2), {"strides": [3, 3], "output_padding": [2, 1]}),
    "pads beyond the reach": ((2, 3, 7, 6), (3, 4, 2, 3), {"strides": [2, 1], "pads": [4, 3, 3, 2]}),
    "dilated": ((2, 3, 5, 4), (3, 4, 3, 3), {"dilations": [2, 3], "pads": [1, 2, 0, 1]}),
    "dilated stride": ((2, 3, 5, 4), (3, 4, 3, 3), {"dilations": [2, 3], "strides": [2, 2], "pads": [2, 1, 1, 2]}),
    "groups": ((2, 4, 5, 4), (4, 3, 3, 3), {"group": 2, "strides": [2, 2]}),
    "depthwise": ((2, 4, 5, 4), (4, 1, 4, 4), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "same upper": ((2, 3, 5, 4), (3, 4, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 2]}),
    "same lower": ((2, 3, 5, 4), (3, 4, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "valid": ((2, 3, 5, 4), (3, 4, 3, 3), {"auto_pad": "VALID", "strides": [2, 2]}),
    "output shape": ((2, 3, 5, 4), (3, 4, 4, 3), {"output_shape": [9, 8], "strides": [2, 2]}),
    "output shape upper": (
        (2, 3, 5, 4),
        (3, 4, 4, 3),
        {"output_shape": [9, 8], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ),
    "output shape lower": (
        (2, 3, 5, 4),
        (3, 4, 4, 3),
        {"output_shape": [9, 8], "strides": [2, 2], "auto_pad": "SAME_LOWER"},
    ),
    "1d": ((2, 3, 9), (3, 4, 5), {"strides": [3], "pads": [2, 1], "output_padding": [1]}),
    "3d": ((1, 3, 3, 4, 2), (3, 2, 3, 2, 4), {"strides": [2, 1, 3], "pads": [1, 0, 1, 0, 1, 1]}),
}


def network(x_shape, w_shape, attrs, *, channels=True, dtype=INT8, bias=True, dynamic=False):
    net = Net()
    x = net.qdq(net.input(["n", x_shape[1], *(["d"] * (len(x_shape) - 2) if dynamic else x_shape[2:])]), 0.031, 119)
    w, scale = net.weight(w_shape, 1 if channels else None, dtype, *((2e-2, 2e-1) if dtype == INT4 else (1e-3, 1e-2)))
    group = attrs.get("group", 1)
    count = w_shape[1] * group
    extra = [net.bias(count, 0.031, np.tile(scale, group) if channels else scale)] if bias else []
    y = net.op("ConvTranspose", x, w, *extra, **attrs)
    net.output(net.qdq(y, 0.04, 121), [None] * len(x_shape))
    return net.model()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("channels", [True, False])
def test_geometries(geometry, channels):
    x_shape, w_shape, attrs = GEOMETRIES[geometry]
    compare(network(x_shape, w_shape, attrs, channels=channels), {"x": noise(x_shape)}, tolerance=0.005)


@pytest.mark.parametrize("geometry", ["kernel 4 stride 2", "pads beyond the reach", "same lower", "plain", "groups"])
def test_dynamic_spatial_sizes(geometry):
    x_shape, w_shape, attrs = GEOMETRIES[geometry]
    model = network(x_shape, w_shape, attrs, dynamic=True)
    for sizes in (x_shape, (3, x_shape[1], 7, 7)):
        compare(model, {"x": noise(sizes)}, tolerance=0.005)


@pytest.mark.parametrize("dtype", [INT8, UINT8, INT4])
def test_weight_dtypes_without_bias(dtype):
    x_shape, w_shape, attrs = GEOMETRIES["kernel 4 stride 2"]
    compare(network(x_shape, w_shape, attrs, dtype=dtype, bias=False), {"x": noise(x_shape)}, tolerance=0.005)


def naive(x, w, strides, pads, dilations, output_padding):
    """The definition, in big enough integers: every input times every tap added where it lands."""
    (n, _, h, v), (_, m, kh, kw) = x.shape, w.shape
    size = [s * (k - 1) + e + (t - 1) * d + 1 for s, k, e, t, d in zip(
        strides, (h, v), output_padding, (kh, kw), dilations, strict=True)]  # fmt: skip
    full = np.zeros((n, m, *size), np.int64)
    for i in range(h):
        for j in range(v):
            for p in range(kh):
                for q in range(kw):
                    add = np.einsum("nc,cm->nm", x[:, :, i, j], w[:, :, p, q])
                    full[:, :, i * strides[0] + p * dilations[0], j * strides[1] + q * dilations[1]] += add
    return full[:, :, pads[0] : size[0] - pads[2], pads[1] : size[1] - pads[3]]


@pytest.mark.parametrize("seed", range(12))
def test_accumulators_are_exact_for_random_geometries_and_extreme_codes(seed):
    rng = np.random.default_rng(seed)
    strides, dilations, kernel = (rng.integers(1, high, 2).tolist() for high in (5, 4, 5))
    extra = [int(rng.integers(0, stride)) for stride in strides]
    pads = rng.integers(0, 4, 4).tolist()
    h, v = (int(rng.integers(3, 6)) + 4 for _ in range(2))
    net = Net(seed)
    x = net.qdq(net.input([1, 2, h, v]), 1.0, 100)
    stored = rng.choice([-128, 127, 3, 0], (2, 3, *kernel)).astype(np.int8)
    w = net.op("DequantizeLinear", net.const(stored), net.const(np.float32(1.0)))
    attrs = {"strides": strides, "dilations": dilations, "pads": pads, "output_padding": extra}
    net.output(net.qdq(net.op("ConvTranspose", x, w, **attrs), 8.0, 1 << 15, UINT16), [1, 3, None, None])
    result = convert(net.model())
    feeds = {"x": rng.choice([-100.0, 155.0, 0.0], (1, 2, h, v)).astype(np.float32)}
    found = run_reference(result.model, feeds)["y"]
    wanted = naive(feeds["x"].astype(np.int64), stored.astype(np.int64), strides, pads, dilations, extra)
    np.testing.assert_array_equal(found, np.rint(wanted / 8).clip(-(1 << 15), (1 << 15) - 1) * 8)
    assert np.abs(wanted).max() <= result.certificate["requantizations"][0]["accumulator_bound"]
    np.testing.assert_array_equal(found, simulate(net.model(), feeds)["y"])


def test_one_convolution_without_zeros_between_the_codes():
    x_shape, w_shape, attrs = GEOMETRIES["kernel 4 stride 2"]
    model = convert(network(x_shape, w_shape, attrs)).model
    weights = [t for t in model.graph.initializer if list(t.dims) == [16, 3, 2, 2]]
    assert [node.op_type for node in model.graph.node].count("ConvInteger") == 1
    assert len(weights) == 1  # four phases of four channels, two taps per axis


@pytest.mark.parametrize("behind", ["Relu", "BatchNormalization", "Add"])
def test_what_follows_without_a_quantizer_between(behind):
    net = Net()
    x = net.qdq(net.input([2, 3, 5, 4]), 0.031, 119)
    w, scale = net.weight((3, 4, 2, 2), 1)
    y = net.op("ConvTranspose", x, w, net.bias(4, 0.031, scale), strides=[2, 2])
    if behind == "BatchNormalization":
        rows = [net.rng.uniform(0.5, 1.5, 4).astype(np.float32) for _ in range(4)]
        y = net.op(behind, y, *map(net.const, rows))
    elif behind == "Add":
        y = net.op(behind, y, net.qdq(net.input([2, 4, 10, 8], "z"), 0.027, 100))
    else:
        y = net.op(behind, y)
    net.output(net.qdq(y, 0.04, 60), [2, 4, 10, 8])
    feeds = {"x": noise((2, 3, 5, 4))} | ({"z": noise((2, 4, 10, 8), seed=1)} if behind == "Add" else {})
    compare(net.model(), feeds, tolerance=0.005)


def test_refusals():
    net = Net()
    x = net.qdq(net.input([1, 3, "h", 4]), 0.031, 119)
    w, _ = net.weight((3, 4, 2, 2), 0)
    net.output(net.qdq(net.op("ConvTranspose", x, w), 0.04, 121), [1, 4, None, None], "a")
    w, _ = net.weight((3, 4, 2, 2), 1)
    net.output(net.qdq(net.op("ConvTranspose", x, w, output_shape=[9, 8]), 0.04, 121), [1, 4, 9, 8], "b")
    y = net.op("ConvTranspose", x, w, strides=[3, 3], auto_pad="SAME_UPPER")
    net.output(net.qdq(y, 0.04, 121), [1, 4, None, None], "c")
    refused(net, "one scale per index of axis 0", "are not static", "larger than its windows reach")


@pytest.mark.parametrize("geometry", ["kernel 4 stride 2", "plain", "groups", "1d"])
def test_activations_of_sixteen_bits(geometry):
    x_shape, w_shape, attrs = GEOMETRIES[geometry]
    net = Net()
    x = net.qdq(net.input(x_shape), 1.3e-4, 31007, UINT16)
    w, scale = net.weight(w_shape, 1)
    count = w_shape[1] * attrs.get("group", 1)
    y = net.op("ConvTranspose", x, w, net.bias(count, 1.3e-4, np.tile(scale, attrs.get("group", 1))), **attrs)
    net.output(net.qdq(y, 2.3e-4, 31000, UINT16), [None] * len(x_shape))
    compare(net.model(), {"x": noise(x_shape)}, tolerance=0.02)


@pytest.mark.parametrize("geometry", ["plain", "kernel 4 stride 2", "dilated", "groups"])
def test_the_runtimes_kernels_as_target(geometry):
    x_shape, w_shape, attrs = GEOMETRIES[geometry]
    model = network(x_shape, w_shape, attrs)
    integer = convert(model, target="onnxruntime").model
    wanted = simulate(model, {"x": noise(x_shape)})["y"]
    assert np.abs(run(integer, {"x": noise(x_shape)})["y"] - wanted).max() <= 0.04 * 1.01
    kernels = {node.op_type for node in integer.graph.node} & {"QLinearConv", "ConvInteger"}
    assert kernels == {"QLinearConv"}  # what is shuffled behind it are codes
