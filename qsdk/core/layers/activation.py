"""Activation functions that are solved together with the layer before them: Relu, Clip and LeakyRelu."""

import math
from dataclasses import dataclass
from typing import Any

from qsdk.core.graph.graph import Graph, Op


@dataclass(frozen=True)
class Activation:
    """The function `clip(x, low, high)`, with negative x multiplied by a slope before. It never falls where x rises.

    Attributes:
        slope: of negative values.
        low: lower bound.
        high: upper bound.
    """

    slope: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __call__(self, x: Any) -> Any:
        """Return the function of a NumPy or torch array of any shape."""
        if self.slope != 1:
            x = x.clip(0, None) + self.slope * x.clip(None, 0)
        return x.clip(self.low, self.high)

    def derivative(self, x: Any) -> Any:
        """Return the derivative; at a bound and at 0, the one from the left."""
        inside = (x > self.low) & (x <= self.high)
        return inside * (1 + (self.slope - 1) * (x <= 0))


def activation_of(graph: Graph, op: Op) -> Activation | None:
    """Return the activation function that an op computes; None for another op or unknown bounds."""
    if op.type == "Relu":
        return Activation(low=0.0)
    if op.type == "LeakyRelu":
        slope = float(op.attributes.get("alpha", 0.01))
        return Activation(slope=slope) if slope >= 0 else None
    if op.type != "Clip":
        return None
    bounds = []
    for position, name, absent in ((1, "min", -math.inf), (2, "max", math.inf)):
        tensor = op.inputs[position] if len(op.inputs) > position else None
        stored = op.attributes.get(name, absent) if tensor is None else graph.scalar(graph.constant_root(tensor))
        if stored is None:
            return None
        bounds.append(float(stored))
    return Activation(low=bounds[0], high=bounds[1])
