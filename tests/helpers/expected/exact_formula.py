"""The float formula of a Q/DQ graph in exact rationals, and the integer model's values before they are rounded.

Every stored number is taken as it is and nothing is rounded; exponentials and roots are right to 60 digits.
"""

from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
from onnx import helper, numpy_helper

DIGITS = 60


def exact(array):
    """Give the numbers of an array as rationals, in an array of objects."""
    array = np.asarray(array)
    found = np.empty(array.shape, object)
    found[...] = np.vectorize(Fraction, otypes=[object])(array.astype(object)) if array.size else found
    return found


def _decimal(function):
    def apply(number):
        with localcontext() as context:
            context.prec = DIGITS
            return Fraction(function(Decimal(number.numerator) / Decimal(number.denominator)))

    return np.vectorize(apply, otypes=[object])


_EXP, _SQRT, _LOG = _decimal(Decimal.exp), _decimal(Decimal.sqrt), _decimal(Decimal.ln)


def _conv(x, w, b=None, pads=(0, 0, 0, 0), strides=(1, 1), group=1, **_):
    x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])), constant_values=Fraction(0))
    kernel, outputs = w.shape[2:], w.shape[0] // group
    sizes = [(x.shape[2 + i] - kernel[i]) // strides[i] + 1 for i in (0, 1)]
    y = np.empty((x.shape[0], w.shape[0], *sizes), object)
    for n, c, i, j in np.ndindex(*y.shape):
        first = c // outputs * w.shape[1]
        rows, columns = (slice(p * s, p * s + k) for p, s, k in zip((i, j), strides, kernel, strict=True))
        y[n, c, i, j] = (x[n, first : first + w.shape[1], rows, columns] * w[c]).sum() + (0 if b is None else b[c])
    return y


def _average_pool(x, kernel_shape, strides=(1, 1), **_):
    ones = np.full((x.shape[1], 1, *kernel_shape), Fraction(1, int(np.prod(kernel_shape))), object)
    return _conv(x, ones, strides=strides, group=x.shape[1])


def _gemm(x, w, b=None, alpha=1.0, beta=1.0, **attrs):
    y = Fraction(alpha) * np.dot(x, w.T if attrs.get("transB") else w)
    return y if b is None else y + Fraction(beta) * b


def _softmax(x, axis=-1, **_):
    powers = _EXP(x - x.max(axis=axis, keepdims=True))
    return powers / powers.sum(axis=axis, keepdims=True)


def _layer_norm(x, gain, bias=None, epsilon=1e-5, **_):
    centred = x - x.sum(axis=-1, keepdims=True) / x.shape[-1]
    variance = (centred * centred).sum(axis=-1, keepdims=True) / x.shape[-1]
    y = centred / _SQRT(variance + Fraction(epsilon)) * gain
    return y if bias is None else y + bias


def _batch_norm(x, gain, bias, mean, variance, epsilon=1e-5, **_):
    shaped = [p.reshape(-1, *[1] * (x.ndim - 2)) for p in (gain, bias, mean, variance)]
    return (x - shaped[2]) / _SQRT(shaped[3] + Fraction(epsilon)) * shaped[0] + shaped[1]


def _cum_sum(x, axis, reverse=0, exclusive=0):
    turned = np.flip(x, int(axis)) if reverse else x
    sums = np.cumsum(turned, int(axis)) - (turned if exclusive else 0)
    return np.flip(sums, int(axis)) if reverse else sums


def _scatter_nd(x, indices, updates, **_):
    found = x.copy()
    for place in np.ndindex(*indices.shape[:-1]):
        found[tuple(int(i) for i in indices[place])] += updates[place]
    return found


def _scatter_elements(x, indices, updates, axis=0, **_):
    found = x.copy()
    for place in np.ndindex(*indices.shape):
        found[(*place[:axis], int(indices[place]), *place[axis + 1 :])] += updates[place]
    return found


FORMULAS = {
    "Add": lambda a, b: a + b,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Clip": lambda x, lo: np.maximum(x, lo),
    "Conv": _conv,
    "CumSum": _cum_sum,
    "Div": lambda a, b: a / b,
    "Gemm": _gemm,
    "GlobalAveragePool": lambda x: x.sum(axis=(2, 3), keepdims=True) / (x.shape[2] * x.shape[3]),
    "LayerNormalization": _layer_norm,
    "Log": lambda x: _LOG(x),
    "MatMul": lambda a, b: np.dot(a, b),
    "Mean": lambda *parts: sum(parts[1:], parts[0]) / len(parts),
    "Mul": lambda a, b: a * b,
    "Relu": lambda x: np.maximum(x, Fraction(0)),
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Softmax": _softmax,
    "Sub": lambda a, b: a - b,
}


def formula(model, codes):
    """Evaluate a graph: `codes` by the name of its first quantizers' outputs; gives (value, scale) of the last one."""
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    values = {name: exact(array) for name, array in codes.items()}
    last = [node for node in model.graph.node if node.op_type == "QuantizeLinear"][-1]
    for node in model.graph.node:
        attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.output[0] in values:
            continue
        if node is last:
            return values[node.input[0]], Fraction(float(stored[node.input[1]]))
        if node.op_type == "DequantizeLinear":
            values[node.output[0]] = _dequantized(node, stored, values, attrs.get("axis", 1))
            continue
        given = [values[n] if n in values else exact(stored[n]) for n in node.input]
        values[node.output[0]] = FORMULAS[node.op_type](*given, **attrs)
    raise AssertionError("the graph has no quantizer")


def _dequantized(node, stored, values, axis):
    name, *parameters = node.input
    codes = values[name] if name in values else exact(stored[name].astype(np.int64))
    scale, zero = (exact(stored[p].astype(np.float64)) for p in (parameters + parameters[:1])[:2])
    if len(parameters) == 1:
        zero = np.asarray(Fraction(0))
    shape = [1] * codes.ndim
    if scale.size > 1:
        shape[axis] = -1
    return (codes - zero.reshape(shape)) * scale.reshape(shape)


def unrounded(row, tensors):
    """Give what a requantization rounds, in output steps: the row's constants on the integer model's tensors."""
    total = 0
    for i, name in enumerate(row["accumulators"]):
        found = tensors[name].astype(object)
        if "cuts" in row:
            found, shift = found - _like(row["zeros"][i], found), _like(row["pre_shifts"][i], found)
            cut = _like(row["cuts"][i], found)
            found = np.where(cut > 0, np.minimum(np.maximum(found, -cut), cut), found)
            half = np.where(shift > 0, 2 ** np.maximum(shift - 1, 0), 0)
            found = (found + half) // 2**shift
        total = total + found * _like(row["mantissas"][i], found)
    return exact(total + _like(row["addends"], total)) / 2 ** _like(row["shifts"], total)


def _like(numbers, tensor):
    """Shape a row's numbers, which are one or one per channel, so that they broadcast against a tensor."""
    array = np.asarray([int(n) for n in numbers], object)
    if array.size == 1:
        return array.reshape(())
    axis = 1 if tensor.ndim == 4 else tensor.ndim - 1
    shape = [1] * tensor.ndim
    shape[axis] = -1
    return array.reshape(shape)
