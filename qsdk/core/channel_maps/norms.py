"""The norms of a graph over its last axis, one op or spelled out, with their stored gain and shift."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.norms import NORMS
from qsdk.core.patterns.supergroup import Supergroup

_LAST_AXIS = {"LayerNorm": True, "RMSNorm": False}  # supergroup -> whether it subtracts the mean
_OPS = {"LayerNormalization": True, "RMSNormalization": False}


@dataclass(frozen=True)
class NormOp:
    """A LayerNorm or RMSNorm over the last axis of a tensor.

    Attributes:
        ops: their ids; the last one computes the output.
        x: id of its input.
        output: id of its output.
        centres: whether it subtracts the mean.
        gain: id of the stored tensor that it multiplies by, if any.
        gain_offset: what is added to the stored tensor to give the gain (1 where the model stores gain - 1).
        shift: id of the stored tensor that it adds, if any.
    """

    ops: tuple[int, ...]
    x: int
    output: int
    centres: bool
    gain: int | None
    gain_offset: float
    shift: int | None


def find_norms(graph: Graph) -> Mapping[int, NormOp]:
    """Return, for each op inside a norm over the last axis, that norm; other ops are absent."""
    return {op: norm for norm in _norms(graph) for op in norm.ops}


def _norms(graph: Graph) -> Iterator[NormOp]:
    groups = {group.ops: group for group in match_supergroups(graph, NORMS).groups.values()}
    for group in groups.values():
        if group.name in _LAST_AXIS and tuple(group.facts.get("axes", ())) == (-1,):
            yield _of_group(graph, group)
    for index, op in enumerate(graph.ops):
        if op.type in _OPS and op.domain in ("", "ai.onnx") and op.inputs[0] is not None:
            rank = len(graph.tensors[op.inputs[0]].shape or ())
            if op.attributes.get("axis", -1) in (-1, rank - 1):
                stored = [_root(graph, tensor) for tensor in (*op.inputs[1:], None, None)[:2]]
                yield NormOp((index,), op.inputs[0], op.outputs[0], _OPS[op.type], stored[0], 0.0, stored[1])


def _of_group(graph: Graph, group: Supergroup) -> NormOp:
    gamma = group.tensors.get("gamma")
    added = [graph.ops[op] for op in group.ops if gamma in graph.ops[op].inputs and graph.ops[op].type == "Add"]
    return NormOp(
        group.ops,
        group.tensors["x"],
        graph.ops[group.ops[-1]].outputs[0],
        _LAST_AXIS[group.name],
        _root(graph, gamma),
        1.0 if added else 0.0,
        _root(graph, group.tensors.get("beta")),
    )


def _root(graph: Graph, tensor: int | None) -> int | None:
    origin = None if tensor is None else graph.origin(tensor)
    return None if origin is None else origin[0]
