"""Mixtures of experts: a scale and a problem for each expert, routers in float, and how many tokens each has seen."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import seeded

from qsdk import calibrate, check_parity, export, gptq, quantize, seq_mse, w4a16, w8a8
from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError
from qsdk.core.patterns.experts import OF_ROUTER

TOKENS, WIDTH, INNER, EXPERTS, CHOSEN = 40, 8, 12, 4, 2
STACKS = ("experts:down", "experts:up")


class Experts(nn.Module):
    """Experts in two stacks, called as those of transformers are."""

    def __init__(self, *, grouped: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded(EXPERTS, INNER, WIDTH, seed=1) * torch.tensor([1.0, 8, 0.2, 3])[:, None, None])
        self.down = nn.Parameter(seeded(EXPERTS, WIDTH, INNER, seed=2))
        self.grouped = grouped

    def forward(self, tokens: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        count, flat = numbers.shape[1], numbers.reshape(-1)
        if not self.grouped:
            rows = tokens.repeat_interleave(count, dim=0)
            inner = F.relu(torch.bmm(self.up[flat], rows.unsqueeze(-1)).squeeze(-1))
            made = torch.bmm(self.down[flat], inner.unsqueeze(-1)).squeeze(-1) * weights.reshape(-1, 1)
            return made.view(len(tokens), count, -1).sum(1)
        sorted_numbers, order = torch.sort(flat)
        ends = torch.cumsum(torch.histc(sorted_numbers.float(), EXPERTS, 0, EXPERTS - 1), 0, dtype=torch.int32)
        inner = F.relu(F.grouped_mm(tokens[order // count], self.up.transpose(-2, -1), offs=ends))
        made = F.grouped_mm(inner, self.down.transpose(-2, -1), offs=ends) * weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return made[back].view(len(tokens), count, -1).sum(1)


class Mixture(nn.Module):
    """A router that never chooses the last expert, and the experts."""

    def __init__(self, *, grouped: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.router.weight.data = seeded(EXPERTS, WIDTH, seed=3)
        self.router.bias.data = torch.tensor([0.0, 0, 0, -100])
        self.experts = Experts(grouped=grouped)

    def forward(self, tokens: Tensor) -> Tensor:
        weights, numbers = torch.topk(F.softmax(self.router(tokens), dim=-1), CHOSEN, dim=-1)
        return self.experts(tokens, numbers, weights / weights.sum(-1, keepdim=True)) + tokens


def tokens() -> Tensor:
    return seeded(TOKENS, WIDTH, seed=4)


def weights_alone() -> QuantConfig:
    return w4a16().override("*", activation="float32")


@pytest.mark.parametrize("grouped", [True, False])
def test_a_stack_has_a_scale_for_each_output_channel_of_each_expert_and_its_file_computes_the_same(
    grouped: bool, tmp_path: Path
):
    x = tokens()
    sim = quantize(Mixture(grouped=grouped).eval(), x, w8a8())
    calibrate(sim, [x], progress=False)
    scales = {site: sim.encodings[site].scale for site in STACKS}
    assert {site: scale.size for site, scale in scales.items()} == {STACKS[0]: 32, STACKS[1]: 48}
    widest = np.abs(sim.model.experts.up.detach().numpy()).max(-1)
    np.testing.assert_allclose(scales["experts:up"].reshape(EXPERTS, INNER), widest / 127.5, rtol=0.01)
    export(sim, tmp_path / "m.onnx")
    assert check_parity(sim, tmp_path / "m.onnx", [x], progress=False).summary["passed"]


def test_a_router_stays_float_and_says_why_unless_a_rule_names_it():
    rows = {row["site"]: row for row in quantize(Mixture(), tokens(), w8a8()).coverage().rows}
    of_router = [row for site, row in rows.items() if site.startswith("router") and row["kind"] != "weight"]
    assert {row["reason"] for row in of_router if not row["reason"].startswith("a part of")} == {OF_ROUTER}
    assert {row["state"] for site, row in rows.items() if site.startswith("router")} == {"float"}
    assert rows["router:weight"]["reason"] == f"a part of {OF_ROUTER}"
    assert {row["state"] for row in rows.values() if "topk" in row["site"] or "softmax" in row["site"]} == {"float"}
    named = quantize(Mixture(), tokens(), w8a8().override("router", weight="int8")).coverage()
    assert {row["dtype"] for row in named.rows if row["site"] == "router:weight"} == {"int8"}


@pytest.mark.parametrize("grouped", [True, False])
def test_an_expert_gets_the_codes_of_a_linear_layer_with_its_weight_and_its_tokens(grouped: bool):
    x, model = tokens(), Mixture(grouped=grouped).eval()
    sim = quantize(model, x, weights_alone())
    calibrate(sim, [x], progress=False)
    report = gptq(sim, [x], progress=False)
    solved = {row["site"] for row in report.rows if row["error_after"] is not None and not row["note"]}
    assert {f"experts:{name}[{number}]" for name in ("up", "down") for number in range(3)} <= solved
    chosen = torch.topk(model.router(x), CHOSEN).indices
    for number in range(3):
        alone = nn.Linear(WIDTH, INNER, bias=False)
        alone.weight.data = model.experts.up.data[number].clone()
        rows = x[(chosen == number).any(-1)]
        single = quantize(alone, rows, weights_alone())
        calibrate(single, [rows], progress=False)
        gptq(single, [rows], progress=False)
        torch.testing.assert_close(sim.model.experts.up[number], single.model.weight, rtol=0, atol=0)


def test_an_expert_without_tokens_is_named_and_all_experts_gives_it_all_of_them():
    x, reasons = tokens(), []
    for config in (weights_alone(), w4a16()):
        sim = quantize(Mixture().eval(), x, config)
        calibrate(sim, [x], progress=False)
        if config == weights_alone():  # such a calibration reads no data
            seq_mse(sim, [x], progress=False)
        reasons.append({row["site"]: row["reason"] for row in sim.coverage().rows}["experts:up"])
    assert all("weight; 0 to " in reason for reason in reasons)
    assert all("fewer than 8, its inputs, for 3: give more data, or all_experts=True" in reason for reason in reasons)
    rows = {row["site"]: row for row in seq_mse(sim, [x], progress=False).rows}
    assert rows["experts:up[3]"]["note"].startswith("no token is routed to it")
    assert rows["experts:up[2]"]["error_after"] < rows["experts:up[2]"]["error_before"]
    rows = {row["site"]: row for row in seq_mse(sim, [x], progress=False, all_experts=True).rows}
    assert 0 < rows["experts:up[3]"]["error_after"] < rows["experts:up[3]"]["error_before"]


def test_all_experts_changes_nothing_for_experts_with_enough_tokens():
    x, results = tokens(), []
    for every in (False, True):
        sim = quantize(Mixture().eval(), x, weights_alone())
        calibrate(sim, [x], progress=False)
        gptq(sim, [x], progress=False, all_experts=every)
        results.append(sim.model.experts.up.detach()[:3])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_all_experts_is_refused_for_a_file(tmp_path: Path):
    sim = quantize(nn.Linear(8, 4), seeded(5, 8), w8a8())
    calibrate(sim, [seeded(5, 8)], progress=False)
    export(sim, tmp_path / "m.onnx")
    of_file = quantize(tmp_path / "m.onnx", None)
    with pytest.raises(ConfigError, match="all_experts routes tokens in modules"):
        gptq(of_file, [{"x": seeded(5, 8).numpy()}], progress=False, all_experts=True)
