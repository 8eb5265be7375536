"""Turn the tensor that an op multiplies with a layer's weight into the rows or images that its solver reads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Op
from qsdk.core.graph.op_facts import RECURRENT
from qsdk.core.layers.graph_layers import GraphLayer
from qsdk.core.layers.layer_problem import PatchGeometry

Array = npt.NDArray[Any]
_STATES = 5  # where a recurrent op takes its first hidden state
_LENGTHS = 4


@dataclass(frozen=True)
class Reading:
    """The way in which one op reads a layer's input.

    Attributes:
        source: position of the tensor among the op's inputs; the hidden states of a recurrent op are its output 0.
        states: True if these hidden states are multiplied.
        swapped: True if the last two axes are swapped first.
        directions: of a recurrent op; each multiplies the whole input.
        reverse: which directions run backwards.
        lead: the pads of a convolution by `auto_pad`: kernel extents, strides, and whether the odd one comes first.
    """

    source: int
    states: bool = False
    swapped: bool = False
    directions: int = 0
    reverse: tuple[bool, ...] = ()
    lead: tuple[tuple[int, ...], tuple[int, ...], bool] | None = None

    def rows(self, value: Array, first: Array | None = None) -> Array:
        """Return the values that the layer multiplies.

        Args:
            value: the op's input, or its output where `states`.
            first: the hidden state that a recurrent op begins with, [directions, N, hidden]; zeros where None.

        Returns:
            float32, [..., K] for a linear layer, [..., directions * K] for a recurrent one, [N, C, *spatial] for a
            convolution.
        """
        if self.states:
            return self._hidden(value, first)
        if self.directions > 1:
            return np.concatenate([value] * self.directions, -1)
        if self.swapped and value.ndim > 1:
            return value.swapaxes(-1, -2)
        return value if self.lead is None else _padded(value, *self.lead)

    def _hidden(self, outputs: Array, first: Array | None) -> Array:
        """Return the states before each step, from the states after each: [length, directions, N, hidden]."""
        begin = np.zeros_like(outputs[:1]) if first is None else first[None]
        parts = []
        for direction, backwards in enumerate(self.reverse):
            start, after = begin[:, direction], outputs[:, direction]
            parts.append(np.concatenate([after[1:], start] if backwards else [start, after[:-1]]))
        return np.concatenate(parts, -1)


def readings(op: Op, found: GraphLayer, position: int) -> tuple[Reading, PatchGeometry | None] | str:
    """Return how an op reads the input of a layer, and the geometry of its patches; or why no solver can use it.

    Args:
        op: one of `found.ops`.
        found: the layer.
        position: of the weight among the op's inputs.
    """
    geometry = found.layer.geometry
    if op.type == "Gather":
        return Reading(1), None
    if op.type in RECURRENT:
        read = _recurrent(op, position)
        return read if isinstance(read, str) else (read, None)
    if geometry is None:
        swapped = position == 0 if op.type == "MatMul" else bool(op.attributes.get("transA", 0))
        return Reading(1 - position if op.type == "MatMul" else 0, swapped=swapped), None
    auto = op.attributes.get("auto_pad", "NOTSET")
    if geometry.transposed and (op.attributes.get("output_shape") or auto not in ("NOTSET", "VALID")):
        return "ConvTranspose whose padding follows from the shape of its output"
    if auto == "NOTSET":
        return Reading(0), geometry
    bare = replace(geometry, padding=((0, 0),) * len(geometry.kernel))
    if auto == "VALID":
        return Reading(0), bare
    extents = tuple(d * (k - 1) + 1 for d, k in zip(geometry.dilation, geometry.kernel, strict=True))
    before = auto == "SAME_LOWER"
    if all(stride == 1 for stride in geometry.stride):
        pads = tuple(_split(extent - 1, before) for extent in extents)
        return Reading(0), replace(geometry, padding=pads)
    return Reading(0, lead=(extents, geometry.stride, before)), bare


def _recurrent(op: Op, position: int) -> Reading | str:
    direction = str(op.attributes.get("direction", "forward"))
    reverse = {"forward": (False,), "reverse": (True,)}.get(direction, (False, True))
    if op.attributes.get("layout", 0):
        return f"{op.type} with the batch first"
    if position == 1:
        return Reading(0, directions=len(reverse))
    if len(op.inputs) > _LENGTHS and op.inputs[_LENGTHS] is not None:
        return f"{op.type} with sequences of several lengths"
    if op.type == "GRU" and not op.attributes.get("linear_before_reset", 0):
        return "GRU that resets the hidden state before it is multiplied"
    return Reading(_STATES, states=True, directions=len(reverse), reverse=reverse)


def _padded(value: Array, extents: Sequence[int], strides: Sequence[int], before: bool) -> Array:
    pads = []
    for size, extent, stride in zip(value.shape[2:], extents, strides, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + extent - size, 0)
        pads.append(_split(total, before))
    return np.pad(value, [(0, 0), (0, 0), *pads])


def _split(total: int, before: bool) -> tuple[int, int]:
    less = total // 2
    return (total - less, less) if before else (less, total - less)
