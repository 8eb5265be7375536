"""Stored tensors that are only rearranged before they are read, and slices that keep everything."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto

from onnx_backend.passes.fold_constants import fold
from onnx_backend.proto.external_data import array
from qsdk.core.graph.op_facts import RESHAPES

Array = npt.NDArray[Any]
_REARRANGING = (RESHAPES - {"Flatten"}) | {"Slice", "Split", "Concat", "Transpose"}


def fold_rearranged(
    node: NodeProto, stored: Mapping[str, TensorProto], opsets: Mapping[str, int], weights: Mapping[str, Array]
) -> dict[str, Array] | None:
    """Return the results of a node that only moves stored values, whatever their size, or None.

    A module reads a part of a packed weight (attention's queries), or arranges several (a recurrent layer's gates),
    before it marks what it reads: the mark belongs on a stored tensor. `weights` has the values that `stored` lacks.
    """
    if node.op_type not in _REARRANGING or any(name and name not in stored for name in node.input):
        return None
    values = {name: weights[name] if name in weights else array(stored[name]) for name in node.input if name}
    size = sum(value.size for value in values.values())
    return fold(node, values, opsets, weights_stay=False, limit=size)


def is_full_slice(node: NodeProto, small: Mapping[str, Array]) -> bool:
    """Return True if a Slice keeps everything (`x[:, 0]` is traced with one)."""
    if (
        node.op_type != "Slice"
        or node.domain not in ("", "ai.onnx")
        or any(n and n not in small for n in node.input[1:])
    ):
        return False
    starts, ends = (small[name] for name in node.input[1:3])
    steps = small[node.input[4]] if len(node.input) > 4 and node.input[4] else np.ones(1)
    return not starts.any() and bool((ends >= np.iinfo(np.int32).max).all()) and bool((steps == 1).all())
