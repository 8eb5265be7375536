"""BatchNorm behind a layer whose forward is the user's own: folded where that forward keeps to weight and bias."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import randomized, seeded, sim_of


class SameConv(nn.Conv2d):
    """Pads before it convolves, as TensorFlow's SAME."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)


class PaddedBySubmodule(nn.Conv2d):
    def __init__(self, *args: int) -> None:
        super().__init__(*args, bias=False)
        self.pad = nn.ZeroPad2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pad(x))


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ForgetsItsBias(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight)


class Activated(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class TwoInputs(nn.Conv2d):
    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.conv2d(x * gain, self.weight, self.bias)


class Gained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = TwoInputs(3, 5, 3), nn.BatchNorm2d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x, x.mean()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "shape"),
    [(SameConv(3, 5, 3), (2, 3, 6, 6)), (PaddedBySubmodule(3, 5, 3), (2, 3, 6, 6)), (OwnLinear(3, 5), (4, 3))],
    ids=["pads by function", "pads by module, no bias", "linear"],
)
def test_a_batch_norm_is_folded_into_a_layer_that_follows_its_weight_and_bias(layer, shape):
    norm = nn.BatchNorm1d(5) if len(shape) == 2 else nn.BatchNorm2d(5)
    model = randomized(nn.Sequential(layer, norm, nn.ReLU())).eval()
    example = seeded(*shape)
    sim = sim_of(model, example)
    assert sim.coverage().summary["folded"] == 1
    assert "BatchNormalization" not in {row["op_type"] for row in sim.coverage().rows}
    with sim.float_phase() as inner, torch.no_grad():
        torch.testing.assert_close(inner(example), model(example))


@pytest.mark.slow
@pytest.mark.parametrize("layer", [ForgetsItsBias(3, 5, 3, bias=False), Activated(3, 5, 3)])
def test_a_batch_norm_after_a_layer_that_computes_something_else_stays_with_a_reason(layer):
    model, example = randomized(nn.Sequential(layer, nn.BatchNorm2d(5))).eval(), seeded(2, 3, 6, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sim = sim_of(model, example)
    assert sim.coverage().summary["folded"] == 0
    reason = sim.coverage().summary["1 (BatchNorm) not folded"]
    assert reason == "0 computes something else than its weight and bias say"
    with sim.float_phase() as inner, torch.no_grad():
        assert torch.equal(inner(example), model(example))
    assert all(torch.equal(value, before[name]) for name, value in sim.unwrap().state_dict().items())


def test_a_layer_that_cannot_be_run_alone_keeps_its_batch_norm():
    model, example = randomized(Gained()).eval(), seeded(2, 3, 6, 6)
    sim = sim_of(model, example)
    assert sim.coverage().summary["norm (BatchNorm) not folded"].startswith("conv computes something else")
    with sim.float_phase() as inner, torch.no_grad():
        assert torch.equal(inner(example), model(example))
