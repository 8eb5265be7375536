"""What is made of integers, positions and masks stays float where no grid serves it, with the reason, at both doors."""

import math
from typing import Any

import pytest
import torch
from float_files import float_onnx
from plans import site
from strategies import GraphBuilder
from torch import Tensor, nn
from torch_models import calibrated, seeded, sim_of
from zoo_models import distinct, tokens

from qsdk import check_parity, export, quantize, w8a8
from qsdk.core.planning.make_plan import make_plan

ANGLE = "an angle made of positions"
INTEGERS = "made of shapes and integers"


class Rotary(nn.Module):
    """Adds the sines and cosines of positions to embedded tokens: [N, T] to [N, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)
        self.register_buffer("frequencies", 100.0 ** -(torch.arange(4) / 4))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])
        angles = (self.frequencies[:, None] @ positions[None].float()).transpose(0, 1)
        return self.head(self.table(ids) + torch.cat([angles.sin(), angles.cos()], -1))


def decisions(sim: Any) -> dict[str, Any]:
    return {decision.op_type: decision for decision in sim.plan.decisions.values()}


def test_angles_keep_all_their_digits_and_their_sines_are_quantized(tmp_path):
    model, ids = distinct(Rotary()), tokens(20, 3, 300)
    sim = calibrated(model, ids)
    decided = sim.plan.decisions
    angle = [d for d in decided.values() if d.reason.startswith(ANGLE)]
    assert {d.op_type for d in angle} == {"Unsqueeze", "Cast", "MatMul", "Transpose"}
    assert not decided["self:frequencies"].quantized
    assert ANGLE in decided["self:frequencies"].reason
    assert all(decided[f"{name}.0:output"].spec.fixed_range == (-1.0, 1.0) for name in ("sin", "cos"))
    assert decided["head:weight"].quantized
    # angles of 8 bits are off by a radian at position 300
    with torch.no_grad():
        wanted = model(ids)
    assert 10 * math.log10(float(wanted.pow(2).sum() / (sim(ids) - wanted).pow(2).sum())) > 30
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [ids], progress=False).summary["passed"]


class Embedded(nn.Module):
    """Tokens to the place of the largest of their scores: all of it computes from integers and stored tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.sin(self.head(self.table(ids))).argmax(-1)


@pytest.mark.parametrize(("dtype", "state"), [("int64", "float"), ("", "quantized"), ("float32", "quantized")])
def test_only_what_is_known_to_hold_integers_is_a_position(dtype: str, state: str):
    b = GraphBuilder()
    x = b.input(shape=(1, 4), dtype=dtype)
    angles = b.op("Mul", [x, b.stored("frequencies:constant", (1, 4))], "angles:output", (1, 4))
    plan = make_plan(b.graph(b.op("Cos", [angles], "wave:output", (1, 4))), w8a8())
    assert site(plan, "angles:output").state == state


def test_data_that_comes_from_tokens_is_no_position():
    sim = calibrated(distinct(Embedded()), tokens(20, 3, 5))
    decided = sim.plan.decisions
    assert all(decided[site].quantized for site in ("table:weight", "table:output", "head:weight", "head:output"))


class Buckets(nn.Module):
    """A bias of scores by the logarithm of a distance, as T5 has it, under a mask that is written into the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.q, self.k = nn.Embedding(8, 1), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places[None]).abs()
        large = 4 + (torch.log(distance.float() / 4) / math.log(4) * 4).to(torch.long)
        bucket = torch.where(distance < 4, distance, large.clamp(max=7))
        bias = self.bias(bucket).permute(2, 0, 1)
        bias = torch.where(mask[:, None], bias, torch.finfo(torch.float32).min)
        scores = self.q(x) @ self.k(x).transpose(-1, -2) + bias
        return scores.softmax(-1) @ x


@pytest.mark.slow
def test_logarithms_of_integers_and_a_bias_that_hides_stay_float(tmp_path):
    x, mask = seeded(2, 9, 4), torch.ones(2, 9, dtype=torch.bool)
    mask[1, 6:] = False
    model = distinct(Buckets())
    sim = calibrated(model, (x, mask))  # log(0) is minus infinity, and no site sees it
    decided = sim.plan.decisions
    assert decided["log.0:output"].reason.startswith(INTEGERS)
    assert decided["bias:weight"].quantized
    assert decided["softmax.0:output"].reason == "MaskedSoftmax"
    assert decided["where.0:output"].reason.startswith("a mask of MaskedSoftmax")
    assert decided["matmul.0:output"].quantized
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [(x, mask)], progress=False).summary["passed"]


class Table(nn.Module):
    """Adds numbers that only the shape gives to its input: data, which is quantized though nothing stores it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x + torch.arange(4).float())


@pytest.mark.slow
def test_a_table_made_of_a_shape_is_an_activation(tmp_path):
    sim = calibrated(distinct(Table()), seeded(2, 3, 4))
    assert sim.plan.decisions["float.0:output"].kind == "activation"
    assert sim.plan.decisions["float.0:output"].quantized
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [seeded(2, 3, 4)], progress=False).summary["passed"]


class Zeros(nn.Module):
    """Scores to which a mask is added, and softmax in double precision of types that are the same."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.transpose(-1, -2) + self.mask, -1, dtype=torch.float32) @ x


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, -1e9])
def test_a_mask_of_zeros_is_a_mask(value: float):
    mask = torch.zeros(3, 3)
    mask[0, 2] = value
    x = seeded(2, 3, 4)
    sims = [sim_of(Zeros(mask), x), quantize(float_onnx(Zeros(mask), (x,)), None, w8a8())]
    for sim in sims:
        softmax = [d for d in sim.plan.decisions.values() if d.reason == "MaskedSoftmax"]
        assert [d.spec.fixed_range for d in softmax] == [(0.0, 1.0)]
