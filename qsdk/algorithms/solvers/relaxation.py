"""The relaxation of AdaRound: soft rounding by gradient descent, pushed to 0 or 1 over time (Nagel et al. 2020)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qsdk.algorithms.solvers.rounding import WeightGrid

#: how far the stretched sigmoid reaches beyond 0 and 1 (the paper's zeta and gamma)
ZETA, GAMMA = 1.1, -0.1
#: steps between two checks for undecided roundings
PATIENCE = 50
#: distance from 0 or 1 at which a rounding counts as decided
DECIDED = 1e-3
#: Adam's decay of the first and second moments of the gradient
BETAS = (0.9, 0.999)
#: weight of the penalty `sum(1 - |2 h - 1|^beta)` on soft roundings h, in units of the mean cost of rounding one weight
#: to nearest: the paper's 0.01 is in units of the outputs, so its effect differs from layer to layer
REGULARIZATION = 10.0
#: share of the steps without the penalty, whose exponent then falls from the first of these to the second
WARM_START, BETA_RANGE = 0.2, (20.0, 2.0)


def soft_rounding(alpha: Tensor) -> Tensor:
    """Return `clip(sigmoid(alpha) (zeta - gamma) + gamma, 0, 1)`: the share of a step by which a weight is raised."""
    return (torch.sigmoid(alpha) * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def beta_at(step: int, steps: int) -> float:
    """Return the exponent of the penalty: after the warm start it falls along a cosine."""
    (start, end), begun = BETA_RANGE, WARM_START * steps
    share = (step - begun) / max(steps - begun, 1)
    return end + 0.5 * (start - end) * (1 + math.cos(max(share, 0) * math.pi))


def relax(weight: Tensor, grid: WeightGrid, gradient: Callable[[Tensor, int], Tensor], steps: int) -> Tensor:
    """Choose between two grid points for each weight by gradient descent on a soft rounding.

    It starts at the weight itself, and ends early when the penalty is active and every rounding is decided.

    Args:
        weight: W, float32 [groups, K, rows].
        grid: its `lowest` and `highest` are the two points.
        gradient: of the reconstruction loss with respect to the weight, at a weight and in a step.
        steps: of Adam, at most.

    Returns:
        Codes of the chosen points, float32 [groups, K, rows].

    Source: Nagel et al. 2020, AdaRound, section 3.2; Adam after Kingma and Ba 2015, whose gradient has a closed form
    here.
    """
    low, step = grid.lowest * grid.scale, (grid.highest - grid.lowest) * grid.scale
    share = torch.where(step > 0, (weight - low) / step, 0.5).clamp(0, 1)
    alpha = torch.logit((share - GAMMA) / (ZETA - GAMMA))
    rate = min(max(50 / max(steps, 1), 1e-3), 0.1)
    first, second = torch.zeros_like(alpha), torch.zeros_like(alpha)
    for index in range(steps):
        sigmoid = alpha.sigmoid()
        stretched = sigmoid * (ZETA - GAMMA) + GAMMA
        soft = stretched.clamp(0, 1)
        slope = gradient(torch.addcmul(low, soft, step), index).mul_(step)
        if index >= WARM_START * steps:
            if index % PATIENCE == 0 and bool(((soft - soft.round()).abs() < DECIDED).all()):
                break
            beta = beta_at(index, steps)
            centre = 2 * soft - 1
            slope -= 2 * REGULARIZATION * beta * centre.abs().pow(beta - 1) * centre.sign()
        # the clip has no gradient outside its bounds
        slope.mul_((ZETA - GAMMA) * sigmoid * (1 - sigmoid)).mul_(soft == stretched)
        first.lerp_(slope, 1 - BETAS[0])
        second.lerp_(slope.square(), 1 - BETAS[1])
        corrected = (second / (1 - BETAS[1] ** (index + 1))).sqrt_().add_(1e-8)
        alpha.addcdiv_(first, corrected, value=-rate / (1 - BETAS[0] ** (index + 1)))
    return torch.where(soft_rounding(alpha) >= 0.5, grid.highest, grid.lowest)
