"""The portable target: the same integers as `standard`, on every runtime, in operators of its table alone."""

import numpy as np
import onnx
import pytest
from every_runtime import every_runtime, onnxruntime
from firmware_models import MODELS
from integer_models import Net
from onnx import TensorProto, shape_inference

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.decompose.prepare import prepare
from onnx_backend.integer.portable.numbers import LIMITS
from onnx_backend.integer.verify.measure import random_inputs
from qsdk import ConfigError, IntegerError

#: onnx's own evaluator gives a MaxPool with auto_pad another shape than the standard says.
OTHER_SHAPES = {"pools": ("evaluator",)}
EDGES = {"QuantizeLinear", "DequantizeLinear"}


def both(model, **options):
    prepared = prepare(model, ())
    return tuple(convert(prepared, target=target, **options) for target in ("standard", "portable"))


def codes(standard, model, seed=0):
    """Inputs of a model with integer edges, over the whole range of their type."""
    rng = np.random.default_rng(seed)
    feeds = random_inputs(standard.model, model, rng)
    for name, values in feeds.items():
        if values.dtype.itemsize <= 2 and values.dtype != bool:
            info = np.iinfo(values.dtype)
            feeds[name] = rng.integers(info.min, info.max, values.shape, endpoint=True).astype(values.dtype)
    return feeds


def require_same(standard, portable, feeds, without=()):
    expected = onnxruntime(standard.model, feeds)
    for runtime, found in every_runtime(portable.model, feeds).items():
        for one, other in zip(expected, found, strict=True) if runtime not in without else ():
            np.testing.assert_array_equal(one, other, err_msg=runtime)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "joined"])
def test_a_network_has_the_integers_of_the_standard_target_on_every_runtime(name):
    model, _ = MODELS[name]()
    standard, portable = both(model, edges="integer")
    require_same(standard, portable, codes(standard, model), OTHER_SHAPES.get(name, ()))
    assert {node.op_type for node in portable.model.graph.node} <= {*LIMITS, *EDGES}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["cnn", "residual", "softmax"])
def test_float_edges_leave_the_model_the_same(name):
    model, feeds = MODELS[name]()
    standard, portable = both(model, edges="float")
    for one, other in zip(onnxruntime(standard.model, feeds), onnxruntime(portable.model, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def test_parts_that_leave_as_one_tensor_have_their_scales_along_its_axis():
    net = Net()
    boxes = net.qdq(net.input([2, 3, 4], "a"), 2.5, 100)
    scores = net.qdq(net.op("Sigmoid", net.qdq(net.input([2, 3, 3], "c"), 0.03, 120)), 1 / 255, 0)
    net.output(net.op("Concat", boxes, scores, axis=2), [2, 3, 7])
    rng = np.random.default_rng(0)
    feeds = {name: rng.normal(size=(2, 3, n)).astype(np.float32) * 100 for name, n in (("a", 4), ("c", 3))}
    (wanted,), (found,) = (onnxruntime(made.model, feeds) for made in both(net.model(), edges="float"))
    np.testing.assert_array_equal(found, wanted)


def layer_norm():
    net = Net()
    x = net.qdq(net.input([3, 5, 24]), 0.05, 119)
    gain, bias = (net.const(net.rng.uniform(0.5, 1.5, 24).astype(np.float32)) for _ in range(2))
    net.output(net.qdq(net.op("LayerNormalization", x, gain, bias), 0.03, 120), [3, 5, 24])
    return net.model()


def norms_of_codes():
    """Gains of both signs and 0, rows whose squares need two sums, a small epsilon, and InstanceNormalization."""
    net = Net()
    x = net.qdq(net.input([2, 3, 1100]), 0.05, 119)
    gain = net.rng.uniform(-1.5, 1.5, 1100).astype(np.float32)
    gain[::7] = 0.0
    bias = net.const(net.rng.uniform(-0.5, 0.5, 1100).astype(np.float32))
    y = net.op("LayerNormalization", x, net.const(gain), bias, epsilon=1e-12)
    net.output(net.qdq(y, 0.03, 120), [2, 3, 1100])
    gains = [net.const(np.array(values, np.float32)) for values in ([1.5, -0.5, 0.1], [0.1, 0.0, -0.3])]
    net.output(net.qdq(net.op("InstanceNormalization", x, *gains, epsilon=0.1), 0.03, 120), [2, 3, 1100], "y2")
    return net.model()


def long_rows():
    """Softmax along a middle axis of more elements than are summed at once, and where nothing is subtracted."""
    net = Net()
    x = net.qdq(net.input([2, 700, 3]), 0.05, 119)
    net.output(net.qdq(net.op("Softmax", x, axis=1), 0.0005, 0), [2, 700, 3])
    z = net.qdq(net.input([3, 1], "z"), 0.05, 119)
    net.output(net.qdq(net.op("Softmax", z), 1 / 255, 0), [3, 1], "y2")
    return net.model()


def log_softmax():
    net = Net()
    x = net.qdq(net.input([3, 24]), 0.05, 119)
    net.output(net.qdq(net.op("LogSoftmax", x), 0.1, 255), [3, 24])
    return net.model()


def root():
    net = Net()
    x = net.qdq(net.input([3, 24]), 0.05, 0)
    mean = net.op("ReduceMean", net.op("Mul", x, x), net.const([-1]))
    net.output(net.qdq(net.op("Sqrt", mean), 0.05, 0), [3, 1])
    return net.model()


def curve():
    net = Net()
    x = net.qdq(net.input([3, 24]), 0.05, 119)
    sums = net.op("Add", x, net.qdq(net.input([3, 24], "z"), 0.031, 100))
    net.output(net.qdq(net.op("Mul", sums, net.op("Sigmoid", sums)), 0.06, 8), [3, 24])
    return net.model()


def masked(dtype=TensorProto.BOOL):
    """Scores with a finite mask: a comparison chooses among numbers of more than 24 bits."""
    net = Net()
    x = net.qdq(net.input([2, 6, 6]), 0.11, 119)
    hidden = net.op("Sub", net.const(np.float32(1)), net.op("Cast", net.input([2, 1, 6], "m", dtype), to=1))
    scores = net.op("Add", x, net.op("Mul", hidden, net.const(np.float32(-10000))))
    net.output(net.qdq(net.op("Softmax", scores), 1 / 255, 0), [2, 6, 6])
    return net.model()


def joined_scales():
    """Two scales on a common grid: some parts of the joined numbers are constant, and still have their shape."""
    net = Net()
    a, b = (net.qdq(net.input([2, 8], name), scale, 119) for name, scale in (("x", 0.03), ("z", 0.04)))
    c = net.qdq(net.input([2, 16], "w"), 0.02, 3)
    net.output(net.qdq(net.op("Mul", net.op("Concat", a, b, axis=1), c), 0.05, 100), [2, 16])
    return net.model()


def recurrent(op, axis=0, **attrs):
    net = Net()
    x = net.qdq(net.input([4, 2, 6]), 0.03, 119)
    rows = {"LSTM": 20, "GRU": 15}[op]
    weights = [net.weight(shape, axis)[0] for shape in ((1, rows, 6), (1, rows, 5))]
    states = net.op(op, x, *weights, outputs=1, hidden_size=5, **attrs)
    net.output(net.qdq(states, 0.01, 128), [4, 1, 2, 5])
    return net.model()


def gru():
    return recurrent("GRU", linear_before_reset=1)


def gru_before():
    return recurrent("GRU")


def lstm():
    return recurrent("LSTM")


def lstm_by_rows():
    return recurrent("LSTM", axis=1)


def guarded():
    """The mean of what a mask keeps: its divisor comes as near to 0 as 1e-9, far from a step of its sum."""
    net = Net()
    x, kept = net.qdq(net.input([8, 4, 6]), 0.03, 119), net.qdq(net.input([8, 4, 1], "m"), 1 / 255, 0)
    kept = net.op("Relu", net.op("Sub", kept, net.const(np.float32(0.8))))  # often 0
    axes = net.const(np.array([1]))
    count = net.op("Clip", net.op("ReduceSum", kept, axes), net.const(np.float32(1e-9)))
    total = net.op("ReduceSum", net.op("Mul", x, kept), axes)
    net.output(net.qdq(net.op("Div", total, count), 0.021, 119), [8, 1, 6])
    return net.model()


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "make",
    [
        layer_norm,
        norms_of_codes,
        long_rows,
        log_softmax,
        root,
        curve,
        masked,
        joined_scales,
        gru,
        gru_before,
        lstm,
        lstm_by_rows,
        guarded,
    ],
)
def test_fixed_point_of_64_bits_is_the_same_in_parts_of_32(make):
    standard, portable = both(make(), edges="integer")
    require_same(standard, portable, codes(standard, make()))


def test_rows_without_a_variance_and_with_an_outlier_are_the_same_everywhere():
    model = layer_norm()
    standard, portable = both(model, edges="integer")
    feeds = codes(standard, model)
    (name,) = feeds
    rows = feeds[name].reshape(15, 24)
    rows[:6] = np.array([0, 255, 119, 7, 128, 254])[:, None]
    rows[6:9], rows[6, 3], rows[7, 0], rows[8, ::2] = 0, 255, 1, 255
    require_same(standard, portable, feeds)


@pytest.mark.slow
def test_an_int64_mask_is_taken_for_32_bits_and_the_certificate_says_so():
    model = masked(TensorProto.INT64)
    standard, portable = both(model, edges="integer")
    feeds = codes(standard, model) | {"m": np.random.default_rng(0).integers(0, 2, (2, 1, 6))}
    require_same(standard, portable, feeds)
    assert "the integers of the input 'm' fit in 32 bits" in portable.certificate["assumed"]


def test_no_64_bit_tensor_is_computed_with():
    model, _ = MODELS["softmax"]()
    _, portable = both(model, edges="integer")
    inferred = shape_inference.infer_shapes(portable.model)
    wide = {
        info.name
        for info in inferred.graph.value_info
        if info.type.tensor_type.elem_type in (TensorProto.INT64, TensorProto.UINT64)
    }
    sizes = {name for node in portable.model.graph.node if node.op_type == "Shape" for name in node.output}
    assert wide <= sizes


def deep(channels, value):
    """A layer whose sums leave the range that float32 adds exactly."""
    net = Net()
    x = net.qdq(net.input([3, channels]), 0.03, 255)
    weight = np.full((channels, 4), value, np.int8)
    weight[::3, 1:] -= np.arange(3, dtype=np.int8)
    stored = net.op("DequantizeLinear", net.const(weight), net.const(np.float32(0.01)))
    net.output(net.qdq(net.op("MatMul", x, stored), 40.0, 250), [3, 4])
    return net.model()


def test_the_sums_of_a_deep_layer_are_added_in_two_halves():
    model = deep(2000, 127)
    standard, portable = both(model, edges="integer")
    require_same(standard, portable, codes(standard, model))
    assert sum(node.op_type == "MatMulInteger" for node in portable.model.graph.node) == 2


def test_a_layer_beyond_int32_sums_of_halves_is_refused_by_name():
    with pytest.raises(
        IntegerError, match=r"MatMul 'node_matmul.*': its sums can reach .*; split the layer into layers of"
    ):
        convert(prepare(deep(20000, 127), ()), target="portable", edges="integer")


def test_options_that_portable_does_not_know_are_refused():
    model, _ = MODELS["cnn"]()
    with pytest.raises(ConfigError, match='target="portable" takes no allow_float; quantize Relu, head'):
        convert(model, target="portable", allow_float=["Relu", "head"])


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", ["cnn", "residual", "16 bits"])
def test_the_firmware_is_that_of_the_standard_target(name, tmp_path):
    model, _ = MODELS[name]()
    onnx.save(model, tmp_path / "model.onnx")
    headers = []
    for target in ("standard", "portable"):
        header = tmp_path / f"{target}.h"
        qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "out.onnx", target=target, firmware=header)
        headers.append(header.read_text().replace(header.stem, "network").replace(header.stem.upper(), "NETWORK"))
    assert headers[0] == headers[1]
