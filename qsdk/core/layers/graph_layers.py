"""The layers of a graph: its linear ops with stored weights, as layer solvers see them, for both sides."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import RECURRENT, SHAPE_OPS
from qsdk.core.layers.layer_problem import Layer, PatchGeometry, WeightLayout, activation_of
from qsdk.core.numerics.spec import PerBlock
from qsdk.core.patterns.experts import stack_of
from qsdk.core.patterns.linear import bias_of_add
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Decision, Plan

_CONVOLUTIONS = ("Conv", "ConvTranspose")
_TAKES = ("Gather", "GatherND")
_MULTIPLIES = frozenset({*_CONVOLUTIONS, *RECURRENT, "Gemm", "MatMul", *_TAKES})


@dataclass(frozen=True)
class GraphLayer:
    """A layer, and its place in the graph.

    Attributes:
        layer: as in a walk; its geometry is that of explicit pads.
        ops: ids of the ops that read the weight, in order; more than one where a module is called again.
        inputs: ids of the tensors that the weight is multiplied with (of a recurrent op, its input `X`), one for each
            op.
        weights: ids of the weight as these ops read it, behind Transpose and Identity.
    """

    layer: Layer
    ops: tuple[int, ...]
    inputs: tuple[int, ...]
    weights: tuple[int, ...]


class _NoLayerError(Exception):
    """The reason why a stored weight is no layer."""


def graph_layers(
    graph: Graph, plan: Plan, frozen: Collection[str], *, experts: bool = False
) -> tuple[list[GraphLayer], dict[str, str]]:
    """Return the layers of a planned graph that solvers can work on, and why other weights are none.

    With `experts`, stacks of matrices of experts are among them, each as one layer with as many groups.

    Returns:
        The layers in the order of the graph, and why each other weight site is none.
    """
    readers = _readers(graph)
    ties = {d.tied_to: d.site for d in plan.decisions.values() if d.tied_to is not None and d.kind == "weight"}
    result, left = [], {}
    for site, decision in plan.decisions.items():
        if decision.kind != "weight":
            continue
        try:
            _require_solvable(decision, frozen, ties)
            root = graph.sites.get(site)
            reading = [] if root is None else readers.get(root, [])
            if root is None or not reading:
                raise _NoLayerError("no op of the traced graph reads it")
            if not experts and stack_of(graph, reading[0][0]) is not None:
                raise _NoLayerError("its experts are solved one by one in the sim of a module")
            result.append(_layer(graph, plan, decision, root, reading))
        except _NoLayerError as reason:
            left[site] = str(reason)
    # of a recurrent op, the weight of its input comes before that of its states
    return sorted(result, key=lambda at: (at.ops[0], graph.ops[at.ops[0]].inputs.index(at.weights[0]))), left


def _require_solvable(decision: Decision, frozen: Collection[str], ties: Mapping[str, str]) -> None:
    spec = decision.spec
    if decision.tied_to is not None:
        raise _NoLayerError(f"shares the encoding of {decision.tied_to}")
    if spec is None or not decision.quantized:
        raise _NoLayerError(f"float: {decision.reason}")
    if decision.site in ties:
        raise _NoLayerError(f"its encoding is shared by {ties[decision.site]}")
    if decision.site in frozen:
        raise _NoLayerError("its encoding is frozen")


def _readers(graph: Graph) -> dict[int, list[tuple[int, int]]]:
    """Return, by stored tensor, the (op, position) of whatever reads its values behind Transpose and Identity."""
    result: dict[int, list[tuple[int, int]]] = {}
    for index, op in enumerate(graph.ops):
        for position, tensor in enumerate(op.inputs):
            root = graph.constant_root(tensor)
            passes_on = op.type in ("Transpose", "Identity") and position == 0
            if root is not None and not passes_on and op.type not in SHAPE_OPS:
                result.setdefault(root, []).append((index, position))
    return result


def _layer(graph: Graph, plan: Plan, decision: Decision, root: int, reading: list[tuple[int, int]]) -> GraphLayer:
    ops = [graph.ops[index] for index, _ in reading]
    other = next((op for op in ops if op.type not in _MULTIPLIES), None)
    if other is not None and len(ops) == 1:
        raise _NoLayerError(f"{other.type} reads it, which multiplies no input with it")
    layouts = [] if other is not None else [_layout(graph, root, *at) for at in reading]
    geometries = [] if other is not None else [_geometry(op, layouts[0].shape) for op in ops]
    if other is not None or any(layout != layouts[0] for layout in layouts) or len(set(geometries)) > 1:
        raise _NoLayerError(f"several ops read it: {', '.join(op.name or op.type for op in ops)}")
    index = reading[0][0]
    data = [op.inputs[1 if at == 0 else 0] for op, (_, at) in zip(ops, reading, strict=True)]
    seen = [op.inputs[at] for op, (_, at) in zip(ops, reading, strict=True)]
    stored = any(tensor is None or graph.constant_root(tensor) is not None for tensor in data)
    if stored and graph.ops[index].type not in _TAKES:  # stored indices of a Gather only select rows
        raise _NoLayerError("it is multiplied with a stored tensor")
    spec, once = decision.spec, len(reading) == 1
    assert spec is not None
    linear = graph.ops[index].type not in (*RECURRENT, *_TAKES)
    bias = _bias(graph, index, root) if once and linear else ""
    last = _activation_behind(graph, plan, index) if once and linear else None
    activation = None if last is None else activation_of(graph, graph.ops[last])
    steps = _steps_of(graph, plan, data) if linear and decision.input_block is None else None
    layer = Layer(
        decision.site,
        spec,
        layouts[0],
        geometries[0],
        bias,
        activation,
        graph.tensors[root].dtype,
        input_steps=steps,
    )
    return GraphLayer(
        layer,
        tuple(index for index, _ in reading),
        tuple(tensor for tensor in data if tensor is not None),
        tuple(tensor for tensor in seen if tensor is not None),
    )


def _steps_of(graph: Graph, plan: Plan, tensors: Sequence[int | None]) -> int | None:
    """Return the steps of the widest grid that some tensors have; None if one of them is in floats."""
    steps = []
    for tensor in tensors:
        decision = None if tensor is None else plan.decisions.get(graph.tensors[tensor].site or "")
        spec = None if decision is None else decision.spec or plan.decisions[decision.encoding_site].spec
        if spec is None or not spec.dtype.is_integer or spec.blocks is not None:
            return None
        steps.append(int(spec.dtype.hi - spec.dtype.lo))
    return max(steps, default=None)


def _activation_behind(graph: Graph, plan: Plan, index: int) -> int | None:
    """Return the op that is quantized as one with a layer, and reads nothing but its result with the bias."""
    group, following = plan.groups.get(index), graph.sole_consumer(graph.ops[index].outputs[0])
    if following is not None and bias_of_add(graph, following) is not None:
        following = graph.sole_consumer(graph.ops[following].outputs[0])
    return following if group is not None and following in group.ops else None


def _layout(graph: Graph, root: int, index: int, position: int) -> WeightLayout:
    op, sizes = graph.ops[index], graph.tensors[root].shape or ()
    shape = tuple(n for n in sizes if isinstance(n, int))
    if not shape or len(shape) != len(sizes) or 0 in shape:
        raise _NoLayerError(f"its shape {sizes} is not fixed")
    if op.type in RECURRENT:
        if position not in (1, 2):
            raise _NoLayerError(f"it is input {position} of {op.type}")
        # [directions, gates * H, K]: each direction multiplies its own inputs, like the groups of a convolution
        return WeightLayout("conv_transpose", shape, shape[0], channel_axis=1, input_axis=0)
    stack = stack_of(graph, index) if op.type in _TAKES and position == 0 else None
    if stack is not None:
        axis = graph.axis_at_root(op.inputs[0] or 0, stack.channel_axis)
        return WeightLayout("conv_transpose", shape, shape[0], channel_axis=axis, input_axis=0)
    if op.type in _TAKES:
        if position != 0 or len(shape) != 2 or op.attributes.get("axis", 0) != 0:
            raise _NoLayerError(f"{op.type} reads it, and not as rows of a table")
        return WeightLayout("embedding", shape, shape[0], channel_axis=1, input_axis=0)
    operand = next((o for o in operands_of(graph, index) if o.tensor == op.inputs[position]), None)
    if operand is None or operand.role != "weight" or operand.channel_axis is None or operand.input_axis is None:
        raise _NoLayerError(f"it is input {position} of {op.type}, not its weight")
    axes = {"channel_axis": operand.channel_axis, "input_axis": operand.input_axis}
    if op.type in _CONVOLUTIONS:
        if (operand.channel_axis, operand.input_axis) != ((0, 1) if op.type == "Conv" else (1, 0)):
            raise _NoLayerError(f"{op.type} reads it transposed")
        return WeightLayout("conv" if op.type == "Conv" else "conv_transpose", shape, _groups(op), **axes)
    if len(shape) != 2:
        raise _NoLayerError(f"{len(shape)} dimensions: several matrices multiply one input each")
    if op.type == "Gemm" and op.attributes.get("alpha", 1.0) != 1.0:
        raise _NoLayerError(f"Gemm multiplies the product by alpha={op.attributes['alpha']}")
    return WeightLayout("linear", shape, **axes)


def experts_of(layer: Layer) -> list[Layer]:
    """Return the layers of a stack, one for each expert, whose sites end in its number: `...:down_proj[3]`.

    None where all experts share one scale, which no expert can choose alone.
    """
    by, axis = layer.spec.granularity, layer.layout.channel_axis
    if not isinstance(by, PerBlock):
        return []
    spec = replace(layer.spec, granularity=PerBlock(by.axis - 1, by.size))
    layout = WeightLayout("linear", layer.layout.shape[1:], channel_axis=axis - 1, input_axis=2 - axis)
    return [
        Layer(f"{layer.site}[{number}]", spec, layout, dtype=layer.dtype, expert=number)
        for number in range(layer.layout.groups)
    ]


def _groups(op: Op) -> int:
    return int(op.attributes.get("group", 1))


def _geometry(op: Op, shape: tuple[int, ...]) -> PatchGeometry | None:
    """Return the patches of a convolution with explicit pads; `auto_pad` depends on the input and counts as none."""
    if op.type not in _CONVOLUTIONS:
        return None
    given: Mapping[str, Any] = op.attributes
    kernel = shape[2:]  # the attribute of that name may be absent
    rank = len(kernel)
    pads = [int(n) for n in given.get("pads") or (0,) * 2 * rank]
    return PatchGeometry(
        kernel,
        tuple(int(n) for n in given.get("strides") or (1,) * rank),
        tuple(zip(pads[:rank], pads[rank:], strict=True)),
        tuple(int(n) for n in given.get("dilations") or (1,) * rank),
        _groups(op),
        transposed=op.type == "ConvTranspose",
        output_padding=tuple(int(n) for n in given.get("output_padding") or (0,) * rank)
        if op.type == "ConvTranspose"
        else (),
    )


def _bias(graph: Graph, index: int, weight: int) -> str:
    """Return the site of the bias that an op alone adds to its product, one number per output channel; "" for none."""
    op = graph.ops[index]
    reader, tensor = index, op.inputs[2] if len(op.inputs) > 2 else None
    if op.type == "MatMul":
        following = graph.sole_consumer(op.outputs[0])
        if following is None:
            return ""
        reader, tensor = following, bias_of_add(graph, following)
    root = graph.constant_root(tensor)
    if root is None or root == weight or (op.type == "Gemm" and op.attributes.get("beta", 1.0) != 1.0):
        return ""
    facts, result = graph.tensors[root], graph.tensors[op.outputs[0]].shape
    several = graph.consumers[root] != [reader] or root in graph.output_set
    outputs = None if result is None else result[1 if op.type in _CONVOLUTIONS else -1]
    fits = (
        facts.shape is not None
        and len(facts.shape) == 1
        and (not isinstance(outputs, int) or facts.shape[0] == outputs)
    )
    return facts.site or "" if fits and not several else ""
