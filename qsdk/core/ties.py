"""Ties: tensors that share an encoding because the op between them keeps the grid (union-find)."""

from collections.abc import Collection, Mapping

from qsdk.core.graph import Graph, Op

# Ops whose output holds values of their first input and nothing else.
PASS_THROUGH = frozenset(
    {"Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "MaxPool", "GlobalMaxPool"}
    | {"Slice", "Split", "Gather", "GatherElements", "Expand", "Tile", "DepthToSpace", "SpaceToDepth", "Dropout"}
)


class Classes:
    """Equivalence classes over tensor ids; the smallest id of a class represents it."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def find(self, item: int) -> int:
        """The representative of an item's class."""
        root = item
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(item, item) != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def union(self, left: int, right: int) -> None:
        """Put two items into one class."""
        low, high = sorted((self.find(left), self.find(right)))
        self._parent[high] = low


def find_ties(graph: Graph, groups: Mapping[int, object]) -> Classes:
    """Tie tensors over every grid-preserving op; `groups` maps a tensor id to what must be equal on both sides.

    A tensor absent from `groups` (float, or inside a supergroup) is never tied, so a tie ends there.
    """
    classes = Classes()
    reached = dict(groups)
    for op in graph.ops:
        _carry_through_inner_tensors(graph, op, reached)
        for left, right in _pairs(graph, op, reached):
            if reached[left] == reached[right]:
                classes.union(left, right)
    return classes


def _carry_through_inner_tensors(graph: Graph, op: Op, reached: dict[int, object]) -> None:
    """Let a tensor inside a module or function (`x[:, 1:]` is two Slices) hand its input's class on."""
    data = op.inputs[0] if op.inputs else None
    if data in reached and op.type != "Concat" and keeps_grid(graph, op):
        inner = [output for output in op.outputs if graph.tensors[output].site is None]
        reached.update({output: reached[data] for output in inner if output not in reached})


def keeps_grid(graph: Graph, op: Op) -> bool:
    """Whether an op's outputs hold only values of its inputs that are data (all of Concat's, else the first), or 0."""
    if op.type == "Pad":
        return _pads_inside(graph, op)
    return op.type in PASS_THROUGH or op.type == "Concat" or _resizes_nearest(op)


def _pairs(graph: Graph, op: Op, sites: Collection[int]) -> list[tuple[int, int]]:
    data = op.inputs[0] if op.inputs else None
    if data is None:
        return []
    if op.type == "Concat":
        # a stored operand keeps its own encoding: it was quantized as a weight
        members = [t for t in op.inputs if t is not None and t in sites and not graph.tensors[t].constant]
        return [(member, output) for output in op.outputs if output in sites for member in members]
    if keeps_grid(graph, op):
        return [(data, output) for output in op.outputs if data in sites and output in sites]
    return []


def _pads_inside(graph: Graph, op: Op) -> bool:
    """Whether a Pad adds only values that its input's range holds: copies of it, or 0."""
    mode = op.attributes.get("mode", "constant")
    if mode not in ("constant", b"constant"):
        return True
    absent = len(op.inputs) < 3 or op.inputs[2] is None
    return absent or graph.scalar(op.inputs[2]) == 0.0


def _resizes_nearest(op: Op) -> bool:
    return op.type == "Resize" and op.attributes.get("mode", "nearest") in ("nearest", b"nearest")
