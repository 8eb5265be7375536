"""Schedules of a training: observed ranges, held ranges, annealed bits, and a function of one's own."""

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
from rank_group import in_process_group
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import qsdk
from qsdk.core.errors import CalibrationError, ConfigError, DataError
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DTYPES, dtype_named
from qsdk.core.numerics.spec import Spec
from qsdk.core.ranges.ranges import Range, encoding_from_range
from torch_bridge.quantizers.wider_grid import finer_grid

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


# observing


def extremes(sim: Any, x: Tensor) -> dict[str, tuple[float, float]]:
    """What every site shows in a forward pass of the model as it is."""
    found = {}

    def visit(site: str, value: Tensor) -> Tensor:
        found[site] = float(value.detach().min()), float(value.detach().max())
        return sim.runtime.quantize(site, value)

    with sim.runtime.in_phase("visit", visit), torch.no_grad():
        sim.model(x)  # what the same batch brings twice counts once
    return found


@pytest.mark.slow
def test_observed_ranges_are_the_moving_average_of_the_training_batches():
    sim = sim_of()
    specs = {site: sim.plan.decisions[site].spec for site in CNN_SITES}
    averages = {site: (sim.encodings[site].low, sim.encodings[site].high) for site in CNN_SITES}
    with sim.training(schedules=[qsdk.observe_ranges(4, momentum=0.25)]) as model:
        optimizer = sgd(sim)
        for number in range(6):
            before, x = sim.encodings, batch(number + 5, factor=1.5)
            seen = extremes(sim, x)
            step(model, optimizer, x)
            for site in CNN_SITES:
                if number >= 4:  # observing has ended
                    assert sim.encodings[site] == before[site]
                    continue
                ends = zip(averages[site], seen[site], strict=True)
                low, high = (old + np.float32(0.25) * (np.float32(new) - old) for old, new in ends)
                averages[site] = low, high
                assert sim.encodings[site] == encoding_from_range(Range(low, high), specs[site])
                assert sim.encodings[site] != before[site]
    assert all(sim.quantizers[site].input_observer is None for site in sim.quantizers)
    assert not any("qsdk_ranges" in name for name in sim.model.state_dict())


def test_a_sim_that_is_not_calibrated_starts_in_float_and_takes_its_ranges_from_the_first_step():
    sim, reference = sim_of(calibrated=False), network()
    x = batch(2)
    with sim.training(learn_scales=True, schedules=[qsdk.observe_ranges(1)]) as model:
        weights = [sim.quantizers[f"{i}:weight"] for i in (0, 2, 5)]
        for i, quantizer in zip((0, 2, 5), weights, strict=True):
            reference[i].weight.data = quantizer(reference[i].weight.data).detach()
        assert torch.equal(model(x), reference(x))
        seen = extremes(sim, x)
        step(model, sgd(sim, lr=0.0, scale_lr=0.0), x)
        assert not torch.equal(model(x), reference(x))
    for site in (*CNN_SITES, "input:input"):
        spec = sim.plan.decisions[site].spec
        low, high = (np.array([end], np.float32) for end in seen[site])
        assert sim.encodings[site] == encoding_from_range(Range(low, high), spec)


def test_a_dead_channel_leaves_its_bias_room_when_the_first_range_is_found():
    model = network()
    with torch.no_grad():
        model[0].weight[1] = 0
        model[0].bias[1] = 3.0
    sim = sim_of(calibrated=False, model=model)
    with sim.training(schedules=[qsdk.observe_ranges(1)]) as trained:
        step(trained, sgd(sim, lr=0.0), batch())
    bias = sim.quantizers["0:bias"](sim.model[0].bias.detach())
    torch.testing.assert_close(bias, model[0].bias.detach(), rtol=1e-3, atol=1e-3)


def test_evaluation_inside_the_block_is_not_observed():
    sim = sim_of()
    with sim.training(schedules=[qsdk.observe_ranges(5)]) as model:
        optimizer = sgd(sim, lr=0.0)
        model.eval()
        with torch.no_grad():
            model(batch(3, factor=100.0))
        model.train()
        step(model, optimizer, batch(1))
    assert float(sim.encodings["input:input"].high[0]) < 10


def test_micro_batches_of_a_step_count_as_one_batch():
    one, many = sim_of(), sim_of()
    x = batch(4, size=8, factor=2.0)
    for sim, parts in ((one, [x]), (many, list(x.split(2)))):
        with sim.training(schedules=[qsdk.observe_ranges(2)]) as model:
            step(model, sgd(sim, lr=0.0), *parts)
    assert same(one, many)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None):
        super().__init__()
        self.body, self.head, self.reentrant = network()[:4], network()[4:], reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is not None and self.training:
            return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))
        return self.head(self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("calibrated", [True, False])
def test_recomputation_does_not_observe_twice(reentrant: bool, calibrated: bool):
    found = []
    for setting in (None, reentrant):
        sim = sim_of(model=Checkpointed(setting), calibrated=calibrated)
        with sim.training(learn_scales=True, schedules=[qsdk.observe_ranges(2)]) as model:
            optimizer = sgd(sim)
            losses = [step(model, optimizer, batch(i, factor=1.0 + i).requires_grad_()) for i in range(4)]
        found.append((losses, sim))
    assert found[0][0] == found[1][0]
    assert same(found[0][1], found[1][1])


def test_learning_starts_where_observing_stops():
    sim = sim_of()
    learned = {"input:input", *CNN_SITES}
    with sim.training(learn_scales=True, schedules=[qsdk.observe_ranges(2)]) as model:
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=1e-3, scale_lr=1e-2))
        factors = {s: sim.quantizers[s].owner._parameters[sim.quantizers[s].log_scale_name] for s in learned}
        weights = sim.quantizers["0:weight"].owner._parameters[sim.quantizers["0:weight"].log_scale_name]
        for number in range(4):
            model(batch(number)).square().mean().backward()
            for parameter in factors.values():
                assert bool(parameter.grad.any()) == (number >= 2)
            assert weights.grad.any()
            optimizer.step()
            for parameter in factors.values():
                assert bool(parameter.any()) == (number >= 2)
                assert (parameter in optimizer.state) == (number >= 2)
            optimizer.zero_grad()


def test_frozen_and_fixed_ranges_stay():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(torch.relu(self.fc(x)), -1)

    sim = qsdk.quantize(Model(), torch.randn(3, 4), qsdk.w8a8())
    qsdk.calibrate(sim, [torch.randn(8, 4)], progress=False)
    sim.freeze("relu*")
    before = sim.encodings
    with sim.training(schedules=[qsdk.observe_ranges(2)]) as model:
        step(model, sgd(sim), torch.randn(8, 4) * 3)
    changed = {site for site, encoding in sim.encodings.items() if encoding != before[site]}
    assert "softmax.0:output" in before
    assert changed == {"x:input", "fc:bias"} | ({"fc:output"} & set(before))


def test_nan_while_observing_names_the_site_and_leaves_the_sim_in_order():
    sim = sim_of()
    block = sim.training(learn_scales=True, schedules=[qsdk.observe_ranges(5)])
    with pytest.raises(DataError, match=r"NaN or inf at the site input:input while its range is observed"), block as m:
        step(m, sgd(sim), batch() * torch.inf)
    assert_in_order(sim)


def assert_in_order(sim: Any) -> None:
    assert not sim.model.training
    assert sim.runtime.schedule_state is None
    assert all(
        q.input_observer is None and q.finer_grid is None and not q.learned_names for q in sim.quantizers.values()
    )
    assert not any(name in key for key in sim.model.state_dict() for name in ("_log2", "qsdk_steps", "qsdk_ranges"))


def test_observing_is_a_context_manager_too():
    by_hand, scheduled = sim_of(), sim_of()
    with by_hand.training(learn_scales=True) as model:
        optimizer = sgd(by_hand)
        with qsdk.observing(by_hand, momentum=0.3):
            for number in range(3):
                step(model, optimizer, batch(number, factor=2.0))
            with pytest.raises(ConfigError, match="observed already"), qsdk.observing(by_hand):
                pass
        for number in range(3):
            step(model, optimizer, batch(number))
    with scheduled.training(learn_scales=True, schedules=[qsdk.observe_ranges(3, momentum=0.3)]) as model:
        optimizer = sgd(scheduled)
        for number in (0, 1, 2):
            step(model, optimizer, batch(number, factor=2.0))
        for number in range(3):
            step(model, optimizer, batch(number))
    assert same(by_hand, scheduled)


def test_a_site_that_no_batch_reaches_stays_uncalibrated():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.extra, self.skips = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            return x if self.skips else self.extra(torch.relu(x))

    sim = qsdk.quantize(Model(), torch.randn(3, 4), qsdk.w8a8())
    sim.model.skips = True
    with sim.training(schedules=[qsdk.observe_ranges(2)]) as model:
        step(model, sgd(sim), torch.randn(8, 4))
    ready = sim.ready()
    assert ready["x:input"]
    assert not ready["extra:output"]
    assert not ready["extra:bias"]


def test_before_its_first_step_an_uncalibrated_sim_is_not_ready():
    sim = sim_of(calibrated=False)
    schedules = [qsdk.observe_ranges(3), lambda s, n: s.freeze("weights") if n == 0 else None]
    with sim.training(schedules=schedules) as model:
        assert not sim.ready()["1:output"]
        assert sim.ready()["0:weight"]
        with pytest.raises(CalibrationError, match=r"no encoding: .*1:output"):
            _ = sim.encodings
        sim.unfreeze("weights")  # takes the state of the sim, and gives it back
        step(model, sgd(sim), batch())
        assert all(sim.ready().values())
        with pytest.raises(ConfigError, match="leave the training block before you change the plan"):
            sim.set_precision("0:weight", "int4")
    assert all(sim.ready().values())
    assert sim.encodings["0:weight"].dtype.name == "int8"


def test_a_sim_without_activations_has_nothing_to_observe():
    sim = qsdk.quantize(network(), batch(), qsdk.weight_only("int4"))
    qsdk.calibrate(sim, [batch()], progress=False)
    before = sim.encodings
    with sim.training(schedules=[qsdk.observe_ranges(2)]) as model:
        step(model, sgd(sim, lr=0.0), batch())
    assert sim.encodings == before


# annealing

GRIDS = [
    (name, bits, symmetric)
    for name in ("int4", "uint4", "int2", "uint2", "int8", "uint8", "int4_strict")
    for bits in (3, 5, 8, 12)
    for symmetric in (True, False)
    if bits > int("".join(c for c in name if c.isdigit()))
]


@pytest.mark.parametrize(("name", "bits", "symmetric"), GRIDS)
def test_a_finer_grid_covers_the_same_range(name: str, bits: int, symmetric: bool):
    spec = Spec(dtype_named(name), symmetric=symmetric)
    for low, high in ((-1.3, 2.1), (0.0, 3.7), (-0.4, 0.0)):
        own = encoding_from_range(Range(np.float32([low]), np.float32([high])), spec)
        finer = finer_grid(spec, bits)
        scale, zero = finer(torch.from_numpy(own.scale), torch.from_numpy(own.zero_point.astype(np.float32)))
        assert float(zero) == round(float(zero))
        assert finer.dtype.lo <= float(zero) <= finer.dtype.hi
        assert finer.dtype.bits == bits
        for end, grid_end in ((own.low, finer.dtype.lo), (own.high, finer.dtype.hi)):
            assert float((grid_end - zero) * scale) == pytest.approx(float(end[0]), abs=0.501 * float(scale))


@pytest.mark.slow
def test_bits_are_annealed_down_to_those_of_the_plan():
    sim, plain = sim_of("w4a8"), sim_of("w4a8")
    raw = sim.model._modules["0"]._parameters["weight"]
    schedules = [qsdk.anneal_bits({0: 8, 1: 6, 3: 4})]
    levels = []
    with sim.training(schedules=schedules) as model:
        optimizer = sgd(sim, lr=0.0)
        for number in range(4):
            quantizer = sim.quantizers["0:weight"]
            with torch.no_grad():
                y = quantizer(raw)
            levels.append(quantizer.finer_grid.dtype.bits if quantizer.finer_grid else 4)
            base = sim.encodings["0:weight"]
            assert base == plain.encodings["0:weight"]  # the encoding is always the plan's
            dtype = DTYPES[f"int{levels[-1]}"]
            scale = torch.from_numpy(base.scale).reshape(-1, 1, 1, 1) / ((dtype.hi - dtype.lo) / 15)
            zero = torch.full_like(scale, {8: 8, 6: 2, 4: 0}[levels[-1]])  # -8 is the lowest, exactly or nearly
            assert torch.equal(y, affine.fake_quantize(raw.detach(), scale, zero, dtype.lo, dtype.hi))
            step(model, optimizer, batch(number))
    assert levels == [8, 6, 6, 4]
    assert_in_order(sim)
    assert torch.equal(sim(batch(9)), plain(batch(9)))


def test_a_block_that_ends_early_leaves_the_grid_of_the_plan():
    sim, plain = sim_of("w4a8"), sim_of("w4a8")
    with sim.training(schedules=[qsdk.anneal_bits({0: 8, 100: 4})]) as model:
        model.eval()
        assert not torch.equal(model(batch(9)), plain(batch(9)))
    assert_in_order(sim)
    assert torch.equal(sim(batch(9)), plain(batch(9)))


def test_activations_and_patterns_can_be_annealed_and_wider_sites_stay():
    config = qsdk.QuantConfig(weight=qsdk.int4, activation=qsdk.uint4).override("5", weight="int8")
    sim = qsdk.quantize(network(), batch(), config)
    qsdk.calibrate(sim, [batch()], progress=False)
    schedules = [qsdk.anneal_bits({0: 6, 5: 4}), qsdk.anneal_bits({0: 8, 5: 4}, "1:output")]
    with sim.training(schedules=schedules):
        bits = {site: q.finer_grid.dtype.name for site, q in sim.quantizers.items() if q.finer_grid is not None}
    assert bits == {"0:weight": "int6", "2:weight": "int6", "1:output": "uint8"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qsdk.anneal_bits({5: 4}), "does not say how to start"),
        (lambda: qsdk.anneal_bits({0: 32, 5: 4}), "2 to 16 bits"),
        (lambda: qsdk.anneal_bits({0: 8, 5: 6}), r"ends at 6 bits, but 0:weight has 4 in the plan"),
        (lambda: qsdk.anneal_bits({0: 8}, "nowhere"), r"anneal_bits\('nowhere'\) matches no owner"),
        (lambda: qsdk.freeze_ranges(3, until=3), "holds nothing"),
        (lambda: qsdk.freeze_ranges(0, "nowhere"), r"freeze_ranges\('nowhere'\) matches no owner"),
        (lambda: qsdk.observe_ranges(0), "observes nothing"),
        (lambda: qsdk.observe_ranges(3, momentum=0.0), "momentum=0.0 is outside"),
    ],
)
def test_bad_schedules_are_refused_and_leave_the_sim_as_it_was(make: Any, message: str):
    sim = sim_of("w4a8")
    before = sim.encodings
    with pytest.raises(ConfigError, match=message), sim.training(learn_scales=True, schedules=[make()]):
        pass
    assert_in_order(sim)
    assert sim.encodings == before


@pytest.mark.parametrize(
    "schedule", [qsdk.observe_ranges(3), qsdk.freeze_ranges(0), qsdk.anneal_bits({0: 8})], ids=["o", "f", "a"]
)
def test_outside_a_training_block_schedules_are_refused(schedule: Any):
    with pytest.raises(ConfigError, match=r"use it inside sim.training\(\)"):
        schedule(sim_of(), 0)


# holding


def test_held_ranges_do_not_move_while_the_others_do():
    sim = sim_of()
    schedules = [qsdk.freeze_ranges(2, "activations"), qsdk.freeze_ranges(0, "weights", until=2)]
    with sim.training(learn_scales=True, schedules=schedules) as model:
        optimizer = sgd(sim, lr=0.0, scale_lr=50.0)  # momentum goes on without a gradient
        for number in range(5):
            before = sim.encodings
            step(model, optimizer, batch(number))
            moved = {site for site, encoding in sim.encodings.items() if encoding != before[site]}
            assert ("0:weight" in moved) == (number >= 2)
            assert ("1:output" in moved) == (number < 2)
    assert not sim.encodings["1:output"].frozen


def test_held_ranges_are_not_observed():
    sim = sim_of()
    before = sim.encodings
    with sim.training(schedules=[qsdk.observe_ranges(3), qsdk.freeze_ranges(0, "1:output")]) as model:
        step(model, sgd(sim), batch(3, factor=3.0))
    assert sim.encodings["1:output"] == before["1:output"]
    assert sim.encodings["3:output"] != before["3:output"]


# any callable


def test_schedules_are_plain_callables_for_ones_own_loop():
    given, own = sim_of("w4a8"), sim_of("w4a8")

    def schedules() -> list[Any]:
        return [qsdk.observe_ranges(2), qsdk.anneal_bits({0: 6, 3: 4}), qsdk.freeze_ranges(4)]

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
    block = sim.training(learn_scales=True, schedules=[qsdk.observe_ranges(9), qsdk.anneal_bits({0: 8, 9: 4}), failing])
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
    schedules = [qsdk.observe_ranges(3), qsdk.anneal_bits({0: 8, 3: 4})]
    with sim.training(learn_scales=True, schedules=schedules) as model:
        optimizer = sgd(sim)
        step(model, optimizer, batch())
        average, kept = copy.deepcopy(model), copy.deepcopy(sim)
        average.eval()
        before = average(batch(7)).detach()
        step(model, optimizer, batch(1, factor=5.0))
        assert torch.equal(average(batch(7)), before)
        assert kept.encodings != sim.encodings
        assert_in_order(kept)


# the compiler


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning")
def test_observing_and_annealing_under_a_compiler_agree_with_eager():
    found = []
    for compiled in (False, True):
        sim = sim_of("w4a8")
        schedules = [qsdk.observe_ranges(2), qsdk.anneal_bits({0: 8, 3: 4}), qsdk.freeze_ranges(4)]
        with sim.training(learn_scales=True, schedules=schedules) as model:
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            optimizer = sgd(sim)
            losses = [step(run, optimizer, batch(number)) for number in range(6)]
        found.append((losses, sim.encodings))
    (eager, one), (compiled_losses, other) = found
    assert compiled_losses == pytest.approx(eager, rel=1e-5)
    for site, encoding in one.items():
        np.testing.assert_allclose(other[site].scale, encoding.scale, rtol=1e-4)
        assert np.array_equal(other[site].zero_point, encoding.zero_point)


# ranks


def rank_work(rank: int, folder: str) -> None:
    def trained() -> tuple[dict[str, tuple[bytes, bytes]], list[float]]:
        sim = sim_of()
        with sim.training(learn_scales=True, schedules=[qsdk.observe_ranges(2)]) as model:
            ddp = nn.parallel.DistributedDataParallel(model)
            optimizer = sgd(sim)
            for number in range(4):
                step(ddp, optimizer, batch(10 * number + rank, factor=1.0 + 2 * rank))
                if number == 1:
                    observed = sim.encodings["1:output"].high.tolist()
        return {site: (e.scale.tobytes(), e.zero_point.tobytes()) for site, e in sim.encodings.items()}, observed

    found = in_process_group(trained, rank=rank, size=2, store=f"{folder}/store")
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))


@pytest.mark.slow
def test_ranks_observe_the_ranges_of_all_and_learn_the_same(tmp_path: Path):
    torch.multiprocessing.spawn(rank_work, (str(tmp_path),), nprocs=2)
    (first, high), (second, other) = (pickle.loads((tmp_path / f"{n}.pickle").read_bytes()) for n in (0, 1))
    assert first == second
    assert high == other
    alone = sim_of()
    with alone.training(schedules=[qsdk.observe_ranges(2)]) as model:
        for number in range(2):
            step(model, sgd(alone, lr=0.0), batch(10 * number))
    assert alone.encodings["1:output"].high[0] < high[0]  # the other rank's data is three times as large
