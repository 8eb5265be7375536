"""Norms, rotary embeddings and attention of a lowered model as the operators that the standard has from opset 23 on.

Each is found by structure, so that one with a quantizer inside, or a part that another node reads, stays written out.
What an operator computes is what the nodes did that it stands for, but for the rounding of floats:

- RMSNormalization(x, gain): x / sqrt(mean(x^2) + epsilon) * gain, over the last axes.
- RotaryEmbedding(x, cos, sin): x [batch, heads, step, size] is cut in two parts, and the tables have half its size and
  every row of the batch.
- Attention(q, k, v, mask): softmax(softcap(scale * q k^T) + mask) v, with fewer heads of keys and values than of
  queries where they are repeated. A row in which the mask, with minus infinity, hides everything gives 0, as the
  guarded softmax of PyTorch does; what is no such softmax keeps its nodes unless no number of its mask is that low.

Measured on onnxruntime 1.32: below opset 25 its Attention takes no mask with a size of 1 for several queries, and a
row of which every score is the lowest float32 as one that is hidden, where the standard takes the mean of the values.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching
from onnx_backend.proto.nodes import drop_unused_initializers, replace_nodes
from onnx_backend.proto.opsets import opset_of
from onnx_backend.single_ops.attention import ATTENTION, keys_order, least_of_mask, scale_of
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import REPEATS
from qsdk.core.patterns.find import PATTERNS, match_supergroups
from qsdk.core.patterns.supergroup import Supergroup

Named = Generator[NodeProto, None, str]  # yields nodes, and returns the name of what they make
OPSET = 23  # the first with these operators
_BROADCASTS = 25  # the first at which ONNX Runtime repeats a mask for every query
_LOWEST = -1e30  # below that, a row of scores may be hidden by a finite number
_OPERATORS = {"RMSNorm": "RMSNormalization", "RoPE": "RotaryEmbedding", "Attention": "Attention"}
_KEPT = frozenset({"Cos", "Sin", "QuantizeLinear", "DequantizeLinear", "Unsqueeze", "Identity"})  # halves stay alike
_HEADS = 4  # axes of a tensor with heads


class _NoOperatorError(Exception):
    """Why a group stays written out."""


def write_single_ops(model: ModelProto) -> dict[str, Any]:
    """Write norms, rotary embeddings and attention of a lowered model as one operator each, in place.

    Returns facts for the report: how many of each operator, and the reasons of those that stay written out.
    """
    if opset_of(model) < OPSET:
        return {}
    return _written(model, frozenset(_OPERATORS))


def write_norms(model: ModelProto) -> None:
    """Write norms as RMSNormalization in place, at any opset: for a reader of the graph, not for a file."""
    _written(model, frozenset({"RMSNorm"}))


def _written(model: ModelProto, wanted: frozenset[str]) -> dict[str, Any]:
    writer = _Writer(model)
    found, reasons = Counter[str](), Counter[str]()
    for group in writer.groups():
        if group.name not in wanted:
            continue
        name = _OPERATORS[group.name]
        try:
            writer.write(group)
            found[name] += 1
        except _NoOperatorError as error:
            reasons[f"{name}: {error}"] += 1
    reasons.update(writer.near_misses())
    writer.finish()
    left = [f"{text} ({count} in the file)" for text, count in reasons.items()]
    return {"single_operators": dict(sorted(found.items())), "written_out": left}


class _Writer:
    """A lowered model, its graph, and what makes the results of operators."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.index, self.opset = model, GraphIndex(model.graph), opset_of(model)
        self.graph: Graph = read_graph(model)
        self.matches = match_supergroups(self.graph, (ATTENTION, *PATTERNS))
        self._new: dict[str, Callable[[], Iterator[NodeProto]]] = {}
        self._made: dict[tuple[str, ...], str] = {}

    def groups(self) -> list[Supergroup]:
        """Return the groups that have an operator."""
        found = {id(group): group for group in self.matches.groups.values() if group.name in _OPERATORS}
        return [*found.values()]

    def near_misses(self) -> list[str]:
        """Return why parts that look like attention are none."""
        return [f"Attention: {one.reason}" for one in self.matches.near_misses if one.pattern == ATTENTION.name]

    def write(self, group: Supergroup) -> None:
        """Have one operator make the result of a group."""
        ops = [self.graph.ops[index] for index in group.ops]
        types = {self.graph.tensors[tensor].dtype for op in ops for tensor in op.outputs}
        if types - {"float32", "bool"} or any(op.type == "Cast" for op in ops):
            raise _NoOperatorError("it is not computed in float32 throughout")
        {"RMSNorm": self._norm, "RoPE": self._turn, "Attention": self._attend}[group.name](group, ops)

    def finish(self) -> None:
        """Put the operators in the places of what they stand for, and drop what nothing reads any more."""
        graph, nodes = self.model.graph, list[NodeProto]()
        for node in graph.node:
            made = next((name for name in node.output if name in self._new), None)
            nodes += [node] if made is None else self._new[made]()
        replace_nodes(graph, nodes_reaching(nodes, [value.name for value in graph.output]))
        drop_unused_initializers(graph)

    # --- the operators ------------------------------------------------------------------------------------------

    def _norm(self, group: Supergroup, ops: Sequence[Op]) -> None:
        x, axes, output = group.tensors["x"], group.facts["axes"], ops[-1].outputs[0]
        shape = self.graph.shape_of(x)
        if shape is None or axes != tuple(range(-len(axes), 0)):
            raise _NoOperatorError("it runs over other axes than the last ones")
        if "beta" in group.tensors:
            raise _NoOperatorError("it adds a bias")
        normed = shape[-len(axes) :]
        gain, added, makes = self._gain(group, ops, output, normed)
        epsilon = next((n for op in ops if op.type == "Add" and (n := self._epsilon(op)) is not None), 0.0)

        def nodes() -> Iterator[NodeProto]:
            """Yield what halves the tables, and the operator."""
            scale = gain
            if added:
                scale = self.index.fresh(f"{self._name(makes)}/gain")
                yield helper.make_node("Add", [gain, self._stored("one", np.array(1, np.float32))], [scale])
            yield self._node("RMSNormalization", [self._name(x), scale], makes, axis=-len(axes), epsilon=epsilon)

        self._new[self._name(makes)] = nodes

    def _gain(self, group: Supergroup, ops: Sequence[Op], output: int, normed: Sequence[Any]) -> tuple[str, bool, int]:
        """Return the gain of a norm, whether 1 is added to it, and the tensor that the norm with its gain makes."""
        if "gamma" in group.tensors:
            gamma = group.tensors["gamma"]
            if self.graph.shape_of(gamma) != tuple(normed):
                raise _NoOperatorError("its gain does not have the sizes of the axes it runs over")
            return self._name(gamma), any(op.type == "Add" and self._scalar(op) == 1.0 for op in ops), output
        reader = self.graph.sole_consumer(output)
        product = None if reader is None else self.graph.ops[reader]
        if product is not None and product.type == "Mul" and len(product.inputs) == 2:
            other = next((one for one in product.inputs if one != output), None)
            if other is not None and self.graph.shape_of(other) == tuple(normed) and self._is_float32(other):
                return self._name(other), False, product.outputs[0]
        if not all(isinstance(size, int) for size in normed):
            raise _NoOperatorError("it has no gain, and the sizes of the axes it runs over are open")
        return self._stored("ones", np.ones([int(size) for size in normed], np.float32)), False, output

    def _turn(self, group: Supergroup, ops: Sequence[Op]) -> None:
        x, makes = group.tensors["x"], ops[-1].outputs[0]
        layout, axis, *_ = group.facts["cut"]
        shape = self.graph.shape_of(x) or ()
        if len(shape) != _HEADS or axis != -1 or not isinstance(shape[-1], int):
            raise _NoOperatorError("what it turns is not [batch, heads, step, size]")
        size, tables = int(shape[-1]), [group.tensors[name] for name in ("cos", "sin")]
        for table in tables:
            self._require_table(table, shape, layout)

        def nodes() -> Iterator[NodeProto]:
            halves = list[str]()
            for table in tables:
                name, sizes = self._name(table), self.graph.shape_of(table) or ()
                if sizes[-1] == size:
                    step = (size // 2, 1) if layout == "halves" else (size, 2)
                    name = yield from self._once("Slice", name, (0,), step[:1], (-1,), step[1:])
                if len(sizes) == _HEADS:
                    name = yield from self._once("Squeeze", name, (1,))
                elif len(sizes) == _HEADS - 2:
                    name = yield from self._once("Unsqueeze", name, (0,))
                rows = sizes[0] if len(sizes) == _HEADS else 1
                if (rows, sizes[-2]) != (shape[0], shape[2]):
                    name = yield from self._expanded(name, self._name(x), (0, 2), 3)
                halves.append(name)
            options = {} if layout == "halves" else {"interleaved": 1}
            yield self._node("RotaryEmbedding", [self._name(x), *halves], makes, **options)

        self._new[self._name(makes)] = nodes

    def _attend(self, group: Supergroup, ops: Sequence[Op]) -> None:
        query, key, value = (group.tensors[name] for name in ("q", "k", "v"))
        mask, makes = group.tensors.get("mask"), ops[-1].outputs[0]
        self._require_mask(mask, guarded="guarded" in group.facts)
        order = keys_order(group.facts["perm"])
        options: dict[str, Any] = {"scale": scale_of(group.facts)}
        options |= {"softcap": group.facts["softcap"]} if "softcap" in group.facts else {}
        if len(self.graph.shape_of(query) or ()) < _HEADS:
            options |= {"q_num_heads": 1, "kv_num_heads": 1}
            if mask is not None and len(self.graph.shape_of(mask) or ()) > 2:
                raise _NoOperatorError("its mask has three axes")

        def nodes() -> Iterator[NodeProto]:
            keys = self._name(key)
            if order is not None:
                keys = self.index.fresh(f"{keys}/in_rows")
                yield helper.make_node("Transpose", [self._name(key)], [keys], perm=order)
            inputs = [self._name(query), keys, self._name(value)]
            if mask is not None:
                inputs.append((yield from self._full_mask(mask, query, key, order)))
            yield self._node("Attention", inputs, makes, **options)

        self._new[self._name(makes)] = nodes

    # --- what they need -----------------------------------------------------------------------------------------

    def _require_table(self, table: int, shape: Sequence[Any], layout: str) -> None:
        sizes, size = self.graph.shape_of(table), int(shape[-1])
        if sizes is None or not 2 <= len(sizes) <= _HEADS or (len(sizes) > 2 and sizes[-3] != 1):
            raise _NoOperatorError("its tables are not the same for all heads")
        if len(sizes) == _HEADS - 1:
            raise _NoOperatorError("its tables have three axes")
        if sizes[-2] == 1 != shape[2]:
            raise _NoOperatorError("its tables have one row for all positions")
        if sizes[-1] == size // 2:
            return
        if sizes[-1] != size or not self._is_repeated(table, layout):
            raise _NoOperatorError("nothing shows that its tables have the same angles for both parts")

    def _is_repeated(self, table: int, layout: str) -> bool:
        """Return whether both parts of a table are alike, by what they are made of."""
        graph = self.graph
        while True:
            value, node = graph.value(table), graph.maker(table)
            if value is not None:
                size = value.shape[-1] // 2
                parts = (
                    (value[..., :size], value[..., size:])
                    if layout == "halves"
                    else (value[..., ::2], value[..., 1::2])
                )
                return bool(np.array_equal(*parts))
            if node is None:
                return False
            first = node.inputs[0]
            if node.type == "Concat" and layout == "halves":
                rank = len(graph.shape_of(table) or ())
                last = rank and node.attributes.get("axis", 0) % rank == rank - 1
                return bool(last) and len(node.inputs) == 2 and first == node.inputs[1]
            if node.type == "Reshape" and layout == "pairs":
                return self._is_spread(table)
            if node.type in ("Mul", "Div"):  # by a number
                others = [one for one in node.inputs if graph.scalar(one) is None]
                first = others[0] if len(others) == 1 else None
            elif node.type == "Gather":
                first = first if node.attributes.get("axis", 0) == 0 and len(graph.shape_of(first) or ()) > 1 else None
            elif node.type in ("Unsqueeze", "QuantizeLinear", "DequantizeLinear"):
                before, behind = graph.shape_of(first), graph.shape_of(table)
                per_tensor = node.type == "Unsqueeze" or all(n == 1 for n in graph.shape_of(node.inputs[1]) or ())
                first = first if before and behind and before[-1] == behind[-1] and per_tensor else None
            elif node.type not in _KEPT:
                return False
            if first is None:
                return False
            table = first

    def _is_spread(self, table: int) -> bool:
        """Return whether each number of a table stands there twice: [..., n, 1] -> [..., n, 2] -> [..., 2n]."""
        graph = self.graph
        wide = graph.maker(table).inputs[0]  # type: ignore[union-attr]
        node, shape = graph.maker(wide), graph.shape_of(wide) or ()
        apart = None if node is None or node.type not in REPEATS else graph.shape_of(node.inputs[0])
        if node is not None and node.type == "Concat" and len(node.inputs) == 2 and len(shape):
            last = node.attributes.get("axis", 0) % len(shape) == len(shape) - 1
            return last and node.inputs[0] == node.inputs[1] and shape[-1] == 2
        return bool(apart) and apart[-1] == 1 and shape[-1] == 2  # type: ignore[index]

    def _require_mask(self, mask: int | None, *, guarded: bool) -> None:
        if mask is None:
            return
        if not self._is_float32(mask):
            raise _NoOperatorError("its mask is not float32")
        if guarded:
            return
        least = least_of_mask(self.graph, mask)
        if least is None or np.isinf(least):
            raise _NoOperatorError("its softmax is NaN where its mask hides all, and the operator's is 0")
        if least < _LOWEST and self.opset < _BROADCASTS:
            raise _NoOperatorError(
                f"its mask hides by {least:.3g}: where that hides all, ONNX Runtime computes it right from opset "
                f"{_BROADCASTS} on"
            )

    def _full_mask(self, mask: int, query: int, key: int, order: Sequence[int] | None) -> Named:
        """Yield what repeats a mask for every query and key, where nothing shows that it has that; return its name."""
        has, queries = self.graph.shape_of(mask) or (), self.graph.shape_of(query) or ()
        keys = self.graph.shape_of(key) or ()
        step = keys[-2] if order is None else keys[order[-2]]
        name = self._name(mask)
        if self.opset >= _BROADCASTS or (len(has) > 1 and (has[-2], has[-1]) == (queries[-2], step)):
            return name
        sizes = [
            (yield from self._size(self._name(query), len(queries) - 2)),
            (yield from self._size(self._name(key), len(keys) - 2 if order is None else order[-2])),
        ]
        return (yield from self._grown(name, sizes))

    def _expanded(self, name: str, like: str, axes: Sequence[int], rank: int) -> Named:
        sizes = list[str]()
        for axis in axes:
            sizes.append((yield from self._size(like, axis)))
        sizes += [self._stored("size_of_1", np.array([1], np.int64))] * (rank - len(axes))
        return (yield from self._grown(name, sizes))

    def _grown(self, name: str, sizes: Sequence[str]) -> Named:
        """Yield an Expand of a tensor to sizes, once; return its name."""
        shape = yield from self._once_of("Concat", tuple(sizes), axis=0)
        return (yield from self._once_of("Expand", (name, shape)))

    def _size(self, name: str, axis: int) -> Named:
        return (yield from self._once_of("Shape", (name,), start=axis, end=axis + 1))

    def _once(self, op: str, name: str, *numbers: Sequence[int]) -> Named:
        stored = [self._stored("numbers", np.array(values, np.int64)) for values in numbers]
        return (yield from self._once_of(op, (name, *stored)))

    def _once_of(self, op: str, inputs: tuple[str, ...], **options: Any) -> Named:
        """Yield a node if none of this pass computes that yet, and return what it makes."""
        key = (op, *inputs, *(f"{name}={value}" for name, value in options.items()))
        if key not in self._made:
            self._made[key] = self.index.fresh(f"{inputs[0]}/{op.lower()}")
            yield helper.make_node(op, inputs, [self._made[key]], self._made[key], **options)
        return self._made[key]

    def _stored(self, name: str, value: np.ndarray[Any, Any]) -> str:
        key = (name, str(value.dtype), str(value.shape), value.tobytes().hex())
        if key not in self._made:
            self._made[key] = self.index.fresh(f"single_ops/{name}")
            self.model.graph.initializer.append(numpy_helper.from_array(value, self._made[key]))
        return self._made[key]

    def _node(self, op: str, inputs: Sequence[str], output: int, **options: Any) -> NodeProto:
        """Return an operator in the place of the node that makes a tensor, under that node's name."""
        name = self._name(output)
        return helper.make_node(op, inputs, [name], self.index.makers[name].name or name, **options)

    def _name(self, tensor: int) -> str:
        return self.graph.tensors[tensor].name

    def _is_float32(self, tensor: int) -> bool:
        return self.graph.tensors[tensor].dtype == "float32"

    def _scalar(self, op: Op) -> float | None:
        return next((value for one in op.inputs if (value := self.graph.scalar(one)) is not None), None)

    def _epsilon(self, op: Op) -> float | None:
        value = self._scalar(op)
        return value if value is not None and 0 <= value < 0.1 else None
