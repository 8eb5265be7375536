"""A layer's outputs behind its activation function, on samples of its inputs: part to learn from, part to judge by."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qsdk.core.layers.activation import Activation
from qsdk.core.layers.layer_problem import LayerProblem

#: rows of a layer's inputs that are looked at
SAMPLES = 2048
#: one of so many judges
HELD_BACK = 4
#: halvings of the interval in which a shift is searched
HALVINGS = 24
#: share of the outputs' mean magnitude by which means may differ
SAME = 1e-6


@dataclass(frozen=True)
class Outputs:
    """What a layer gives on samples, in float and with other weights.

    Attributes:
        function: the activation function behind the layer; one that does nothing where there is none.
        bias: of the float model, float32 [groups, outputs]; zeros where there is none.
        exact: W x + b for each sample, float32 [groups, rows, outputs].
        x_quantized: the quantized inputs, float32 [groups, rows, K].
        judging: bool [rows], which samples judge; all where there are too few to part.
        learning: the others; all likewise.
    """

    function: Activation
    bias: Tensor
    exact: Tensor
    x_quantized: Tensor
    judging: Tensor
    learning: Tensor

    @classmethod
    def of(cls, problem: LayerProblem) -> "Outputs":
        """Return those of a problem on torch, with samples."""
        assert problem.samples is not None
        x, x_quantized = problem.samples
        bias = problem.weight.new_zeros(problem.weight.shape[:2]) if problem.bias is None else problem.bias
        exact = x @ problem.weight.mT + bias[:, None]
        judging = torch.arange(x.shape[1], device=x.device) % HELD_BACK == HELD_BACK - 1
        learning = ~judging
        judging = judging if bool(judging.any()) else learning
        return cls(problem.activation or Activation(), bias, exact, x_quantized, judging, learning)

    def given(self, weight: Tensor) -> Tensor:
        """W~ x~ + b for each sample, [groups, rows, outputs], for W~ [groups, outputs, K]."""
        return self.x_quantized @ weight.mT + self.bias[:, None]

    def errors(self, given: Tensor) -> Tensor:
        """Return the squared error behind the function of each sample, [groups, rows, outputs]."""
        errors: Tensor = (self.function(self.exact) - self.function(given)).square()
        return errors

    def falls(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the outputs whose error on the samples that judge is smaller, bool [groups, outputs]."""
        return after[:, self.judging].sum(1) < before[:, self.judging].sum(1)

    def shift(self, given: Tensor) -> Tensor:
        """What brings the mean behind the function to that of the float model, [groups, outputs]; see below."""
        return matching_shift(self.function, self.exact[:, self.learning], given[:, self.learning])

    def relative(self, errors: Tensor) -> float:
        """Errors over the energy of the float model's outputs; 0 where there is nothing to get wrong."""
        energy = float(self.function(self.exact).square().sum())
        return float(errors.sum()) / energy if energy > 0 else 0.0


def matching_shift(function: Activation, exact: Tensor, given: Tensor) -> Tensor:
    """Return the smallest shift of each output that gives it the wanted mean behind a function, by bisection.

    Args:
        function: that never falls.
        exact: what goes into it in the float model, float32 [groups, rows, outputs].
        given: what goes into it in the quantized one, likewise.

    Returns:
        [groups, outputs].
    """
    wanted = function(exact)
    target, near = wanted.mean(1), SAME * wanted.abs().mean(1)
    missing = target - function(given).mean(1)
    sign = torch.where(missing.abs() <= near, 0, missing.sign())
    # moved so far, no row is short of what is wanted there
    far = (sign[:, None] * (exact - given)).amax(1).clamp(min=0)
    short = torch.zeros_like(far)
    for _ in range(HALVINGS):
        middle = (short + far) / 2
        left = sign * (target - function(given + (sign * middle)[:, None]).mean(1))
        far, short = torch.where(left <= near, middle, far), torch.where(left <= near, short, middle)
    return sign * far
