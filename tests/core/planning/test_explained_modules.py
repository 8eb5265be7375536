"""Modules of the user's own: what the graph says of their parameters, and how they are seen by code that asks."""

import pytest
import torch
from torch import Tensor, nn
from torch_models import calibrated, seeded
from zoo_models import distinct, tokens

from qsdk import check_parity, export


class RmsNorm(nn.Module):
    """As language models write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(8, seed=3).abs())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Transposed(nn.Module):
    """A linear layer that stores its weight as [inputs, outputs]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(seeded(8, 6, seed=4)), nn.Parameter(seeded(6, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, 8), self.weight).view(*x.shape[:-1], 6)


class Looked(nn.Module):
    """A table by integer indices."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(seeded(20, 8, seed=6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table[ids]


class Gain(nn.Module):
    """A factor, of which nothing says what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(seeded(6, seed=7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


@pytest.mark.slow
def test_modules_whose_parameters_the_graph_explains_need_no_declaration(tmp_path):
    model, ids = distinct(nn.Sequential(Looked(), RmsNorm(), Transposed())), tokens(20, 3, 5)
    sim = calibrated(model, ids)
    decided = sim.plan.decisions
    assert decided["0:table"].reason == "embedding"
    assert decided["1/mul.1:output"].reason == "RMSNorm"
    assert decided["1:weight"].quantized
    assert str(decided["2:weight"].spec.granularity) == "per channel (axis 1)"
    assert decided["2:bias"].bias_of is not None
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [ids], progress=False).summary["passed"]


class Registry(nn.Module):
    """Keeps its settings under the text of its class, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * SETTINGS[str(self.__class__)]


SETTINGS = {str(Registry): 2.0}


def test_a_wrapped_class_reads_like_its_own():
    model, x = distinct(Registry()), seeded(2, 4)
    sim = calibrated(model, x)
    assert str(type(sim.model)) == str(Registry)
    assert type(sim.model) is not Registry
    assert torch.allclose(sim(x), model(x), atol=0.1)
