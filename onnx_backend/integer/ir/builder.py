"""Record the integer graph: names, constants, nodes, requantizations and tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.integer.ir.exact_bounds import round_up
from onnx_backend.integer.ir.operations import Operation, Requantization, Table
from onnx_backend.integer.ir.requantization import RequantMultiplier, requant_multiplier
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Linear, Lookup, Refused, Term
from onnx_backend.proto.graph_queries import unique
from qsdk.core.numerics.fixed_point import HIGH_MUL, MAX_SHIFT, Rounding


@dataclass(frozen=True)
class Shuffle:
    """How sums have been moved whose channels hold the phases of a larger image."""

    source: str  # the sums, not moved
    phases: int  # of a channel; they follow one another
    move: Callable[[str], str]  # moves a tensor in the same way and gives its name

    def unmoved(self, value: Linear) -> Linear | None:
        """Return a value of the moved sums as one of the others; None where it depends on more than the channel."""
        (term,) = value.terms
        given = (term.scale, term.zero, term.lo, term.hi, value.constant)
        if any(a.size != 1 and (a.ndim < 2 or a.shape[0] != a.size) for a in given):
            return None
        scale, zero, lo, hi, constant = (np.repeat(a, self.phases, 0) if a.size != 1 else a for a in given)
        return replace(value, terms=(Term(self.source, scale, zero, lo, hi),), constant=constant)


class Builder:
    """The recorder of an integer graph: its operations, initializers and the rows of its certificate."""

    def __init__(self, reserved: Sequence[str], rounding: Rounding) -> None:
        self.nodes: list[Operation] = []
        self.initializers: list[TensorProto] = []
        self.certificate: list[dict[str, Any]] = []
        self.rounding = rounding
        self.label = ""  # the node being lowered
        self.behind = ""  # the node that computed its first input
        self.facts: dict[str, dict[str, Any]] = {}  # facts of the certificate about a node of the Q/DQ model
        self.indices: set[str] = set()  # codes that only tables read, written as int32
        self.assumed: list[str] = []  # the certificate's notes on numbers that only their type bounds
        self.proven: dict[str, tuple[int, int]] = {}  # bounds of 64-bit tensors, tighter than those of their operators
        self.row_sums: dict[str, int] = {}  # int32 sums along the last axis, and its length
        self.shuffles: dict[str, Shuffle] = {}  # of sums
        self.code_shapes: Mapping[str, Sequence[int | None]] = {}  # of codes, where known
        self._taken = set(reserved)
        self._constants: dict[tuple[Any, ...], str] = {}

    def fresh(self, stem: str) -> str:
        """Return an unused tensor name, `stem` itself if it is free."""
        return unique(stem, self._taken)

    def constant(self, array: Any, dtype: Any = None, stem: str = "constant") -> str:
        """Return the name of an initializer with these values; equal ones are written once."""
        values = np.asarray(array, dtype)
        key = (str(values.dtype), values.shape, values.tobytes())
        if key not in self._constants:
            name = self.fresh(stem)
            self.initializers.append(numpy_helper.from_array(values, name))
            self._constants[key] = name
        return self._constants[key]

    def constant64(self, array: Any) -> str:
        """Return the name of an int64 initializer with these values."""
        return self.constant(array, np.int64)

    def packed(self, values: Array, bits: int, stem: str) -> str:
        """Return the name of a uint8 tensor of small constants, stored in 8, 4 or 2 bits and widened by a Cast."""
        unsigned = values.astype(np.uint8)
        if bits == 8:
            return self.constant(unsigned, stem=stem)
        kind = ml_dtypes.uint4 if bits == 4 else ml_dtypes.uint2
        return self.cast(self.constant(unsigned.astype(kind), stem=stem), TensorProto.UINT8)

    def node(self, op_type: str, inputs: Sequence[str], *, name: str | None = None, **attributes: Any) -> str:
        """Append a node with one output and return that output's name (`name`, made unique)."""
        output = self.fresh(name or f"{self.label}.{op_type}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=f"{output}_node", **attributes))
        return output

    def write(self, op_type: str, inputs: Sequence[str], output: str, *, domain: str = "", **attributes: Any) -> None:
        """Append a node that makes `output`, a name that is taken already."""
        node = helper.make_node(op_type, inputs, [output], name=f"{output}_node", domain=domain, **attributes)
        self.nodes.append(node)

    def copy(self, node: NodeProto, inputs: Sequence[str]) -> list[str]:
        """Append a node of the Q/DQ model with other inputs and return the names of its outputs."""
        outputs = [self.fresh(name) if name else "" for name in node.output]
        copied = NodeProto()
        copied.CopyFrom(node)
        del copied.input[:], copied.output[:]
        copied.input.extend(inputs)
        copied.output.extend(outputs)
        self.nodes.append(copied)
        return outputs

    def split(self, tensor: str, sizes: Sequence[int], axis: int) -> list[str]:
        """Append a Split and return the names of the parts."""
        names = [self.fresh(f"{tensor}.{i}") for i in range(len(sizes))]
        inputs = [tensor, self.constant(list(sizes), np.int64)]
        self.nodes.append(helper.make_node("Split", inputs, names, name=f"{names[0]}_node", axis=axis))
        return names

    @contextmanager
    def inside(self) -> Iterator[tuple[list[Operation], list[TensorProto]]]:
        """Record the nodes and constants of a control-flow operator's body apart from the graph's own."""
        kept = self.nodes, self.initializers, self._constants
        self.nodes, self.initializers, self._constants = [], [], {}
        try:
            yield self.nodes, self.initializers
        finally:
            self.nodes, self.initializers, self._constants = kept

    def shifted_right(self, unsigned: str, by: Any, kind: type = np.uint64) -> str:
        """Append a right shift of a tensor of an unsigned type, the only one that ONNX has."""
        return self.node("BitShift", [unsigned, self.constant(by, kind)], direction="RIGHT")

    def shape_of(self, *codes: str) -> str:
        """Return the name of the shape of codes: a stored one where at most one size is open, else of the first."""
        known = next((self.code_shapes[name] for name in codes if name in self.code_shapes), (None, None))
        if sum(size is None for size in known) > 1 or 0 in known:
            return self.node("Shape", [codes[0]])
        return self.constant64([-1 if size is None else size for size in known])

    def cast(self, tensor: str, to: int, *, name: str | None = None) -> str:
        """Append a Cast."""
        return self.node("Cast", [tensor], name=name, to=to)


def requantize(b: Builder, value: Linear, encoding: ActivationEncoding, name: str) -> str:
    """Record the requantization of accumulators to codes and return their name; `value.after` is not applied.

    The clip of a Relu or Clip is folded into the saturation, and ties are rounded up wherever no accumulator within
    the static bounds can tie, which every rounding then agrees with.
    """
    shuffle = b.shuffles.get(value.terms[0].name) if len(value.terms) == 1 else None
    if shuffle is not None and (unmoved := shuffle.unmoved(value)) is not None:
        codes = shuffle.move(requantize(b, unmoved, encoding, f"{name}.phases"))  # a byte moves faster than four
        next(op for op in reversed(b.nodes) if isinstance(op, Requantization)).row["tensor"] = codes
        return codes
    multiplier = requant_multiplier(value, encoding)
    rounding = b.rounding if multiplier.ties or b.rounding == "gemmlowp" else "half_up"
    lo, hi = (int(encoding.quantize(bound)) for bound in (value.lo, value.hi))
    result = b.fresh(name)
    row = {**_row(b, value, encoding, multiplier, rounding, result), "codes": [lo, hi]}
    b.nodes.append(Requantization(value, encoding, multiplier, rounding, (lo, hi), result, b.label, row))
    return result


def _row(
    b: Builder,
    value: Linear,
    encoding: ActivationEncoding,
    fixed: RequantMultiplier,
    rounding: str,
    codes: str,
) -> dict[str, Any]:
    ratios = [(term.scale / encoding.scale).reshape(-1).tolist() for term in value.terms]
    return {
        "node": value.source,
        **b.facts.get(value.source, {}),
        "quantize_node": b.label,
        "form": "fixed point",
        "tensor": codes,
        "accumulators": [term.name for term in value.terms],
        # without the bias
        "accumulator_bounds": [max(int(np.max(term.hi)), -int(np.min(term.lo))) for term in value.terms],
        "accumulator_bound": fixed.bound,
        "multipliers": ratios,
        "mantissas": [np.asarray(m).reshape(-1).tolist() for m in fixed.mantissas],
        "shifts": fixed.shift.reshape(-1).tolist(),
        "addends": np.asarray(fixed.addend).reshape(-1).tolist(),
        "output_zero_point": encoding.zero_point,
        "rounding": rounding,
        "ties_possible": fixed.ties,
        "error_bound": round_up(fixed.error + _first_rounding(fixed, rounding) + _clip_error(value, encoding)),
    }


def _first_rounding(fixed: RequantMultiplier, rounding: str) -> Fraction:
    """Bound the first of two roundings, which only `gemmlowp` has: half a unit of the bits that the second takes."""
    shift = int(np.min(fixed.shift[fixed.shift > HIGH_MUL], initial=MAX_SHIFT + 1))
    return Fraction(1, 2 << (shift - HIGH_MUL)) if rounding == "gemmlowp" and shift <= MAX_SHIFT else Fraction(0)


def _clip_error(value: Linear, to: ActivationEncoding) -> Fraction:
    """Bound the distance, beyond half a step, of a clip's code from the clip: float32 may round it across a tie."""
    worst = Fraction(0)
    for bound in (value.lo, value.hi):
        if np.isfinite(bound):
            exact = min(max(Fraction(bound) / Fraction(to.scale) + to.zero_point, Fraction(0)), Fraction(to.hi))
            worst = max(worst, abs(int(to.quantize(bound)) - exact) - Fraction(1, 2))
    return worst


def look_up(b: Builder, value: Lookup, encoding: ActivationEncoding, name: str) -> str:
    """Record the codes of any function of one tensor of codes: nothing, a Clip, or a table with an entry per code.

    The table holds the result of QuantizeLinear for each input code, so it is exact by construction.
    """
    if np.any(np.isnan(value.values)):
        raise Refused(
            "what is quantized is not a number for some value that the input can have (0 / 0, infinity - infinity)",
            "clip the input to where it is defined",
        )
    table = encoding.quantize(value.values)
    if np.array_equal(table, np.arange(table.size)) and encoding.wide == (table.size > 256):
        return value.name
    result = b.fresh(name)
    row = {
        "node": b.behind,
        **b.facts.get(b.behind, {}),
        "quantize_node": b.label,
        "form": "table",
        "input": value.name,
        "tensor": result,
        "output_zero_point": encoding.zero_point,
        "rounding": "half_even",
        "error_bound": 0.0,
    }
    if table.size <= 256:  # those of 16 bits would be most of the certificate
        row["table"] = table.tolist()
    b.nodes.append(Table(value.name, table, encoding, value.encoding, value.function, result, b.label, row))
    return result
