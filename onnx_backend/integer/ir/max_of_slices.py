"""Write MaxPool of codes as the Max of slices in int32, axis by axis.

ONNX Runtime's MaxPool of uint8 takes several times as long, and there is none for int32.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.proto.nodes import attributes


def max_pool(b: Builder, node: NodeProto) -> bool:
    """Write a MaxPool of uint8 codes of known sizes; return False, with nothing written, for any other node."""
    sizes = b.shapes.get(node.input[0]) if node.op_type == "MaxPool" and len(node.output) == 1 else None
    if sizes is None:
        return False
    attrs = attributes(node)
    spatial = [size for size in sizes[2:] if size is not None]
    if len(spatial) != len(sizes) - 2 or attrs.get("ceil_mode", 0) or attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return False
    rank = len(spatial)
    kernel, pads = list(attrs["kernel_shape"]), list(attrs.get("pads", [0] * 2 * rank))
    strides, dilations = (list(attrs.get(key, [1] * rank)) for key in ("strides", "dilations"))
    wanted = [
        (size + pads[i] + pads[rank + i] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i, size in enumerate(spatial)
    ]
    if min(wanted) < 1:
        return False
    b.label = node.output[0]
    wide = b.cast(node.input[0], TensorProto.INT32)
    largest = largest_of_slices(b, wide, attrs, spatial, wanted)
    b.write("Cast", [largest], node.output[0], to=TensorProto.UINT8)
    return True


def largest_of_slices(
    b: Builder,
    codes: str,
    attributes: Mapping[str, Any],
    sizes: Sequence[int],
    wanted: Sequence[int],
    name: str | None = None,
) -> str:
    """Write a MaxPool of int32 codes as the Max of strided slices, axis by axis; return the result's name.

    Args:
        b: where to write.
        codes: int32, not negative.
        attributes: of the MaxPool; its padding given as numbers.
        sizes: of the spatial axes of the codes.
        wanted: of the spatial axes of the result.
        name: of the result of each axis.
    """
    kernel = list(attributes["kernel_shape"])
    rank = len(kernel)
    strides, dilations = (list(attributes.get(key, [1] * rank)) for key in ("strides", "dilations"))
    pads = list(attributes.get("pads", [0] * 2 * rank))
    for i, size in enumerate(sizes):
        reach = (wanted[i] - 1) * strides[i] + (kernel[i] - 1) * dilations[i] + 1
        after = max(reach - size - pads[i], 0)  # with ceil_mode more than its pad
        along = b.constant([i + 2], np.int64)
        if pads[i] or after:  # 0 is the smallest code, so padding never wins
            # of all axes: between Transposes, ONNX Runtime's optimizer of these moves the pads and not the input `axes`
            widths = [0] * (i + 2) + [pads[i]] + [0] * (rank + 1) + [after] + [0] * (rank - 1 - i)
            codes = b.node("Pad", [codes, b.constant(widths, np.int64), b.constant(0, np.int32)])
        taps = []
        for start in range(0, kernel[i] * dilations[i], dilations[i]):
            ends = [start], [start + (wanted[i] - 1) * strides[i] + 1]
            bounds = [b.constant(end, np.int64) for end in ends]
            taps.append(b.node("Slice", [codes, *bounds, along, b.constant([strides[i]], np.int64)]))
        codes = b.node("Max", taps, name=name)
    return codes
