"""Scan of the ONNX standard, from opset 9 on; its body is run by the caller."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ValueInfoProto, helper


@dataclass(frozen=True)
class Body:
    """A graph that a node carries.

    Attributes:
        outputs: its declared outputs.
        run: from its inputs, in order, to its outputs.
    """

    outputs: Sequence[ValueInfoProto]
    run: Callable[[Sequence[Any]], list[Any]]


Bodies = Mapping[str, Body]


def scan(attrs: Mapping[str, Any], bodies: Bodies, *inputs: Any) -> list[Any]:
    """Run a body for every step of the scanned inputs.

    Raises:
        ValueError: these have different lengths.
    """
    body, count = bodies["body"], int(attrs["num_scan_inputs"])
    states, read = list(inputs[:-count]), inputs[-count:]
    declared = body.outputs[len(states) :]
    axes = attrs.get("scan_input_axes") or [0] * count
    backward = attrs.get("scan_input_directions") or [0] * count
    rows = [np.moveaxis(x, axis, 0)[:: -1 if back else 1] for x, axis, back in zip(read, axes, backward, strict=True)]
    lengths = {len(row) for row in rows}
    if len(lengths) != 1:
        raise ValueError(f"the scanned inputs have the lengths {sorted(lengths)}; give all of them one length")
    scanned: list[list[Any]] = [[] for _ in declared]
    for parts in zip(*rows, strict=True):
        states = collected(body.run([*states, *(np.asarray(part) for part in parts)]), len(states), scanned)
    stacks = stacked(scanned, declared)
    axes = attrs.get("scan_output_axes") or [0] * len(stacks)
    backward = attrs.get("scan_output_directions") or [0] * len(stacks)
    turned = [x[:: -1 if back else 1] for x, back in zip(stacks, backward, strict=True)]
    return [*states, *(np.moveaxis(x, 0, axis) for x, axis in zip(turned, axes, strict=True))]


def collected(found: list[Any], states: int, scanned: list[list[Any]]) -> list[Any]:
    """Return the first `states` results of a body and add the others to `scanned`."""
    for parts, part in zip(scanned, found[states:], strict=True):
        parts.append(part)
    return found[:states]


def stacked(scanned: Sequence[list[Any]], declared: Sequence[ValueInfoProto]) -> list[npt.NDArray[Any]]:
    """Return the results of all runs of a body as tensors, by their declarations where it never ran."""
    return [np.stack(parts) if parts else _empty(info) for parts, info in zip(scanned, declared, strict=True)]


def _empty(info: ValueInfoProto) -> npt.NDArray[Any]:
    """Return the stack of results of a body that never ran; an undeclared dimension is 0."""
    kind = info.type.tensor_type
    dims = [int(dim.dim_value) for dim in kind.shape.dim]
    return np.zeros((0, *dims), helper.tensor_dtype_to_np_dtype(kind.elem_type))
