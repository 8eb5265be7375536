"""Learned scales and zero points against exact numbers, and their gradients."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qsdk import uint8
from qsdk.core.numerics.spec import Spec
from torch_bridge.quantizers.quantizer import learned_scale, learned_zero_point

SPEC = Spec(uint8)


@given(st.floats(2**-10, 2**10, width=32), st.floats(-3, 3, width=32), st.integers(1, 8))
def test_a_learned_scale_of_few_digits_is_the_nearest(base: float, log2: float, digits: int):
    exact = torch.tensor(base) * torch.exp2(torch.tensor(log2))
    found = learned_scale(torch.tensor(base), torch.tensor(log2), replace(SPEC, scale_bits=digits))
    step = Fraction(2) ** (math.frexp(float(exact))[1] - digits)
    assert Fraction(float(found)) % step == 0
    assert abs(Fraction(float(found)) - Fraction(float(exact))) <= step / 2


@pytest.mark.parametrize("digits", [None, 3])
def test_the_gradient_of_a_learned_scale_is_that_of_a_power_of_two(digits: int | None):
    base, log2 = torch.tensor([0.3, 0.02]), torch.tensor([0.4, -1.2], requires_grad=True)
    scale = learned_scale(base, log2, replace(SPEC, scale_bits=digits))
    scale.backward(torch.tensor([1.0, 3.0]))
    assert log2.grad is not None
    torch.testing.assert_close(log2.grad, torch.tensor([1.0, 3.0]) * scale.detach() * math.log(2))


@given(st.integers(0, 255), st.floats(-2, 2, width=32))
def test_a_learned_zero_point_is_the_nearest_in_the_whole_grid(base: int, shift: float):
    found = learned_zero_point(torch.tensor(float(base)), torch.tensor(shift), 0, 255)
    assert 0 <= float(found) <= 255
    wanted = min(max(base + Fraction(shift) * 255, Fraction(0)), Fraction(255))
    assert abs(Fraction(float(found)) - wanted) <= Fraction(1, 2) + Fraction(1, 1000)


def test_learned_zero_points_reach_both_ends_and_pass_their_gradient():
    shift = torch.tensor([-2.0, 2.0, 0.1, 0.0, 0.0], requires_grad=True)
    found = learned_zero_point(torch.tensor([100.0, 100.0, 100.0, 0.0, 255.0]), shift, 0, 255)
    assert found.tolist() == [0.0, 255.0, 126.0, 0.0, 255.0]
    found.sum().backward()
    assert shift.grad is not None
    assert shift.grad.tolist() == [0.0, 0.0, 255.0, 255.0, 255.0]  # one that starts at an end can leave it
