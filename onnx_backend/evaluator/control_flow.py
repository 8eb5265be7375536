"""If, Loop, Scan, SequenceMap and Optional of the ONNX standard; their bodies are run by the caller.

A sequence is a list, and an optional is its value, or None if it holds none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ValueInfoProto, helper

Attributes = Mapping[str, Any]


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


def _is(condition: Any) -> bool:
    return bool(np.asarray(condition).item())


def _if(attrs: Attributes, bodies: Bodies, condition: Any) -> list[Any]:
    return bodies["then_branch" if _is(condition) else "else_branch"].run([])


def _loop(attrs: Attributes, bodies: Bodies, most: Any = None, condition: Any = None, *carried: Any) -> list[Any]:
    body, states = bodies["body"], list(carried)
    going = condition is None or _is(condition)
    turns = None if most is None else int(np.asarray(most).item())
    scanned: list[list[Any]] = [[] for _ in body.outputs[1 + len(states) :]]
    turn = 0
    while going and (turns is None or turn < turns):
        going_on, *found = body.run([np.asarray(turn, np.int64), np.asarray(going), *states])
        going = _is(going_on)
        states = _collected(found, len(states), scanned)
        turn += 1
    return [*states, *_stacked(scanned, body.outputs[1 + len(states) :])]


def _collected(found: list[Any], states: int, scanned: list[list[Any]]) -> list[Any]:
    """Return the first `states` results of a body and add the others to `scanned`."""
    for parts, part in zip(scanned, found[states:], strict=True):
        parts.append(part)
    return found[:states]


def _stacked(scanned: list[list[Any]], declared: Sequence[ValueInfoProto]) -> list[npt.NDArray[Any]]:
    return [np.stack(parts) if parts else _empty(info) for parts, info in zip(scanned, declared, strict=True)]


def _empty(info: ValueInfoProto) -> npt.NDArray[Any]:
    """Return the stack of results of a body that never ran; an undeclared dimension is 0."""
    kind = info.type.tensor_type
    dims = [int(dim.dim_value) for dim in kind.shape.dim]
    return np.zeros((0, *dims), helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _scan(attrs: Attributes, bodies: Bodies, *inputs: Any) -> list[Any]:
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
        states = _collected(body.run([*states, *(np.asarray(part) for part in parts)]), len(states), scanned)
    stacked = _stacked(scanned, declared)
    axes = attrs.get("scan_output_axes") or [0] * len(stacked)
    backward = attrs.get("scan_output_directions") or [0] * len(stacked)
    turned = [x[:: -1 if back else 1] for x, back in zip(stacked, backward, strict=True)]
    return [*states, *(np.moveaxis(x, 0, axis) for x, axis in zip(turned, axes, strict=True))]


def _sequence_map(attrs: Attributes, bodies: Bodies, *inputs: Any) -> list[Any]:
    body, length = bodies["body"], len(inputs[0])
    for other in inputs[1:]:
        if isinstance(other, list) and len(other) != length:
            raise ValueError(f"sequences of {length} and {len(other)} elements; give all of them one length")
    rows = [
        body.run([value[index] if isinstance(value, list) else value for value in inputs]) for index in range(length)
    ]
    return [[row[position] for row in rows] for position in range(len(body.outputs))]


def _optional(attrs: Attributes, bodies: Bodies, value: Any = None) -> list[Any]:
    """Return the value as it is; ReferenceEvaluator wraps it in a list, which ops that read an optional refuse."""
    return [value]


#: op_type -> (the first opset with these semantics, its function `run(attributes, bodies, *inputs)`). Scan of opset 8
#: has a batch axis and is another op.
CONTROL_FLOW: Mapping[str, tuple[int, Callable[..., list[Any]]]] = MappingProxyType(
    {
        "If": (1, _if),
        "Loop": (1, _loop),
        "Optional": (15, _optional),
        "Scan": (9, _scan),
        "SequenceMap": (17, _sequence_map),
    }
)
