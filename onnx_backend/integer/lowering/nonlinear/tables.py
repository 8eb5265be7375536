"""Lower elementwise functions of codes to a table with an entry for every code."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.ir.context import Args, Lowering, LoweringContext
from onnx_backend.integer.ir.values import Array, Constant, Function, Lookup, Refused, Value
from onnx_backend.proto.nodes import attributes

_BETWEEN = "put a QuantizeLinear/DequantizeLinear pair between the two ops"


#: Defaults of the ONNX standard.
SELU: Mapping[str, float] = MappingProxyType({"alpha": 1.6732632423543772, "gamma": 1.0507010221481323})
NO_NUMBER = "it is not a number for some value that its input can have"


def table(function: Callable[[Array, Mapping[str, float]], Array]) -> Lowering:
    """Make the lowering of an elementwise function: its values at every code of a uint8 tensor."""

    def lower(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
        """Return the function's values at every code, or at every element of a constant."""
        value = args[0]
        if isinstance(value, Lookup):
            given = value.values.astype(np.float64)
            with np.errstate(all="ignore"):
                values = function(given, attributes(node)).astype(np.float32)
                if not np.all(np.isfinite(values)) and ctx.reach(node.input[0])[0] > 0.0:  # smaller codes never occur
                    least = np.maximum(given, ctx.reach(node.input[0])[0])
                    values = function(least, attributes(node)).astype(np.float32)
            if np.any(np.isnan(values)):  # an infinity is quantized to the end of the grid
                raise Refused(NO_NUMBER, "clip its input to where it is defined")
            made_by = Function(node.op_type, value.encoding, attributes(node)) if value.encoding else None
            return Lookup(value.name, values, None, made_by)
        if isinstance(value, Constant):
            return Constant(function(value.values.astype(np.float64), attributes(node)).astype(np.float32))
        raise Refused("its input is a float tensor", _BETWEEN)

    return lower


def _sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def _erf(x: Array) -> Array:
    return np.asarray([math.erf(v) for v in x.reshape(-1)]).reshape(x.shape)


def _gelu(x: Array, attrs: Mapping[str, object]) -> Array:
    if attrs.get("approximate", "none") == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))


def _selu(x: Array, attrs: Mapping[str, float]) -> Array:
    given = {**SELU, **attrs}
    return given["gamma"] * np.where(x > 0, x, given["alpha"] * np.expm1(x))


def _celu(x: Array, attrs: Mapping[str, float]) -> Array:
    alpha = attrs.get("alpha", 1.0)
    return np.where(x > 0, x, alpha * np.expm1(x / alpha))


def _shrink(x: Array, attrs: Mapping[str, float]) -> Array:
    bound, bias = attrs.get("lambd", 0.5), attrs.get("bias", 0.0)
    return np.where(x < -bound, x + bias, np.where(x > bound, x - bias, 0.0))


def _swish(x: Array, attrs: Mapping[str, float]) -> Array:
    return x / (1.0 + np.exp(-attrs.get("alpha", 1.0) * x))


#: Elementwise functions computed by a 256-entry table (attributes with the defaults of the ONNX standard).
TABLES: Mapping[str, Callable[[Array, Mapping[str, float]], Array]] = MappingProxyType(
    {
        "Acos": lambda x, a: np.arccos(x),
        "Acosh": lambda x, a: np.arccosh(x),
        "Asin": lambda x, a: np.arcsin(x),
        "Asinh": lambda x, a: np.arcsinh(x),
        "Atan": lambda x, a: np.arctan(x),
        "Atanh": lambda x, a: np.arctanh(x),
        "Ceil": lambda x, a: np.ceil(x),
        "Celu": _celu,
        "Cos": lambda x, a: np.cos(x),
        "Cosh": lambda x, a: np.cosh(x),
        "Floor": lambda x, a: np.floor(x),
        "Mish": lambda x, a: x * np.tanh(np.log1p(np.exp(x))),
        "Sin": lambda x, a: np.sin(x),
        "Swish": _swish,
        "Abs": lambda x, a: np.abs(x),
        "Elu": lambda x, a: np.where(x > 0, x, a.get("alpha", 1.0) * np.expm1(x)),
        "Erf": lambda x, a: _erf(x),
        "Exp": lambda x, a: np.exp(x),
        "Gelu": _gelu,
        "HardSigmoid": lambda x, a: np.clip(a.get("alpha", 0.2) * x + a.get("beta", 0.5), 0.0, 1.0),
        "HardSwish": lambda x, a: x * np.clip(x / 6.0 + 0.5, 0.0, 1.0),
        "LeakyRelu": lambda x, a: np.where(x >= 0, x, a.get("alpha", 0.01) * x),
        "Log": lambda x, a: np.log(x),
        "Neg": lambda x, a: -x,
        "Reciprocal": lambda x, a: 1.0 / x,
        "Round": lambda x, a: np.rint(x),
        "Selu": _selu,
        "Shrink": _shrink,
        "Sigmoid": lambda x, a: _sigmoid(x),
        "Sign": lambda x, a: np.sign(x),
        "Sinh": lambda x, a: np.sinh(x),
        "Softplus": lambda x, a: np.logaddexp(0.0, x),
        "Softsign": lambda x, a: x / (1.0 + np.abs(x)),
        "Sqrt": lambda x, a: np.sqrt(x),
        "Tan": lambda x, a: np.tan(x),
        "Tanh": lambda x, a: np.tanh(x),
        "ThresholdedRelu": lambda x, a: np.where(x > a.get("alpha", 1.0), x, 0.0),
    }
)
