"""Ops on elements: sums and products of two tensors, functions of one, reductions."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.litert.program import Grid
from onnx_backend.litert.writer import (
    FOR_LITERT,
    NONE,
    RELU,
    RELU6,
    Codes,
    Failed,
    Pending,
    Refused,
    Shape,
    Stored,
    Value,
    Writer,
)

Attributes = Mapping[str, Any]
_OPS = {"Add": "ADD", "Sub": "SUB", "Mul": "MUL", "Div": "MUL"}
#: one code for a number that a model states in float: exact, since the scale is its 127th part
_ONE = 127


def _operand(w: Writer, name: str, shape: Shape, perm: Shape) -> int:
    """Return the tensor of a stored operand in the layout of the other one."""
    stored = w.stored(name)
    values, grid = stored.values, stored.grid
    if grid is None:
        number = float(values.reshape(-1)[0]) if values.size == 1 else 0.0
        if values.size != 1 or number == 0:
            raise Refused(f"its operand {name!r} is stored and not quantized", f"quantize it: {FOR_LITERT}")
        values, grid = np.full(values.shape, _ONE * np.sign(number)), Grid.of("int8", abs(number) / _ONE, 0)
    if grid.scale.size > 1:
        raise Refused(f"its operand {name!r} has a scale for each channel", "give it one scale (per_channel=False)")
    values = values.reshape((1,) * (len(shape) - values.ndim) + values.shape).transpose(perm)
    number_of = w.store(values, grid, stored.site or f"{name}/stored")
    if stored.site:
        own = tuple(range(values.ndim - stored.values.ndim, values.ndim))
        lies = tuple(axis - own[0] for axis in perm if axis >= own[0]) if own else ()
        w.note(stored.site, "constant", number_of, stored.values.shape, lies)
    return number_of


def _product_and_bias(w: Writer, node: NodeProto) -> tuple[Pending | None, str]:
    """Return the product without a bias that an Add reads, None if there is none, and the name of the stored bias."""
    for name, other in (node.input, reversed(node.input)) if node.op_type == "Add" else ():
        product, bias = w.values.get(name), w.values.get(other)
        if not (isinstance(product, Pending) and product.biased is not None and isinstance(bias, Stored)):
            continue
        if bias.values.ndim and bias.values.size == bias.values.shape[-1] == product.shape[-1]:
            return product, str(other)
    return None, ""


def _without_zeros(w: Writer, node: NodeProto) -> Value | None:
    """Return the value that an Add of stored zeros, such as a mask that hides nothing, leaves as it is."""
    for name, other in (node.input, reversed(node.input)):
        value, zeros = w.values.get(name), w.values.get(other)
        adds_nothing = isinstance(zeros, Stored) and zeros.grid is None and not np.any(zeros.values)
        if adds_nothing and isinstance(value, Codes | Pending) and value.shape == w.shapes[node.output[0]]:
            return value
    return None


def binary(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write ADD, SUB or MUL; a division by a stored number is a product."""
    shape, kind = w.shapes[node.output[0]], _OPS[node.op_type]
    product, bias = _product_and_bias(w, node)
    if product is not None and product.biased is not None and product.shape == shape:
        return product.biased(bias)
    if node.op_type == "Add" and (left := _without_zeros(w, node)) is not None:
        return left
    if node.op_type == "Div":
        divisor = w.stored(node.input[1])
        if divisor.values.size != 1:
            raise Refused("LiteRT divides no integers of 8 bits", "leave it float, or multiply instead")
        w.values[f"{node.output[0]}/factor"] = Stored(1 / divisor.floats())
        names = [node.input[0], f"{node.output[0]}/factor"]
    else:
        names = list(node.input)
    held = [isinstance(w.values.get(name), Stored) for name in names]
    if all(held):
        raise Refused("both operands are stored", "fold it")
    given = {
        name: w.ranked(w.codes(name), len(shape)) for name, is_held in zip(names, held, strict=True) if not is_held
    }
    lead = max(given.values(), key=lambda value: (int(np.prod(value.shape)), -value.tensor))
    dtype = w.grid(lead).dtype
    if any(w.grid(value).dtype != dtype for value in given.values()):
        raise Refused("its operands have different types", "give both the same number of bits")
    sides = [
        _operand(w, name, shape, lead.perm) if is_held else w.at(given[name], lead.perm).tensor
        for name, is_held in zip(names, held, strict=True)
    ]
    sizes = tuple(shape[axis] for axis in lead.perm)

    def written(out: Grid, name: str, activation: int) -> Codes:
        if out.dtype != dtype:
            raise Refused(f"it reads {dtype} and makes {out.dtype}", "give both the same number of bits")
        made = w.emit(kind, sides, sizes, out, name, fusedActivationFunction=activation)
        return Codes(made, shape, lead.perm)

    factor = [w.values[name] for name, is_held in zip(names, held, strict=True) if is_held] if kind == "MUL" else []
    if len(factor) == 1 and isinstance(factor[0], Stored) and factor[0].values.size == 1 and shape == lead.shape:
        number, own = float(factor[0].floats().reshape(-1)[0]), w.grid(lead)
        if number > 0:  # the codes stay what they are, where nothing states another grid
            return Pending(shape, written, fuses=True, own=replace(own, scale=own.scale * np.float32(number)))
    return Pending(shape, written, fuses=True)


def bounds(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Bound what the op in front makes, or write an op of its own behind codes."""
    low, high = -np.inf, np.inf
    if node.op_type == "Relu":
        low = 0.0
    else:
        ends = [w.stored(name).floats().reshape(-1)[0] if name else None for name in node.input[1:]]
        ends += [None] * (2 - len(ends))
        low = low if ends[0] is None else float(ends[0])
        high = high if ends[1] is None else float(ends[1])
    value = w.values.get(node.input[0])
    if isinstance(value, Pending):
        return replace(value, low=max(value.low, low), high=min(value.high, high), own=None)
    codes = w.codes(node.input[0])

    def written(out: Grid, name: str, activation: int) -> Codes:
        if activation == NONE:
            return w.requantized(codes, out, name)
        kind = {RELU: "RELU", RELU6: "RELU6"}.get(activation, "RELU_N1_TO_1")
        return replace(codes, tensor=w.emit(kind, [codes.tensor], w.program.tensors[codes.tensor].shape, out, name))

    return Pending(codes.shape, written, fuses=True, low=low, high=high)


def _unary(kind: str, **options: Any) -> Callable[[Writer, NodeProto, Attributes], Value]:
    def write(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
        """Write an op of one operand, on the grid of its result."""
        codes, own = w.codes(node.input[0]), dict(options)
        if w.grid(codes).dtype != "int8" and kind != "LEAKY_RELU":
            raise Refused(f"LiteRT computes {node.op_type} in 8 bits alone", "give it 8 bits, or leave it float")
        if kind == "LEAKY_RELU":
            own["alpha"] = float(attrs.get("alpha", 0.01))
        if kind == "GELU":
            own["approximate"] = attrs.get("approximate", "none") == "tanh"

        def written(out: Grid, name: str, _: int) -> Codes:
            sizes = w.program.tensors[codes.tensor].shape
            return replace(codes, tensor=w.emit(kind, [codes.tensor], sizes, out, name, **own))

        return Pending(codes.shape, written)

    return write


def _fixed(kind: str, scale: float, zero_point: int) -> Callable[[Writer, NodeProto, Attributes], Value]:
    """Return the writer of a function whose result has one grid."""

    def write(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
        """Write an op whose result has a grid that is fixed."""
        codes = w.codes(node.input[0])
        options = {}
        if kind == "SOFTMAX":
            axis, rank = int(attrs.get("axis", -1)) % len(codes.shape), len(codes.shape)
            codes = w.at(codes, [*(one for one in codes.perm if one != axis), axis])
            options = {"beta": 1.0}
            if rank < 2:
                raise Refused("LiteRT's SOFTMAX has two axes or more", "give it a batch axis")
        if w.grid(codes).dtype != "int8":
            raise Refused(f"{node.op_type} of 16 bits, which LiteRT takes from tables", "give what it reads 8 bits")
        grid = Grid.of("int8", scale, zero_point)

        def written(out: Grid, name: str) -> Codes:
            sizes = w.program.tensors[codes.tensor].shape
            return replace(codes, tensor=w.emit(kind, [codes.tensor], sizes, out, name, **options))

        return w.fixed(codes.shape, grid, written)

    return write


def hard_sigmoid(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write relu6(x + 3) on the grid of the result, six times as wide, and divide by 6, which is exact there."""
    codes = w.codes(node.input[0])
    if (round(float(attrs.get("alpha", 0.2)) * 6, 6), float(attrs.get("beta", 0.5))) != (1.0, 0.5):
        raise Refused("its slope is not 1/6 and its middle not 1/2", "use torch's Hardsigmoid")
    if w.grid(codes).dtype != "int8":
        raise Refused("LiteRT computes it in 8 bits alone", "give it 8 bits, or leave it float")

    def written(out: Grid, name: str, _: int) -> Codes:
        three = w.store(np.array(_ONE), Grid.of("int8", 3 / _ONE, 0), f"{name}/three")
        sixth = w.store(np.array(1), Grid.of("int8", 1 / 6, 0), f"{name}/sixth")
        sizes, six = w.program.tensors[codes.tensor].shape, Grid.of("int8", 6 * out.step, out.zero)
        moved = w.emit("ADD", [codes.tensor, three], sizes, six, f"{name}/six", fusedActivationFunction=RELU6)
        return replace(codes, tensor=w.emit("MUL", [moved, sixth], sizes, out, name, fusedActivationFunction=NONE))

    return Pending(codes.shape, written, own=Grid.of("int8", 1 / 255, -128))


def never(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Return that integers are no NaN."""
    return Stored(np.zeros(w.shapes[node.output[0]], np.bool_))


def where(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Return the one side that a condition takes everywhere, as that behind the Softmax of an attention does."""
    condition, shape = w.stored(node.input[0]).values, w.shapes[node.output[0]]
    if condition.all() or not condition.any():
        value = w.values.get(node.input[1 if condition.all() else 2])
        if value is not None and (isinstance(value, Failed) or getattr(value, "shape", None) == shape):
            return value
    raise Refused("it takes some elements of one operand and some of another", "compute it outside of the model")


def prelu(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write PRELU with a stored slope, or LEAKY_RELU where all slopes are one number."""
    slope, codes = w.stored(node.input[1]), w.codes(node.input[0])
    numbers = np.unique(slope.floats())
    if numbers.size == 1:

        def leaky(out: Grid, name: str, _: int) -> Codes:
            sizes = w.program.tensors[codes.tensor].shape
            made = w.emit("LEAKY_RELU", [codes.tensor], sizes, out, name, alpha=float(numbers[0]))
            return replace(codes, tensor=made)

        return Pending(codes.shape, leaky)
    own = _operand(w, node.input[1], codes.shape, codes.perm)

    def written(out: Grid, name: str, _: int) -> Codes:
        sizes = w.program.tensors[codes.tensor].shape
        return replace(codes, tensor=w.emit("PRELU", [codes.tensor, own], sizes, out, name))

    return Pending(codes.shape, written)


def reduce(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write MEAN, which rounds once, or REDUCE_MAX, which keeps the grid."""
    codes, rank = w.codes(node.input[0]), len(w.shapes[node.input[0]])
    if node.op_type.startswith("Global"):
        axes, keep = list(range(2, rank)), True
    else:
        given = attrs.get("axes") or (w.constant(node.input[1]) if len(node.input) > 1 and node.input[1] else [])
        axes, keep = [axis % rank for axis in given] or list(range(rank)), bool(attrs.get("keepdims", 1))
    shape = tuple(1 if axis in axes else size for axis, size in enumerate(codes.shape))
    places = w.ints(sorted(codes.perm.index(axis) for axis in axes), f"{node.output[0]}/axes")
    left = [axis for axis in range(rank) if axis not in axes]
    after = shape if keep else tuple(shape[axis] for axis in left)
    perm = codes.perm if keep else tuple(left.index(axis) for axis in codes.perm if axis in left)
    is_max = node.op_type in ("ReduceMax", "GlobalMaxPool")

    def written(out: Grid, name: str, _: int) -> Codes:
        sizes = tuple(after[axis] for axis in perm)
        made = w.emit("REDUCE_MAX" if is_max else "MEAN", [codes.tensor, places], sizes, out, name, keepDims=keep)
        return Codes(made, after, perm)

    return written(w.grid(codes), node.output[0], NONE) if is_max else Pending(after, written)


leaky_relu, gelu, exp = _unary("LEAKY_RELU"), _unary("GELU"), _unary("EXP")
hard_swish, absolute = _unary("HARD_SWISH"), _unary("ABS")
softmax = _fixed("SOFTMAX", 1 / 256, -128)
sigmoid = _fixed("LOGISTIC", 1 / 256, -128)
tanh = _fixed("TANH", 1 / 128, 0)
