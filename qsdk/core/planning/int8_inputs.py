"""Layers whose weights alone are quantized, and which round their input to int8: the blocks that they round it in.

ONNX Runtime's kernel for such layers (MatMulNBits) has one scale for each block of input channels of each row: blocks
as long as those of the weight, or of 32 where the weight has none.
"""

from collections.abc import Mapping
from dataclasses import replace

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerBlock, Spec
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.plan import Decision

_WITHOUT_BLOCKS = 32
_LENGTHS = frozenset({16, 32, 64, 128, 256})  # those that the kernel has
_LEAST_BITS = 3  # weights of 2 bits have kernels for some lengths alone


def with_int8_inputs(
    context: PlanningContext, activations: Mapping[int, Decision], stored: Mapping[int, Decision]
) -> dict[int, Decision]:
    """Return the decisions on stored tensors, in which those of layers that compute in int8 have an input block."""
    result = dict(stored)
    if context.config.compute != "int8":
        return result
    shared = {decision.tied_to for decision in stored.values()}
    read_by: dict[int, list[int]] = {}
    for op, operands in context.operands.items():
        for operand in operands:
            read_by.setdefault(operand.root, []).append(op)
    layers = context.linear_weights
    for root in dict.fromkeys(layers.values()):
        decision = stored[root]
        inputs = [context.graph.ops[op].inputs[0] for op in read_by[root] if layers.get(op) == root]
        block = None if decision.site in shared or len(inputs) < len(read_by[root]) else input_block(decision)
        if block is not None and all(t is not None and _is_float(context.graph, activations, t) for t in inputs):
            result[root] = replace(decision, input_block=block)
    return result


def input_block(decision: Decision) -> int | None:
    """Return the block in which the kernel of a layer with this weight rounds its input; None where there is none."""
    spec, shape = decision.spec, decision.shape
    if not _has_kernel(decision, spec) or spec is None or shape is None or len(shape) != 2:
        return None
    if not isinstance(spec.granularity, PerBlock):
        return _WITHOUT_BLOCKS
    return spec.granularity.size if spec.granularity.size in _LENGTHS else None


def _has_kernel(decision: Decision, spec: Spec | None) -> bool:
    if spec is None or not spec.dtype.is_integer or decision.tensor_type != "float32":
        return False
    return _LEAST_BITS <= spec.dtype.bits <= 8


def _is_float(graph: Graph, activations: Mapping[int, Decision], tensor: int) -> bool:
    """Return whether a tensor is a float32 matrix, or a stack of them, that is read as it is."""
    decision, facts = activations.get(tensor), graph.tensors[tensor]
    shape = facts.shape
    quantized = decision is not None and (decision.spec is not None or decision.tied_to is not None)
    return facts.dtype == "float32" and not quantized and shape is not None and len(shape) > 1 and not facts.constant
