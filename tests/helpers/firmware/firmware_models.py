"""Small Q/DQ models with inputs, one for each thing that firmware programs can say."""

import numpy as np
from integer_models import INT8, INT16, UINT8, UINT16, Net, small_cnn
from onnx import TensorProto


def floats(shape, reach=3.0, seed=1):
    return np.random.default_rng(seed).uniform(-reach, reach, shape).astype(np.float32)


def cnn(dtype=UINT8):
    return small_cnn(3, dtype=dtype), {"x": floats((3, 3, 12, 12))}


def residual():
    """A residual Add and a Mul of two activations (squeeze and excite), with a bias in float."""
    net = Net(1)
    x = net.qdq(net.input(["n", 4, 6, 6]), 0.031, 119)
    weight, _ = net.weight((4, 4, 3, 3), 0)
    y = net.op("Conv", x, weight, net.const(np.linspace(-1, 1, 4, dtype=np.float32)), pads=[1] * 4)
    y = net.qdq(net.op("Relu", net.op("Add", net.qdq(y, 0.029, 101), x)), 0.041, 0)
    gate = net.qdq(net.op("GlobalAveragePool", y), 0.033, 0)
    gate = net.qdq(net.op("Sigmoid", gate), 1 / 256, 0)
    net.output(net.qdq(net.op("Mul", y, gate), 0.023, 0), ["n", 4, 6, 6])
    return net.model(), {"x": floats((3, 4, 6, 6))}


def sixteen_bits():
    """16-bit activations: bytes for the layers, int32 codes for all else."""
    net = Net(2)
    x = net.qdq(net.input(["n", 4, 6, 6]), 1.3e-4, 31007, UINT16)
    weight, _ = net.weight((4, 1, 3, 3), 0)
    y = net.op("Conv", x, weight, net.const(np.linspace(-1, 1, 4, dtype=np.float32)), pads=[1, 0, 1, 2], group=4)
    y = net.qdq(y, 1.7e-4, -411, INT16)
    y = net.qdq(net.op("Sigmoid", net.qdq(net.op("Add", y, x), 2.3e-4, 30001, UINT16)), 1.6e-5, 3, UINT16)
    net.output(net.qdq(net.op("Mul", y, x), 1.9e-4, 29000, UINT16), ["n", 4, 6, 6])
    return net.model(), {"x": floats((2, 4, 6, 6), 4.0)}


def matmuls():
    """Both operands activations, a weight on the left, on the right, with batch axes that are repeated."""
    net = Net(4)
    a, c = (net.qdq(net.input(shape, name), 0.037, 121) for name, shape in (("a", [2, 3, 4, 5]), ("c", [3, 5, 6])))
    y = net.qdq(net.op("MatMul", a, c), 0.21, 130)
    right, _ = net.weight((6, 7), 1)
    y = net.qdq(net.op("MatMul", y, right), 0.39, 117)
    left, _ = net.weight((8, 4))
    net.output(net.qdq(net.op("MatMul", left, y), 0.71, 125), [2, 3, 8, 7])
    return net.model(), {"a": floats((2, 3, 4, 5)), "c": floats((3, 5, 6), seed=2)}


def pools():
    """Pools whose divisor varies at the borders, that overhang, and padding that is not symmetric."""
    net = Net(5)
    x = net.qdq(net.input(["n", 3, 9, 8]), 0.031, 119)
    averaged = net.op("AveragePool", x, kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 0, 1], ceil_mode=1)
    net.output(net.qdq(averaged, 0.029, 117), ["n", 3, None, None], "averaged")
    largest = net.op("MaxPool", x, kernel_shape=[2, 4], strides=[2, 1], auto_pad="SAME_LOWER")
    net.output(net.qdq(largest, 0.031, 119), ["n", 3, None, None], "largest")
    weight, _ = net.weight((6, 3, 4, 2), 0)
    conv = net.op("Conv", x, weight, strides=[2, 1], auto_pad="SAME_UPPER")
    net.output(net.qdq(conv, 0.05, 121), ["n", 6, None, None], "conv")
    net.output(net.qdq(net.op("ReduceMean", x, net.const([1, 3]), keepdims=0), 0.02, 99), ["n", 9], "mean")
    net.output(net.qdq(net.op("GlobalMaxPool", x), 0.031, 119), ["n", 3, 1, 1], "peak")
    return net.model(), {"x": floats((2, 3, 9, 8))}


def clips():
    """Bounds of codes, behind no layer, of 8 and of 16 bits."""
    net = Net(14)
    for name, encoding in (("x", (0.031, 119, UINT8)), ("z", (1.3e-4, 31007, UINT16))):
        x = net.qdq(net.input(["n", 40], name), *encoding)
        bounded = net.op("Clip", x, net.const(np.float32(-0.5)), net.const(np.float32(2)))
        net.output(net.qdq(bounded, *encoding), ["n", 40], f"bounded_{name}")
    return net.model(), {"x": floats((2, 40)), "z": floats((2, 40), seed=4)}


def silu_of_sixteen_bits():
    """Three convolutions with SiLU, with activations of 16 bits."""
    net = Net(13)
    y = net.qdq(net.input(["n", 8, 6, 6]), 1.3e-4, 31007, UINT16)
    for scale, zero in ((2.1e-4, 30001), (1.9e-4, 33333), (2.3e-4, 29999)):
        weight, _ = net.weight((8, 8, 3, 3), 0)
        y = net.qdq(net.op("Conv", y, weight, pads=[1] * 4), scale, zero, UINT16)
        gate = net.qdq(net.op("Sigmoid", y), 1 / 65535, 0, UINT16)
        y = net.qdq(net.op("Mul", y, gate), scale * 0.6, 3000, UINT16)
    net.output(y, ["n", 8, 6, 6])
    return net.model(), {"x": floats((2, 8, 6, 6), 4.0)}


def one_axis():
    net = Net(6)
    x = net.qdq(net.input(["n", 3, 20]), 0.031, -9, INT8)
    weight, _ = net.weight((5, 3, 4), 0)
    y = net.qdq(net.op("Conv", x, weight, pads=[5, 1], strides=[1], dilations=[3]), 0.04, 11, INT8)
    net.output(net.qdq(net.op("MaxPool", y, kernel_shape=[2]), 0.04, 11, INT8), ["n", 5, None])
    return net.model(), {"x": floats((2, 3, 20))}


def signal():
    """Rows longer than what is summed at once, kernels longer than what is unrolled, a stored operand with a batch."""
    net = Net(18)
    x = net.qdq(net.input(["n", 1, 150]), 0.031, 119)
    weight, _ = net.weight((4, 1, 11), 0)
    y = net.qdq(net.op("Conv", x, weight, pads=[5, 5]), 0.04, 121)
    y = net.qdq(net.op("AveragePool", y, kernel_shape=[9], strides=[2]), 0.03, 117)
    y = net.op("Reshape", y, net.const(np.array([-1, 4, 1, 71])))
    right, _ = net.weight((4, 71, 6), 2)
    net.output(net.qdq(net.op("MatMul", y, right), 0.09, 125), ["n", 4, 1, 6])
    return net.model(), {"x": floats((2, 1, 150))}


def three_axes():
    net = Net(7)
    x = net.qdq(net.input([1, 2, 4, 5, 6]), 0.031, 100)
    weight, _ = net.weight((4, 1, 2, 3, 3), 0)
    window = {"pads": [1, 0, 1, 0, 1, 1], "strides": [2, 1, 2], "dilations": [2, 1, 1]}
    y = net.qdq(net.op("Conv", x, weight, group=2, **window), 0.04, 128)
    net.output(y, [1, 4, None, None, None])
    return net.model(), {"x": floats((1, 2, 4, 5, 6))}


def moves():
    """What only moves elements, in every form: in order, at regular steps, by a table of positions, with a fill."""
    net = Net(8)
    encoding = (0.031, 119)
    x = net.qdq(net.input([2, 8, 4, 6]), *encoding)
    y = net.qdq(net.op("Transpose", x, perm=[0, 2, 3, 1]), *encoding)
    ends = [net.const(np.array(part, np.int64)) for part in ([3, -1], [-(2**40), 0], [1, 2], [-1, -2])]
    y = net.qdq(net.op("Slice", y, *ends), *encoding)
    net.output(y, [None] * 4, "reversed")
    padded = net.op("Pad", x, net.const(np.array([0, 0, 1, 0, 0, 0, 0, 2])), net.const(np.float32(0)))
    net.output(net.qdq(padded, *encoding), [None] * 4, "padded")
    reflected = net.op("Pad", x, net.const(np.array([0, 0, 1, 1, 0, 0, 1, 1])), mode="reflect")
    net.output(net.qdq(reflected, *encoding), [None] * 4, "reflected")
    parts = net.op("Split", x, net.const(np.array([2, 6])), outputs=2, axis=1)
    net.output(net.qdq(parts[0], *encoding), [None] * 4, "first")
    net.output(net.qdq(net.op("Unsqueeze", parts[1], net.const(np.array([0]))), *encoding), [None] * 5, "second")
    net.output(net.qdq(net.op("DepthToSpace", x, blocksize=2), *encoding), [None] * 4, "space")
    net.output(net.qdq(net.op("Tile", x, net.const(np.array([1, 1, 2, 1]))), *encoding), [None] * 4, "tiled")
    return net.model(), {"x": floats((2, 8, 4, 6))}


def joined():
    """A Concat whose parts have encodings of their own, in the middle and at the end."""
    net = Net(9)
    x = net.qdq(net.input(["n", 3, 5]), 0.031, 119)
    z = net.qdq(net.input(["n", 2, 5], "z"), 0.017, 40)
    net.output(net.qdq(net.op("Concat", x, z, axis=1), 0.027, 101), ["n", 5, 5], "one")
    net.output(net.op("Concat", x, z, x, axis=1), ["n", 8, 5], "each")
    return net.model(), {"x": floats((2, 3, 5)), "z": floats((2, 2, 5), seed=4)}


def ties():
    """Averages of four codes on the same scale: a quarter of all sums ties."""
    net = Net(10)
    x = net.qdq(net.input(["n", 2, 16, 16]), 0.0625, 101)
    net.output(net.qdq(net.op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2]), 0.0625, 101), ["n", 2, 8, 8])
    return net.model(), {"x": floats((3, 2, 16, 16), 8.0)}


def wide_weights():
    """Weights whose zero points leave int8."""
    net = Net(11)
    x = net.qdq(net.input(["n", 3, 6, 6]), 0.031, 119)
    stored, scale = net.const(net.rng.integers(0, 256, (4, 3, 3, 3)).astype(np.uint8)), net.const(np.float32(0.003))
    weight = net.op("DequantizeLinear", stored, scale, net.const(np.uint8(20)))
    net.output(net.qdq(net.op("Conv", x, weight), 0.4, 60), ["n", 4, 4, 4])
    return net.model(), {"x": floats((2, 3, 6, 6))}


def blocks():
    """A weight with a scale per block is three layers; what is added behind it is far from them in scale."""
    net = Net(17)
    x = net.qdq(net.input(["n", 40]), 0.031, 119)
    codes = net.const(net.rng.integers(-128, 128, (40, 40)).astype(np.int8))
    scale = net.const(net.rng.uniform(1e-4, 1e-3, (3, 40)).astype(np.float32))
    y = net.op("MatMul", x, net.op("DequantizeLinear", codes, scale, axis=0, block_size=16))
    net.output(net.qdq(net.op("Add", y, x), 0.047, 121), ["n", 40])
    return net.model(), {"x": floats((3, 40))}


def softmax():
    """Between quantizers on wide integers, in plain ONNX operators."""
    net = Net(12)
    x = net.qdq(net.input([3, 10]), 0.031, 119)
    net.output(net.qdq(net.op("Softmax", x, axis=-1), 1 / 256, 0), [3, 10])
    return net.model(), {"x": floats((3, 10))}


def embedding():
    """Token ids, which are no codes."""
    net = Net(13)
    ids = net.input(["n", 5], "ids", TensorProto.INT64)
    stored, scale = net.const(net.rng.integers(-128, 128, (20, 8)).astype(np.int8)), net.const(np.float32(0.02))
    rows = net.op("Gather", net.op("DequantizeLinear", stored, scale), ids)
    weight, _ = net.weight((8, 3), 1)
    net.output(net.qdq(net.op("MatMul", rows, weight), 0.009, 121), ["n", 5, 3])
    return net.model(), {"ids": np.random.default_rng(0).integers(0, 20, (2, 5))}


def enlarged():
    """A transposed convolution, resizing in two ways, a LeakyRelu and a Max of three."""
    net = Net(16)
    encoding = (0.031, 119)
    x = net.qdq(net.input(["n", 4, 5, 6]), *encoding)
    weight, _ = net.weight((4, 4, 3, 3), 1)
    up = net.op("ConvTranspose", x, weight, strides=[2, 2], pads=[1, 1, 1, 1], output_padding=[1, 1])
    up = net.qdq(net.op("LeakyRelu", up, alpha=0.1), *encoding)
    twice = net.const(np.array([1, 1, 2, 2], np.float32))
    smooth = net.op("Resize", x, "", twice, mode="linear", coordinate_transformation_mode="half_pixel")
    how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    coarse = net.qdq(net.op("Resize", x, "", twice, **how), *encoding)
    largest = net.op("Max", up, net.qdq(smooth, *encoding), coarse)
    net.output(net.qdq(largest, *encoding), ["n", 4, 10, 12])
    return net.model(), {"x": floats((2, 4, 5, 6))}


def vector():
    """One axis, and nothing but a table."""
    net = Net(14)
    net.output(net.qdq(net.op("Tanh", net.qdq(net.input([40]), 0.031, 119)), 1 / 127, 127), [40])
    return net.model(), {"x": floats([40])}


def nothing():
    """Quantized, and given back."""
    net = Net(15)
    net.output(net.qdq(net.input(["n", 40]), 0.031, 119), ["n", 40])
    return net.model(), {"x": floats((2, 40))}


def token():
    """A stored token before those of every image, slopes of both signs, and padding with a number off the grid."""
    net = Net(16)
    x = net.qdq(net.input(["n", 5, 8]), 0.031, 119)
    size = net.op("Gather", net.op("Shape", x), net.const(np.array([0])))
    shape = net.op("Concat", size, net.const(np.array([1, 1])), axis=0)
    first = net.op("Expand", net.qdq(net.const(floats((1, 1, 8), 1.0)), 0.01, 3, INT8), shape)
    y = net.qdq(net.op("Concat", first, x, axis=1), 0.033, 120)
    y = net.op("PRelu", y, net.const(np.linspace(-1, 1, 8, dtype=np.float32)))
    y = net.op("Pad", y, net.const(np.array([0, 1, 0, 0, 0, 2])), net.const(np.float32(0.777)))
    net.output(net.qdq(y, 0.041, 100), ["n", 7, 10])
    return net.model(), {"x": floats((3, 5, 8))}


#: Those that a C header can express.
IN_C = {
    "cnn": cnn,
    "cnn of int8": lambda: cnn(INT8),
    "residual": residual,
    "16 bits": sixteen_bits,
    "matmuls": matmuls,
    "pools": pools,
    "one axis": one_axis,
    "signal": signal,
    "three axes": three_axes,
    "moves": moves,
    "joined": joined,
    "ties": ties,
    "wide weights": wide_weights,
    "blocks": blocks,
    "enlarged": enlarged,
    "vector": vector,
    "nothing": nothing,
    "clips": clips,
    "token": token,
}
MODELS = {**IN_C, "softmax": softmax, "embedding": embedding}
