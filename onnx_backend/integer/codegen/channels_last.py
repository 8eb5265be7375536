"""Write a few operations as ONNX Runtime's 8-bit kernels like them, which keep the channels last; no integer changes.

The runtime surrounds QLinearConv by Transposes and moves these together: a Transpose that is written here meets one of
them and both disappear.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from onnx import NodeProto, numpy_helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import Accumulation
from onnx_backend.integer.ir.values import Array
from onnx_backend.proto.nodes import attributes

_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
_RANK = 4
#: Input channels of a convolution that copies its windows in pieces of so few bytes that blocks are faster.
_FEW = 4
#: A nearest neighbour is repeated at most so often.
_MOST_COPIES = 4


def in_blocks(b: Builder, maker: Accumulation) -> Accumulation:
    """Return a convolution of stride 2 over few channels as one of stride 1 over blocks of 2 x 2; others as they are.

    The weights that a kernel of whole blocks has beside the given ones are 0, so the sums are the same.
    """
    sizes, attrs, weight = b.shapes.get(maker.codes), maker.attributes, maker.weight
    if weight.ndim != _RANK or weight.shape[1] > _FEW or not sizes or None in sizes[2:]:
        return maker
    plain = attrs.get("group", 1) == 1 and list(attrs.get("dilations", [1, 1])) == [1, 1]
    if not plain or list(attrs.get("strides", [1, 1])) != [2, 2] or _is_padded_by_name(attrs.get("auto_pad")):
        return maker
    pads = list(attrs.get("pads", [0] * 4))
    axes = [_axis(int(sizes[i + 2] or 0), weight.shape[i + 2], pads[i], pads[i + 2]) for i in range(2)]
    if any(axis is None for axis in axes) or weight.shape[2:] == (1, 1):
        return maker
    (height, width) = (axis for axis in axes if axis is not None)
    blocks = {
        "kernel_shape": [height[0], width[0]],
        "strides": [1, 1],
        "pads": [height[1], width[1], height[2], width[2]],
    }
    codes = b.node("SpaceToDepth", [maker.codes], blocksize=2)
    spread = _spread(weight, (pads[0], pads[1]), (height[0], width[0]))
    return replace(maker, codes=codes, weight=spread, attributes={**attrs, **blocks})


def _is_padded_by_name(auto_pad: object) -> bool:
    return auto_pad not in (None, "NOTSET", b"NOTSET")


def _axis(size: int, kernel: int, before: int, after: int) -> tuple[int, int, int] | None:
    """Return kernel and pads over blocks of 2; None where the size is odd or a pad would be negative."""
    outputs = (size + before + after - kernel) // 2 + 1
    first, last = -before // 2, (kernel - 1 - before) // 2
    blocks = last - first + 1
    rest = outputs - 1 + blocks + first - size // 2
    return None if size % 2 or first > 0 or rest < 0 else (blocks, -first, rest)


def _spread(weight: Array, pads: tuple[int, int], blocks: tuple[int, int]) -> Array:
    """Return the weights of a kernel over blocks: the channels of a block are those of its four places, row by row."""
    outputs, channels, *kernel = weight.shape
    found = np.zeros((outputs, 2, 2, channels, *blocks), weight.dtype)
    firsts = [-pad // 2 for pad in pads]
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            places = (row - pads[0], column - pads[1])
            (i, y), (j, x) = ((place // 2 - first, place % 2) for place, first in zip(places, firsts, strict=True))
            found[:, y, x, :, i, j] = weight[:, :, row, column]
    return found.reshape(outputs, 4 * channels, *blocks)


def repeat(b: Builder, node: NodeProto) -> bool:
    """Write a Resize that repeats every position as Concats of whole rows of channels; False for any other node."""
    given = b.shapes.get(node.input[0]) if node.op_type == "Resize" and len(node.input) == _RANK else None
    stored = [tensor for tensor in b.initializers if given is not None and tensor.name == node.input[3]]
    if given is None or len(given) != _RANK or not stored or None in given:
        return False
    batch, channels, height, width = (int(size or 0) for size in given)
    sizes = numpy_helper.to_array(stored[0]).tolist()
    if min(batch, channels, height, width) < 1 or sizes[:2] != [batch, channels]:
        return False
    (down, rest_down), (across, rest_across) = divmod(sizes[2], height), divmod(sizes[3], width)
    modes = [attributes(node).get(key) for key in ("mode", "coordinate_transformation_mode", "nearest_mode")]
    repeats = [str(mode) for mode in modes] == ["nearest", "asymmetric", "floor"]
    if not repeats or rest_down or rest_across or not 0 < max(down, across) <= _MOST_COPIES or not down * across:
        return False
    b.label = node.output[0]
    last = b.node("Transpose", [node.input[0]], perm=list(_LAST))
    wide = b.node("Concat", [last] * across, axis=3)
    rows = b.node("Reshape", [wide, b.constant([batch * height, 1, across * width * channels], np.int64)])
    all_rows = b.node("Concat", [rows] * down, axis=1)
    shape = b.constant([batch, down * height, across * width, channels], np.int64)
    b.write("Transpose", [b.node("Reshape", [all_rows, shape])], node.output[0], perm=list(_FIRST))
    return True


def turned(b: Builder, codes: str, axis: int, rank: int | None) -> tuple[str, Sequence[int]]:
    """Write a Transpose that puts the channels of pictures last; return its result and the way back, none for others.

    The kernel of a Softmax would do the same by itself, where no other Transpose can meet it.
    """
    if rank != _RANK or axis not in (1, 1 - _RANK):
        return codes, ()
    return b.node("Transpose", [codes], perm=list(_LAST)), _FIRST
