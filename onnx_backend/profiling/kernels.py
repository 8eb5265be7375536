"""What a runtime runs of a model: kernels, in integers or in float, and the nodes and layer that each stands for."""

import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto

from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import is_constant, node_label
from onnx_backend.proto.subgraphs import reads
from qsdk.core.graph.op_facts import LINEAR, SHAPE_OPS
from qsdk.core.site import owner_of, port_of

Array = npt.NDArray[Any]
Precision = Literal["integer", "float", "conversion", "index"]

_FLOATS = frozenset({"float", "float16", "bfloat16", "double", "f32", "f16", "bf16", "f64"})
_CODES = frozenset({"int8", "uint8", "int16", "uint16", "int4", "uint4", "i8", "u8", "i16", "u16", "i4", "u4"})
_CONVERSIONS = frozenset(
    {
        "QuantizeLinear",
        "DequantizeLinear",
        "DynamicQuantizeLinear",
        "FakeQuantize",  # OpenVINO's QuantizeLinear
        "ReorderInput",
        "ReorderOutput",
        "Reorder",
    }
)
_CASTS = frozenset({"Cast", "Convert"})
#: what ONNX Runtime adds to the type of an op that it fuses, or computes in integers
_ADDED = re.compile(r"^(QLinear|Fused|Nhwc|Q(?=Gemm))|(IntegerToFloat|NBits)$")
_WEIGHTED = LINEAR | {"ConvInteger", "MatMulInteger"}
#: a tensor of a site, in a file that qsdk wrote
_OF_SITE = re.compile(r"(.+:[a-z]+\d*)/(?:de)?quantized")
_PREFIX = "qsdknode"
_NUMBER = re.compile(rf"{_PREFIX}(\d+)")


@dataclass(frozen=True)
class Kernel:
    """What a runtime runs in one piece: a node of the file, several that it fused, or a conversion of its own.

    Attributes:
        name: in the runtime.
        op_type: as it is executed.
        inputs: names of the tensors (OpenVINO: of the kernels) that it reads.
        outputs: names of its results.
        origins: names from which the nodes of the file that it replaced can be told; none for one of the runtime's own.
        precision: `integer` or `float` by what it computes with; `conversion` between the two, or of the layout;
            `index` for arithmetic on sizes and indices, which a float model has as well.
        ms: milliseconds of one run.
    """

    name: str
    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    origins: tuple[str, ...]
    precision: Precision
    ms: float


@dataclass(frozen=True)
class Profile:
    """The time of a model in a runtime.

    Attributes:
        title: name and version of the runtime.
        runs: milliseconds of each run as an application waits for it, without the profiler.
        kernels: in the order in which they run.
        graph: that the runtime has made of the model, if it writes it.
    """

    title: str
    runs: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    graph: GraphProto | None = None

    @property
    def ms(self) -> float:
        """Return the median of the runs."""
        return median(self.runs)

    @property
    def spread(self) -> float:
        """Return by how much the runs differ: the range of the middle eight tenths of them, over their median."""
        return (self.ends[1] - self.ends[0]) / self.ms if self.ms else 0.0

    @property
    def ends(self) -> tuple[float, float]:
        """Return the milliseconds that a tenth of the runs stay below, and that a tenth take longer than."""
        ordered, beyond = sorted(self.runs), len(self.runs) // 10
        return ordered[beyond], ordered[-1 - beyond]


def precision_of(
    op_type: str, reads: Collection[str], makes: Collection[str], *, from_codes: bool, in_integers: bool
) -> Precision:
    """Return what a kernel computes with, by the types of its inputs and results in the runtime's words.

    Args:
        op_type: of the kernel.
        reads: types of its inputs.
        makes: types of its results.
        from_codes: it reads results of integer kernels: numbers in a type that indices have too.
        in_integers: it is known to multiply integers, although it reads float scales or gives float results.
    """
    float_in, float_out = not _FLOATS.isdisjoint(reads), not _FLOATS.isdisjoint(makes)
    if op_type in _CONVERSIONS or (op_type in _CASTS and (float_in or float_out)):
        return "conversion"
    if in_integers:
        return "integer"
    if op_type not in SHAPE_OPS and (float_in or float_out):
        return "float"
    return "integer" if from_codes or not _CODES.isdisjoint((*reads, *makes)) else "index"


def numbered(model: ModelProto) -> ModelProto:
    """Return a copy in which every node is named after its position; a runtime keeps parts of names when it fuses."""
    found = load(model)
    for position, node in enumerate(found.graph.node):
        node.name = f"{_PREFIX}{position}"
    return found


def number_in(name: str) -> int | None:
    """Return the position of the node that the name of a kernel begins with, or None."""
    match = _NUMBER.match(name)
    return None if match is None else int(match[1])


def with_labels(text: str, model: ModelProto) -> str:
    """Return the text of an error about the numbered copy of a model with the nodes' own labels."""
    return _NUMBER.sub(lambda match: node_label(model.graph.node[int(match[1])]), text)


class _FileNodes:
    """The nodes of a file by their positions, and the ways between them."""

    def __init__(self, model: ModelProto) -> None:
        self.nodes = list(model.graph.node)
        self.names = {node.name: position for position, node in enumerate(self.nodes) if node.name}
        self.makers = {name: p for p, node in enumerate(self.nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = {}
        for position, node in enumerate(self.nodes):
            for name in reads(node):
                self.readers.setdefault(name, []).append(position)

    def named_by(self, kernel: Kernel) -> list[int]:
        """Return the nodes that a kernel names itself: by a number, a tensor or their names."""
        found = []
        for name in kernel.origins:
            # ONNX Runtime names a convolution in a blocked layout after the tensor that it makes
            tensor = name if name in self.makers else name.removesuffix("_nchwc")
            number = number_in(name)
            position = self.makers.get(tensor) if number is None else number
            position = self._named(name) if position is None else position
            if position is not None:
                found.append(position)
        return list(dict.fromkeys(found))

    def _named(self, kernel: str) -> int | None:
        """Return the node from whose name that of a kernel was made: `name_token_3`, `name/MatMulAddFusion`."""
        while kernel and kernel not in self.names:
            kernel = kernel[: max(kernel.rfind("_"), kernel.rfind("/"), 0)]
        return self.names.get(kernel)

    def before(self, position: int) -> list[int]:
        """Return the makers of what a node reads."""
        return [self.makers[name] for name in reads(self.nodes[position]) if name in self.makers]

    def behind(self, position: int) -> list[int]:
        """Return the readers of a node; none of a QuantizeLinear, with which a kernel ends."""
        node = self.nodes[position]
        outputs = () if node.op_type == "QuantizeLinear" else node.output
        return [reader for name in outputs for reader in self.readers.get(name, ())]

    def has_type(self, positions: Iterable[int], kernel: Kernel) -> bool:
        """Return True if one of the nodes is of the type of a kernel."""
        wanted = plain_type(kernel.op_type)
        return any(plain_type(self.nodes[position].op_type) == wanted for position in positions)


def plain_type(op_type: str) -> str:
    """Return the type of the op that a kernel of this type computes."""
    return _ADDED.sub("", op_type)


def nodes_of(model: ModelProto, kernels: Sequence[Kernel]) -> list[list[NodeProto]]:
    """Return the nodes of the file that each kernel of its numbered copy runs; none for one of the runtime's own.

    A kernel names some of them, by a node or a tensor. The others lie between these. In front of a kernel are the
    DequantizeLinear that it does without; behind it are the QuantizeLinear and the activation; and where many nodes
    became one of another type (a LayerNormalization), all between them belong to it.
    """
    graph = _FileNodes(model)
    found = [graph.named_by(kernel) for kernel in kernels]
    home = {position: kernel for kernel, named in reversed(list(enumerate(found))) for position in named}
    for index, kernel in enumerate(kernels):
        if not graph.has_type(found[index], kernel):
            # it names only the activation: the node that gave it its type is in front
            way = _way(found[index], graph.before, partial(graph.has_type, kernel=kernel), closed=home)
            home.update(dict.fromkeys(way, index))
            found[index] += way
    merged = {index for index, kernel in enumerate(kernels) if not graph.has_type(found[index], kernel)}
    for position, node in enumerate(graph.nodes):
        if position not in home and not is_constant(node):
            nearest = _nearest(graph, position, home, merged)
            if nearest is not None:
                found[nearest].append(position)
    return [[graph.nodes[position] for position in sorted(positions)] for positions in found]


def _nearest(graph: _FileNodes, position: int, home: Mapping[int, int], merged: set[int]) -> int | None:
    """Return the kernel that ran a node which no kernel names."""
    ways = [_way([position], step, lambda found: found[0] in home) for step in (graph.behind, graph.before)]
    behind, before = (home[way[-1]] if way else None for way in ways)
    belongs_behind = graph.nodes[position].op_type == "DequantizeLinear" or behind in merged
    first, second = (behind, before) if belongs_behind else (before, behind)
    return second if first is None else first


def _way(
    starts: Sequence[int],
    step: Callable[[int], Iterable[int]],
    is_goal: Callable[[list[int]], bool],
    *,
    closed: Container[int] = (),
) -> list[int]:
    """Return the positions on the shortest way from a start, which is left out, to a goal; nothing if there is none."""
    ways: dict[int, list[int]] = {start: [] for start in starts}
    queue = list(starts)
    for position in queue:
        for other in step(position):
            if other not in ways and other not in closed:
                ways[other] = [*ways[position], other]
                queue.append(other)
                if is_goal([other]):
                    return ways[other]
    return []


def layers_of(model: ModelProto, kernels: Sequence[Kernel], nodes: Sequence[Sequence[NodeProto]]) -> list[str]:
    """Return the layer of each kernel: the owner of its weight, else of its result; in other files that node.

    A conversion of the runtime's own counts for the kernel that reads it, else for the one that it reads.

    Args:
        model: the file.
        kernels: in the order in which they run.
        nodes: as `nodes_of` returns them.
    """
    quantizers = {node.input[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
    found = [_layer(own, quantizers) if own else "" for own in nodes]
    reader = {name: index for index, kernel in reversed(list(enumerate(kernels))) for name in kernel.inputs}
    maker = {name: index for index, kernel in enumerate(kernels) for name in kernel.outputs}
    for index in reversed(range(len(kernels))):
        beside = [reader[name] for name in kernels[index].outputs if name in reader]
        beside += [maker[name] for name in kernels[index].inputs if name in maker]
        known = [found[other] for other in beside if found[other]]
        found[index] = found[index] or (known[0] if known else kernels[index].name)
    return found


def _layer(nodes: Sequence[NodeProto], quantizers: Mapping[str, NodeProto]) -> str:
    """Return the layer of a kernel that runs nodes of the file."""
    read = [match[1] for node in nodes for name in node.input if (match := _OF_SITE.match(name))]
    weights = [site for site in read if port_of(site).startswith("weight")]
    last = nodes[-1]
    results = [*last.output, *(last.input[:1] if last.op_type == "DequantizeLinear" else ())]
    results += [name for result in results if result in quantizers for name in quantizers[result].output]
    made = [match[1] for name in results if (match := _OF_SITE.match(name))]
    if weights or made:
        return owner_of((weights or made)[0])
    return node_label(next((node for node in nodes if node.op_type in _WEIGHTED), last))
