"""Schedules of a training: held ranges, and a function of one's own."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor, nn

import qsdk
from qsdk import ConfigError

CNN_SITES = ("1:output", "3:output")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(*layers).eval()


def batch(seed: int = 0, size: int = 6, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(size, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


@functools.cache
def made(config: str) -> Any:
    return qsdk.quantize(network(), batch(), getattr(qsdk, config)())


def sim_of(config: str = "w8a8", *, calibrated: bool = True, model: nn.Module | None = None) -> Any:
    sim = copy.deepcopy(made(config)) if model is None else qsdk.quantize(model, batch(), getattr(qsdk, config)())
    if calibrated:
        qsdk.calibrate(sim, [batch(1)], progress=False)
    return sim


def sgd(sim: Any, lr: float = 0.05, scale_lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(sim.parameter_groups(lr=lr, scale_lr=scale_lr), momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> float:
    optimizer.zero_grad()
    losses = [model(x).square().mean() for x in inputs]
    for loss in losses:
        loss.backward()
    optimizer.step()
    return float(sum(losses).detach())


def same(one: Any, other: Any) -> bool:
    return one.encodings == other.encodings


def assert_in_order(sim: Any) -> None:
    assert not sim.model.training
    assert sim.runtime.schedule_state is None
    assert not any(q.learned_names for q in sim.quantizers.values())
    assert not any(name in key for key in sim.model.state_dict() for name in ("_log2", "qsdk_steps"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qsdk.train.freeze_ranges(3, until=3), "holds nothing"),
        (lambda: qsdk.train.freeze_ranges(0, "nowhere"), r"freeze_ranges\('nowhere'\) matches no owner"),
    ],
)
def test_bad_schedules_are_refused_and_leave_the_sim_as_it_was(make: Any, message: str):
    sim = sim_of("w4a8")
    before = sim.encodings
    with pytest.raises(ConfigError, match=message), sim.training(learn_scales=True, schedules=[make()]):
        pass
    assert_in_order(sim)
    assert sim.encodings == before


def test_outside_a_training_block_schedules_are_refused():
    with pytest.raises(ConfigError, match=r"use it inside sim.training\(\)"):
        qsdk.train.freeze_ranges(0)(sim_of(), 0)


# holding


def test_held_ranges_do_not_move_while_the_others_do():
    sim = sim_of()
    schedules = [qsdk.train.freeze_ranges(2, "activations"), qsdk.train.freeze_ranges(0, "weights", until=2)]
    with sim.training(learn_scales=True, schedules=schedules) as model:
        optimizer = sgd(sim, lr=0.0, scale_lr=50.0)  # momentum goes on without a gradient
        for number in range(5):
            before = sim.encodings
            step(model, optimizer, batch(number))
            moved = {site for site, encoding in sim.encodings.items() if encoding != before[site]}
            assert ("0:weight" in moved) == (number >= 2)
            assert ("1:output" in moved) == (number < 2)
    assert not sim.encodings["1:output"].frozen


# any callable


def test_schedules_are_plain_callables_for_ones_own_loop():
    given, own = sim_of("w4a8"), sim_of("w4a8")

    def schedules() -> list[Any]:
        return [qsdk.train.freeze_ranges(1, "weights", until=3), qsdk.train.freeze_ranges(4)]

    with given.training(learn_scales=True, schedules=schedules()) as model:
        optimizer = sgd(given)
        losses = [step(model, optimizer, batch(number)) for number in range(6)]
    with own.training(learn_scales=True) as model:
        optimizer, mine, found = sgd(own), schedules(), []
        for schedule in mine:
            schedule(own, 0)
        for number in range(6):
            found.append(step(model, optimizer, batch(number)))
            for schedule in mine:
                schedule(own, number + 1)
    assert found == losses
    assert same(given, own)


def test_a_lambda_is_a_schedule_and_its_error_comes_through():
    sim, seen = sim_of(), []
    with sim.training(schedules=[lambda s, n: seen.append((s is sim, n)), lambda s, n: n == 1 and s.freeze("weights")]):
        step(sim.model, sgd(sim), batch())
        step(sim.model, sgd(sim), batch())
    assert seen == [(True, 0), (True, 1), (True, 1)] or seen == [(True, 0), (True, 1), (True, 2)]
    assert sim.encodings["0:weight"].frozen

    def failing(_: Any, number: int) -> None:
        if number == 2:
            raise ZeroDivisionError("mine")

    sim = sim_of("w4a8")
    block = sim.training(learn_scales=True, schedules=[qsdk.train.freeze_ranges(0, "weights"), failing])
    taken = []

    def train() -> None:
        with block as model:
            optimizer = sgd(sim)
            for number in range(5):
                taken.append(step(model, optimizer, batch(number)))

    with pytest.raises(ZeroDivisionError, match="mine"):
        train()
    assert len(taken) == 1  # it was raised by the second step of the optimizer
    assert_in_order(sim)
    with sim.training(learn_scales=True) as model:
        step(model, sgd(sim), batch())


def test_a_copy_in_the_middle_is_independent():
    sim = sim_of("w4a8")
    with sim.training(learn_scales=True, schedules=[qsdk.train.freeze_ranges(1, "weights")]) as model:
        optimizer = sgd(sim)
        step(model, optimizer, batch())
        average, kept = copy.deepcopy(model), copy.deepcopy(sim)
        average.eval()
        before = average(batch(7)).detach()
        step(model, optimizer, batch(1, factor=5.0))
        assert torch.equal(average(batch(7)), before)
        assert kept.encodings != sim.encodings
        assert_in_order(kept)
