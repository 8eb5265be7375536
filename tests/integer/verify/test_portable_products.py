"""Requantization by four products of 32 bits: the codes of the 64-bit form, for every kind of constants."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Requantization
from onnx_backend.integer.ir.requantization import RequantMultiplier
from onnx_backend.integer.ir.values import ActivationEncoding, Linear, Term
from onnx_backend.integer.portable.requantize import requantize, split_products, wide_product
from onnx_backend.integer.reference.run import OPS, run_reference


def operation(lo, hi, mantissas, shifts, addends, rounding="half_up", *, codes=False, zero=120, bounds=(3, 250)):
    array = lambda v: np.asarray(v, np.int64)  # noqa: E731
    none = np.zeros((), np.int64)
    plan = RequantMultiplier((array(mantissas),), array(shifts), array(addends), none, none, False, 0, Fraction(0))
    term = Term("t", np.ones(()), none, array(lo), array(hi), codes)
    encoding = ActivationEncoding(1.0, zero, TensorProto.UINT8)
    return Requantization(Linear((term,)), encoding, plan, rounding, bounds, "y", "y", {})


def rows_of(op):
    """Mantissa, shift and addend of every channel."""
    plan = op.plan
    columns = np.broadcast_arrays(plan.mantissas[0], plan.shift, plan.addend)
    return list(zip(*(column.reshape(-1).tolist() for column in columns), strict=True))


def exact(op, values):
    """The codes in Python's integers, one row of values per channel."""
    pairs = zip(values.tolist(), rows_of(op), strict=True)
    codes = np.asarray([[((t * m + c + (1 << (n - 1))) >> n) + 120 for t in row] for row, (m, n, c) in pairs])
    return np.clip(codes, 3, 250)


def written(op, values):
    """The codes that the nodes compute, on int32 that raises where it overflows."""
    b = Builder(["t", "y"], "half_up")
    b.label, b.indices = "y", set()
    assert requantize(b, op)
    kinds = {"t": TensorProto.INT32, "y": TensorProto.UINT8}
    edges = [helper.make_tensor_value_info(name, kind, values.shape) for name, kind in kinds.items()]
    graph = helper.make_graph(b.nodes, "products", edges[:1], edges[1:], b.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return run_reference(model, {"t": values.astype(np.int32)})["y"]


def drawn_values(op, seed=0):
    """The ends, places next to cuts of 15 bits, and where the codes change: one row per channel."""
    rng = np.random.default_rng(seed)
    lo, hi = max(int(op.value.terms[0].lo), -(1 << 31)), min(int(op.value.terms[0].hi), (1 << 31) - 1)
    rows = []
    for m, n, c in rows_of(op):
        steps = [((k << n) + (1 << (n - 1)) - c) // m for k in range(-3, 4)] if m else [0] * 7
        near = [s + d for s in steps for d in (-1, 0, 1)]
        cuts = [(k << 15) + d for k in rng.integers(-(1 << 15), 1 << 15, 20).tolist() for d in (-1, 0, 1 << 14)]
        whole = [lo, hi, lo + 1, hi - 1, 0, *near, *cuts, *rng.integers(lo, hi, 60, endpoint=True).tolist()]
        rows.append([min(max(v, lo), hi) for v in whole])
    return np.asarray(rows, np.int64)


CHANNEL = st.tuples(st.integers(-(1 << 31) + 1, (1 << 31) - 1), st.integers(31, 58), st.integers(-(1 << 59), 1 << 59))


@settings(deadline=None, max_examples=100)
@given(
    st.integers(-(1 << 30), 1 << 30),
    st.integers(1, (1 << 31) - 1),
    st.lists(CHANNEL, min_size=1, max_size=4),
    st.integers(0),
)
@example(0, 1 << 30, [((1 << 31) - 1, 52, 0)], 0)
@example(0, 1 << 29, [((1 << 30) + 1, 52, 0), (0, 1, 1 << 20)], 0)
@example(-(1 << 30), (1 << 31) - 1, [((1 << 31) - 1, 53, 0)], 0)
@example(-328769965, 657539930, [(1520514153, 51, 1 << 50), (-1483875181, 50, -(1 << 48)), (0, 40, 9)], 0)
@example(-(1 << 29), 1 << 30, [((1 << 31) - 1, 53, -(1 << 59)), (-(1 << 31) + 1, 53, 1 << 59), (0, 40, 1 << 45)], 0)
def test_the_codes_are_those_of_the_64_bit_form(lo, span, channels, seed):
    mantissas, shifts, addends = ([[c[i]] for c in channels] for i in range(3))
    op = operation(lo, lo + span, mantissas, shifts, addends)
    form = wide_product(op)
    if span <= 1 << 30 and all(n >= 31 for m, n, _ in channels if m) and np.max(np.abs(addends)) <= 1 << 58:
        assert form is not None
    assume(form is not None)
    values = drawn_values(op, seed % 1000)
    np.testing.assert_array_equal(written(op, values), exact(op, values))


@pytest.mark.parametrize(
    ("lo", "hi"), [(0, 1 << 30), (-(1 << 29), 1 << 29), (5, (1 << 30) + 5)], ids=["rising", "centred", "moved"]
)
def test_a_full_range_and_a_full_mantissa_have_a_form(lo, hi):
    op = operation(lo, hi, (1 << 31) - 1, 53, 12345)
    form = wide_product(op)
    assert form is not None
    values = drawn_values(op)
    np.testing.assert_array_equal(written(op, values), exact(op, values))


def test_a_channel_without_a_weight_leaves_the_others_their_parts():
    op = operation(0, 27_153, [[1518500249], [0]], [[38], [1]], [[0], [9]])
    form = split_products(op)
    assert form is not None
    assert len(form.addends) > 1
    values = drawn_values(op)
    np.testing.assert_array_equal(written(op, values), exact(op, values))


def test_what_has_no_such_form_is_left_to_others():
    assert wide_product(operation(0, 1 << 28, (1 << 31) - 1, 53, 0, "half_even")) is None
    assert wide_product(operation(0, 1 << 28, 1 << 33, 55, 0)) is None
    assert wide_product(operation(0, 1 << 28, 1 << 30, 29, 0)) is None
    assert wide_product(operation(-(1 << 31), (1 << 31) - 1, (1 << 31) - 1, 40, 0)) is None


def sum_of_two(lowest, span, mantissas, shift, addend, rounding):
    """The requantization of a sum of two tensors, each of which begins at its lowest value."""
    array, none = lambda v: np.asarray(v, np.int64), np.zeros((), np.int64)
    terms = tuple(
        Term(name, np.ones(()), none, array(lo), array(lo + span), False) for name, lo in zip("tu", lowest, strict=True)
    )
    multipliers = tuple(map(array, mantissas))
    plan = RequantMultiplier(multipliers, array(shift), array(addend), none, none, False, 0, Fraction(0))
    encoding = ActivationEncoding(1.0, 120, TensorProto.UINT8)
    return Requantization(Linear(terms), encoding, plan, rounding, (3, 250), "y", "y", {})


@pytest.mark.parametrize("rounding", ["half_up", "half_even"])
@pytest.mark.parametrize(
    ("mantissas", "shift", "addend"),
    [((3, 5), 3, 1), ((1 << 29, -(1 << 28)), 30, 1 << 29), ((715827883, 613566757), 31, -123456789)],
)
def test_the_codes_of_a_sum_are_those_of_the_64_bit_form_for_all_pairs(mantissas, shift, addend, rounding):
    op = sum_of_two((-121, 0), 255, mantissas, shift, addend, rounding)
    t, u = (pair.reshape(-1) for pair in np.meshgrid(np.arange(-121, 135), np.arange(256)))
    b = Builder(["t", "u", "y"], rounding)
    b.label, b.indices = "y", set()
    assert requantize(b, op)
    kinds = {"t": TensorProto.INT32, "u": TensorProto.INT32, "y": TensorProto.UINT8}
    edges = [helper.make_tensor_value_info(name, kind, t.shape) for name, kind in kinds.items()]
    graph = helper.make_graph(b.nodes, "sum", edges[:2], edges[2:], b.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found = run_reference(model, {"t": t.astype(np.int32), "u": u.astype(np.int32)})["y"]
    exact = [int(v) for v in t * mantissas[0] + u * mantissas[1] + addend]
    half = {
        "half_up": lambda v: (v + (1 << (shift - 1))) >> shift,
        "half_even": lambda v: round(Fraction(v, 1 << shift)),
    }
    np.testing.assert_array_equal(found, np.clip([half[rounding](v) + 120 for v in exact], 3, 250))


@pytest.mark.parametrize(("lowest", "has_form"), [((-255, -255), True), ((-256, -256), False), ((0, 0), False)])
def test_a_sum_of_more_pairs_than_are_tried_has_no_such_form(lowest, has_form):
    span = 255 if has_form else 256
    assert (split_products(sum_of_two(lowest, span, (1 << 28, 1 << 27), 30, 0, "half_up")) is not None) is has_form


def divided_in_float32(_, x, by):
    """The quotient as OpenVINO computes it."""
    return np.trunc(np.ldexp(x.astype(np.float32).astype(np.float64), -np.log2(by).astype(int))).astype(np.int32)


@pytest.mark.parametrize("divide", [OPS["Div"], divided_in_float32], ids=["integers", "float32"])
@pytest.mark.parametrize(
    ("reach", "mantissa", "shift", "addend", "zero", "lowest"),
    [
        ((1 << 25) - 2, 9728, 34, 102264413222, 194, 3),
        (1 << 28, 6946816, 40, 0, 20, 0),
        ((1 << 29) - 1, 7808, 34, -(1 << 34), 238, 238),
    ],
)
def test_forms_whose_sums_are_large_or_lose_bits_in_float32_are_not_written(
    reach, mantissa, shift, addend, zero, lowest, divide
):
    """Ties to even are possible with these multipliers, so that the sums of the parts are those of the 64-bit form."""
    bounds = (lowest, 255)
    op = operation(-reach, reach, mantissa, shift, addend, "half_even", zero=zero, bounds=bounds)
    steps = ((np.arange(-3, 260) - zero << shift) - (1 << (shift - 1)) - addend) // mantissa
    near = (steps[:, None] + np.arange(-3, 4)).reshape(-1)
    even = np.linspace(-reach, reach, 5000).astype(np.int64)
    values = np.unique(np.clip(np.concatenate([near, even]), -reach, reach))
    b = Builder(["t", "y"], "half_even")
    b.label, b.indices = "y", set()
    assert requantize(b, op)
    tensors = {"t": values.astype(np.int32), **{t.name: numpy_helper.to_array(t) for t in b.initializers}}
    for node in b.nodes:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        compute = divide if node.op_type == "Div" else OPS[node.op_type]
        tensors[node.output[0]] = compute(attributes, *(tensors[name] for name in node.input))
    expected = [round(Fraction(t * mantissa + addend, 1 << shift)) + zero for t in values.tolist()]
    np.testing.assert_array_equal(tensors["y"], np.clip(expected, *bounds))
