"""Short forms: lowerings of operands that have codes, to a table, a scale or an int32 accumulator.

A lowering has the signature `(ctx, node, args) -> Value | tuple of Value`; an absent optional input is None. It raises
`Refused` where the op cannot be computed on integers alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.integer.fixed_point.to_fixed import cast_to_float
from onnx_backend.integer.ir.context import (
    Args,
    LoweringContext,
    concat_codes,
    integer_name,
)
from onnx_backend.integer.ir.exact_bounds import one_rounding, one_sum
from onnx_backend.integer.ir.values import (
    INTEGER_TYPES,
    Array,
    Bent,
    Constant,
    Function,
    Integers,
    Joined,
    Linear,
    Lookup,
    Refused,
    Value,
    as_linear,
    clip_value,
)
from onnx_backend.integer.lowering.layers.layers import (
    accumulate,
    as_sum,
    bytes_of,
    factor,
    plus_constant,
    products,
    scaled,
    stored_values,
)
from onnx_backend.integer.lowering.movement.moves import filled
from onnx_backend.integer.lowering.nonlinear.tables import NO_NUMBER, TABLES, table
from onnx_backend.proto.nodes import attributes, node_label

#: Of a folded normalization: its stored numbers, epsilon, root, quotient and the products with it.
_NORM_ROUNDINGS = 8
_BETWEEN = "put a QuantizeLinear/DequantizeLinear pair between the two ops"


def clip(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Clip with constant bounds, folded into the requantization before it."""
    bounds = [_scalar(args[i]) if i < len(args) and args[i] is not None else None for i in (1, 2)]
    attrs = attributes(node)  # bounds were attributes before opset 11
    lo = attrs.get("min", -math.inf) if bounds[0] is None else bounds[0]
    hi = attrs.get("max", math.inf) if bounds[1] is None else bounds[1]
    return clipped(args, float(lo), float(hi))


def clipped(args: Args, lo: float, hi: float) -> Value:
    """Return the first argument clipped, folded into the requantization before it."""
    value = args[0]
    done = None if value is None else clip_value(value, lo, hi)
    if done is None:
        raise Refused("its input is not quantized", _BETWEEN)
    return done


def _scalar(value: Value | None) -> float:
    if isinstance(value, Constant) and value.values.size == 1:
        return float(value.values.reshape(-1)[0])
    raise Refused("one of its bounds is not a constant scalar", "store the bounds as initializers")


def add(ctx: LoweringContext, node: NodeProto, args: Args, sign: int = 1) -> Value:
    """Lower Add of activations and constants to one fixed point with a common shift; with a `sign` of -1 Sub."""
    left, right = args
    mapped = _mapped(np.add if sign > 0 else np.subtract, left, right)
    if mapped is not None:
        return mapped
    if isinstance(right, Constant):
        constant = right if sign > 0 else _negated(right)
        return plus_constant(_summand(node, left), constant)
    if isinstance(left, Constant):
        return plus_constant(scaled(_summand(node, right), np.asarray(float(sign))), left)
    first, second = _summand(node, left), scaled(_summand(node, right), np.asarray(float(sign)))
    addend = first.constant + second.constant
    error = first.error + second.error + one_sum(first.constant, second.constant)
    return Linear((*first.terms, *second.terms), addend, source=node_label(node), error=error)


def total(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Sum to one fixed point; a Sum of one operand, which keeps a runtime from fusing, is dropped."""
    value = args[0]
    for other in args[1:]:
        value = add(ctx, node, [value, other])
    assert value is not None  # the first input is required by the standard
    return value


def mean(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Mean to a Sum whose scales are divided by the number of operands."""
    value = total(ctx, node, args)
    mapped = _mapped(np.divide, value, Constant(np.asarray(len(args), np.float32)))
    return scaled(_summand(node, value), np.asarray(1.0 / len(args)), 2) if mapped is None else mapped


def _negated(constant: Constant) -> Constant:
    coded = constant.coded and replace(constant.coded, integers=-constant.coded.integers)
    return Constant(-constant.values, coded)


def _summand(node: NodeProto, value: Value | None) -> Linear:
    found = None if value is None else as_linear(value, node_label(node))
    if found is None:
        raise Refused("one of its inputs is not quantized", _BETWEEN)
    return found


def _mapped(function: Callable[[Array, Array], Array], left: Value | None, right: Value | None) -> Value | None:
    """Compute an elementwise function of one uint8 tensor, or of constants, by its table of values."""
    if isinstance(left, Constant) and isinstance(right, Constant):
        return Constant(function(left.values, right.values))
    if isinstance(left, Lookup) and isinstance(right, Lookup):
        return _of_both(function, left, right)
    if isinstance(left, Lookup) and isinstance(right, Constant) and _single(right, left):
        return Lookup(left.name, function(left.values, right.values.reshape(())), None)
    if isinstance(right, Lookup) and isinstance(left, Constant) and _single(left, right):
        return Lookup(right.name, function(left.values.reshape(()), right.values), None)
    return None


def _of_both(function: Callable[[Array, Array], Array], left: Lookup, right: Lookup) -> Lookup | None:
    """Compute a function of two functions of the same codes; None if they are of different ones."""
    names = [left.name, right.name, *(side.root.name for side in (left, right) if side.root is not None)]
    for name in names:
        one, other = left.of(name), right.of(name)
        if one is not None and other is not None:
            return Lookup(name, function(one.values, other.values), None, root=one.root or other.root)
    return None


def _silu(left: Value | None, right: Value | None) -> Function | None:
    """Return the function if a product is `x * sigmoid(x)` of codes, else None."""
    for x, gate in ((left, right), (right, left)):
        if isinstance(x, Lookup) and isinstance(gate, Lookup) and x.name == gate.name and x.encoding is not None:
            function = gate.function
            if function is not None and function.op_type == "Sigmoid" and function.encoding == x.encoding:
                return Function("Silu", x.encoding, {})
    return None


def _single(constant: Constant, activation: Lookup) -> bool:
    # a one-element constant of any rank; a higher rank than the activation's would add axes, which only a
    # degenerate export writes: shape inference then contradicts the table's shape and the checker refuses
    return constant.values.size == 1 and constant.values.ndim <= 1


def mul(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Mul of two activations to an int32 product, of an activation and a constant to a scale."""
    left, right = args
    mapped = _mapped(np.multiply, left, right)
    if mapped is not None:
        return replace(mapped, function=_silu(left, right)) if isinstance(mapped, Lookup) else mapped
    if isinstance(left, Constant):
        left, right = right, left
    if isinstance(right, Constant):
        return scaled(_summand(node, as_sum(ctx, left)), stored_values(right), 2)
    return _product(ctx, node, left, right)


def _product(ctx: LoweringContext, node: NodeProto, left: Value | None, right: Value | None) -> Linear:
    if isinstance(left, Lookup) and isinstance(right, Lookup) and left.encoding and right.encoding:
        both_wide = left.encoding.wide and right.encoding.wide  # one of them in bytes keeps the products in int32
        sides = bytes_of(ctx, left) if both_wide else [(left.name, left.encoding)]
        return products(ctx, node, "Mul", sides, [(right.name, right.encoding)])
    first, second = factor(ctx, left, "its first input"), factor(ctx, right, "its second input")
    product = ctx.node("Mul", [first.name, second.name], name=f"{node.output[0]}.accumulator")
    ends = [a * b for a in (first.low, first.high) for b in (second.low, second.high)]
    low, high = (np.asarray(end, np.int64) for end in (min(ends), max(ends)))
    return accumulate(product, np.asarray(first.scale * second.scale, np.float64), low, high, node)


def power(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Pow with a stored exponent or base to a table."""
    left, right = args
    with np.errstate(all="ignore"):
        mapped = _mapped(np.power, left, right) if isinstance(left, Constant) or isinstance(right, Constant) else None
    if mapped is None:
        raise Refused("it is no power of one quantized tensor with a stored exponent or base", _BETWEEN)
    if isinstance(mapped, Lookup) and np.any(np.isnan(mapped.values)):
        raise Refused(NO_NUMBER, "clip its input to where it is defined")
    return mapped


def leaky_relu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Lower LeakyRelu: behind a layer to two requantizations, of one tensor to a table."""
    slope = float(attributes(node).get("alpha", 0.01))
    if isinstance(args[0], Linear):
        return _bent(args[0], np.asarray(slope))
    return table(TABLES["LeakyRelu"])(ctx, node, args)


def prelu(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower PRelu with a stored slope, as LeakyRelu with a slope per channel."""
    value, slope = args
    if not isinstance(slope, Constant):
        raise Refused("its slope is an activation", "store the slope as an initializer")
    if isinstance(value, Lookup) and _single(slope, value):
        factor = slope.values.reshape(()).astype(np.float32)
        return Lookup(value.name, np.where(value.values >= 0, value.values, value.values * factor), None)
    return _bent(_summand(node, value), slope.values.astype(np.float64))


def _bent(value: Linear, slope: Array) -> Value:
    if not value.open:
        raise Refused("its input is clipped or moved first", _BETWEEN)
    falling, rising = scaled(value, np.minimum(slope, 0.0)), scaled(value, np.maximum(slope, 0.0))
    parts = [replace(value, lo=0.0)]
    parts += [replace(rising, hi=0.0)] if np.any(slope > 0) else []
    parts += [replace(falling, lo=0.0)] if np.any(slope < 0) else []
    choice = "Max" if np.all(slope <= 1.0) else "Min" if np.all(slope >= 1.0) else ""
    return Bent(tuple(parts), (value, scaled(value, slope)), choice)


def batch_normalization(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower an inference-time BatchNormalization to a scale and a constant per channel."""
    attrs = attributes(node)
    parameters = [stored_values(arg) for arg in args[1:] if isinstance(arg, Constant)]
    if len(parameters) != 4 or attrs.get("training_mode", 0):
        raise Refused("its statistics are not constants", "export the model in evaluation mode")
    gain, bias, mean, variance = parameters
    factor = gain / np.sqrt(variance + attrs.get("epsilon", 1e-5))
    channels = (-1, *(1 for _ in range(ctx.rank(node.input[0]) - 2)))
    value = scaled(_summand(node, args[0]), factor.reshape(channels), _NORM_ROUNDINGS)
    constant = value.constant + (bias - mean * factor).reshape(channels)
    error = (
        one_rounding((), mean * factor) * _NORM_ROUNDINGS
        + one_rounding((), bias) * 2
        + one_sum(value.constant, constant)
    )
    return replace(value, constant=constant, error=value.error + error)


def div(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Div by a constant to a scale, of one tensor by a function of itself to a table."""
    left, right = args
    if isinstance(right, Constant) and not np.all(right.values):
        raise Refused("it divides by zero", "remove the zero from the constant")
    with np.errstate(divide="ignore", invalid="ignore"):
        mapped = _mapped(np.divide, left, right)
    if mapped is not None:
        return mapped
    if isinstance(right, Constant):
        return scaled(_summand(node, left), 1.0 / stored_values(right), 3)
    raise Refused("it divides by an activation", _BETWEEN)


def concat(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Concat: free where all inputs share one encoding, else each input is brought to the output's."""
    axis = int(attributes(node)["axis"])
    parts = tuple(arg for arg in args if arg is not None)
    if all(isinstance(arg, Constant) for arg in args):
        return Constant(np.concatenate([arg.values for arg in args if isinstance(arg, Constant)], axis))
    if any(isinstance(part, Integers) for part in parts):
        raise Refused("it mixes integer and float tensors", "concatenate tensors of one type")
    shapes = [ctx.shapes.get(name) for name in node.input]
    first = shapes[0]
    axis = axis % len(first) if first else axis
    sizes = tuple(shape[axis] if shape else None for shape in shapes)
    if any(sizes) and 0 in sizes:  # a part without elements adds nothing
        parts = tuple(part for part, size in zip(parts, sizes, strict=True) if size != 0)
        sizes = tuple(size for size in sizes if size != 0)
    return concat_codes(ctx, Joined(parts, axis, sizes), node.output[0])


def copied(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | tuple[Value, ...]:
    """Copy a node that computes on integers already (shape arithmetic), or treat its float results as numbers."""
    numbers = cast_to_float(ctx, node, args) if node.op_type != "ConstantOfShape" else filled(ctx, node, args)
    if numbers is not None:
        return numbers
    for name in filter(None, node.output):
        if ctx.types.get(name, TensorProto.UNDEFINED) not in INTEGER_TYPES:
            raise Refused(
                "it makes a float tensor from integers",
                "compute it on integers, or store its result if it never changes",
            )
    outputs = ctx.copy(node, [integer_name(ctx, arg) for arg in args])
    values = tuple(Integers(o, dtype=ctx.types.get(n, 0)) for n, o in zip(node.output, outputs, strict=True))
    return values[0] if len(values) == 1 else values


def constant(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Read a Constant node."""
    attribute = node.attribute[0]
    found = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return stored(found)
    kinds = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}
    if attribute.name not in kinds:
        raise Refused(f"a Constant with {attribute.name}", "store it as a tensor")
    return stored(numpy_helper.from_array(np.asarray(found, kinds[attribute.name])))


def stored(tensor: TensorProto) -> Value:
    """Return the value of an initializer: float tensors as constants, all others as integers."""
    array = numpy_helper.to_array(tensor)
    if tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16):
        return Constant(array.astype(np.float32))
    return Integers("", array, tensor.data_type)
