"""What linear layers read, in the graph, and which quantized activations something else reads as well."""

from collections.abc import Collection, Mapping

from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.planning.plan import Plan
from qsdk.core.planning.ties import JOINS, keeps_grid
from torch_bridge.compressed.scheme import NoFieldError

_PRODUCTS = ("Gemm", "MatMul")


def readers_of_weight(graph: Graph, root: int) -> list[int]:
    """Return the ops that read a stored tensor's values, behind Transpose, Identity and Casts."""
    views = [tensor for tensor in range(len(graph.tensors)) if graph.constant_root(tensor) == root]
    reading = [op for tensor in views for op in graph.consumers[tensor] if graph.ops[op].type not in SHAPE_OPS]
    return [op for op in reading if not all(graph.constant_root(t) == root for t in graph.ops[op].outputs)]


def read_by_layer(graph: Graph, root: int) -> list[int]:
    """Return the tensors that linear ops multiply a stored weight with, one for each op.

    Raises:
        NoFieldError: an op that is no product of an activation and this weight reads it too.
    """
    result = []
    for index in readers_of_weight(graph, root):
        op = graph.ops[index]
        data, weight = (*op.inputs, None, None)[:2]
        if op.type not in _PRODUCTS or data is None or weight is None or graph.constant_root(weight) != root:
            raise NoFieldError(f"{op.type} reads it as well, which is no linear layer")
        result.append(data)
    return result


def input_site(graph: Graph, plan: Plan, read: Collection[int]) -> str | None:
    """Return the site whose encoding everything that a layer reads has; None where all of it is float.

    Raises:
        NoFieldError: the layer is called with values of several encodings, or of a dynamic one.
    """
    sites = {_encoding_site(graph, plan, tensor) for tensor in read}
    if len(sites) > 1:
        raise NoFieldError("it is called with inputs of several scales")
    return next(iter(sites), None)


def also_read_by(graph: Graph, plan: Plan, tensor: int, layers: Mapping[int, str]) -> str:
    """Return what reads a quantized activation besides linear layers that quantize it; "" where nothing does.

    Args:
        graph: of the sim.
        plan: of the sim.
        tensor: of the activation.
        layers: op of a linear layer -> the site whose encoding its input has in the file.
    """
    if tensor in graph.output_set:
        return "it leaves the model"
    home = _encoding_site(graph, plan, tensor)
    for index in graph.consumers[tensor]:
        op = graph.ops[index]
        if op.type in SHAPE_OPS or (layers.get(index) == home and tensor not in op.inputs[1:]):
            continue
        if not keeps_grid(graph, op) or any(_encoding_site(graph, plan, t) != home for t in op.outputs):
            return f"{op.type} reads it"
        for made in op.outputs:
            if further := also_read_by(graph, plan, made, layers):
                return further
    return ""


def _encoding_site(graph: Graph, plan: Plan, tensor: int) -> str | None:
    """Return the site whose encoding a tensor's values have; one without a site has that of what it is a view of."""
    current = tensor
    while graph.tensors[current].site is None and current in graph.producer:
        op = graph.ops[graph.producer[current]]
        if op.type in JOINS or not keeps_grid(graph, op) or op.inputs[0] is None:
            return None
        current = op.inputs[0]
    decision = plan.decisions.get(graph.tensors[current].site or "")
    if decision is not None and (decision.dynamic or decision.tied_dynamically):
        home = plan.decisions[decision.encoding_site]
        if home.spec is not None and home.spec.dynamic == "token":
            return home.site
        raise NoFieldError(f"{decision.site} has a range found while the model runs, as uint8 with a zero point")
    return decision.encoding_site if decision is not None and decision.quantized else None
