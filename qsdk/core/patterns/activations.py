"""Activation functions that exporters write as arithmetic: GELU, SiLU, HardSwish, HardSigmoid, Mish, Softplus."""

import math
from functools import partial

from qsdk.core.graph.graph import Graph
from qsdk.core.patterns.terms import Captured, Pattern, Term, any_of, number, op, product


def _times(t: Term | str, factor: float) -> Term:
    """Return a term times a number, as a product or a quotient."""
    return any_of(op("Mul", t, factor), op("Div", t, 1 / factor))


def _gelu() -> Term:
    """Return the term for `x * (1 + erf(x / sqrt(2))) / 2`, or its form with tanh (Hendrycks and Gimpel 2016)."""
    inner, cubed = math.sqrt(2 / math.pi), 0.044715
    cubic = any_of(
        _times(op("Pow", "x", 3.0), cubed),
        product(cubed, "x", op("Pow", "x", 2.0)),
        product(cubed, "x", "x", "x"),
    )
    square = any_of(product(cubed, "x", "x"), _times(op("Pow", "x", 2.0), cubed))
    bent = op("Add", "x", cubic)
    factored = op("Add", square, 1.0)
    curve = any_of(_times(bent, inner), product("x", inner, factored))
    doubled = any_of(_times(bent, 2 * inner), product("x", 2 * inner, factored))
    step = any_of(op("Erf", _times("x", math.sqrt(0.5))), op("Tanh", curve))
    rise = op("Add", step, 1.0)
    return any_of(
        op("Mul", _times("x", 0.5), rise),
        op("Mul", "x", any_of(_times(rise, 0.5), op("Add", _times(step, 0.5), 0.5))),
        _times(op("Mul", "x", rise), 0.5),
        op("Mul", "x", op("Sigmoid", doubled)),
    )


def _bounded(low: float, high: float, graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    """Accept a Clip to exactly these bounds, given as inputs or as attributes."""
    op_node = graph.ops[op_id]
    given = [graph.scalar(op_node.inputs[i]) if len(op_node.inputs) > i else None for i in (1, 2)]
    given = [
        op_node.attributes.get(key) if value is None else value
        for key, value in zip(("min", "max"), given, strict=True)
    ]
    return (
        captured
        if given == [low, high]
        else f"its Clip goes from {given[0]} to {given[1]}, not from {low:g} to {high:g}"
    )


def _clip(t: Term, low: float, high: float) -> Term:
    floored = any_of(op("Max", t, low), op("Relu", t)) if low == 0 else op("Max", t, low)
    return any_of(op("Clip", t, where=partial(_bounded, low, high)), op("Min", floored, high))


def _is_sixth(graph: Graph, op_id: int, tensor: int, captured: Captured) -> Captured | str:
    attributes = graph.ops[op_id].attributes
    alpha, beta = attributes.get("alpha", 0.2), attributes.get("beta", 0.5)
    fits = abs(alpha - 1 / 6) < 1e-4 and abs(beta - 0.5) < 1e-4
    return captured if fits else f"its HardSigmoid has a slope of {alpha:.6g}, not of 1/6"


_RELU6 = _clip(op("Add", "x", 3.0), 0.0, 6.0)
_HARD_SIGMOID = any_of(_times(_RELU6, 1 / 6), _clip(op("Add", _times("x", 1 / 6), 0.5), 0.0, 1.0))
_HARD_SWISH = any_of(
    op("Mul", _times("x", 1 / 6), _RELU6),
    op("Mul", "x", any_of(_HARD_SIGMOID, op("HardSigmoid", "x", where=_is_sixth))),
    _times(op("Mul", "x", _RELU6), 1 / 6),
)
_LOG_OF_EXP = op("Log", op("Add", op("Exp", "x"), 1.0))
_PLAIN_SOFTPLUS = any_of(op("Softplus", "x"), _LOG_OF_EXP)
# above such a threshold, softplus(x) equals x to the last digit
_THRESHOLD = number(10, math.inf, "a threshold of 10 or more")
_GUARDED_SOFTPLUS = op("Where", op("Greater", "x", _THRESHOLD), "x", _PLAIN_SOFTPLUS)
_SOFTPLUS = any_of(_PLAIN_SOFTPLUS, _GUARDED_SOFTPLUS)
_SHARPNESS = number(1e-6, math.inf, "a positive constant")
_SHARP = op("Mul", "x", _SHARPNESS)
_SHARP_SOFTPLUS = op("Where", op("Greater", _SHARP, _THRESHOLD), "x", op("Div", op("Softplus", _SHARP), _SHARPNESS))
_NEGATED = any_of(op("Neg", "x"), op("Mul", "x", -1.0))
_SILU = any_of(op("Mul", "x", op("Sigmoid", "x")), op("Div", "x", op("Add", op("Exp", _NEGATED), 1.0)))
_SLOPE = number(-math.inf, math.inf, "a constant slope")

ACTIVATIONS = (
    Pattern("Gelu", _gelu(), near=("Erf",)),
    Pattern("SiLU", _SILU),
    Pattern("QuickGelu", op("Mul", "x", op("Sigmoid", _times("x", 1.702)))),
    Pattern("Swish", op("Mul", "x", op("Sigmoid", op("Mul", "x", _SLOPE)))),
    Pattern("HardSwish", _HARD_SWISH),
    Pattern("HardSigmoid", _HARD_SIGMOID),
    Pattern("Mish", op("Mul", "x", op("Tanh", _SOFTPLUS))),
    Pattern("Softplus", any_of(_LOG_OF_EXP, _GUARDED_SOFTPLUS, _SHARP_SOFTPLUS)),
    Pattern("LogSigmoid", op("Log", op("Sigmoid", "x"))),
    Pattern("Tanhshrink", op("Sub", "x", op("Tanh", "x"))),
    Pattern("Softsign", op("Div", "x", op("Add", op("Abs", "x"), 1.0))),
)
