"""Layers whose input no merged rotation reaches: a product with a fixed matrix, while the model runs, rotates it.

In front of the last layer of a feed-forward part is a function of each element, which no rotation passes. Its layer
takes up the inverse: `W x = (W R)(R^T x)`, whatever computes x (Ashkboos et al. 2024, QuaRot).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.config.config import QuantConfig
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Plan
from qsdk.core.rotations.steps import MOVES
from qsdk.core.rotations.streams import Stream
from qsdk.core.rotations.turns import stored_readers
from qsdk.core.scaling.edits import is_linear, stored_operand

_KIND = "input of a layer, at run time"


@dataclass(frozen=True)
class OnlineTurn:
    """A layer whose input is rotated while the model runs.

    Attributes:
        op: its id.
        root: id of its stored weight.
        axis: of the weight, along which the channels of its input lie.
        size: of the rotation, that is, of the input.
        blocked: why its input is left as it is, or "".
        kind: the name of such a row in reports.
    """

    op: int
    root: int
    axis: int
    size: int
    blocked: str = ""
    kind: str = _KIND


@dataclass(frozen=True)
class InputRotation:
    """A rotation in front of a layer.

    Attributes:
        site: of the layer's input.
        signed: whether that is quantized to a signed dtype.
        factors: see `qsdk.algorithms.rotation.orthogonal`.
    """

    site: str
    signed: bool
    factors: Sequence[npt.NDArray[np.float64]]


def with_online_rules(
    config: QuantConfig, rotations: Iterable[InputRotation], matrices: Iterable[str], between: Iterable[str]
) -> QuantConfig:
    """Return a config that quantizes rotations such that they cost nothing: what they read has the outliers still.

    Where linear layers alone are quantized, the products stay float. Elsewhere their operands get 16 bits, and the
    matrices, whose elements have one magnitude, 8.

    Args:
        config: of the sim.
        rotations: that are new.
        matrices: sites of their factors.
        between: sites of what is computed between two factors.
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


def find_online(graph: Graph, streams: Iterable[Stream], plan: Plan) -> list[OnlineTurn]:
    """Return the layers that write a residual stream and whose inputs neither lie in a stream nor behind a layer.

    Args:
        graph: of the model.
        streams: of the graph.
        plan: of the sim: only an input of 8 bits or fewer is worth a rotation.
    """
    streams = list(streams)
    turned = {tensor for stream in streams if not stream.blocked for tensor in stream.members}
    writers = {turn.op: None for one in streams if one.kind == "residual stream" for turn in one.writers}
    result = []
    for op_id in writers:
        op = graph.ops[op_id]
        x = op.inputs[0]
        if op.type not in ("Gemm", "MatMul") or not is_linear(graph, op_id) or x is None or x in turned:
            continue
        for operand in operands_of(graph, op_id):
            if operand.role == "weight" and operand.input_axis is not None and not _behind_a_layer(graph, x):
                size = (graph.tensors[operand.root].shape or ())[operand.input_axis]
                assert isinstance(size, int)
                result.append(
                    OnlineTurn(
                        op_id, operand.root, operand.input_axis, size, _obstacle(graph, op_id, operand.root, plan)
                    )
                )
    return result


def _behind_a_layer(graph: Graph, tensor: int) -> bool:
    """Return whether a layer computes a tensor, or what it is a view of: a rotation could be merged into that one."""
    while tensor in graph.producer:
        op_id = graph.producer[tensor]
        op, bias = graph.ops[op_id], stored_operand(graph, op_id)
        if is_linear(graph, op_id):
            return True
        ahead = list(_data(op.inputs, bias)) if op.type in MOVES or (op.type == "Add" and bias is not None) else []
        if not ahead:
            return False
        tensor = ahead[0]
    return False


def _data(inputs: Iterable[int | None], bias: int | None) -> Iterator[int]:
    yield from (tensor for tensor in inputs if tensor is not None and tensor != bias)


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
    if op.attributes.get("transA", 0) or not graph.tensors[x].shape:
        return "its input is not read along its last axis"
    return ""
