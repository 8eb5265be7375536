"""The stored tensors of a rotated group: gains of norms folded into the layers behind, then the rotation."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from qsdk.core.channel_maps.equalize import bias_of
from qsdk.core.channel_maps.norms import NormOp
from qsdk.core.channel_maps.rotation_groups import FoldedNorm, RotatedTensor, RotationGroup, stored_readers
from qsdk.core.graph.graph import Graph

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
