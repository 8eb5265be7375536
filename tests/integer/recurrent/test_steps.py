"""LSTM and GRU on integers against float64, the stated errors, directions, initial states, open lengths, refusals."""

import numpy as np
import pytest
from integer_comparison import compare, noise, refused
from integer_models import INT4, INT8, Net, run, simulate
from onnx import helper, numpy_helper
from recurrent_models import BATCH, ENCODING, GATES, HIDDEN, INPUT, LENGTH, OUT, feeds, growing_cell, network, weights

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference


@pytest.mark.parametrize("op", ["LSTM", "GRU", "GRU behind"])
@pytest.mark.parametrize(
    ("direction", "initial"),
    [("forward", None), ("forward", "zeros"), ("reverse", "constants"), ("bidirectional", "quantized")],
)
def test_directions_and_initial_states(op, direction, initial):
    attrs = {"linear_before_reset": 1} if op == "GRU behind" else {}
    op = op.split()[0]
    outputs = (0, 1, 2) if op == "LSTM" else (0, 1)
    model = network(op, direction=direction, initial=initial, outputs=outputs, **attrs)
    result = compare(model, feeds(initial, direction, op), tolerance=0.02)
    for row in result.certificate["requantizations"]:
        assert row["error_bound"] < 1.0, row["error_bound"]


@pytest.mark.spread(3)
@pytest.mark.parametrize("op", ["LSTM", "GRU", "GRU behind"])
@pytest.mark.parametrize(
    ("granularity", "dtype", "bias"), [("tensor", INT8, True), ("row", INT4, False), ("direction", INT8, False)]
)
def test_weights(op, granularity, dtype, bias):
    attrs = {"linear_before_reset": 1} if op == "GRU behind" else {}
    direction = "bidirectional" if granularity == "direction" else "forward"
    attrs |= {"granularity": granularity, "dtype": dtype, "bias": bias, "direction": direction, "length": 2}
    compare(network(op.split()[0], **attrs), feeds(direction=direction, length=2), tolerance=0.02)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def exact(model, x):
    """The layer in float64, from the ONNX standard, on the values behind the DequantizeLinear nodes."""
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    node = next(n for n in model.graph.node if n.op_type in GATES)
    makers = {n.output[0]: n for n in model.graph.node}

    def values(name):
        maker = makers[name]
        rows = stored[maker.input[1]].astype(np.float64)
        rows = rows[None, :, None] if rows.ndim else rows
        return stored[maker.input[0]].astype(np.float64) * rows

    w, r, b = values(node.input[1])[0], values(node.input[2])[0], stored[node.input[3]][0].astype(np.float64)
    wb, rb = np.split(b, 2)
    scale, zero = np.float32(ENCODING[0]), ENCODING[1]
    codes = np.clip(np.rint(x / scale) + zero, 0, 255)
    x = ((codes - zero) * scale).astype(np.float64)
    h, c, found = np.zeros((x.shape[1], HIDDEN)), np.zeros((x.shape[1], HIDDEN)), []
    behind = next((a.i for a in node.attribute if a.name == "linear_before_reset"), 0)
    for step in x:
        inputs = step @ w.T + wb
        if node.op_type == "LSTM":
            i, o, f, g = np.split(inputs + h @ r.T + rb, 4, axis=1)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        else:
            z, q, _ = np.split(inputs + h @ r.T + rb, 3, axis=1)
            z, q, last = sigmoid(z), sigmoid(q), slice(2 * HIDDEN, None)
            inner = q * (h @ r[last].T + rb[last]) if behind else (q * h) @ r[last].T + rb[last]
            g = np.tanh(inputs[:, last] + inner)
            h = (1 - z) * g + z * h
        found.append(h)
    return np.stack(found), c


@pytest.mark.spread(4)
@pytest.mark.parametrize("op", ["LSTM", "GRU", "GRU behind"])
@pytest.mark.parametrize("size", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("length", [1, 12])
def test_states_stay_within_the_stated_error_of_float64(op, size, length):
    attrs = {"linear_before_reset": 1} if op == "GRU behind" else {}
    model = network(op.split()[0], size=size, length=length, granularity="row", **attrs)
    result = convert(model)
    row = result.certificate["requantizations"][0]
    for seed, spread in enumerate((0.5, 3.0, 100.0)):  # the last one saturates every code
        x = noise((length, BATCH, INPUT), spread, seed)
        tensor = run_reference(result.model, {"x": x}, every_tensor=True)[row["accumulators"][0]]
        found = tensor[:, 0] * row["multipliers"][0][0]
        wanted = exact(model, x)[0] / np.float64(np.float32(OUT[0]))
        worst = np.abs(found - wanted).max()
        assert worst <= row["error_bound"], (worst, row["error_bound"])
        assert worst < 2e-3


@pytest.mark.spread(3)
@pytest.mark.parametrize("op", ["LSTM", "GRU", "GRU behind"])
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 300.0, (1e-9, 1.0)])
def test_scales_of_any_size(op, scale):
    """R may be tiny or huge beside W, as a whole or by rows: no sum leaves 62 bits, and no table grows."""
    attrs = {"linear_before_reset": 1} if op == "GRU behind" else {}
    model = network(op.split()[0], granularity="row" if isinstance(scale, tuple) else "tensor", length=2, **attrs)
    node = next(n for n in model.graph.node if n.op_type in GATES)
    maker = next(n for n in model.graph.node if n.output[0] == node.input[2])
    stored = next(t for t in model.graph.initializer if t.name == maker.input[1])
    found = numpy_helper.to_array(stored)
    changed = found * np.geomspace(*scale, found.size) if isinstance(scale, tuple) else found * scale
    stored.CopyFrom(numpy_helper.from_array(changed.astype(np.float32), stored.name))
    result = compare(model, feeds(length=2), tolerance=0.02)
    bound = result.certificate["requantizations"][0]["error_bound"]
    assert bound < 1.0 or scale == 300.0  # there one state's rounding can turn a gate
    assert result.model.ByteSize() < 2_000_000


@pytest.mark.spread(3)
@pytest.mark.parametrize("op", ["LSTM", "GRU", "GRU behind"])
@pytest.mark.parametrize("size", [5.0, 40.0, 3000.0])
def test_first_states_far_beyond_one(op, size):
    """A state that begins large has fewer fraction bits, and no product leaves 62."""
    attrs = {"linear_before_reset": 1} if op == "GRU behind" else {}
    model = network(op.split()[0], initial="constants", length=2, states=size, **attrs)
    compare(model, feeds(length=2), tolerance=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_long_sequences_stay_close_whatever_is_proven(op):
    model = network(op, length=30, size=3.0)
    found = run_reference(convert(model).model, feeds(length=30))["y0"]
    steps = np.abs(found - simulate(model, feeds(length=30))["y0"]) / OUT[0]
    assert steps.max() < 1.01
    assert (steps > 0.5).mean() < 0.005


def test_a_cell_that_grows_at_every_step():
    found = run(convert(growing_cell(20)).model, {"x": np.full((20, 1, 1), 200, np.float32)})["y"]
    np.testing.assert_allclose(found, 20.0, atol=0.11)


@pytest.mark.slow
def test_sequence_lengths_that_are_whole_are_accepted():
    net = Net()
    x = net.qdq(net.input([LENGTH, BATCH, INPUT]), *ENCODING)
    lengths = net.const(np.full(BATCH, LENGTH, np.int32))
    y, _, _ = net.op("LSTM", x, *weights(net, "LSTM"), lengths, outputs=3, hidden_size=HIDDEN)
    net.output(net.qdq(y, *OUT), [LENGTH, 1, BATCH, HIDDEN])
    compare(net.model(), feeds(), tolerance=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, 0.7])
def test_first_states_of_a_dynamic_batch(value):
    net = Net()
    x = net.qdq(net.input([LENGTH, "n", INPUT]), *ENCODING)
    batch = net.op("Gather", net.op("Shape", x), net.const(np.array([1], np.int64)))
    one = net.const(np.array([1], np.int64))
    shape = net.op("Concat", one, batch, net.const(np.array([HIDDEN], np.int64)), axis=0)
    first = net.op("Expand", net.const(np.full((1, 1, HIDDEN), value, np.float32)), shape)
    y, _ = net.op("GRU", x, *weights(net, "GRU"), "", first, outputs=2, hidden_size=HIDDEN)
    net.output(net.qdq(y, *OUT), [LENGTH, 1, None, HIDDEN])
    result = compare(net.model(), feeds(), tolerance=0.02)
    assert result.certificate["requantizations"][0]["error_bound"] < 1.0


@pytest.mark.slow
def test_moves_and_layers_behind_it():
    net = Net()
    x = net.qdq(net.input([LENGTH, BATCH, INPUT]), *ENCODING)
    y, _ = net.op("GRU", x, *weights(net, "GRU"), outputs=2, hidden_size=HIDDEN)
    y = net.op("Squeeze", y, net.const(np.array([1], np.int64)))
    y = net.qdq(net.op("Transpose", y, perm=[1, 0, 2]), *OUT)
    w, _ = net.weight((HIDDEN, 4), 1)
    net.output(net.qdq(net.op("MatMul", y, w), 0.0113, 120), [BATCH, LENGTH, 4])
    compare(net.model(), feeds(), tolerance=0.05)


def test_no_float_and_one_input_product_for_all_steps():
    result = convert(network("LSTM"))
    products = [node for node in result.model.graph.node if node.op_type == "MatMulInteger"]
    assert len(products) == LENGTH  # the input's once, and one per step that has a state before it
    assert np.isfinite(simulate(network("LSTM"), feeds())["y0"]).all()


@pytest.mark.parametrize("op", ["LSTM", "GRU"])
def test_sums_beyond_the_tables_in_32_bits(op):
    model = network(op, size=30.0, length=2)
    given = {"x": noise((2, BATCH, INPUT), 100.0, 3)}
    standard, portable = (convert(model, target=target).model for target in ("standard", "portable"))
    assert any(node.op_type == "Min" for node in standard.graph.node)
    np.testing.assert_array_equal(run(standard, given)["y0"], run(portable, given)["y0"])


# --- refusals --------------------------------------------------------------------------------------------------------


def variant(op="LSTM", **changes):
    """A model with one operand or attribute changed."""
    net = Net()
    x = net.qdq(net.input([changes.pop("length", LENGTH), BATCH, INPUT]), *ENCODING)
    operands = [x, *weights(net, op), "", "", "", ""]
    for place, array in changes.pop("operands", {}).items():
        operands[place] = net.const(array)
    operands = operands[: 8 if op == "LSTM" else 6]
    while not operands[-1]:
        operands.pop()
    y = net.op(op, *operands, outputs=2, hidden_size=HIDDEN, **changes)[0]
    net.output(net.qdq(y, *OUT), [None] * 4)
    return net.model()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"operands": {7: np.ones((1, 3 * HIDDEN), np.float32)}}, "it has peepholes"),
        ({"operands": {4: np.array([LENGTH, 2, LENGTH], np.int32)}}, "lengths of their own"),
        ({"operands": {1: np.ones((1, 4 * HIDDEN, INPUT), np.float32)}}, "W is float"),
        ({"operands": {2: np.ones((1, 4 * HIDDEN, HIDDEN), np.float32)}}, "store W and R as integers"),
        ({"activations": ["Relu", "Tanh", "Tanh"]}, "its activations are Relu, Tanh, Tanh"),
        ({"clip": 3.0}, "it clips its gates"),
        ({"input_forget": 1}, "input_forget=1"),
    ],
)
def test_refusals(changes, message):
    refused(variant(**changes), "LSTM 'node_lstm", message)


def test_a_layout_with_the_batch_first_is_refused():
    model = variant("GRU")
    node = next(n for n in model.graph.node if n.op_type == "GRU")
    node.attribute.append(helper.make_attribute("layout", 1))
    refused(model, "layout=1", "Transpose")


def test_a_bias_that_is_computed_is_refused():
    net = Net()
    x = net.qdq(net.input([LENGTH, BATCH, INPUT]), *ENCODING)
    bias = net.qdq(net.input([1, 8 * HIDDEN], "b"), 0.01, 128)
    y, _, _ = net.op("LSTM", x, *weights(net, "LSTM")[:2], bias, outputs=3, hidden_size=HIDDEN)
    net.output(net.qdq(y, *OUT), [LENGTH, 1, BATCH, HIDDEN])
    refused(net, "its bias is not a constant", "initializer")
