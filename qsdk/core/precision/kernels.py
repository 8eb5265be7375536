"""Which sites ONNX Runtime's integer kernels take together: one that is raised alone costs a layer its kernel.

A layer that reads codes beside a raised weight, or floats beside codes of a weight, dequantizes in every run what it
has as codes; a Conv whose result is no codes does too. What is fast says `qsdk.core.planning.fast_table`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.spec import PerBlock
from qsdk.core.planning.fast_table import LAYERS_ON_CODES, kernel_of
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.planning.ties import keeps_grid

_BYTE = 8  # bits; narrower weights are stored in bytes where a kernel reads them


@dataclass(frozen=True)
class CodedLayer:
    """A layer that has an integer kernel, by the sites whose encodings it computes with.

    Attributes:
        op_type: of the layer.
        fed: what it reads as codes.
        weight: of the layer; None for a product of two activations.
        made: what it gives, where its kernel gives codes alone.
    """

    op_type: str
    fed: tuple[str, ...]
    weight: str | None
    made: tuple[str, ...] = ()

    @property
    def activations(self) -> tuple[str, ...]:
        """Return all but the weight."""
        return (*self.fed, *self.made)

    def has_kernel(self, dtype_of: Callable[[str], DType | None]) -> bool:
        """Return whether its kernel runs where sites have these dtypes, None for floats."""
        weight = "" if self.weight is None else f"/{_stored_in(dtype_of(self.weight))}"
        read = [dtype_of(site) for site in self.fed]
        return None not in [dtype_of(site) for site in self.made] and all(
            dtype is not None and kernel_of(self.op_type + weight, dtype.container) is not None for dtype in read
        )


def _stored_in(dtype: DType | None) -> str:
    if dtype is None or not dtype.is_integer or dtype.bits > _BYTE:
        return "floats"
    return "int8" if dtype.signed else "uint8"


def coded_layers(graph: Graph, plan: Plan) -> Iterator[CodedLayer]:
    """Yield the layers of a plan that ONNX Runtime computes on codes."""
    members = {group.ops[0]: group.ops[-1] for group in plan.groups.values()}
    for index, op in enumerate(graph.ops):
        if op.type not in LAYERS_ON_CODES:
            continue
        weight = next((o for o in operands_of(graph, index) if o.role == "weight" and o.tensor == op.inputs[1]), None)
        if weight is None and (op.type != "MatMul" or any(graph.constant_root(t) is not None for t in op.inputs)):
            continue
        decisions = [_quantized_at(graph, plan, t) for t in op.inputs[: 2 if weight is None else 1]]
        stored = [] if weight is None else [_stored_at(graph, plan, weight.tensor, weight.root)]
        made = [] if op.type != "Conv" else [_stored_at(graph, plan, graph.ops[members.get(index, index)].outputs[0])]
        found = [None if d is None else d.encoding_site for d in (*decisions, *stored, *made)]
        if None in found:
            continue
        sites = [site for site in found if site is not None]
        fed, rest = tuple(sites[: len(decisions)]), sites[len(decisions) :]
        layer = CodedLayer(op.type, fed, rest[0] if stored else None, tuple(rest[len(stored) :]))
        specs = {site: spec for site in sites if (spec := plan.decisions[site].spec) is not None}
        blocks = any(isinstance(spec.granularity, PerBlock) for spec in specs.values())
        if not blocks and layer.has_kernel({site: spec.dtype for site, spec in specs.items()}.get):
            yield layer


def _stored_at(graph: Graph, plan: Plan, *tensors: int) -> Decision | None:
    """Return the decision on the first of some tensors that is quantized."""
    decisions = (plan.decisions.get(graph.tensors[tensor].site or "") for tensor in tensors)
    return next((decision for decision in decisions if decision is not None and decision.quantized), None)


def _quantized_at(graph: Graph, plan: Plan, tensor: int | None) -> Decision | None:
    """Return the decision on a tensor, or on what it holds the values of."""
    while tensor is not None:
        decision = _stored_at(graph, plan, tensor)
        maker = graph.maker(tensor)
        if decision is not None or maker is None or not keeps_grid(graph, maker):
            return decision
        tensor = maker.inputs[0]
    return None


def sites_on_codes(graph: Graph, plan: Plan) -> frozenset[str]:
    """Return the sites whose codes an op other than a layer computes with: sums, products, Concats."""
    found = set[str]()
    for op in graph.ops:
        kernel = None if op.type in LAYERS_ON_CODES else kernel_of(op.type)
        if kernel is not None and kernel.startswith("Q"):
            floats = [t for t in (*op.inputs, *op.outputs) if t is not None and graph.tensors[t].is_float]
            around = [_quantized_at(graph, plan, t) for t in floats]
            sites = [d.encoding_site for d in around if d is not None and d.kind != "bias"]
            found.update(sites if len(sites) == len(floats) else ())
    return frozenset(found)


def raised_with(
    layers: Sequence[CodedLayer], others: frozenset[str], dtypes: Mapping[str, DType], raised: Mapping[str, DType]
) -> set[str]:
    """Return what is to be raised to floats beside some sites, so that nothing is dequantized for nothing.

    A layer that loses its kernel takes its weight with it, a product of activations both; and an activation that no
    kernel reads or writes as codes then goes too.

    Args:
        layers: those with kernels before anything is raised.
        others: sites that other kernels read or write.
        dtypes: site -> its dtype before.
        raised: site -> the dtype that it is raised to.
    """
    found = set[str]()

    def dtype_of(site: str) -> DType | None:
        dtype = None if site in found else raised.get(site, dtypes.get(site))
        return dtype if dtype is not None and dtype.is_integer else None

    size = -1
    while size != len(found):
        size = len(found)
        kept = [layer for layer in layers if layer.has_kernel(dtype_of)]
        on_codes = others.union(site for layer in kept for site in layer.activations)
        for layer in layers:
            if layer not in kept:
                lost = {*(layer.fed if layer.weight is None else [layer.weight]), *(set(layer.activations) - on_codes)}
                found.update(site for site in lost if dtype_of(site) is not None)
    return found
