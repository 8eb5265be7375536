"""Integer-only conversion of 16-bit activations: bytes for the layers, int32 codes for everything else."""

import numpy as np
import pytest
from integer_models import INT16, LEVELS, UINT8, UINT16, Net, run, simulate

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.integer_only import integer_findings

BOTH = [(1.3e-4, 31007, UINT16), (1.7e-4, -411, INT16)]


def compare(net: Net, feeds, tolerance=0.05, **options):
    """Integer model == reference at every level, within 1 LSB of the Q/DQ model in float32, whose own noise shows."""
    model = net.model()
    result = convert(model, **options)
    assert integer_findings(result.model) == []
    reference = run_reference(result.model, feeds)
    for level in LEVELS:
        for name, found in run(result.model, feeds, level).items():
            np.testing.assert_array_equal(found, reference[name], err_msg=f"{name} at {level}")
    for name, wanted in simulate(model, feeds).items():
        lsb = np.abs(
            np.rint((reference[name].astype(np.float64) - wanted) / result.certificate["outputs"][name]["scale"])
        )
        assert np.unique(wanted).size > 50
        assert lsb.max() <= 1, f"{name}: {lsb.max()} LSB"
        assert (lsb > 0).mean() <= tolerance, f"{name}: {(lsb > 0).mean()} of the elements differ"
    return result


def uniform(shape, seed=1, reach=5.0):
    return np.random.default_rng(seed).uniform(-reach, reach, shape).astype(np.float32)


@pytest.mark.parametrize("encoding", BOTH)
@pytest.mark.parametrize("group", [1, 4])
def test_conv(encoding, group):
    net = Net()
    x = net.qdq(net.input([2, 4, 9, 9]), *encoding)
    weight, _ = net.weight((8, 4 // group, 3, 3), 0)
    bias = net.const(np.linspace(-1, 1, 8, dtype=np.float32))
    y = net.op("Relu", net.op("Conv", x, weight, bias, pads=[1, 0, 1, 2], group=group))
    net.output(net.qdq(y, 2.1e-4, 0, UINT16), [2, 8, 9, 9])
    result = compare(net, {"x": uniform([2, 4, 9, 9])})
    assert len(result.certificate["requantizations"][0]["accumulators"]) == 2


@pytest.mark.parametrize("encoding", BOTH)
def test_gemm_and_matmul_with_constants_on_either_side(encoding):
    net = Net()
    x = net.qdq(net.input([3, 32]), *encoding)
    first, _ = net.weight((24, 32), 0)
    y = net.qdq(net.op("Gemm", x, first, net.const(uniform(24)), transB=1), 3.1e-4, 30000, UINT16)
    second, _ = net.weight((24, 16), 1)
    y = net.qdq(net.op("MatMul", y, second), 2.3e-4, 30000, UINT16)
    third, _ = net.weight((5, 3))
    net.output(net.qdq(net.op("MatMul", third, y), 1.1e-3, 33000, UINT16), [5, 16])
    compare(net, {"x": uniform([3, 32])}, tolerance=0.2)


@pytest.mark.parametrize("dtypes", [(UINT16, UINT16), (INT16, UINT8), (UINT8, UINT16)])
@pytest.mark.parametrize("op", ["MatMul", "Mul", "Add", "Sub"])
def test_two_activations(op, dtypes):
    net = Net()
    scales = {UINT8: (0.037, 121), UINT16: (1.3e-4, 31007), INT16: (1.7e-4, -411)}
    a, c = (net.qdq(net.input([16, 16], name), *scales[d], d) for name, d in zip("ac", dtypes, strict=True))
    net.output(net.qdq(net.op(op, a, c), 3.3e-4 if op != "MatMul" else 3e-3, 31111, UINT16), [16, 16])
    result = compare(net, {"a": uniform([16, 16]), "c": uniform([16, 16], 2)})
    if op == "MatMul":  # one accumulator for every pair of bytes
        pairs = np.prod([1 if dtype == UINT8 else 2 for dtype in dtypes])
        assert len(result.certificate["requantizations"][0]["accumulators"]) == pairs


@pytest.mark.parametrize("dtype", [UINT8, UINT16])
def test_a_product_with_the_negative_of_an_activation(dtype):
    net = Net()
    scale, zero = (0.037, 121) if dtype == UINT8 else (1.3e-4, 31007)
    a, c = (net.qdq(net.input([16, 16], name), scale, zero, dtype) for name in "ac")
    net.output(net.qdq(net.op("MatMul", a, net.op("Neg", c)), 3e-3, 31111, UINT16), [16, 16])
    compare(net, {"a": uniform([16, 16]), "c": uniform([16, 16], 2)})


@pytest.mark.parametrize("encoding", BOTH)
@pytest.mark.parametrize("op", ["Sigmoid", "Tanh", "HardSwish", "Exp"])
def test_functions_on_every_code(op, encoding):
    scale, zero, dtype = encoding
    lo = 0 if dtype == UINT16 else -32768
    values = ((np.arange(65536) + lo - zero) * np.float32(scale)).astype(np.float32)
    net = Net()
    x = net.qdq(net.input([65536]), *encoding)
    net.output(net.qdq(net.op(op, x), 2.9e-4 if op != "Exp" else 5e-3, 5000, UINT16), [65536])
    compare(net, {"x": values}, tolerance=0.001)


@pytest.mark.parametrize("ends", [(UINT8, UINT16), (UINT16, UINT8)])
def test_a_change_of_width_is_a_table(ends):
    net = Net()
    encodings = {UINT8: (0.041, 120, UINT8), UINT16: (1.3e-4, 31007, UINT16)}
    x = net.qdq(net.input([4096]), *encodings[ends[0]])
    net.output(net.qdq(x, *encodings[ends[1]]), [4096])
    result = compare(net, {"x": uniform([4096])}, tolerance=0.0)
    assert [row["form"] for row in result.certificate["requantizations"]] == ["table"]


@pytest.mark.parametrize("encoding", BOTH)
@pytest.mark.parametrize(
    ("op", "attributes", "shape"),
    [
        ("MaxPool", {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}, [1, 3, 4, 8]),
        ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "dilations": [2, 1]}, [1, 3, 4, 4]),
        ("AveragePool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}, [1, 3, 8, 8]),
        ("GlobalAveragePool", {}, [1, 3, 1, 1]),
        ("GlobalMaxPool", {}, [1, 3, 1, 1]),
        ("Transpose", {"perm": [0, 2, 3, 1]}, [1, 8, 8, 3]),
    ],
)
def test_pools_and_moves(op, attributes, shape, encoding):
    net = Net()
    x = net.qdq(net.input([1, 3, 8, 8]), *encoding)
    net.output(net.qdq(net.op(op, x, **attributes), *encoding), shape)
    model = net.model()
    feeds = {"x": uniform([1, 3, 8, 8])}
    result = convert(model)
    wanted = simulate(model, feeds)["y"]
    reference = run_reference(result.model, feeds)["y"]
    for level in LEVELS:
        np.testing.assert_array_equal(run(result.model, feeds, level)["y"], reference)
    assert np.abs(reference - wanted).max() <= encoding[0] * 1.01
    if op in ("MaxPool", "GlobalMaxPool", "Transpose"):
        np.testing.assert_array_equal(reference, wanted)


def test_max_pool_behind_a_layer():
    net = Net()
    x = net.qdq(net.input([1, 4, 8, 8]), *BOTH[0])
    weight, _ = net.weight((4, 4, 1, 1), 0)
    y = net.op("MaxPool", net.op("Conv", x, weight), kernel_shape=[2, 2], strides=[2, 2])
    net.output(net.qdq(y, 1.9e-6 * 100, 30000, UINT16), [1, 4, 4, 4])
    compare(net, {"x": uniform([1, 4, 8, 8])})


@pytest.mark.parametrize("encoding", BOTH)
def test_integer_edges(encoding):
    net = Net()
    x = net.qdq(net.input([64]), *encoding)
    net.output(net.qdq(net.op("Tanh", x), 3.1e-5, 0, INT16), [64])
    whole, edged = (convert(net.model(), edges=edges).model for edges in ("float", "integer"))
    kind = edged.graph.input[0].type.tensor_type.elem_type
    assert (kind, edged.graph.output[0].type.tensor_type.elem_type) == (encoding[2], INT16)
    x = uniform([64])
    lo, hi = (0, 65535) if kind == UINT16 else (-32768, 32767)
    codes = np.clip(np.rint(x / np.float32(encoding[0])) + encoding[1], lo, hi)
    found = run(edged, {"x": codes.astype(np.uint16 if kind == UINT16 else np.int16)})["y"]
    np.testing.assert_array_equal(found * np.float32(3.1e-5), run(whole, {"x": x})["y"])
