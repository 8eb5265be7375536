"""Products of half-precision tensors in float32, for walks on processors without instructions for them."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_bridge.walk import forward_pairs as module
from torch_bridge.walk.forward_pairs import FloatProducts, float_products

HALF = torch.bfloat16


def test_a_product_is_that_of_float32_rounded_once() -> None:
    x, weight, bias = (torch.randn(*shape).to(HALF) for shape in ((3, 8), (4, 8), (4,)))
    wanted = functional.linear(x.float(), weight.float(), bias.float()).to(HALF)
    with FloatProducts([HALF]):
        assert torch.equal(functional.linear(x, weight, bias=bias), wanted)
        assert torch.equal(x @ weight.mT, (x.float() @ weight.float().mT).to(HALF))
        assert torch.equal(x + bias[0], x.float().add(bias[0].float()).to(HALF))


def test_other_dtypes_stay_as_they_are() -> None:
    x = torch.randn(3, 8)
    with FloatProducts([HALF]):
        assert torch.equal(x @ x.mT, x @ x.mT)
        assert (x.double() @ x.double().mT).dtype == torch.float64
        assert (x.half() @ x.half().mT).dtype == torch.float16
        with pytest.raises(RuntimeError, match="dtype"):
            torch.matmul(x, x.to(HALF).mT)


def test_only_what_the_processor_lacks_is_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = nn.Linear(4, 4)
    assert not isinstance(float_products(linear), FloatProducts)
    monkeypatch.setattr(module, "has_kernels", lambda dtype: False)
    assert isinstance(float_products(linear.to(HALF)), FloatProducts)
    monkeypatch.setattr(module, "has_kernels", lambda dtype: True)
    assert not isinstance(float_products(linear.to(HALF)), FloatProducts)
