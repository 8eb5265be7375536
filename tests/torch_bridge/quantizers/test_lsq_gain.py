"""The gain of a learned scale's gradient: 1 / sqrt(elements per scale x highest code) (Esser et al. 2020)."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch_models import calibrated, seeded

X = seeded(4, 8)


def slopes(x: Tensor, scale: Tensor, zero: Tensor, lo: int, hi: int) -> Tensor:
    """What each element adds to the gradient of the scale, with a gain of 1."""
    codes = torch.round(x / scale) + zero
    inside = torch.round(x / scale) - x / scale
    return torch.where(codes > hi, hi - zero, torch.where(codes < lo, lo - zero, inside))


@pytest.mark.slow
def test_the_gain_counts_the_elements_of_one_example_and_those_of_a_channel():
    torch.manual_seed(0)
    sim = calibrated(nn.Linear(8, 4), X)
    with sim.training(learn_scales=True) as model:
        for site, x, lo, hi in (("input:input", X, 0, 255), ("self:weight", model.weight.detach(), -128, 127)):
            quantizer, values = sim.quantizers[site], (x * 1.5).requires_grad_()
            scale, zero = (tensor.detach() for tensor in quantizer.scale_and_zero_point())
            per_channel = scale.numel() > 1
            rows = [one.reshape(-1, 1) if per_channel else one for one in (scale, zero)]
            found = slopes(values.detach(), *rows, lo, hi)
            summed = found.sum(1) if per_channel else found.sum()
            quantizer(values).sum().backward()
            learned = quantizer.owner.get_parameter(quantizer.log_scale_name).grad
            assert learned is not None
            expected = summed * scale.flatten() * math.log(2) / math.sqrt(8 * hi)
            torch.testing.assert_close(learned.flatten(), expected.flatten(), rtol=1e-3, atol=1e-6)
