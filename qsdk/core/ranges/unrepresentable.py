"""Sites for which calibration shows that no grid serves them: divisors that would become 0, angles of many turns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import PERIODIC
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import BY_CALIBRATION, Plan
from qsdk.core.planning.ties import JOINS, keeps_grid, moved_inputs
from qsdk.core.planning.unquantizable import divisors
from qsdk.core.ranges.ranges import Range
from qsdk.core.site import owner_of

#: (site of an input, axis) -> largest magnitude at each index of that axis
Parts = Mapping[tuple[str, int], npt.NDArray[np.float32]]

#: radians; a grid of 8 bits holds four turns in such steps
_COARSEST_ANGLE = 8.0 * math.pi / 255.0
#: ops whose result is 0 where their operands are
_ZERO_OF_ZERO = frozenset({"Abs", "Sqrt", "Mul", "Pow", "Neg"})
_SAME_SIZE = frozenset({"Add", "Sub", "Sum", "Neg", "Abs", "Where", "Cast", "Mod", "Clip"})
#: steps of a grid that a part of what is joined has at least: with fewer, it is 20 dB from its values
_FEW = 4.0
#: a MatMul over so few inputs multiplies coordinates by frequencies, and is no layer
_COORDINATES = 4


@dataclass(frozen=True)
class CalibrationResult:
    """The result of a calibration.

    Attributes:
        plan: of the sim.
        ranges: site -> observed range.
        encodings: of the sites that own one.
    """

    plan: Plan
    ranges: Mapping[str, Range]
    encodings: Mapping[str, Encoding]

    def of(self, site: str | None) -> tuple[Range | None, Encoding | None]:
        """Return the range and the encoding of a site that calibration decides; None where there are none."""
        decision = None if site is None else self.plan.decisions.get(site)
        if decision is None or not decision.quantized or decision.kind in ("weight", "bias"):
            return None, None
        if decision.spec is not None and decision.spec.blocks is not None:
            return None, None  # no grid yet: each block finds its own
        encoding = self.encodings.get(decision.encoding_site)
        free = encoding is not None and not encoding.frozen
        result = self.ranges.get(decision.site, self.ranges.get(decision.encoding_site))
        return result, encoding if free else None


def unrepresentable_sites(graph: Graph, observed: CalibrationResult) -> dict[str, str]:
    """Return, by site, why it has to stay float, given what reads it and its observed range."""
    return {**_divisors_of_zero(graph, observed), **_wide_angles(graph, observed)}


def erased_parts(graph: Graph, observed: CalibrationResult, parts: Parts) -> dict[str, str]:
    """Return a remark by site for each grid on which a part of what it holds is 0, or one step away from it, at most.

    Boxes and scores in one tensor: a grid for boxes of up to 640 makes every score the same. Of what is joined, as
    the levels of a detector, or chosen, a part is named that has fewer than `_FEW` steps; so is a fixed range of which
    the data take so few. `parts`: (site of an input, axis) -> largest magnitude at each index.
    """
    result: dict[str, str] = {}
    for (site, axis), largest in parts.items():
        _, encoding = observed.of(site)
        lost = _within_a_step(largest, encoding)
        if encoding is not None and lost:
            part = f"what it holds at {', '.join(map(str, lost[:6]))}{', ...' if len(lost) > 6 else ''} of axis {axis}"
            remedy = "or give it as an input of its own"
            result[site] = _erased(site, part, float(largest[lost].max()), encoding, remedy)
    for decision in observed.plan.decisions.values():
        seen, encoding = observed.of(decision.site)
        size = _magnitude(seen)
        if encoding is not None and decision.spec and decision.spec.fixed_range and _is_coarse(size, encoding):
            result[decision.site] = _erased(
                decision.site, "what it holds", size, encoding, 'or fixed_range="observed" in its place'
            )
    for op in graph.ops:
        chooses = op.type == "Where"  # between values and the constant of a mask, say
        joined = graph.tensors[op.outputs[0]].site if chooses or (op.type in JOINS and keeps_grid(graph, op)) else None
        _, encoding = observed.of(joined)
        if joined is None or encoding is None:
            continue
        parts_of_op = [t for t in op.inputs[1:] if t is not None] if chooses else moved_inputs(op)
        for part_site in (graph.tensors[tensor].site for tensor in parts_of_op):
            seen, _ = observed.of(part_site)
            size = _magnitude(seen)
            if _is_coarse(size, encoding):
                remedy = f"or config.skip({owner_of(joined)!r})" + (", or minus infinity in a mask" if chooses else "")
                result[joined] = _erased(joined, f"its part {part_site}", size, encoding, remedy)
    return result


def _magnitude(seen: Range | None) -> float:
    """Return the largest magnitude in a range; 0 where it is not known."""
    return 0.0 if seen is None else float(max(np.abs(seen.low).max(), np.abs(seen.high).max()))


def _is_coarse(size: float, encoding: Encoding) -> bool:
    """Return whether values of a magnitude above 0 have few steps of the one scale of a grid."""
    return encoding.axis is None and 0.0 < size < _FEW * float(encoding.scale.max())


def _within_a_step(largest: npt.NDArray[np.float32], encoding: Encoding | None) -> list[int]:
    """Return where magnitudes are above 0 and below the one step of a grid."""
    if encoding is None or encoding.axis is not None:
        return []
    return [int(at) for at in np.flatnonzero((largest > 0) & (largest < float(encoding.scale.max())))]


def _erased(site: str, part: str, largest: float, encoding: Encoding, remedy: str) -> str:
    steps = int(largest / float(encoding.scale.max()))
    left = "one step" if not steps else f"{steps + 1} steps"
    what = "lost" if not steps else "coarse"
    return (
        f"{part} (up to {largest:.3g}) lies within {left} of {_step(encoding)} and is {what}: "
        f'config.override({owner_of(site)!r}, activation="uint16"), {remedy}'
    )


def left_float(plan: Plan) -> dict[str, str]:
    """Return, by site, why calibrations have left it float."""
    decisions = plan.decisions.values()
    return {d.site: d.reason for d in decisions if d.rule == BY_CALIBRATION and d.state == "float"}


def _divisors_of_zero(graph: Graph, observed: CalibrationResult) -> dict[str, str]:
    result: dict[str, str] = {}
    waiting, seen = list(divisors(graph)), set[int]()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen or graph.tensors[tensor].constant:
            continue
        seen.add(tensor)
        site = graph.tensors[tensor].site
        seen_there, encoding = observed.of(site)
        if site is not None and seen_there is not None and encoding is not None:
            nearest = np.maximum(np.maximum(seen_there.low, -seen_there.high), 0.0)
            if (nearest < encoding.scale.reshape(-1)).any():
                result[site] = f"a divisor, or what a logarithm reads: 0 lies within a step of {_step(encoding)} of it"
        op = graph.maker(tensor)
        if op is not None and (op.type in _ZERO_OF_ZERO or keeps_grid(graph, op)):
            waiting += [t for t in op.inputs if t is not None] if op.type == "Mul" else moved_inputs(op)
    return result


def _wide_angles(graph: Graph, observed: CalibrationResult) -> dict[str, str]:
    result: dict[str, str] = {}
    gains: dict[int, float] = {}
    for op in graph.ops:
        if op.type in PERIODIC and op.inputs[0] is not None:
            gains[op.inputs[0]] = 1.0
    # from the last op to the first, so that the gain of a tensor is known before that of its inputs
    for index in reversed(range(len(graph.ops))):
        gain = max((gains.get(t, 0.0) for t in graph.ops[index].outputs), default=0.0)
        if gain > 0.0:
            for tensor, factor in _factors(graph, index, observed).items():
                gains[tensor] = max(gains.get(tensor, 0.0), gain * factor)
    for tensor, gain in gains.items():
        site = graph.tensors[tensor].site
        _, encoding = observed.of(site)
        if site is not None and encoding is not None and float(encoding.scale.max()) * gain > _COARSEST_ANGLE:
            result[site] = f"an angle of Sin or Cos: a step of {_step(encoding)} would turn it too far"
    return result


def _factors(graph: Graph, index: int, observed: CalibrationResult) -> dict[int, float]:
    """Return the operands that an op computes an angle from, and how much it multiplies their errors."""
    op = graph.ops[index]
    read = [t for t in op.inputs if t is not None and graph.tensors[t].is_float]
    if op.type in _SAME_SIZE:
        return dict.fromkeys(read, 1.0)
    if keeps_grid(graph, op):
        return dict.fromkeys(moved_inputs(op), 1.0)
    if op.type == "Mul" and len(read) == 2:
        return {read[0]: _largest(graph, read[1], observed), read[1]: _largest(graph, read[0], observed)}
    if op.type == "Div" and len(read) == 2:
        divisor = graph.scalar(read[1])
        return {read[0]: 1.0 / abs(divisor) if divisor else 1.0}
    if op.type in ("MatMul", "Gemm") and len(read) >= 2:
        return _of_coordinates(graph, op, index, read, observed)
    return {}


def _of_coordinates(graph: Graph, op: Op, index: int, read: list[int], observed: CalibrationResult) -> dict[int, float]:
    """Return the operands of a product over a few coordinates; {} for a layer, whose inputs are no angles.

    The result of a layer whose bias a separate op adds is an angle like the sum.
    """
    weights = [o for o in operands_of(graph, index) if o.role == "weight" and o.input_axis is not None]
    shape = (
        (graph.tensors[read[0]].shape or (None,)) if not weights else graph.tensors[weights[0].root].shape or (None,)
    )
    width = shape[weights[0].input_axis or 0] if weights else shape[-1]
    if not isinstance(width, int) or width > _COORDINATES:
        return {}
    left, right = read[:2]
    return {left: width * _largest(graph, right, observed), right: width * _largest(graph, left, observed)}


def _largest(graph: Graph, tensor: int, observed: CalibrationResult) -> float:
    """Return the largest magnitude of a tensor, as far as it is known; 1 where it is not."""
    root = graph.constant_root(tensor)
    value = graph.value(tensor if root is None else root)
    if value is not None and value.size:
        return float(np.abs(value).max())
    seen, _ = observed.of(graph.tensors[tensor].site)
    return 1.0 if seen is None else _magnitude(seen)


def _step(encoding: Encoding) -> str:
    return f"{float(encoding.scale.max()):.2g}"
