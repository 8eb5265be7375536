"""Layers whose input no merged rotation reaches: a product with a fixed matrix, while the model runs, rotates it.

In front of the last layer of a feed-forward part is a function of each element, which no rotation passes. Its layer
takes up the inverse: `W x = (W R)(R^T x)`, whatever computes x (Ashkboos et al. 2024, QuaRot).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsdk.core.channel_maps.flood import is_linear, stored_operand
from qsdk.core.channel_maps.rotation_groups import MOVES, RotationGroup, stored_readers
from qsdk.core.config.config import QuantConfig
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Plan


@dataclass(frozen=True)
class OnlineRotation:
    """A layer, by its id and that of its weight, whose input of this size is rotated while the model runs.

    `blocked` says why its input is left as it is, or "".
    """

    op: int
    root: int
    size: int
    blocked: str = ""


@dataclass(frozen=True)
class InputRotation:
    """A rotation in front of a layer, at the site of its input, which has a signed dtype or not.

    The factors are those of `qsdk.algorithms.rotation.orthogonal`.
    """

    site: str
    signed: bool
    factors: Sequence[npt.NDArray[np.float64]]


def with_online_rules(
    config: QuantConfig, rotations: Iterable[InputRotation], matrices: Iterable[str], between: Iterable[str]
) -> QuantConfig:
    """Return a config in which new rotations lose no accuracy, though the inputs that they read still have outliers.

    Where linear layers alone are quantized, the products stay float. Elsewhere their operands get 16 bits, and the
    matrices, whose elements have one magnitude, 8. `matrices` are the sites of the rotations' factors, `between` those
    of what is computed between two factors.
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


def find_online(graph: Graph, groups: Iterable[RotationGroup], plan: Plan) -> list[OnlineRotation]:
    """Return the layers that write a residual stream and whose inputs neither lie in a group nor behind a layer.

    By the plan, only an input of 8 bits or fewer is worth a rotation.
    """
    groups = list(groups)
    rotated = {tensor for group in groups if not group.blocked for tensor in group.members}
    writers = {one.op: None for group in groups if group.kind == "residual stream" for one in group.writers}
    result = []
    for op_id in writers:
        op = graph.ops[op_id]
        x = op.inputs[0]
        if op.type not in ("Gemm", "MatMul") or not is_linear(graph, op_id) or x is None or x in rotated:
            continue
        for operand in operands_of(graph, op_id):
            if operand.role == "weight" and operand.input_axis is not None and not _behind_a_layer(graph, x):
                size = (graph.tensors[operand.root].shape or ())[operand.input_axis]
                assert isinstance(size, int)
                result.append(OnlineRotation(op_id, operand.root, size, _obstacle(graph, op_id, operand.root, plan)))
    return result


def _behind_a_layer(graph: Graph, tensor: int) -> bool:
    """Return whether a layer computes a tensor, or what it is a view of: a rotation could be merged into that one."""
    while tensor in graph.producer:
        op_id = graph.producer[tensor]
        op, bias = graph.ops[op_id], stored_operand(graph, op_id)
        if is_linear(graph, op_id):
            return True
        moves = op.type in MOVES or (op.type == "Add" and bias is not None)
        ahead = [other for other in op.inputs if other is not None and other != bias] if moves else []
        if not ahead:
            return False
        tensor = ahead[0]
    return False


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
