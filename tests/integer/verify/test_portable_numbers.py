"""Numbers in parts: chains of operations give the exact integers, and no tensor on the way leaves int32."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.portable.numbers import Arithmetic, Number, constant, divided, divided_by_powers
from onnx_backend.integer.reference.run import run_reference

COUNT = 40
MOST = 1 << 62
STEP = st.one_of(
    st.tuples(st.sampled_from(["add", "subtract", "multiply"]), st.integers(0, 4)),
    st.tuples(st.sampled_from(["plus", "times"]), st.integers(-(1 << 45), 1 << 45)),
    st.tuples(st.sampled_from(["shift", "divide"]), st.integers(1, 45)),
    st.tuples(st.just("flat"), st.just(0)),
)
EDGES = [(0, 255), (-(1 << 17), 1 << 17), (0, (1 << 31) - 1), (-(1 << 31), (1 << 31) - 1), (-1, 0), (0, (1 << 28) - 1)]


def drawn(lo, hi, rng):
    """Numbers of every size within bounds, ends included."""
    sizes = rng.integers(0, 33, COUNT)
    values = [int(rng.integers(-(1 << 31), 1 << 31)) >> int(32 - size) for size in sizes]
    return [lo, hi, *(min(max(v, lo), hi) for v in values)]


class Chain:
    """Numbers with their exact values, as Python integers."""

    def __init__(self, seed):
        self.b = Builder([], "half_up")
        self.b.label = "chain"
        self.arithmetic = Arithmetic(self.b)
        rng = np.random.default_rng(seed)
        self.feeds = {f"x{i}": drawn(lo, hi, rng) for i, (lo, hi) in enumerate(EDGES)}
        numbers = [Number((name,), *ends) for name, ends in zip(self.feeds, EDGES, strict=True)]
        self.found = list(zip(numbers, self.feeds.values(), strict=True))

    def take(self, kind, operand, place):
        a = self.arithmetic
        x, exact = self.found[place % len(self.found)]
        other, theirs = self.found[operand % len(self.found)] if kind in ("add", "subtract", "multiply") else (None, [])
        if kind in ("add", "subtract"):
            sign = 1 if kind == "add" else -1
            made = lambda: a.add(x, other, sign=sign)  # noqa: E731
            values = [v + sign * w for v, w in zip(exact, theirs, strict=True)]
        elif kind == "multiply":
            made, values = lambda: a.multiply(x, other), [v * w for v, w in zip(exact, theirs, strict=True)]
        elif kind == "plus":
            made, values = lambda: a.add(x, constant(np.asarray(operand))), [v + operand for v in exact]
        elif kind == "times":
            made, values = lambda: a.multiply(x, constant(np.asarray(operand))), [v * operand for v in exact]
        elif kind == "shift":
            made, values = lambda: a.shifted_right(x, operand), [v >> operand for v in exact]
        elif kind == "divide":
            made = lambda: divided_by_powers(a, x, constant(np.asarray(1 << operand)))  # noqa: E731
            values = [abs(v) // (1 << operand) * (-1 if v < 0 else 1) for v in exact]
        else:
            made, values = lambda: Number((a.flat(x),), x.lo, x.hi), exact
            if not -(1 << 31) <= x.lo <= x.hi < 1 << 31:
                return
        sizes = [max(abs(x.lo), abs(x.hi)), max(abs(other.lo), abs(other.hi)) if other else abs(operand)]
        most = sizes[0] * sizes[1] if kind in ("multiply", "times") else sum(sizes)
        if most < MOST or kind == "shift":
            self.found.append((made(), values))


def evaluate(chain):
    """Every tensor of a chain, with int64 where int32 could overflow unseen."""
    b = chain.b
    wide = [numpy_helper.from_array(numpy_helper.to_array(t).astype(np.int64), t.name) for t in b.initializers]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [COUNT + 2]) for name in chain.feeds]
    last = b.nodes[-1].output[0]
    output = helper.make_tensor_value_info(last, TensorProto.INT64, None)
    graph = helper.make_graph(b.nodes, "chain", inputs, [output], wide)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    feeds = {name: np.asarray(values, np.int64) for name, values in chain.feeds.items()}
    return {**feeds, **run_reference(model, feeds, every_tensor=True)}


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(STEP, st.integers(0, 50)), min_size=1, max_size=8), st.integers(0, 1000))
@example([(("times", (1 << 30) - 1), 5), (("shift", 3), 6), (("add", 7), 7), (("shift", 14), 8)], 3)
@example([(("times", (1 << 31) - 5), 5), (("add", 6), 6), (("add", 7), 7), (("add", 7), 8), (("shift", 15), 9)], 4)
@example([(("shift", 30), 2), (("shift", 29), 3)], 0)
@example([(("multiply", 2), 2), (("multiply", 1), 0), (("add", 6), 7), (("shift", 31), 8), (("flat", 0), 9)], 0)
@example([(("times", -(1 << 27) - 3), 3), (("plus", (1 << 45) - 1), 6), (("shift", 17), 7), (("shift", 28), 6)], 1)
@example(
    [(("times", (1 << 30) + 1), 3), (("subtract", 5), 5), (("shift", 14), 5), (("add", 5), 5), (("shift", 9), 8)], 2
)
def test_a_chain_of_operations_is_exact_and_stays_in_int32(steps, seed):
    chain = Chain(seed)
    for (kind, operand), place in steps:
        chain.take(kind, operand, place)
    if not chain.b.nodes:
        return
    tensors = evaluate(chain)
    for name, values in tensors.items():
        assert values.min() >= -(1 << 31), name
        assert values.max() < 1 << 31, name
    stored = {t.name: numpy_helper.to_array(t).astype(np.int64) for t in chain.b.initializers}
    for number, exact in chain.found:
        parts = [np.broadcast_to({**stored, **tensors}[part], COUNT + 2).tolist() for part in number.parts]
        whole = [sum(v << (14 * i) for i, v in enumerate(row)) for row in zip(*parts, strict=True)]
        assert whole == exact
        assert number.lo <= min(exact)
        assert max(exact) <= number.hi
        for part, (lo, hi) in zip(parts, number.loose, strict=False):
            assert lo <= min(part)
            assert max(part) <= hi


def test_carries_are_added_once_for_all_readers_and_bounds_may_become_tighter():
    chain = Chain(0)
    a = chain.arithmetic
    wide = a.multiply(chain.found[1][0], constant(np.asarray((1 << 40) + 1)))
    assert wide.loose
    names = a.names(wide)
    count = len(chain.b.nodes)
    assert a.names(replace(wide, lo=wide.lo + 1, hi=wide.hi - 1)) == names
    assert len(chain.b.nodes) == count
    assert not a.tight(wide).loose


@pytest.mark.parametrize(("value", "nodes"), [((1 << 24) - 1, 1), (1 << 24, 2), ((1 << 31) - 1, 2)])
def test_a_shift_of_what_a_float32_division_takes_is_one_node(value, nodes):
    chain = Chain(0)
    chain.arithmetic.shifted_right(Number(("x0",), 0, value), 8)
    assert len(chain.b.nodes) == nodes


@pytest.mark.parametrize("most", [1 << 14, (1 << 28) - 1, (1 << 31) - 1])
def test_quotients_of_numbers_are_exact(most):
    """Remainders of 0, 1 and one less than the divisor, which is next to a place where its highest part changes."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, most.bit_length(), 3000)
    near = rng.choice([0, 1, -1, (1 << 13) - 1], 3000) << np.maximum(sizes - 14, 0)
    right = np.clip((1 << sizes) + near + rng.integers(-1, 2, 3000), 1, most)
    top = (1 << 31) - 1
    left = top // right - rng.choice([0, 1, 2], 3000) * (rng.random(3000) < 0.5) >> rng.integers(0, 20, 3000)
    left = np.clip(left * right + rng.choice([0, 1, -1], 3000) % right, 0, top)
    b = Builder([], "half_up")
    b.label = "quotient"
    arithmetic = Arithmetic(b)
    name = arithmetic.flat(divided(arithmetic, Number(("x",), 0, top), Number(("y",), 1, most)))
    *edges, output = (helper.make_tensor_value_info(n, TensorProto.INT32, None) for n in ("x", "y", name))
    model = helper.make_model(
        helper.make_graph(b.nodes, "quotient", edges, [output], b.initializers),
        opset_imports=[helper.make_opsetid("", 21)],
        ir_version=10,
    )
    found = run_reference(model, {"x": left.astype(np.int32), "y": right.astype(np.int32)})[name]
    np.testing.assert_array_equal(found, left // right)
