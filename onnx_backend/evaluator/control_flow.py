"""If, Loop, Scan, SequenceMap and Optional of the ONNX standard; their bodies are run by the caller.

A sequence is a list, and an optional is its value, or None if it holds none.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from onnx_backend.integer.reference.scan import Bodies, collected, scan, stacked

Attributes = Mapping[str, Any]


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
        states = collected(found, len(states), scanned)
        turn += 1
    return [*states, *stacked(scanned, body.outputs[1 + len(states) :])]


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
        "Scan": (9, scan),
        "SequenceMap": (17, _sequence_map),
    }
)
