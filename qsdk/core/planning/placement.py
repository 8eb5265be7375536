"""Where a pair of 8 bits is read or written by an integer kernel of ONNX Runtime, and so saves time."""

from qsdk.core.numerics.dtypes import BlockFormat
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.fast_table import LAYERS_ON_CODES, kernel_of
from qsdk.core.planning.ties import keeps_grid

NO_KERNEL = 'no integer kernel of ONNX Runtime reads or writes it (placement="all" quantizes it)'


def kernel_tensors(context: PlanningContext) -> frozenset[int]:
    """Return the activations that integer kernels read, and those that they only have as codes.

    Layers read codes, and convolutions give nothing else; a Linear gives floats as well, so its result is no such
    tensor unless a layer reads it. What only moves values stands behind the pair. A sum, product, Concat or what else
    has a kernel is computed on codes where its result is read as codes and an operand is there as codes anyway.
    """
    graph, found = context.graph, set[int]()
    for index, op in enumerate(graph.ops):
        if op.type in LAYERS_ON_CODES and (stored := _is_quantized(context, index)) is not None:
            found.update(t for t in op.inputs[: 1 if stored else 2] if t is not None)
            if op.type == "Conv":
                last = context.groups[index].ops[-1] if index in context.groups else index
                found.update(graph.ops[last].outputs)
    size = -1
    while size != len(found):
        size = len(found)
        for index in reversed(range(len(graph.ops))):
            op, group = graph.ops[index], context.groups.get(index)
            last = index if group is None or group.ops[0] != index else group.ops[-1]
            if found.isdisjoint(graph.ops[last].outputs):
                continue
            parts = [t for t in op.inputs if t is not None and graph.tensors[t].is_float]
            parts = [t for t in parts if graph.constant_root(t) is None]
            if group is None and op.type != "Concat" and keeps_grid(graph, op):
                found.update(parts[:1])
            elif kernel_of(op.type) is not None and not found.isdisjoint(parts):
                found.update(parts)
    return frozenset(found)


def _is_quantized(context: PlanningContext, index: int) -> bool | None:
    """Return True for a layer with a quantized weight, False for a product of activations, None for any other op."""
    weights = [operand.root for operand in context.operands[index] if operand.role == "weight"]
    if not weights:
        both = [t for t in context.graph.ops[index].inputs if t is not None and context.graph.constant_root(t) is None]
        return False if len(both) == 2 and context.graph.ops[index].type == "MatMul" else None
    for root in weights:
        wanted = context.resolver.at(context.stored_place(index, root)).wanted.weight
        if not isinstance(wanted, BlockFormat) and not wanted.is_quantized:
            return None
    return True
