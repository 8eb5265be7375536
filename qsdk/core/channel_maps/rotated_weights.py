"""The stored tensors of a rotated group, and layers whose input no merged rotation reaches."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.channel_maps.equalize import bias_of
from qsdk.core.channel_maps.flood import is_linear, stored_operand
from qsdk.core.channel_maps.rotation_groups import (
    MOVES,
    FoldedNorm,
    NormOp,
    RotatedTensor,
    RotationGroup,
    stored_readers,
)
from qsdk.core.config.config import QuantConfig
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Plan

Floats = npt.NDArray[np.float64]
Stored = npt.NDArray[np.generic]
#: returns a stored tensor by its id
Read = Callable[[int], Stored]

_SMALLEST_GAIN = 1e-3  # of the largest: below it, a shift divided by the gain would grow too large to be quantized
_AT_ONCE = 2**24  # elements


def gain_of(norm: NormOp, read: Read) -> Floats | None:
    """Return the gain of a norm as a vector, or None where it has none."""
    return None if norm.gain is None else np.asarray(read(norm.gain), np.float64).reshape(-1) + norm.gain_offset


def fold_obstacle(graph: Graph, group: RotationGroup, read: Read) -> str:
    """Return why the shift of a norm cannot go along with its gain, or ""."""
    for one in group.folded:
        gain = gain_of(one.norm, read)
        if gain is None or one.norm.shift is None or _biases(graph, one) is not None:
            continue
        if np.abs(gain).min() < _SMALLEST_GAIN * np.abs(gain).max() and np.any(read(one.norm.shift)):
            name = graph.tensors[one.norm.gain or 0].name
            return f"{name} is nearly 0 for a channel, and not every layer behind has a bias to take up the shift"
    return ""


def rotated_values(
    graph: Graph, group: RotationGroup, rotation: Floats, read: Read
) -> dict[int, npt.NDArray[np.float32]]:
    """Return the new value of every stored tensor that rotating a group changes, by its id.

    The rotation is orthogonal, [size, size]; it leaves the vector of ones as it is if `group.keeps_mean`.
    """
    values: dict[int, Stored] = {}
    gains = {one.norm: gain_of(one.norm, read) for one in group.folded}
    for one in group.folded:
        gain = gains[one.norm]
        assert gain is not None
        values |= _folded_shift(graph, group, one, gain, read, values)
    for tensor in group.rotated:
        value = values.get(tensor.root, read(tensor.root))
        values[tensor.root] = _rotated(value, tensor, rotation, None if tensor.gain is None else gains[tensor.gain])
    for one in group.folded:
        if one.norm.gain is not None:
            values[one.norm.gain] = np.full(np.shape(read(one.norm.gain)), 1.0 - one.norm.gain_offset)
        if one.norm.shift is not None:
            shift = np.asarray(values[one.norm.shift], np.float64)
            values[one.norm.shift] = (shift.reshape(-1) @ rotation).reshape(shift.shape)
    return {root: np.asarray(value, np.float32) for root, value in values.items()}


def _folded_shift(
    graph: Graph, group: RotationGroup, one: FoldedNorm, gain: Floats, read: Read, values: Mapping[int, Stored]
) -> dict[int, Stored]:
    """Return the shift of a norm after its gain is folded, before it is rotated, and the biases that take it up."""
    if one.norm.shift is None:
        return {}
    stored = np.asarray(read(one.norm.shift), np.float64)
    biases = _biases(graph, one)
    if biases is None:
        return {one.norm.shift: (stored.reshape(-1) / np.where(gain == 0, 1.0, gain)).reshape(stored.shape)}
    result: dict[int, Stored] = {one.norm.shift: np.zeros_like(stored)}
    for reader in group.readers:
        if reader.op in one.readers:
            bias = biases[reader.op]
            weight = np.moveaxis(np.asarray(read(reader.root), np.float64), reader.axis, -1)
            now = np.asarray(values.get(bias, read(bias)), np.float64)
            result[bias] = now + (weight @ stored.reshape(-1)).reshape(now.shape)
    return result


def _biases(graph: Graph, one: FoldedNorm) -> dict[int, int] | None:
    """Return the stored bias of each layer behind a norm, or None where one has none of its own."""
    result = {}
    for op_id in one.readers:
        op, bias = graph.ops[op_id], bias_of(graph, op_id)
        ranks = [len(graph.tensors[root].shape or ()) for root in (op.inputs[1], bias) if root is not None]
        plain = op.attributes.get("alpha", 1.0) == op.attributes.get("beta", 1.0) == 1.0
        if bias is None or not plain or ranks != [2, 1] or len(list(stored_readers(graph, bias))) != 1:
            return None
        result[op_id] = bias
    return result


def _rotated(value: Stored, tensor: RotatedTensor, rotation: Floats, gain: Floats | None) -> npt.NDArray[np.float32]:
    """Return a stored tensor times the gain, then rotated block by block."""
    last = np.moveaxis(np.asarray(value), tensor.axis, -1)
    rows = last.reshape(-1, last.shape[-1])
    result = np.empty(rows.shape, np.float32 if value.dtype != np.float64 else np.float64)
    places = np.flatnonzero(tensor.ids.reshape(-1) >= 0)
    step = max(_AT_ONCE // rows.shape[-1], 1)
    for start in range(0, len(rows), step):
        part = rows[start : start + step].astype(np.float64)
        if gain is not None:
            part = part * gain
        blocks = part[:, places].reshape(len(part), -1, len(rotation)) @ rotation
        part[:, places] = blocks.reshape(len(part), -1)
        result[start : start + step] = part
    return np.moveaxis(result.reshape(last.shape), -1, tensor.axis)


# --- at run time ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnlineRotation:
    """A layer, by its id and that of its weight, whose input of this size is rotated while the model runs.

    `blocked` says why its input is left as it is, or "".
    """

    op: int
    root: int
    size: int
    blocked: str = ""


@dataclass(frozen=True)
class InputRotation:
    """A rotation in front of a layer, at the site of its input, which has a signed dtype or not.

    The factors are those of `qsdk.algorithms.rotation.orthogonal`.
    """

    site: str
    signed: bool
    factors: Sequence[npt.NDArray[np.float64]]


def with_online_rules(
    config: QuantConfig, rotations: Iterable[InputRotation], matrices: Iterable[str], between: Iterable[str]
) -> QuantConfig:
    """Return a config in which new rotations lose no accuracy, though the inputs that they read still have outliers.

    Where linear layers alone are quantized, the products stay float. Elsewhere their operands get 16 bits, and the
    matrices, whose elements have one magnitude, 8. `matrices` are the sites of the rotations' factors, `between` those
    of what is computed between two factors.
    """
    rotations = list(rotations)
    for site in matrices:
        config = config.override(site, weight="float32" if config.only_linear else "int8")
    if config.only_linear:
        return config
    wide = "int16" if any(one.signed for one in rotations) else "uint16"
    for site in (*dict.fromkeys(one.site for one in rotations), *between):
        config = config.override(site, activation=wide)
    return config


def find_online(graph: Graph, groups: Iterable[RotationGroup], plan: Plan) -> list[OnlineRotation]:
    """Return the layers that write a residual stream and whose inputs neither lie in a group nor behind a layer.

    By the plan, only an input of 8 bits or fewer is worth a rotation.
    """
    groups = list(groups)
    rotated = {tensor for group in groups if not group.blocked for tensor in group.members}
    writers = {one.op: None for group in groups if group.kind == "residual stream" for one in group.writers}
    result = []
    for op_id in writers:
        op = graph.ops[op_id]
        x = op.inputs[0]
        if op.type not in ("Gemm", "MatMul") or not is_linear(graph, op_id) or x is None or x in rotated:
            continue
        for operand in operands_of(graph, op_id):
            if operand.role == "weight" and operand.input_axis is not None and not _behind_a_layer(graph, x):
                size = (graph.tensors[operand.root].shape or ())[operand.input_axis]
                assert isinstance(size, int)
                result.append(OnlineRotation(op_id, operand.root, size, _obstacle(graph, op_id, operand.root, plan)))
    return result


def _behind_a_layer(graph: Graph, tensor: int) -> bool:
    """Return whether a layer computes a tensor, or what it is a view of: a rotation could be merged into that one."""
    while tensor in graph.producer:
        op_id = graph.producer[tensor]
        op, bias = graph.ops[op_id], stored_operand(graph, op_id)
        if is_linear(graph, op_id):
            return True
        moves = op.type in MOVES or (op.type == "Add" and bias is not None)
        ahead = [other for other in op.inputs if other is not None and other != bias] if moves else []
        if not ahead:
            return False
        tensor = ahead[0]
    return False


def _obstacle(graph: Graph, op_id: int, root: int, plan: Plan) -> str:
    op = graph.ops[op_id]
    x = op.inputs[0]
    assert x is not None
    decision = plan.decisions.get(graph.tensors[x].site or "")
    if decision is None or decision.spec is None or not decision.quantized:
        return "its input is not quantized"
    if not decision.spec.dtype.is_integer or decision.spec.dtype.bits > 8:
        return f"its input is {decision.spec.dtype}, which outliers cost little"
    if list(stored_readers(graph, root)) != [op_id] or root in graph.output_set:
        return f"{graph.tensors[root].name} is shared: other ops read it as well"
    return "" if graph.tensors[x].shape else "its input is not read along its last axis"
