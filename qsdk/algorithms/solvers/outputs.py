"""A layer's outputs behind its activation function, on samples of its inputs: some to fit, the others to judge."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qsdk.core.layers.layer_problem import Activation, LayerProblem

#: number of sampled rows of a layer's inputs
SAMPLES = 2048
#: one sample of so many judges
HELD_BACK = 4
#: halvings of the interval in which a shift is searched
HALVINGS = 24
#: share of the outputs' mean magnitude by which means may differ
SAME = 1e-6
#: outputs whose shifts are searched at a time: few enough for a processor's cache, and a multiple of those that torch
#: adds up side by side, so that sums keep their bits
AT_ONCE = 128


@dataclass(frozen=True)
class SampledOutputs:
    """The outputs of a layer on samples, for the float weight and others.

    Attributes:
        function: the activation function behind the layer; the identity where there is none.
        bias: of the float model, float32 [groups, outputs]; zeros where there is none.
        exact: W x + b for each sample, float32 [groups, rows, outputs].
        x_quantized: the quantized inputs, float32 [groups, rows, K].
        judging: bool [rows], the samples that judge; all where there are too few to split.
        learning: the others; all likewise.
    """

    function: Activation
    bias: Tensor
    exact: Tensor
    x_quantized: Tensor
    judging: Tensor
    learning: Tensor

    @classmethod
    def of(cls, problem: LayerProblem) -> "SampledOutputs":
        """Return the outputs of a problem on torch, with samples."""
        assert problem.samples is not None
        x, x_quantized = problem.samples
        bias = problem.weight.new_zeros(problem.weight.shape[:2]) if problem.bias is None else problem.bias
        exact = (x @ problem.weight.mT).add_(bias[:, None])
        judging = torch.arange(x.shape[1], device=x.device) % HELD_BACK == HELD_BACK - 1
        learning = ~judging
        judging = judging if bool(judging.any()) else learning
        return cls(problem.activation or Activation(), bias, exact, x_quantized, judging, learning)

    def given(self, weight: Tensor) -> Tensor:
        """Return W~ x~ + b for each sample, [groups, rows, outputs], for W~ [groups, outputs, K]."""
        result: Tensor = (self.x_quantized @ weight.mT).add_(self.bias[:, None])
        return result

    def errors(self, given: Tensor) -> Tensor:
        """Return the squared error behind the function of each sample, [groups, rows, outputs]."""
        errors: Tensor = self.function(self.exact)
        return errors.sub_(self.function(given)).square_()

    def falls(self, before: Tensor, after: Tensor) -> Tensor:
        """Return whether the error on the judging samples is smaller, bool [groups, outputs]."""
        return after[:, self.judging].sum(1) < before[:, self.judging].sum(1)

    def shift(self, given: Tensor) -> Tensor:
        """Return the shift that restores the float model's mean behind the function, [groups, outputs]."""
        return matching_shift(self.function, self.exact[:, self.learning], given[:, self.learning])

    def corrected(self, given: Tensor, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the shift of each output, 0 where the judging samples contradict it, and the errors with it.

        Of W~ x~ + b, [groups, rows, outputs]; without a shift [groups, outputs], the one that restores the mean.
        """
        shift = self.shift(given) if shift is None else shift
        before, after = self.errors(given), self.errors(given + shift[:, None])
        falls = self.falls(before, after)
        return torch.where(falls, shift, 0), torch.where(falls[:, None], after, before)

    def relative(self, errors: Tensor) -> float:
        """Return errors relative to the energy of the float model's outputs; 0 where these are all 0."""
        energy = float(self.function(self.exact).square().sum())
        return float(errors.sum()) / energy if energy > 0 else 0.0


def matching_shift(function: Activation, exact: Tensor, given: Tensor) -> Tensor:
    """Return the smallest shift, [groups, outputs], that restores the float model's mean behind a function.

    By bisection, as the function never falls. Its arguments in the float model and in the quantized one are float32
    [groups, rows, outputs].
    """
    parts = zip(*(torch.split(values, AT_ONCE, -1) for values in (exact, given)), strict=True)
    return torch.cat([_matching_shift(function, one, other.contiguous()) for one, other in parts], -1)


def _matching_shift(function: Activation, exact: Tensor, given: Tensor) -> Tensor:
    wanted = function(exact)
    target, tolerance = wanted.mean(1), SAME * wanted.abs().mean(1)
    missing = target - function(given).mean(1)
    sign = torch.where(missing.abs() <= tolerance, 0, missing.sign())
    # with this shift, no row is below its target
    far = (sign[:, None] * (exact - given)).amax(1).clamp(min=0)
    short = torch.zeros_like(far)
    for _ in range(HALVINGS):
        middle = (short + far) / 2
        left = sign * (target - function(given + (sign * middle)[:, None]).mean(1))
        far, short = torch.where(left <= tolerance, middle, far), torch.where(left <= tolerance, short, middle)
    return sign * far
