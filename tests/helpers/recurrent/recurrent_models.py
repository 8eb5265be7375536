"""LSTM and GRU behind quantizers, with weights as integers."""

import numpy as np
from integer_comparison import noise
from integer_models import INT4, INT8, UINT8, Net

GATES = {"LSTM": 4, "GRU": 3}
LENGTH, BATCH, INPUT, HIDDEN = 4, 3, 6, 5
ENCODING, OUT, CELL = (0.031, 119, UINT8), (1 / 127, 128, UINT8), (0.0271, 128, UINT8)


def weights(net, op, *, directions=1, granularity="tensor", dtype=INT8, size=1.0, bias=True):
    """W, R and B: integers behind DequantizeLinear with gates that neither vanish nor saturate."""
    lo, hi = {INT8: (-128, 127), INT4: (-8, 7)}[dtype]
    found = []
    for depth in (INPUT, HIDDEN):
        rows = GATES[op] * HIDDEN
        stored = net.rng.integers(lo, hi + 1, (directions, rows, depth))
        stored = stored if dtype == INT4 else stored.astype(np.int8)
        shape = {"tensor": (), "row": (rows,), "direction": (directions,)}[granularity]
        scale = (net.rng.uniform(0.7, 1.3, shape) * size / hi / np.sqrt(depth)).astype(np.float32)
        attrs = {"tensor": {}, "row": {"axis": 1}, "direction": {"axis": 0}}[granularity]
        tensor = net.const(stored, "weight", dtype)
        found.append(net.op("DequantizeLinear", tensor, net.const(scale), **attrs))
    values = net.rng.normal(0, 0.3, (directions, 2 * GATES[op] * HIDDEN)).astype(np.float32)
    return [*found, net.const(values) if bias else ""]


def network(
    op,
    *,
    initial=None,
    direction="forward",
    outputs=(0,),
    length=LENGTH,
    encoding=ENCODING,
    seed=0,
    states=0.8,
    **options,
):
    attrs = {key: options.pop(key) for key in ("linear_before_reset", "activations", "layout") if key in options}
    net = Net(seed)
    directions = 1 + (direction == "bidirectional")
    x = net.qdq(net.input([length, "n", INPUT]), *encoding)
    operands = [x, *weights(net, op, directions=directions, **options)]
    shape = (directions, BATCH, HIDDEN)
    count, size = {"LSTM": 2, "GRU": 1}[op], states
    if initial == "zeros":
        operands += ["", *(net.const(np.zeros(shape, np.float32)) for _ in range(count))]
    elif initial == "constants":
        operands += ["", *(net.const(noise(shape, size, 7 + i)) for i in range(count))]
    elif initial == "quantized":
        operands += ["", *(net.qdq(net.input(shape, f"s{i}"), 0.0113, 120 + i) for i in range(count))]
    counts = {"LSTM": 3, "GRU": 2}[op]
    names = net.op(op, *operands, outputs=counts, hidden_size=HIDDEN, direction=direction, **attrs)
    shapes = [[length, directions, "n", HIDDEN], list(shape), list(shape)]
    encodings = [OUT, OUT, CELL]
    for i in outputs:
        net.output(net.qdq(names[i], *encodings[i]), [None if d == "n" else d for d in shapes[i]][:4], f"y{i}")
    return net.model()


def feeds(initial=None, direction="forward", op="LSTM", length=LENGTH, seed=3):
    found = {"x": noise((length, BATCH, INPUT), 1.5, seed)}
    if initial == "quantized":
        for i in range({"LSTM": 2, "GRU": 1}[op]):
            found[f"s{i}"] = noise((1 + (direction == "bidirectional"), BATCH, HIDDEN), 0.6, seed + i)
    return found


def growing_cell(length, scale=0.1):
    """Gates wide open: the cell reaches the sequence's length, its proven bound."""
    net = Net()
    x = net.qdq(net.input([length, 1, 1]), 1.0, 0)
    w = net.op("DequantizeLinear", net.const(np.full((1, 4, 1), 100, np.int8)), net.const(np.float32(1.0)))
    r = net.op("DequantizeLinear", net.const(np.zeros((1, 4, 1), np.int8)), net.const(np.float32(1.0)))
    _, _, cell = net.op("LSTM", x, w, r, outputs=3, hidden_size=1)
    net.output(net.qdq(cell, scale, 3), [1, 1, 1])
    return net.model()
