"""Distillation from the float model: logits and sites, in every way that a model is called."""

import copy
import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
import torch.nn.functional as F
from rank_group import in_process_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsdk
from qsdk import ConfigError, DataError, ModelError


class Body(nn.Module):
    """Writes over an activation in place."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        y = F.relu(self.second(x))
        y += x
        return y


class Network(nn.Module):
    def __init__(self, how: str = "plain"):
        super().__init__()
        self.body, self.head = Body(), nn.Linear(6, 4)
        self.dropout, self.how = nn.Dropout(0.5), how

    def forward(self, x: Tensor) -> Any:
        if self.how in ("reentrant", "not reentrant") and self.training:
            y = checkpoint(self.body, x, use_reentrant=self.how == "reentrant")
        else:
            y = self.body(x)
        if self.how == "dropout":
            y = self.dropout(y)
        y = self.head(y)
        return {"dict": {"hidden": x, "logits": y}, "pair": (y, x)}.get(self.how, y)


def batch(seed: int = 0) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))


@functools.cache
def made(how: str = "plain") -> Any:
    torch.manual_seed(0)
    sim = qsdk.quantize(Network(how), batch(), qsdk.w4a8())
    qsdk.calibrate(sim, [batch()], progress=False)
    return sim


def sim_of(how: str = "plain") -> tuple[Any, Any]:
    """A sim that was trained a little, and its float teacher."""
    sim = copy.deepcopy(made(how))
    teacher = copy.deepcopy(sim)
    with torch.no_grad():
        for parameter in sim.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return sim, teacher


def float_sites(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    first = F.relu(model.body.first(x))
    second = F.relu(model.body.second(first))
    return {"body/relu.0:output": first, "body/relu.1:output": second, "body/add.0:output": second + first}


@pytest.mark.slow
def test_logits_count_by_their_divergence_at_a_temperature():
    sim, teacher = sim_of()
    net = teacher.unwrap()
    with sim.training() as model:
        found = qsdk.distill_loss(sim, net, batch(), temperature=3.0)
        outputs = model(batch())
        assert torch.equal(found.outputs, outputs)
        p, q = (F.softmax(x / 3.0, -1) for x in (net(batch()), outputs))
        expected = 9.0 * (p * (p.log() - q.log())).sum(-1).mean()
        torch.testing.assert_close(found.loss, expected)
        assert found.loss is found.logits or torch.equal(found.loss, found.logits)
        assert not found.sites
    same = qsdk.distill_loss(teacher, net, batch(), temperature=3.0)
    assert 0 < float(same.loss.detach()) < float(found.loss.detach())


@pytest.mark.slow
def test_the_divergence_is_averaged_over_all_positions():
    net = nn.Linear(4, 3)
    x = torch.randn(2, 5, 4)
    sim = qsdk.quantize(net, x, qsdk.w4a8())
    qsdk.calibrate(sim, [x], progress=False)
    whole = qsdk.distill_loss(sim, net, x).loss
    parts = torch.stack([qsdk.distill_loss(sim, net, x[i : i + 1]).loss for i in range(2)])
    torch.testing.assert_close(whole, parts.mean())


@pytest.mark.parametrize("kind", ["mse", "cosine", "own"])
def test_sites_are_held_against_those_of_the_float_model(kind: str):
    sim, teacher = sim_of()
    wanted = float_sites(teacher.unwrap(), batch())
    seen: dict[str, Tensor] = {}

    def visit(site: str, x: Tensor) -> Tensor:
        seen[site] = sim.runtime.quantize(site, x)
        return seen[site].clone()

    with sim.training():
        with sim.runtime.in_phase("visit", visit):
            sim.model(batch())
        loss = F.l1_loss if kind == "own" else kind
        found = qsdk.distill_loss(
            sim, teacher, batch(), sites=("relu*", "add*"), site_loss=loss, site_weight=0.5, temperature=None
        )
        expected = {}
        for site, target in wanted.items():
            x = seen[site]
            expected[site] = {
                "mse": (x - target).square().sum() / target.square().sum(),
                "cosine": 1 - F.cosine_similarity(x, target, dim=-1).mean(),
                "own": (x - target).abs().mean(),
            }[kind]
        assert found.sites.keys() == wanted.keys()
        for site, value in expected.items():  # what is written over later counts as it was
            torch.testing.assert_close(found.sites[site], value)
        torch.testing.assert_close(found.loss, 0.5 * torch.stack(list(expected.values())).mean())
        assert found.logits is None


def gradients(sim: Any, teacher: Any, forward: Any = None) -> dict[str, Tensor]:
    with sim.training(learn_scales=True) as model:
        found = qsdk.distill_loss(sim, teacher, batch(), sites="relu*", temperature=2.0, forward=forward)
        found.loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_gradients_flow_to_the_student_alone_and_modes_stay():
    sim, teacher = sim_of("dropout")
    teacher.model.train()
    before = copy.deepcopy(teacher.model.state_dict())
    found = gradients(sim, teacher)
    assert {"body.first.weight", "body.second.weight", "head.weight"} <= found.keys()
    assert any(name.endswith("_log2") for name in found)
    assert teacher.model.training
    assert all(parameter.grad is None for parameter in teacher.model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in teacher.model.state_dict().items())
    assert sim.runtime.site_observer is None
    assert teacher.runtime.phase == "quantize"
    # the teacher drops nothing
    net = teacher.unwrap().train()
    with sim.training():
        one, other = (qsdk.distill_loss(sim, net, batch(), forward=lambda m, b: m(b)) for _ in range(2))
        assert not torch.equal(one.outputs, other.outputs)
    with torch.no_grad():
        assert torch.equal(teacher.model.eval()(batch()), teacher.model(batch()))
    assert net.training


def test_an_error_leaves_both_as_they_were():
    sim, teacher = sim_of()

    def failing(model: Any, x: Tensor) -> Tensor:
        if model is sim.model:
            raise ZeroDivisionError("mine")
        return model(x)

    with sim.training(), pytest.raises(ZeroDivisionError):
        qsdk.distill_loss(sim, teacher, batch(), sites="relu*", forward=failing)
    assert sim.runtime.site_observer is None
    assert teacher.runtime.phase == "quantize"


@pytest.mark.spread(1)
@pytest.mark.parametrize("how", ["dict", "object"])
def test_logits_are_found_by_name(how: str):
    sim, teacher = sim_of(how) if how == "dict" else sim_of()
    if how == "object":  # such as the outputs of transformers
        found = qsdk.distill_loss(sim, teacher, batch(), forward=lambda m, b: SimpleNamespace(logits=m(b), loss=None))
    else:
        found = qsdk.distill_loss(sim, teacher, batch())
    logits = found.outputs["logits"] if how == "dict" else found.outputs.logits
    teachers = qsdk.distill_loss(*sim_of(), batch())
    torch.testing.assert_close(logits, teachers.outputs)
    torch.testing.assert_close(found.loss, teachers.loss)


def test_meaningless_arguments_are_refused():
    sim, teacher = sim_of()
    net, (pair, other) = teacher.unwrap(), sim_of("pair")
    with pytest.raises(ModelError, match=r"gives 2 tensors; say which are the logits"):
        qsdk.distill_loss(pair, other, batch())
    assert qsdk.distill_loss(pair, other, batch(), logits=lambda out: out[0]).loss > 0
    with pytest.raises(ModelError, match=r"teacher = copy.deepcopy\(sim\), before training"):
        qsdk.distill_loss(sim, net, batch(), sites="relu*")
    with pytest.raises(ConfigError, match="nothing to distill"):
        qsdk.distill_loss(sim, net, batch(), temperature=None)
    with pytest.raises(ConfigError, match=r"temperature=0 must be positive"):
        qsdk.distill_loss(sim, net, batch(), temperature=0)
    with pytest.raises(ConfigError, match=r"sites='gelu\*' matches no activation"):
        qsdk.distill_loss(sim, teacher, batch(), sites=("relu*", "gelu*"))
    with pytest.raises(ConfigError, match="site_loss='huber' is unknown"):
        qsdk.distill_loss(sim, teacher, batch(), sites="relu*", site_loss="huber")
    with pytest.raises(DataError, match=r"shape \(8, 4\), the teacher's \(8, 7\)"):
        qsdk.distill_loss(sim, nn.Linear(6, 7), batch())
    with pytest.raises(DataError, match="the batch has 2 elements"):
        qsdk.distill_loss(sim, net, (batch(), torch.zeros(8)))
    with pytest.raises(ModelError, match=r"the teacher has no site body/relu.0:output"):
        qsdk.distill_loss(sim, qsdk.quantize(nn.Linear(6, 4), batch(), qsdk.w8a8()), batch(), sites="relu*")


@pytest.mark.spread(1)
@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_sites_inside_checkpointed_parts(how: str):
    sim, teacher = sim_of(how)
    if how == "reentrant":  # its first pass has no gradients, so a loss on what it shows would be silently lost
        with sim.training(), pytest.raises(ModelError, match=r"body/relu.0:output.* use_reentrant=False"):
            qsdk.distill_loss(sim, teacher, batch().requires_grad_(), sites="relu*")
        return
    found, expected = gradients(sim, teacher), gradients(*sim_of())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_a_compiled_student_has_the_same_gradients():
    sim, teacher = sim_of()
    expected = gradients(*sim_of())
    compiled = torch.compile(sim.model, fullgraph=True, backend="aot_eager")
    found = gradients(sim, teacher, lambda m, b: compiled(b) if m is sim.model else m(b))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_distillation_pulls_the_student_back_to_the_teacher():
    sim, teacher = sim_of()
    losses = []
    with sim.training(learn_scales=True):
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=3e-3))
        for number in range(60):
            found = qsdk.distill_loss(sim, teacher, batch(number), sites="relu*", temperature=2.0)
            optimizer.zero_grad()
            found.loss.backward()
            optimizer.step()
            losses.append(float(found.loss.detach()))
    assert sum(losses[-10:]) < 0.4 * sum(losses[:10])


def rank_work(rank: int, folder: str) -> None:
    def gradients() -> dict[str, Tensor | None]:
        sim, teacher = sim_of()
        with sim.training(learn_scales=True) as model:
            ddp = nn.parallel.DistributedDataParallel(model)
            part = batch()[4 * rank : 4 * rank + 4]
            forward = lambda m, b: ddp(b) if m is sim.model else m(b)  # noqa: E731
            qsdk.distill_loss(sim, teacher, part, temperature=2.0, forward=forward).loss.backward()
            return {name: p.grad for name, p in model.named_parameters() if not name.endswith("_log2")}

    found = in_process_group(gradients, rank=rank, size=2, store=f"{folder}/store")
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.mark.nightly
def test_two_ranks_have_the_gradient_of_one(tmp_path: Path):
    torch.multiprocessing.spawn(rank_work, (str(tmp_path),), nprocs=2)
    first, second = (pickle.loads((tmp_path / f"{n}.pickle").read_bytes()) for n in (0, 1))
    sim, teacher = sim_of()
    with sim.training(learn_scales=True) as model:
        qsdk.distill_loss(sim, teacher, batch(), temperature=2.0).loss.backward()
        for name, parameter in model.named_parameters():
            if name in first:
                assert torch.equal(first[name], second[name])
                torch.testing.assert_close(first[name], parameter.grad)
