"""Writing the integer graph: names, constants, nodes, and the requantize recipe.

The recipe uses only operators whose integer kernels are right on every operand: ONNX Runtime's int64 Sign, Clip, Max
and Min are wrong for operands in [2**31, 2**32) on x86, so the shift is done on uint64 and the clip on int32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.integer.values import Array, Encoding, Linear, Lookup, Refused
from qsdk.core.errors import ConfigError
from qsdk.core.fixed_point import MAX_SHIFT, Rounding, fixed_point, tie_in_range, ties_possible

#: Above this many channels or positions a tie is assumed possible instead of searched for.
_TIE_SEARCH = 1 << 16


class Builder:
    """Collects the nodes and initializers of the integer graph and the rows of its certificate."""

    def __init__(self, reserved: Sequence[str], rounding: Rounding) -> None:
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self.certificate: list[dict[str, Any]] = []
        self.rounding = rounding
        self.label = ""  # the node being lowered
        self.behind = ""  # the node that made its first input
        self.facts: dict[str, dict[str, Any]] = {}  # what the certificate says about a node of the Q/DQ model
        self._taken = set(reserved)
        self._constants: dict[tuple[Any, ...], str] = {}

    def fresh(self, stem: str) -> str:
        """Give a tensor name that nothing has yet, `stem` itself if it is free."""
        name, count = stem, 0
        while name in self._taken:
            count += 1
            name = f"{stem}_{count}"
        self._taken.add(name)
        return name

    def constant(self, array: Any, dtype: Any = None, stem: str = "constant") -> str:
        """Give the name of an initializer with these values; equal ones are written once."""
        values = np.asarray(array, dtype)
        key = (str(values.dtype), values.shape, values.tobytes())
        if key not in self._constants:
            name = self.fresh(stem)
            self.initializers.append(numpy_helper.from_array(values, name))
            self._constants[key] = name
        return self._constants[key]

    def node(self, op_type: str, inputs: Sequence[str], *, name: str | None = None, **attributes: Any) -> str:
        """Append a node with one output and give that output's name (`name`, made unique)."""
        output = self.fresh(name or f"{self.label}.{op_type}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_node", **attributes))
        return output

    def cast(self, tensor: str, to: int, *, name: str | None = None) -> str:
        """Append a Cast."""
        return self.node("Cast", [tensor], name=name, to=to)


@dataclass(frozen=True)
class Plan:
    """The constants of one requantization, all int64 arrays that broadcast against the tensor.

    Attributes:
        mantissas: one per term.
        shift: right shift, 1..62.
        addend: what the products need besides half a unit: zero points, biases, constants.
        low: smallest value of products + addend.
        high: largest value of products + addend.
        ties: whether an exact tie can occur for some accumulator within the bounds.
        bound: largest magnitude of a term with its zero point or bias applied.
    """

    mantissas: tuple[Array, ...]
    shift: Array
    addend: Array
    low: Array
    high: Array
    ties: bool
    bound: int


def plan(value: Linear, encoding: Encoding) -> Plan:
    """Compute the fixed-point constants that take `value` to `encoding`.

    Raises:
        Refused: a multiplier is too large for a fixed point.
    """
    ratios = [term.scale / np.float64(encoding.scale) for term in value.terms]
    single = len(ratios) == 1 and not np.any(value.constant) and bool(np.all(ratios[0] > 0))
    if single:
        mantissa, shift = _fixed(ratios[0])
        dead = shift > MAX_SHIFT  # rounds to 0 for every int32
        mantissas: tuple[Array, ...] = (np.where(dead, 0, mantissa),)
        shift = np.where(dead, 1, shift)
        constant: Array = np.zeros((), np.int64)
    else:
        shift, real = _common_shift(value, ratios, encoding)
        mantissas = tuple(np.rint(np.ldexp(ratio, shift)).astype(np.int64) for ratio in ratios)
        constant = np.rint(np.ldexp(real, shift)).astype(np.int64)
    low = high = addend = constant
    for term, mantissa in zip(value.terms, mantissas, strict=True):
        ends = (mantissa * (term.lo - term.zero), mantissa * (term.hi - term.zero))
        low, high = low + np.minimum(*ends), high + np.maximum(*ends)
        addend = addend - mantissa * term.zero
    bound = max(
        int(np.max(np.maximum(np.abs(term.lo - term.zero), np.abs(term.hi - term.zero)))) for term in value.terms
    )
    ties = _ties(value, mantissas, shift, constant)
    return Plan(mantissas, np.asarray(shift), addend, low, high, ties, bound)


def _fixed(ratio: Array) -> tuple[Array, Array]:
    try:
        return fixed_point(ratio)
    except ConfigError as error:
        raise Refused(str(error), "recalibrate: the output's scale is far too small for its inputs") from error


def _common_shift(value: Linear, ratios: Sequence[Array], encoding: Encoding) -> tuple[Array, Array]:
    """Give the shift that several terms share and the constant in output steps."""
    largest, reach = np.zeros(()), np.zeros(())
    for term, ratio in zip(value.terms, ratios, strict=True):
        raw = np.maximum(np.abs(term.lo), np.abs(term.hi)) + np.abs(term.zero)
        largest, reach = np.maximum(largest, np.abs(ratio)), reach + np.abs(ratio) * raw
    # beyond this the output saturates whatever the terms are, so clipping changes nothing
    limit = np.max(reach) + 2.0 * encoding.hi + 2.0
    constant = np.clip(value.constant / np.float64(encoding.scale), -limit, limit)
    _, shift = _fixed(np.where(largest > 0, largest, 1.0))
    _, exponent = np.frexp(reach + np.abs(constant) + 1.0)
    shift = np.minimum(np.minimum(shift, 60), 61 - exponent)  # products and their sum stay below 2**61
    if np.any(shift < 1):
        raise Refused("its terms are too far apart for one fixed point", "recalibrate: one scale is far too large")
    return shift.astype(np.int64), constant


def _ties(value: Linear, mantissas: Sequence[Array], shift: Array, constant: Array) -> bool:
    if len(mantissas) == 1:
        term, mantissa = value.terms[0], mantissas[0]
        lo, hi = term.lo - term.zero, term.hi - term.zero
        if not np.any(constant):
            return bool(np.any(ties_possible(np.maximum(np.abs(lo), np.abs(hi)), np.abs(mantissa), shift)))
        rows = np.broadcast_arrays(lo, hi, mantissa, shift, constant)
        if rows[0].size > _TIE_SEARCH:
            return True
        return any(tie_in_range(*(int(v) for v in row)) for row in zip(*(r.reshape(-1) for r in rows), strict=True))
    scalars = all(a.size == 1 for term in value.terms for a in (term.lo, term.hi, term.zero))
    if len(mantissas) != 2 or not scalars or shift.size != 1 or constant.size != 1:
        return True
    spans = [int(term.hi.item()) - int(term.lo.item()) + 1 for term in value.terms]
    if spans[0] * spans[1] > _TIE_SEARCH:
        return True
    first, second = (
        (np.arange(int(t.lo.item()), int(t.hi.item()) + 1) - t.zero.item()) * m.item()
        for t, m in zip(value.terms, mantissas, strict=True)
    )
    n = int(shift.item())
    low_bits = (first[:, None] + second[None, :] + constant.item()) & ((1 << n) - 1)
    return bool(np.any(low_bits == 1 << (n - 1)))


def requantize(b: Builder, value: Linear, encoding: Encoding, name: str) -> str:
    """Emit the requantization of an accumulator to uint8 codes and give their name; `value.after` is not applied.

    Products in int64, one rounding, zero point, saturation (with the clip of a Relu or Clip folded in). The half-up
    form stands wherever no accumulator within the static bounds can tie.
    """
    fixed = plan(value, encoding)
    products = []
    for term, mantissa in zip(value.terms, fixed.mantissas, strict=True):
        wide = b.cast(term.name, TensorProto.INT64)
        products.append(b.node("Mul", [wide, b.constant(mantissa, np.int64)]))
    total = products[0]
    for product in products[1:]:
        total = b.node("Add", [total, product])
    rounding = b.rounding if fixed.ties else "half_up"
    rounded, lift, narrow = _shifted(b, fixed, total, rounding)
    lo, hi = (int(encoding.quantize(bound)) for bound in (value.lo, value.hi))
    codes = _saturated(b, rounded, encoding.zero_point - lift, (lo, hi), narrow, name)
    b.certificate.append(_row(b, value, encoding, fixed, rounding, codes))
    return codes


def _shifted(b: Builder, fixed: Plan, total: str, rounding: str) -> tuple[str, Array, bool]:
    """Emit the rounding shift; give the tensor, what it is too large by, and whether it is int32 (else int64)."""
    n = fixed.shift
    half = np.left_shift(np.int64(1), n - 1)
    lift = np.maximum(0, -(fixed.low >> n))
    lift = lift + (lift & 1)  # even, so that the parity of the quotient is its own
    peak = np.maximum(fixed.high, 0).astype(np.float64) + np.ldexp(lift.astype(np.float64), n) + half
    if np.max(peak) < 2.0**62.9 and np.max(np.abs(fixed.addend.astype(np.float64))) < 2.0**61:
        biased = b.node("Add", [total, b.constant(fixed.addend + (lift << n) + half, np.int64)])
        u = b.cast(biased, TensorProto.UINT64)
    else:  # the sum may leave int64: make it non-negative first and finish in uint64
        lift = np.maximum(2, np.left_shift(np.int64(1), MAX_SHIFT - n))
        biased = b.node("Add", [total, b.constant(fixed.addend + (1 << 62), np.int64)])
        rest = (lift.astype(np.uint64) << n.astype(np.uint64)) + half.astype(np.uint64) - np.uint64(1 << 62)
        u = b.node("Add", [b.cast(biased, TensorProto.UINT64), b.constant(rest, np.uint64)])
    quotient = b.node("BitShift", [u, b.constant(n, np.uint64)], direction="RIGHT")
    reach = np.maximum(np.abs(fixed.high >> n), np.abs(fixed.low >> n)) + 1
    narrow = bool(np.max(lift + reach) < (1 << 31) - 1024)
    dtype = TensorProto.INT32 if narrow else TensorProto.INT64
    if rounding == "half_up":
        return b.cast(quotient, dtype), lift, narrow
    mask = b.constant((np.uint64(1) << n.astype(np.uint64)) - np.uint64(1), np.uint64)
    tie = b.node("Equal", [b.node("BitwiseAnd", [u, mask]), b.constant(0, np.uint64)])
    if rounding == "half_even":
        odd = b.node("BitwiseAnd", [b.cast(tie, TensorProto.UINT64), quotient])
        return b.cast(b.node("Sub", [quotient, odd]), dtype), lift, narrow
    signed = b.cast(quotient, dtype)  # half away: half-up, minus one where a tie is negative
    kind = np.int32 if narrow else np.int64
    down = b.node("And", [tie, b.node("LessOrEqual", [signed, b.constant(lift, kind)])])
    return b.node("Sub", [signed, b.cast(down, dtype)]), lift, narrow


def _saturated(b: Builder, rounded: str, addend: Array, bounds: tuple[int, int], narrow: bool, name: str) -> str:
    kind = np.int32 if narrow else np.int64
    shifted = b.node("Add", [rounded, b.constant(addend, kind)])
    lo, hi = (b.constant(bound, kind) for bound in bounds)
    if narrow:
        inside = b.node("Clip", [shifted, lo, hi])
    else:  # int64 Clip is wrong in ONNX Runtime beyond 2**31
        above = b.node("Where", [b.node("Less", [shifted, lo]), lo, shifted])
        inside = b.node("Where", [b.node("Greater", [above, hi]), hi, above])
    return b.cast(inside, TensorProto.UINT8, name=name)


def _row(b: Builder, value: Linear, encoding: Encoding, fixed: Plan, rounding: str, codes: str) -> dict[str, Any]:
    ratios = [(term.scale / encoding.scale).reshape(-1).tolist() for term in value.terms]
    return {
        "node": value.source,
        **b.facts.get(value.source, {}),
        "quantize_node": b.label,
        "form": "fixed point",
        "tensor": codes,
        "accumulators": [term.name for term in value.terms],
        "accumulator_bound": fixed.bound,
        "multipliers": ratios,
        "mantissas": [np.asarray(m).reshape(-1).tolist() for m in fixed.mantissas],
        "shifts": fixed.shift.reshape(-1).tolist(),
        "output_zero_point": encoding.zero_point,
        "rounding": rounding,
        "ties_possible": fixed.ties,
    }


def look_up(b: Builder, value: Lookup, encoding: Encoding, name: str) -> str:
    """Emit the uint8 codes of any function of one uint8 tensor: nothing, a Clip, or a 256-entry table.

    The table holds what QuantizeLinear gives for each of the input's codes, so it is exact by construction.
    """
    table = encoding.quantize(value.values)
    codes = np.arange(table.size)
    lo, hi = int(table.min()), int(table.max())
    if np.array_equal(table, codes):
        return value.name
    if np.array_equal(table, codes.clip(lo, hi)):
        bounds = [b.constant(bound, np.uint8) for bound in (lo, hi)]
        output = b.node("Clip", [value.name, *bounds], name=name)
        form = "clip"
    else:
        output = _gathered(b, value.name, table, name)
        form = "table"
    b.certificate.append(
        {
            "node": b.behind,
            **b.facts.get(b.behind, {}),
            "quantize_node": b.label,
            "form": form,
            "tensor": output,
            "output_zero_point": encoding.zero_point,
            "rounding": "half_even",
        }
    )
    return output


def _gathered(b: Builder, tensor: str, table: Array, name: str) -> str:
    # GatherElements on the flattened tensor is several times faster than Gather in ONNX Runtime
    flat = b.node("Reshape", [b.cast(tensor, TensorProto.INT32), b.constant([-1], np.int64)])
    found = b.node("GatherElements", [b.constant(table, np.uint8, "table"), flat], axis=0)
    return b.node("Reshape", [found, b.node("Shape", [tensor])], name=name)
