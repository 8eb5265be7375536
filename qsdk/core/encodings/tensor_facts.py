"""The facts about a model's tensors that encodings files need: names, shapes and axes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock, PerChannel
from qsdk.core.planning.graph_matching import match_graphs
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Plan
from qsdk.core.site import owner_of


@dataclass(frozen=True)
class TensorFacts:
    """The facts about a tensor of a model.

    Attributes:
        site: its site, or the tensor's name where there is none.
        name: its name in the ONNX model; for a parameter of a module its path.
        stored: whether it is a parameter.
        shape: dimensions; a name or None where dynamic; None where even the rank is unknown.
        channel_axis: output channels, None where per channel has no meaning.
        block_axis: input channels, which blocks run along.
        wanted: its dtype in a plan, or None.
        readers: the modules that take it, as `read_by` names it.
    """

    site: str
    name: str
    stored: bool = False
    shape: tuple[int | str | None, ...] | None = None
    channel_axis: int | None = None
    block_axis: int | None = None
    wanted: DType | None = None
    readers: tuple[str, ...] = ()

    @property
    def whole_shape(self) -> tuple[int, ...] | None:
        """Return the shape, if no dimension is dynamic."""
        if self.shape is None or not all(isinstance(n, int) for n in self.shape):
            return None
        return tuple(n for n in self.shape if isinstance(n, int))


def tensor_facts(graph: Graph, plan: Plan | None = None) -> list[TensorFacts]:
    """Return the facts about the float tensors of a graph, those with a site first and in graph order.

    Args:
        graph: of a model.
        plan: its axes and dtypes take precedence; None for those of the ops.
    """
    facts = _facts_by_id(graph, plan)
    sited = [facts[index] for index in graph.sites.values()]
    return sited + [result for index, result in facts.items() if graph.tensors[index].site is None]


def _facts_by_id(graph: Graph, plan: Plan | None) -> dict[int, TensorFacts]:
    axes, readers = _axes(graph), _readers(graph)
    result = {}
    for index, tensor in enumerate(graph.tensors):
        if tensor.site is None and not tensor.is_float:
            continue
        site = tensor.site or tensor.name
        decision = None if plan is None else plan.decisions.get(site)
        spec = None if decision is None else decision.spec
        channel, block = axes.get(index, (None, None))
        if spec is not None and isinstance(spec.granularity, PerChannel):
            channel = spec.granularity.axis
        if spec is not None and isinstance(spec.granularity, PerBlock):
            block = spec.granularity.axis
        wanted = None if spec is None else spec.dtype
        result[index] = TensorFacts(
            site, tensor.name, tensor.constant, tensor.shape, channel, block, wanted, tuple(readers.get(index, ()))
        )
    return result


def read_by(module: str, index: int | str) -> str:
    """Return the name of the tensor that is an argument of a module, for files that go by modules."""
    return f"{module} (input {index})"


def _readers(graph: Graph) -> dict[int, list[str]]:
    """Return, by computed tensor, the arguments of modules that it is: those of the first op of each."""
    result: dict[int, list[str]] = {}
    seen: set[str] = set()
    for op in graph.ops:
        roots = [None if index is None else graph.constant_root(index) for index in op.inputs]
        sites = [graph.tensors[index].site for index in (*roots, *op.outputs) if index is not None]
        owners = {owner_of(site) for site in sites if site is not None} - seen
        seen |= owners
        taken = [index for index, root in zip(op.inputs, roots, strict=True) if index is not None and root is None]
        for place, index in enumerate(index for index in taken if graph.tensors[index].is_float):
            result.setdefault(index, []).extend(read_by(owner, place) for owner in sorted(owners))
    return result


def _axes(graph: Graph) -> dict[int, tuple[int | None, int | None]]:
    """Return, by stored tensor, the axes of output and input channels in the first op that reads it."""
    result: dict[int, tuple[int | None, int | None]] = {}
    for index in range(len(graph.ops)):
        for operand in operands_of(graph, index):
            result.setdefault(operand.root, (operand.channel_axis, operand.input_axis))
    return result


def by_name(tensors: Iterable[TensorFacts]) -> dict[str, TensorFacts]:
    """Return the tensors by every name that an encodings file may use: name, site, `owner.weight`, or who reads it."""
    listed = list(tensors)
    result = {tensor.name: tensor for tensor in reversed(listed)}
    for tensor in listed:
        result.setdefault(tensor.site, tensor)
    for tensor in listed:
        if tensor.stored:
            result.setdefault(tensor.site.replace(":", "."), tensor)
        for reader in tensor.readers:
            result.setdefault(reader, tensor)
    return result


def counterparts(graph: Graph, plan: Plan | None, model: Graph) -> list[tuple[TensorFacts, TensorFacts]]:
    """Return pairs of the tensors of a graph and of another model that play the same part, by structure alone.

    Returns:
        The facts about each tensor in the graph and in the model; tensors without a counterpart are left out.
    """
    mine, theirs = _facts_by_id(graph, plan), _facts_by_id(model, None)
    matched = match_graphs(graph, model)
    return [
        (mine[index], theirs[matched[index]])
        for index in graph.sites.values()
        if index in matched and matched[index] in theirs
    ]


def in_layout_of(encoding: Encoding, source: TensorFacts, target: TensorFacts) -> Encoding:
    """Return the encoding of a matrix in the layout of its counterpart, which may be stored transposed."""
    pair = (source.channel_axis, target.channel_axis)
    if encoding.axis is None or None in pair or pair[0] == pair[1] or len(source.shape or ()) != 2:
        return encoding
    blocked = encoding.block_size is not None
    return replace(
        encoding,
        scale=encoding.scale.T if blocked else encoding.scale,
        zero_point=encoding.zero_point.T if blocked else encoding.zero_point,
        axis=1 - encoding.axis % 2,
    )
