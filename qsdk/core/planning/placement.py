"""Where a pair is read or written by an integer kernel, of ONNX Runtime or of a target that lists its own."""

from qsdk.core.numerics.dtypes import BlockFormat
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.fast_table import LAYERS_ON_CODES, kernel_of
from qsdk.core.planning.hardware import only_kernels
from qsdk.core.planning.ties import keeps_grid

NO_KERNEL = 'no integer kernel of ONNX Runtime reads or writes it (placement="all" quantizes it)'


NOT_OF_TARGET = "no integer kernel of the target reads or writes it (integer_ops)"


def without_kernels(context: PlanningContext) -> dict[int, str]:
    """Return the tensors that stay float because no integer kernel reads or writes them, with that reason."""
    if context.config.integer_ops is not None:
        kept, reason = _tensors_of_target(context), NOT_OF_TARGET
    elif only_kernels(context.config):
        kept, reason = _kernel_tensors(context), NO_KERNEL
    else:
        return {}
    return {tensor: reason for tensor in range(len(context.graph.tensors)) if tensor not in kept}


def has_kernel(context: PlanningContext, op: int) -> bool:
    """Return whether the target of a config has an integer kernel for an op, or for its supergroup."""
    wanted = context.config.integer_ops
    return wanted is None or not set(wanted).isdisjoint(context.types_of(op))


def _tensors_of_target(context: PlanningContext) -> frozenset[int]:
    """Return the tensors that ops with an integer kernel, or their supergroups, read and write."""
    graph, found = context.graph, set[int]()
    for index, op in enumerate(graph.ops):
        if has_kernel(context, index):
            last = context.groups[index].ops[-1] if index in context.groups else index
            found.update(tensor for tensor in (*op.inputs, *graph.ops[last].outputs) if tensor is not None)
    return frozenset(found)


def _kernel_tensors(context: PlanningContext) -> frozenset[int]:
    """Return the activations that integer kernels read, and those that they only have as codes.

    Layers read codes, and convolutions give nothing else; a Linear gives floats as well, so its result is no such
    tensor unless a layer reads it. What only moves values stands behind the pair. A sum, product, Concat or what else
    has a kernel is computed on codes where its result is read as codes and an operand is there as codes anyway. Codes
    whose range is found while the model runs are read by a Linear or a product alone.
    """
    graph, found = context.graph, set[int]()
    for index, op in enumerate(graph.ops):
        if op.type in LAYERS_ON_CODES and (stored := _is_quantized(context, index)) is not None:
            fed = [t for t in op.inputs[: 1 if stored else 2] if t is not None]
            dynamic = any(_is_dynamic(context, t) for t in fed)
            found.update(fed if op.type != "Conv" or not dynamic else ())
            if op.type == "Conv" and not dynamic:
                last = context.groups[index].ops[-1] if index in context.groups else index
                found.update(graph.ops[last].outputs)
    size = -1
    while size != len(found):
        size = len(found)
        for index in reversed(range(len(graph.ops))):
            op, group = graph.ops[index], context.groups.get(index)
            last = index if group is None or group.ops[0] != index else group.ops[-1]
            made = graph.ops[last].outputs
            if found.isdisjoint(made) or any(_is_dynamic(context, t) for t in made):
                continue
            parts = [t for t in op.inputs if t is not None and graph.tensors[t].is_float]
            parts = [t for t in parts if graph.constant_root(t) is None]
            if group is None and op.type != "Concat" and keeps_grid(graph, op):
                found.update(parts[:1])
            elif kernel_of(op.type) is not None and not found.isdisjoint(parts):
                found.update(parts)
    return frozenset(found)


def _is_dynamic(context: PlanningContext, tensor: int) -> bool:
    return bool(context.result_choice(tensor, context.graph.producer.get(tensor)).wanted.dynamic_activations)


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
