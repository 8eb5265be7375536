"""Keep tensors in the layout of ONNX Runtime's convolutions where pairs and statistics read them.

On the CPU the runtime (1.31, 1.32) stores the channels of a convolution's results in blocks, and goes back to rows of
pixels (a ReorderOutput) in front of every op that its own pass does not know, QuantizeLinear among them. Such an op
reads each value by itself, so that it may as well read the blocks: the two reorders around it go, and the values stay
the same to the last bit. `benchmarks/onnx_simulation.py` measures what that saves.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching
from onnx_backend.proto.nodes import attributes, rename_inputs, replace_nodes

DOMAIN = "com.microsoft.nchwc"
#: The runtime's blocks are of 8 or 16 channels; a multiple of 16 is not padded on any processor.
BLOCK = 16
_STANDARD = ("", "ai.onnx")
_PAIR = frozenset({"QuantizeLinear", "DequantizeLinear"})
#: Ops of one tensor that give 0 for 0, as padding is, and finite values for finite ones.
_KEEPS_ZERO = frozenset({"Relu", "LeakyRelu", "Tanh", "Erf", "HardSwish", "QuickGelu", "Gelu", "Identity", "Sum"})
_OF_ONE = _KEEPS_ZERO | {"Sigmoid", "HardSigmoid"}
_OF_TWO = frozenset({"Add", "Sub", "Mul", "Max", "Min"})
_EXTREMES = frozenset({"ReduceMax", "ReduceMin"})
_ALONG_CHANNELS = frozenset({"Concat", "Split"})

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class _Blocked:
    """A tensor in blocks.

    Attributes:
        name: of the tensor in blocks.
        channels: as the model counts them.
        shape: of the tensor in rows; None where it is not known.
        has_codes: whether it holds the codes of a pair.
    """

    name: str
    channels: int
    shape: Shape | None
    has_codes: bool = False

    @property
    def is_padded(self) -> bool:
        return self.channels % BLOCK != 0


def optimized_model(open_session: Callable[[str], object]) -> ModelProto:
    """Return the model that a session runs, as the runtime has optimized it for this processor.

    Args:
        open_session: opens the session and lets it write its model to the given path.
    """
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        path = Path(folder) / "optimized.onnx"
        open_session(str(path))
        return onnx.load(path)


def keep_blocks(model: ModelProto, shapes: Mapping[str, Shape | None]) -> bool:
    """Let ops read blocks where they read what a ReorderOutput made of them, in place; return whether any does.

    Args:
        model: as the runtime has optimized it.
        shapes: of the tensors of the model before that, by name, as far as they are known.
    """
    if not any(node.domain == DOMAIN for node in model.graph.node):
        return False
    walk = _Walk(model, shapes)
    for node in model.graph.node:
        walk.visit(node)
    if not walk.moved:
        return False
    rename_inputs(walk.nodes, walk.renamed)
    outputs = {value.name for value in model.graph.output}
    replace_nodes(model.graph, nodes_reaching(walk.nodes, outputs))
    return True


class _Walk(GraphIndex):
    """One pass over the nodes, in their order: what is in blocks so far, and the nodes of the result."""

    def __init__(self, model: ModelProto, shapes: Mapping[str, Shape | None]) -> None:
        super().__init__(model.graph)
        self.shapes = shapes
        self.blocked: dict[str, _Blocked] = {}
        self.renamed: dict[str, str] = {}
        self.nodes: list[NodeProto] = []
        self.moved = 0

    def visit(self, node: NodeProto) -> None:
        """Add a node, or its form on blocks with reorders behind it, which go where nothing reads them."""
        facts = attributes(node) if node.domain == DOMAIN else {}
        if facts.get("channels_last", 0) == 0 and facts:
            if node.op_type == "ReorderInput" and node.input[0] in self.blocked:
                self.renamed[node.output[0]] = self.blocked[node.input[0]].name
                return
            if node.op_type == "ReorderOutput":
                shape = self.shapes.get(node.output[0])
                self.blocked[node.output[0]] = _Blocked(node.input[0], int(facts["channels"]), shape)
        read = [self.blocked.get(name) for name in node.input]
        results = self._results(node, read)
        if results is None:
            self.nodes.append(node)
        else:
            self._move(node, read, results)

    def _results(self, node: NodeProto, read: Sequence[_Blocked | None]) -> list[_Blocked | None] | None:
        """Return what a node gives if it reads blocks (None for a result without blocks), or None if it may not."""
        first = read[0] if read else None
        if first is None or node.domain not in (*_STANDARD, "com.microsoft"):
            return None
        if node.op_type in _PAIR:
            per_tensor = self._is_number(node.input[1])
            return [replace(first, has_codes=node.op_type == "QuantizeLinear")] if per_tensor else None
        if any(each is not None and each.has_codes for each in read):
            return None
        if node.op_type in _OF_ONE and (node.op_type != "Sum" or len(read) == 1):
            return [first] if node.op_type in _KEEPS_ZERO or not first.is_padded else None
        if node.op_type == "Clip":
            numbers = all(not name or self._is_number(name) for name in node.input[1:])
            return [first] if numbers and not first.is_padded else None
        if node.op_type in _OF_TWO:
            scaled = node.op_type == "Mul" and self._is_number(node.input[1])
            return [first] if scaled or (len(read) == 2 and self._are_alike(read)) else None
        if node.op_type in _EXTREMES:
            facts = attributes(node)
            of_all = len(node.input) == 1 and "axes" not in facts and not facts.get("noop_with_empty_axes", 0)
            return [None] if of_all and facts.get("keepdims", 1) == 0 and not first.is_padded else None
        if node.op_type == "MaxPool":
            return [replace(first, shape=None)] if len(node.output) == 1 and not first.is_padded else None
        return self._along_channels(node, [each for each in read if each is not None], first)

    def _along_channels(
        self, node: NodeProto, read: Sequence[_Blocked], first: _Blocked
    ) -> list[_Blocked | None] | None:
        """Return what joins or splits channels gives, if whole blocks are moved."""
        if node.op_type not in _ALONG_CHANNELS or attributes(node).get("axis", 0) != 1:
            return None
        if any(each.is_padded for each in read):
            return None
        if node.op_type == "Concat":
            total = sum(each.channels for each in read)
            return [_Blocked("", total, None)] if len(read) == len(node.input) else None
        sizes = self.stored.get(node.input[1]) if len(node.input) == 2 else None
        if sizes is None:
            return None
        found = [_Blocked("", int(size), None) for size in numpy_helper.to_array(sizes)]
        return None if any(each.is_padded for each in found) else [*found]

    def _are_alike(self, read: Sequence[_Blocked | None]) -> bool:
        """Return whether tensors are in blocks and of one known shape: in blocks there is no broadcasting."""
        shapes = {None if each is None else each.shape for each in read}
        shape = next(iter(shapes))
        return len(shapes) == 1 and shape is not None and None not in shape

    def _is_number(self, name: str) -> bool:
        return name in self.stored and not self.stored[name].dims

    def _move(self, node: NodeProto, read: Sequence[_Blocked | None], results: Sequence[_Blocked | None]) -> None:
        """Add a node's form on blocks, and behind each result the reorder for readers that need rows."""
        self.moved += 1
        on_blocks = NodeProto()
        on_blocks.CopyFrom(node)
        on_blocks.input[:] = [name if each is None else each.name for name, each in zip(node.input, read, strict=True)]
        if node.op_type == "MaxPool":
            on_blocks.domain = DOMAIN
        self.nodes.append(on_blocks)
        for place, (name, result) in enumerate(zip(node.output, results, strict=True)):
            if result is None:
                continue
            inside = self.fresh(f"{name}/blocks")
            on_blocks.output[place] = inside
            shape = self.shapes.get(name) or result.shape
            self.blocked[name] = replace(result, name=inside, shape=shape)
            back = helper.make_node("ReorderOutput", [inside], [name], domain=DOMAIN, channels=result.channels)
            self.nodes.append(back)
