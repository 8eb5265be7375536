"""Attention of a decoder with a cache, found by its structure and written as GroupQueryAttention.

The kernel (ONNX Runtime, contrib operator GroupQueryAttention) appends keys and values to its cache in place, turns
queries and keys by tables of a rotary embedding, hides later tokens and those before a window, and repeats no head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.genai.adapters import find_adapted, with_adapters
from onnx_backend.genai.computed import Computed
from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.products import find_products, merge_alike, merged
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.forms import PART_OF_FORM
from qsdk.core.arrays import Array

_TURNED_UNIT = 8  # pairs of numbers that the kernel turns at once
_TABLES = ("cos_cache", "sin_cache")
_HEADS_LAST, _TURNED = [0, 2, 1, 3], [0, 1, 3, 2]


class _NoFormError(Exception):
    """Why an attention has no fused form."""


@dataclass(frozen=True)
class Norm:
    """An RMS norm over the last axis.

    Attributes:
        source: the tensor that is normed.
        gain: along that axis.
        epsilon: that is added to the mean of squares.
    """

    source: str
    gain: Array
    epsilon: float

    def node(self, editor: Editor, source: str, output: str) -> NodeProto:
        """Return the kernel of the norm of a tensor."""
        inputs = [source, editor.keep_once(f"{output}/gain", self.gain)]
        return editor.node(
            "SimplifiedLayerNormalization", inputs, [output], epsilon=self.epsilon, axis=-1, stash_type=1
        )


@dataclass(frozen=True)
class Turn:
    """A rotary embedding that the patterns of planning have found.

    Attributes:
        source: the tensor that is turned.
        cos, sin: tensors that are computed of positions.
        pairs: True if it turns neighbours, False if it turns halves.
    """

    source: str
    cos: str
    sin: str
    pairs: bool


@dataclass
class _Heads:
    """Queries, keys or values on their way to attention.

    Attributes:
        rows: the tensor [batch, step, heads, size], or the one in front of its Reshape, [batch, step, heads x size].
        flat: whether it is the latter.
        turn: the rotary embedding behind it.
        norm: the norm of each head in front of that, which is yet to be written.
    """

    rows: str
    flat: bool
    turn: Turn | None = None
    norm: Norm | None = None


@dataclass
class _Attention:
    query: _Heads
    key: _Heads
    value: _Heads
    cache: tuple[str, str, str, str]  # past key and value, present key and value
    heads: tuple[int, int, int]  # of queries, of keys, and the size of one
    scale: float
    softcap: float
    window: int
    sinks: Array | None  # one score for each head, which takes a share and gives nothing
    output: str


class AttentionWriter:
    """Writes the attentions of a decoder.

    Attributes:
        reasons: result of an attention without a form -> why.
        switches: lengths of texts up to which tables of rotary positions have rows of their own.
    """

    def __init__(
        self,
        editor: Editor,
        turns: Mapping[str, Turn],
        norms: Mapping[str, Norm],
        computed: Computed,
        sizes: Mapping[str, Sequence[Any]],
    ) -> None:
        self.editor, self.turns, self.norms, self.computed, self.sizes = editor, turns, norms, computed, sizes
        self.products = {product.output: product for product in find_products(editor)}
        self.adapted = find_adapted(editor)
        self.reasons = dict[str, str]()
        self.switches = set[int]()
        self._tables = list[tuple[str, str, int]]()
        self._lengths: list[NodeProto] = []

    def write(self) -> int:
        """Write every attention that has a form, in place, and return their number."""
        found = list[tuple[NodeProto, _Attention]]()
        for node in self.editor.model.graph.node:
            # scores of a router are [tokens, experts]
            if node.op_type == "Softmax" and len(self.sizes.get(node.input[0], (0, 0, 0))) > 2:
                try:
                    found.append((node, self._read(node)))
                except _NoFormError as error:
                    self.reasons[node.output[0]] = str(error)
        for number, (_, attention) in enumerate(found):
            self._write(attention, first=number == 0)
        self.editor.apply()
        return len(found)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self, softmax: NodeProto) -> _Attention:
        editor = self.editor
        if editor.options(softmax).get("axis", -1) not in (-1, 3):
            raise _NoFormError("its softmax is not over the last axis")
        scores, sinks = self._unshifted(softmax.input[0]), None
        if (joined := editor.maker(scores, "Concat")) is not None:
            scores, sinks = joined.input[0], self._sinks(joined)
        values, output = self._behind(softmax.output[0], sinks is not None)
        window, softcap, factor = -1, 0.0, 1.0
        while (node := editor.maker(scores, "Add", "Mul", "Div", "Where", "Cast")) is not None:
            scores, window, softcap, factor = self._in_front(node, window, softcap, factor)
        product = editor.maker(scores, "MatMul")
        if product is None:
            raise _NoFormError(f"its scores {scores!r} are no product of queries and keys")
        query, factor = self._scaled(product.input[0], factor)
        keys, factor = self._scaled(product.input[1], factor)
        turned = editor.maker(keys, "Transpose")
        if turned is None or editor.options(turned).get("perm") != _TURNED:
            raise _NoFormError(f"its keys {keys!r} are not transposed")
        keys, factor = self._scaled(turned.input[0], factor)
        past_key, present_key, key = self._cached(self._unrepeated(keys))
        past_value, present_value, value = self._cached(self._unrepeated(values))
        if factor <= 0:
            raise _NoFormError("the factor of its scores is not positive")
        cache = (past_key, past_value, present_key, present_value)
        kept, size = (self.sizes[present_key][axis] for axis in (1, 3))
        query_heads = self._heads(query)
        count = self.sizes[query][1]
        if not all(isinstance(n, int) for n in (kept, size, count)):
            raise _NoFormError("the number of its heads is open")
        if sinks is not None and sinks.size != count:
            raise _NoFormError("its heads have no sink each")
        heads = (int(count), int(kept), int(size))
        own = _Attention(
            query_heads, self._heads(key), self._heads(value), cache, heads, factor, softcap, window, sinks, output
        )
        self._require_same_turn(own)
        return own

    def _in_front(self, node: NodeProto, window: int, softcap: float, factor: float) -> tuple[str, int, float, float]:
        """Step over a node between the product and the softmax: a mask, a factor, or a cap."""
        editor = self.editor
        if node.op_type == "Cast":
            return node.input[0], window, softcap, factor
        if node.op_type == "Where":
            hidden = editor.scalar(node.input[2])
            found = self.computed.window(node.input[0]) if hidden is not None and hidden < -1e4 else None
            if found is None:
                raise _NoFormError(f"the mask {node.input[0]!r} is neither causal nor a window")
            return node.input[1], found, softcap, factor
        if node.op_type == "Add":
            for scores, mask in (node.input, reversed(node.input)):
                found = self.computed.window(mask)
                if found is not None:
                    return scores, found, softcap, factor
            raise _NoFormError(f"what {node.name!r} adds to its scores is neither a causal mask nor a window")
        number = next((n for name in node.input if (n := editor.scalar(name)) is not None), None)
        inner = next((name for name in node.input if name not in editor.index.stored), "")
        if number is None:
            raise _NoFormError(f"its scores are multiplied by a tensor, {node.name!r}")
        tanh = editor.maker(inner, "Tanh") if node.op_type == "Mul" else None
        if tanh is None:
            return inner, window, softcap, factor * (number if node.op_type == "Mul" else 1 / number)
        if factor != 1.0 or softcap or number <= 0:
            raise _NoFormError("the cap of its scores is not c tanh(x / c)")
        below, share = self._scaled(tanh.input[0], 1.0)
        return below, window, number, share * number

    def _scaled(self, tensor: str, factor: float) -> tuple[str, float]:
        """Step over factors in front of a tensor."""
        while (node := self.editor.maker(tensor, "Mul", "Div")) is not None and tensor not in self.turns:
            number = self.editor.scalar(node.input[1])
            inner = node.input[0]
            if number is None and node.op_type == "Mul":
                number, inner = self.editor.scalar(node.input[0]), node.input[1]
            if number is None:
                break
            tensor, factor = inner, factor * (number if node.op_type == "Mul" else 1 / number)
        return tensor, factor

    def _unshifted(self, scores: str) -> str:
        """Step over a shift of scores by their largest, and over a bound far below it: they change no share."""
        bounded = self.editor.maker(scores, "Max")
        if bounded is not None and PART_OF_FORM in metadata(bounded):
            scores = bounded.input[0]
        shifted = self.editor.maker(scores, "Sub")
        largest = None if shifted is None else self.editor.maker(shifted.input[1], "ReduceMax")
        return (
            scores if shifted is None or largest is None or largest.input[0] != shifted.input[0] else shifted.input[0]
        )

    def _sinks(self, joined: NodeProto) -> Array:
        """Return the scores of sinks, one for each head, that are joined behind those of tokens."""
        editor = self.editor
        wide = editor.maker(joined.input[1], "Expand") if len(joined.input) == 2 else None
        value = editor.value(joined.input[1] if wide is None else wide.input[0])
        if value is None or value.shape != (1, value.size, 1, 1) or editor.options(joined).get("axis") not in (-1, 3):
            raise _NoFormError("what is joined to its scores is no stored score for each head")
        return value.reshape(-1)

    def _behind(self, shares: str, sinks: bool) -> tuple[str, str]:
        """Return the values that the shares of a softmax multiply, and the result [batch, step, heads x size]."""
        editor = self.editor
        if sinks:
            cut = editor.reader(shares, "Slice")
            bounds = [] if cut is None else [editor.scalar(name) for name in cut.input[1:]]
            if cut is None or bounds[:2] != [0, -1] or bounds[2] not in (-1, 3) or bounds[3:] not in ([], [1]):
                raise _NoFormError("its values are not multiplied by the shares of all but the sink")
            shares = cut.output[0]
        readers = editor.index.readers.get(shares, [])
        guard = next((node for node in readers if node.op_type == "Where"), None)
        if guard is not None and {node.op_type for node in readers} == {"Where", "IsNaN"}:
            shares = guard.output[0]  # a row that hides every token, of which there is none
        while (cast := editor.reader(shares, "Cast", "Identity")) is not None:
            shares = cast.output[0]
        product = editor.reader(shares, "MatMul")
        result = "" if product is None else product.output[0]
        if (same := editor.reader(result, "Reshape")) is not None and len(self.sizes.get(same.output[0], ())) == 4:
            result = same.output[0]
        moved = editor.reader(result, "Transpose")
        if product is None or moved is None or editor.options(moved).get("perm") != _HEADS_LAST:
            raise _NoFormError(f"its shares {shares!r} do not multiply values whose heads are put last")
        flat = editor.reader(moved.output[0], "Reshape")
        if flat is None:
            raise _NoFormError("its heads are not joined behind it")
        return product.input[1], flat.output[0]

    def _unrepeated(self, tensor: str) -> str:
        """Step over the repetition of heads: Unsqueeze, Expand, Reshape."""
        editor = self.editor
        shaped = editor.maker(tensor, "Reshape")
        wide = None if shaped is None else editor.maker(shaped.input[0], "Expand", "Tile")
        apart = None if wide is None else editor.maker(wide.input[0], "Unsqueeze", "Reshape")
        if apart is None:
            return tensor
        axes = editor.value(apart.input[1])
        if apart.op_type == "Unsqueeze" and (axes is None or axes.reshape(-1).tolist() != [2]):
            raise _NoFormError("its heads are not repeated one by one")
        return str(apart.input[0])

    def _cached(self, present: str) -> tuple[str, str, str]:
        """Return the past of a cache, what leaves as present, and what is new."""
        editor = self.editor
        joined = editor.maker(present, "Concat")
        inputs = {value.name for value in editor.model.graph.input}
        if joined is None or len(joined.input) != 2 or joined.input[0] not in inputs:
            raise _NoFormError(f"{present!r} is not a cache and what is new, joined")
        if editor.options(joined).get("axis") not in (-2, 2) or present not in editor.index.outputs:
            raise _NoFormError(f"{present!r} does not leave the model as it is read")
        return joined.input[0], present, joined.input[1]

    def _heads(self, tensor: str) -> _Heads:
        """Return where queries, keys or values come from: through a rotary embedding, a norm and a Transpose."""
        editor = self.editor
        source, turn = self._turned(tensor)
        norm = self.norms.get(source)
        moved = editor.maker(source if norm is None else norm.source, "Transpose")
        if moved is None or editor.options(moved).get("perm") != _HEADS_LAST:
            raise _NoFormError(f"{source!r} is not transposed from [batch, step, heads, size]")
        if turn is None:
            inner, turn = self._turned(moved.input[0])
            return self._flat(inner, turn, norm)
        return self._flat(moved.input[0], turn, norm)

    def _turned(self, tensor: str) -> tuple[str, Turn | None]:
        """Return what a rotary embedding turns, all of it or its first numbers, and that; or the tensor itself."""
        editor, turn = self.editor, self.turns.get(tensor)
        if turn is not None:
            return turn.source, turn
        joined = editor.maker(tensor, "Concat")
        turn = None if joined is None or len(joined.input) != 2 else self.turns.get(joined.input[0])
        if joined is None or turn is None or editor.options(joined).get("axis") not in (-1, 3):
            return tensor, None
        first, second = (editor.maker(name, "Slice", "Split") for name in (turn.source, joined.input[1]))
        size = self.sizes[turn.source][-1]
        if self.sizes[tensor] == self.sizes[turn.source]:  # what is not turned is empty
            return turn.source, turn
        if first is None or second is None or first.input[0] != second.input[0]:
            raise _NoFormError("what its rotary embedding does not turn comes from elsewhere")
        if first.op_type == "Split":
            whole = first is second and [*first.output] == [turn.source, joined.input[1]]
        else:
            bounds = [[editor.scalar(name) for name in cut.input[1:4]] for cut in (first, second)]
            whole = bounds[0][0] == 0 and bounds[1][0] == size and all(bound[2] in (-1, 3) for bound in bounds)
        if not whole or self.sizes[tensor] != self.sizes[first.input[0]]:
            raise _NoFormError("its rotary embedding does not turn the first numbers of each head")
        return str(first.input[0]), turn

    def _flat(self, rows: str, turn: Turn | None, norm: Norm | None) -> _Heads:
        shaped = None if norm is not None else self.editor.maker(rows, "Reshape")
        if shaped is not None and len(self.sizes.get(shaped.input[0], ())) == 3:
            return _Heads(str(shaped.input[0]), True, turn)
        return _Heads(rows, False, turn, norm)

    def _require_same_turn(self, found: _Attention) -> None:
        turns = [one.turn for one in (found.query, found.key)]
        if found.value.turn is not None or (turns[0] is None) != (turns[1] is None):
            raise _NoFormError("its queries and keys do not turn alike")
        if turns[0] is None or turns[1] is None:
            return
        if turns[0].pairs != turns[1].pairs:
            raise _NoFormError("its queries and keys do not turn alike")
        tables = [self._table(turn) for turn in turns if turn is not None]
        if tables[0] is None or tables[1] is None:
            raise _NoFormError("its rotary embedding depends on more than the position of a token")
        if tables[0][0].shape[1] % _TURNED_UNIT:
            raise _NoFormError(f"its rotary embedding does not turn a multiple of {_TURNED_UNIT} pairs")
        if not all(np.array_equal(left, right) for left, right in zip(*tables, strict=True)):
            raise _NoFormError("its queries and keys do not turn alike")

    def _table(self, turn: Turn) -> tuple[Array, Array, int] | None:
        """Return the tables [rows, half of what is turned] of a rotary embedding.

        And the length up to which texts have rows of their own, which come first.
        """
        found, switches = [], []
        for name in (turn.cos, turn.sin):
            known = self.computed.table(name)
            if known is None:
                return None
            whole, switch = known
            switches.append(switch)
            if 2 * whole.shape[1] == self.sizes[turn.source][-1]:  # both values of a pair read one number
                found.append(whole)
                continue
            half = whole.shape[1] // 2
            both = (whole[:, ::2], whole[:, 1::2]) if turn.pairs else (whole[:, :half], whole[:, half:])
            if not np.array_equal(*both):
                return None
            found.append(both[0])
        return (found[0], found[1], switches[0]) if switches[0] == switches[1] else None

    # --- writing ---------------------------------------------------------------------------------------------------

    def _write(self, found: _Attention, *, first: bool) -> None:
        editor, nodes = self.editor, list[NodeProto]()
        if first:
            nodes += self._count_tokens()
        past_key, past_value, present_key, present_value = found.cache
        inputs = [*self._rows(found, nodes), past_key, past_value, "qsdk/seqlens_k", "qsdk/total_length"]
        options: dict[str, Any] = {"do_rotary": 0}
        if found.query.turn is not None:
            *tables, switch = self._stored_tables(found.query.turn)
            inputs += [*tables, *self._rows_of_positions(switch, nodes)]
            options = {"do_rotary": 1, "rotary_interleaved": int(found.query.turn.pairs)}
        heads, kept, _ = found.heads
        options |= {"num_heads": heads, "kv_num_heads": kept, "scale": found.scale, "softcap": found.softcap}
        options |= {"local_window_size": found.window}
        if found.sinks is not None:
            inputs += [""] * (11 - len(inputs)) + [editor.keep_once(f"{found.output}/sinks", found.sinks)]
        outputs = [found.output, present_key, present_value]
        nodes.append(editor.node("GroupQueryAttention", inputs, outputs, domain=MICROSOFT, **options))
        editor.replace(found.output, nodes, also=(present_key, present_value))

    def _rows(self, found: _Attention, nodes: list[NodeProto]) -> list[str]:
        """Return the queries, keys and values as the kernel takes them: packed side by side, or apart."""
        parts = (found.query, found.key, found.value)
        adapted = [self.adapted.get(part.rows) for part in parts]
        names = [part.rows if one is None else one.base for part, one in zip(parts, adapted, strict=True)]
        known = [
            self.products[name] for part, name in zip(parts, names, strict=True) if part.flat and name in self.products
        ]
        once = all(map(self.editor.index.is_read_once, (*names, *(part.rows for part in parts))))
        sources = {one.source for one in adapted if one is not None}
        if len(known) == 3 and len(merge_alike(known)) == 1 and once and sources.issubset({known[0].source}):
            name = self.editor.index.fresh(f"{found.output}/packed")
            nodes.append(merged(self.editor, known, name))
            name, sums = with_adapters(self.editor, name, [*zip(known, adapted, strict=True)])
            nodes += sums
            return [name, "", ""]
        whole = self._parts_of_one(parts)
        if whole:
            return [whole, "", ""]
        return [self._flattened(part, nodes) for part in parts]

    def _parts_of_one(self, parts: Sequence[_Heads]) -> str:
        """Return the tensor that queries, keys and values are cut from in this order, or ""."""
        editor, end, wholes = self.editor, 0, set[str]()
        if not all(part.flat for part in parts):
            return ""
        split = [editor.maker(part.rows, "Split") for part in parts]
        if split[0] is not None and split[1] is split[0] and split[2] is split[0]:
            return str(split[0].input[0]) if [*split[0].output] == [part.rows for part in parts] else ""
        for part in parts:
            cut = editor.maker(part.rows, "Slice")
            bounds = [] if cut is None else [editor.scalar(name) for name in cut.input[1:]]
            if cut is None or len(bounds) < 3 or bounds[0] != end or bounds[2] not in (-1, 2):
                return ""
            if len(bounds) > 3 and bounds[3] != 1:
                return ""
            wholes.add(cut.input[0])
            end += int(self.sizes[part.rows][2])
        if len(wholes) != 1 or self.sizes[whole := wholes.pop()][2] != end:
            return ""
        return whole

    def _flattened(self, part: _Heads, nodes: list[NodeProto]) -> str:
        if part.flat:
            return part.rows
        rows = part.rows
        if part.norm is not None:
            rows = self.editor.index.fresh(f"{rows}/normed")
            nodes.append(part.norm.node(self.editor, part.rows, rows))
        nodes.append(self.editor.shaped(rows, [0, 0, -1], f"{rows}/flat"))
        return str(nodes[-1].output[0])

    def _stored_tables(self, turn: Turn) -> tuple[str, str, int]:
        found = self._table(turn)
        if found is None:
            raise ValueError(f"{turn} has no table")
        *tables, switch = found
        for known in self._tables:
            if known[2] == switch and all(
                np.array_equal(self.editor.stored(str(n))(), t) for n, t in zip(known, tables, strict=False)
            ):
                return known
        cos, sin = (
            self.editor.keep(f"{name}{len(self._tables) or ''}", t) for name, t in zip(_TABLES, tables, strict=True)
        )
        self._tables.append((cos, sin, switch))
        return self._tables[-1]

    def _rows_of_positions(self, switch: int, nodes: list[NodeProto]) -> list[str]:
        """Return the tensor [batch, step] of rows of tables, where those depend on the length of the text too."""
        if not switch:
            return []
        editor, prefix = self.editor, f"qsdk/switch_{switch}"
        if switch not in self.switches:
            self.switches.add(switch)
            one, axis = (
                editor.keep(f"{prefix}/one", np.array(1, np.int64)),
                editor.keep("qsdk/axis", np.array(1, np.int64)),
            )
            length = editor.keep(f"{prefix}/length", np.array(switch, np.int64))
            nodes += [
                editor.node("Shape", ["input_ids"], [f"{prefix}/sizes"]),
                editor.node("Gather", [f"{prefix}/sizes", axis], [f"{prefix}/step"], axis=0),
                editor.node("Greater", ["qsdk/longest", length], [f"{prefix}/is_long"]),
                editor.node("Cast", [f"{prefix}/is_long"], [f"{prefix}/is_long/number"], to=7),
                editor.node("Mul", [f"{prefix}/is_long/number", length], [f"{prefix}/start"]),
                editor.node("Add", ["qsdk/longest", f"{prefix}/start"], [f"{prefix}/end"]),
                editor.node("Sub", [f"{prefix}/end", f"{prefix}/step"], [f"{prefix}/first"]),
                editor.node("Range", [f"{prefix}/first", f"{prefix}/end", one], [f"{prefix}/of_one"]),
                editor.node("Expand", [f"{prefix}/of_one", f"{prefix}/sizes"], [f"{prefix}/rows"]),
            ]
        return [f"{prefix}/rows"]

    def _count_tokens(self) -> list[NodeProto]:
        """Return nodes that count the tokens of each text and of the longest, from the mask of tokens."""
        editor = self.editor
        one, axis = editor.keep("qsdk/one", np.array([1], np.int64)), editor.keep("qsdk/axis", np.array(1, np.int64))
        return [
            editor.node("ReduceSum", ["attention_mask", one], ["qsdk/lengths"], keepdims=0),
            editor.node("Sub", ["qsdk/lengths", one], ["qsdk/last"]),
            editor.node("Cast", ["qsdk/last"], ["qsdk/seqlens_k"], to=6),
            editor.node("Shape", ["attention_mask"], ["qsdk/shape"]),
            editor.node("Gather", ["qsdk/shape", axis], ["qsdk/longest"], axis=0),
            editor.node("Cast", ["qsdk/longest"], ["qsdk/total_length"], to=6),
        ]
