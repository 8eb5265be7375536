"""Mixtures of experts as QMoE: found by what their parts compute, and written as one kernel for each layer.

The kernel (ONNX Runtime, contrib operator QMoE) gives each token to the experts that a router has chosen: a product,
a gated activation, a product, and the sum by the router's weights. Exporters write that as sorting, looking up,
multiplying and sorting back; the parts between the two products are run with numbers that show what they do.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.genai.computed import Computed
from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.products import CODES, packed_bits
from onnx_backend.proto.nodes import metadata
from qsdk.core.arrays import Array

_TOKENS = 5  # that the parts are tried with
_LEAST_BLOCK = 16
_BITS = (4, 8)  # with 2, the kernel (onnxruntime 1.32) is off by a thousandth
_VIEWS, _TAKES = ("Squeeze", "Unsqueeze", "Reshape"), ("Gather", "GatherND")
_ONE_TO_ONE = 1e-5  # by which kernels of one function differ


class _NoFormError(Exception):
    """Why a mixture of experts has no fused form."""


@dataclass(frozen=True)
class _Stack:
    """A stack of stored matrices, of which each row of data takes one.

    Attributes:
        product: the MatMul.
        pair: the DequantizeLinear of the stack.
        numbers: the tensor of the numbers that are taken.
        inputs_last: whether a matrix is [outputs, inputs].
    """

    product: NodeProto
    pair: NodeProto
    numbers: str
    inputs_last: bool

    @property
    def site(self) -> str:
        """Return the site of the stack."""
        return str(metadata(self.pair).get("qsdk.site", self.pair.input[0]))


@dataclass(frozen=True)
class _Gate:
    """min(a, limit) sigmoid(alpha a) (clip(b, -limit, limit) + beta), with a and b side by side or in halves."""

    halves: bool
    alpha: float
    beta: float
    limit: float

    def of(self, x: Array) -> Array:
        """Return what the kernel computes of rows."""
        half = x.shape[1] // 2
        gate, up = (x[:, :half], x[:, half:]) if self.halves else (x[:, ::2], x[:, 1::2])
        gate, up = np.minimum(gate, self.limit), np.clip(up, -self.limit, self.limit)
        with np.errstate(over="ignore"):
            return np.asarray(gate / (1 + np.exp(-self.alpha * gate)) * (up + self.beta))


@dataclass(frozen=True)
class _Experts:
    hidden: str  # [tokens, width]
    scores: str  # [tokens, experts], of which the largest are chosen
    indices: str  # [tokens, chosen]
    weights: str  # of the chosen
    output: str  # [tokens, width]
    stacks: tuple[_Stack, _Stack]
    biases: tuple[str, str]  # stored [experts, outputs], or ""
    gate: _Gate
    chosen: int


class ExpertsWriter:
    """Writes the mixtures of experts of a decoder.

    Attributes:
        reasons: site of the first stack of a mixture without a form -> why.
    """

    def __init__(self, editor: Editor, computed: Computed) -> None:
        self.editor, self.computed = editor, computed
        self.reasons = dict[str, str]()

    def write(self) -> int:
        """Write every mixture that has a form, in place, and return their number."""
        stacks, count = [*self._stacks()], 0
        for first, second in zip(stacks[::2], stacks[1::2], strict=False):
            try:
                found = self._read(first, second)
                self._write(found)
                count += 1
            except _NoFormError as error:
                self.reasons[first.site] = str(error)
        self.editor.apply()
        return count

    # --- reading ---------------------------------------------------------------------------------------------------

    def _stacks(self) -> Iterator[_Stack]:
        editor = self.editor
        for node in editor.model.graph.node:
            if node.op_type != "MatMul":
                continue
            turned = editor.maker(node.input[1], "Transpose")
            taken = editor.maker(node.input[1] if turned is None else turned.input[0], "Gather")
            pair = None if taken is None else editor.maker(taken.input[0], "DequantizeLinear")
            held = None if pair is None else editor.index.stored.get(pair.input[0])
            if taken is not None and pair is not None and held is not None and len(held.dims) == 3:
                yield _Stack(node, pair, taken.input[1], turned is not None)

    def _read(self, first: _Stack, second: _Stack) -> _Experts:
        editor = self.editor
        top = self._router(first.numbers)
        chosen = editor.scalar(top.input[1])
        rows = self._behind_views(first.product.input[0])
        hidden = self._taken_from(rows)
        (into, bias), (made, other) = self._biased(first), self._biased(second)
        weighted = editor.reader(made, "Mul")
        factors = "" if weighted is None else next(name for name in weighted.input if name != made)
        weights = self._taken_from(factors, through=_VIEWS)
        output = self._sum_behind("" if weighted is None else weighted.output[0])
        experts, width = editor.index.stored[first.pair.input[0]].dims[0], self._sizes(first)[0]
        pairs = self._pairs(int(experts), int(chosen or 0))
        given = {hidden: np.repeat(np.arange(1, _TOKENS + 1, dtype=np.float32)[:, None], width, 1)}
        given[top.output[1]] = pairs
        tokens = self._computed(rows, given)[:, 0].astype(np.int64) - 1
        numbers = [self._computed(one.numbers, given).reshape(-1) for one in (first, second)]
        wanted = sorted((token, int(number)) for token, own in enumerate(pairs) for number in own)
        if any(sorted(zip(tokens.tolist(), taken.tolist(), strict=True)) != wanted for taken in numbers):
            raise _NoFormError("its rows are not the tokens of each chosen expert")
        for node in (bias, other):
            if node is not None and not np.array_equal(self._computed(node.input[1], given).reshape(-1), numbers[0]):
                raise _NoFormError("its biases are not those of the chosen experts")
        self._require_weighted_sum(made, weights, output, pairs, tokens, numbers[0], given)
        biases = self._stored_bias(bias), self._stored_bias(other)
        gate = self._gate(into, self._behind_views(second.product.input[0]), self._sizes(first)[1], given)
        ends = (hidden, top.input[0], top.output[1], weights, output)
        return _Experts(*ends, (first, second), biases, gate, pairs.shape[1])

    def _router(self, numbers: str) -> NodeProto:
        """Return the TopK that chooses experts: the nearest in front of their numbers that takes a stored count."""
        waiting, seen = [numbers], set[str]()
        while waiting:
            node = self.editor.index.makers.get(waiting.pop(0))
            if node is None or node.output[0] in seen:
                continue
            seen.add(node.output[0])
            if node.op_type == "TopK" and self.editor.scalar(node.input[1]) is not None:
                return node
            waiting += node.input
        raise _NoFormError("its experts are not chosen by a TopK of a stored count")

    def _behind_views(self, tensor: str) -> str:
        while (node := self.editor.maker(tensor, *_VIEWS)) is not None:
            tensor = node.input[0]
        return tensor

    def _taken_from(self, tensor: str, through: Sequence[str] = ()) -> str:
        """Return the tensor from which rows were taken, in front of Transposes that turn nothing."""
        passed = False
        while node := self.editor.maker(tensor, "Transpose", *_TAKES, *(_VIEWS if passed and through else through)):
            if node.op_type == "Transpose" and self.editor.options(node).get("perm") != [*range(len(self._perm(node)))]:
                break
            if passed and node.op_type in _TAKES:
                break
            passed |= node.op_type in _TAKES
            tensor = node.input[0]
        if not passed:
            raise _NoFormError(f"{tensor!r} is not taken from rows of tokens")
        return tensor

    def _perm(self, node: NodeProto) -> Sequence[int]:
        found: Sequence[int] = self.editor.options(node).get("perm", ())
        return found

    def _biased(self, stack: _Stack) -> tuple[str, NodeProto | None]:
        """Return the result of a product with its bias, and the node that takes that, or None."""
        made = stack.product.output[0]
        while (view := self.editor.reader(made, *_VIEWS)) is not None:
            made = view.output[0]
        total = self.editor.reader(made, "Add")
        if total is None:
            return made, None
        other = next(name for name in total.input if name != made)
        taken = self.editor.maker(self._behind_turn(other), *_TAKES)
        return (made, None) if taken is None else (total.output[0], taken)

    def _behind_turn(self, tensor: str) -> str:
        node = self.editor.maker(tensor, "Transpose")
        return tensor if node is None or [*self._perm(node)] != [*range(len(self._perm(node)))] else node.input[0]

    def _stored_bias(self, taken: NodeProto | None) -> str:
        """Return the stored biases that a node takes, or "" without one."""
        if taken is None:
            return ""
        name = self._behind_turn(taken.input[0])
        if name not in self.editor.index.stored or self.editor.index.stored[name].data_type != TensorProto.FLOAT:
            raise _NoFormError("its biases are not stored floats")
        return name

    def _sum_behind(self, tensor: str) -> str:
        for _ in range(8):
            readers = self.editor.index.readers.get(tensor, [])
            node = next((one for one in readers if one.input[0] == tensor and one.op_type != "Shape"), None)
            if node is None:
                break
            tensor = node.output[0]
            if node.op_type == "ReduceSum":
                return tensor
        raise _NoFormError("the results of its experts are not added up behind it")

    def _pairs(self, experts: int, chosen: int) -> Array:
        if not 0 < chosen <= experts:
            raise _NoFormError("the number of its chosen experts is open")
        rng = np.random.default_rng(0)
        return np.stack([rng.permutation(experts)[:chosen] for _ in range(_TOKENS)]).astype(np.int64)

    def _computed(self, tensor: str, given: dict[str, Array]) -> Array:
        found = self.computed.of(tensor, given, _TOKENS)
        if found is None:
            raise _NoFormError(f"{tensor!r} depends on more than its tokens and the experts that are chosen")
        return found

    def _require_weighted_sum(
        self,
        made: str,
        weights: str,
        output: str,
        pairs: Array,
        tokens: Array,
        numbers: Array,
        given: dict[str, Array],
    ) -> None:
        rng = np.random.default_rng(1)
        results = rng.normal(size=(pairs.size, 3)).astype(np.float32)
        width = next(iter(given.values())).shape[1]
        results = np.repeat(results[:, :1], width, 1) * np.arange(1, width + 1, dtype=np.float32)
        shares = rng.uniform(0.1, 1, pairs.shape).astype(np.float32)
        got = self._computed(output, {**given, made: results, weights: shares})
        wanted = np.zeros((_TOKENS, width), np.float32)
        for row, (token, number) in enumerate(zip(tokens, numbers, strict=True)):
            wanted[token] += shares[token, pairs[token].tolist().index(number)] * results[row]
        if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=_ONE_TO_ONE, atol=1e-4):
            raise _NoFormError("the results of its experts are not added up by the weights of its router")

    def _gate(self, into: str, out: str, made: int, given: dict[str, Array]) -> _Gate:
        """Return the gated activation between two products."""
        x = 4 * np.random.default_rng(2).normal(size=(64, made)).astype(np.float32)
        got = self._computed(out, {**given, into: x})
        numbers = sorted({n for n in self.computed.numbers(out, {**given, into: x}, _TOKENS) if n > 0} - {1.0})
        for halves, alpha, beta, limit in product((True, False), (1.0, *numbers), (0.0, 1.0), (np.inf, *numbers)):
            gate = _Gate(halves, alpha, beta, limit)
            wanted = gate.of(x)
            if got.shape == wanted.shape and np.allclose(got, wanted, rtol=_ONE_TO_ONE, atol=_ONE_TO_ONE):
                return gate
        raise _NoFormError("its activation is no gate that the kernel has (SwiGLU)")

    # --- writing ---------------------------------------------------------------------------------------------------

    def _sizes(self, stack: _Stack) -> tuple[int, int]:
        """Return how many inputs and outputs each matrix has."""
        first, second = self.editor.index.stored[stack.pair.input[0]].dims[1:]
        return (int(second), int(first)) if stack.inputs_last else (int(first), int(second))

    def _write(self, found: _Experts) -> None:
        editor, name = self.editor, found.output
        bits, block = self._common(found.stacks)
        rows = None if not found.gate.halves else _alternating(self._sizes(found.stacks[0])[1])
        first, second = (self._kept(s, bits, block, r) for s, r in zip(found.stacks, (rows, None), strict=True))
        biases = [editor.stored(bias)() if bias else None for bias in found.biases]
        if biases[0] is not None and rows is not None:
            biases[0] = biases[0][:, rows]
        kept = ["" if b is None else editor.keep(f"{name}/bias", np.asarray(b, np.float32)) for b in biases]
        zero, one = (helper.make_tensor("value", TensorProto.FLOAT, [1], [number]) for number in (0.0, 1.0))
        nodes = [
            editor.node("Shape", [found.scores], [f"{name}/shape"]),
            editor.node("ConstantOfShape", [f"{name}/shape"], [f"{name}/none"], value=zero),
            editor.node("Shape", [found.indices], [f"{name}/shape_of_chosen"]),
            editor.node("ConstantOfShape", [f"{name}/shape_of_chosen"], [f"{name}/ones"], value=one),
            editor.node("ScatterElements", [f"{name}/none", found.indices, f"{name}/ones"], [f"{name}/chosen"], axis=1),
            editor.node("ScatterElements", [f"{name}/none", found.indices, found.weights], [f"{name}/weights"], axis=1),
        ]
        inputs = [found.hidden, f"{name}/chosen", *first[:2], kept[0], *second[:2], kept[1], "", "", ""]
        inputs += [first[2], second[2], "", f"{name}/weights"]
        options = {"k": found.chosen, "expert_weight_bits": bits, "swiglu_fusion": 1, "activation_type": "swiglu"}
        options |= {"activation_alpha": found.gate.alpha, "activation_beta": found.gate.beta}
        options |= {"block_size": block} if block else {}
        options |= {"swiglu_limit": found.gate.limit} if np.isfinite(found.gate.limit) else {}
        nodes.append(editor.node("QMoE", inputs, [name], domain=MICROSOFT, normalize_routing_weights=0, **options))
        editor.replace(name, nodes)
        words = f"QMoE, {bits} bits" + (f", blocks of {block}" if block else "")
        editor.forms |= {stack.site: words for stack in found.stacks}

    def _common(self, stacks: Sequence[_Stack]) -> tuple[int, int]:
        """Return the bits of the codes of both stacks and the length of their blocks, 0 for one of all inputs."""
        every_bits, blocks = set[int](), set[int]()
        for stack in stacks:
            held = self.editor.index.stored[stack.pair.input[0]]
            if CODES.get(held.data_type, (0, 0))[0] not in _BITS:
                raise _NoFormError("its codes are not of 4 or 8 bits")
            options, inputs = self.editor.options(stack.pair), self._sizes(stack)[0]
            axis, block = options.get("axis", 1) % 3, options.get("block_size", 0)
            if axis == (2 if stack.inputs_last else 1) and not block:
                raise _NoFormError("its scales are those of inputs")
            every_bits.add(CODES[held.data_type][0])
            blocks |= {block} if block and block != inputs else set()
        block = next(iter(blocks), 0)
        if len(every_bits) > 1 or len(blocks) > 1:
            raise _NoFormError("its two stacks differ in bits or blocks")
        (bits,) = every_bits
        sizes = [self._sizes(stack)[0] for stack in stacks]
        if block and (block < _LEAST_BLOCK or block & (block - 1) or any(size % block for size in sizes)):
            raise _NoFormError(
                f"its blocks of {block} are no power of two that divides {sizes[0]} and {sizes[1]} inputs"
            )
        if bits == 8 and block:
            raise _NoFormError("with blocks of 8 bits the kernel rounds its inputs; give 4 bits, or no blocks")
        return bits, block

    def _kept(self, stack: _Stack, bits: int, block: int, rows: Array | None) -> tuple[str, str, str]:
        """Store the codes of a stack as the kernel reads them, their scales and zero points, and return the names."""
        editor, pair = self.editor, stack.pair
        held = editor.index.stored[pair.input[0]]
        lift, (inputs, outputs) = CODES[held.data_type][1], self._sizes(stack)
        experts = int(held.dims[0])
        order = np.arange(outputs) if rows is None else rows
        axis = editor.options(pair).get("axis", 1) % 3
        blocks = inputs // block if block else 1

        def of_blocks(value: Array) -> Array:
            whole = value
            if value.ndim < 3:
                whole = value.reshape([-1 if place == axis else 1 for place in range(3)])
            whole = whole if stack.inputs_last else whole.transpose(0, 2, 1)
            return np.broadcast_to(whole, (experts, outputs, blocks))[:, order]

        codes = partial(_codes, editor.stored(pair.input[0]), stack.inputs_last, lift, bits, order)
        name = stack.site.replace(":", ".")
        dims = (experts, outputs, inputs * bits // 8)
        scales = of_blocks(editor.stored(pair.input[1])())
        zeros, half = "", 1 << (bits - 1)
        if len(pair.input) > 2 and pair.input[2]:
            values = of_blocks(editor.stored(pair.input[2])()).astype(np.int16) + lift
            if (values != half).any():
                packed = packed_bits(values.astype(np.uint8) if block else values[..., 0].astype(np.uint8), bits)
                zeros = editor.keep(f"{name}/zero_points", packed)
        elif lift != half:
            raise _NoFormError("its codes are unsigned and have no zero points")
        scale = editor.keep(f"{name}/scales", scales.astype(np.float32) if block else scales[..., 0])
        return editor.keep_lazily(f"{name}/codes", dims, codes), scale, zeros


def _alternating(outputs: int) -> Array:
    """Return the places of outputs of which the first half is to alternate with the second."""
    return np.arange(outputs).reshape(2, -1).T.reshape(-1)


def _codes(stored: Callable[[], Array], inputs_last: bool, lift: int, bits: int, order: Array) -> Array:
    """Return the codes of a stack as bytes [experts, outputs, bytes of all inputs]."""
    codes = stored()
    parts = []
    for matrix in codes:  # one by one: codes of 16 bits of a whole stack would be large
        rows = matrix if inputs_last else matrix.T
        lifted = (rows.astype(np.int16) + lift).astype(np.uint8)[order]
        parts.append(packed_bits(lifted, bits))
    return np.stack(parts)
