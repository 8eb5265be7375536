"""Schedules for training: callables `schedule(sim, step)`, for `sim.training(schedules=[...])` or for one's own loop.

Each sets the state that belongs to a number of optimizer steps, and may be called with any number, so that training can
be resumed. Their changes end with the training block. A function of one's own can be a schedule as well.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from qsdk.algorithms.ranks import all_reduce_max
from qsdk.core.errors import ConfigError
from qsdk.core.ranges.estimators import MOMENTUM
from qsdk.core.sims.state import matched_owners
from qsdk.core.sims.stateful import require_sim
from torch_bridge.calibrate import install
from torch_bridge.quantizers.wider_grid import finer_grid
from torch_bridge.sim import QuantSim
from torch_bridge.training.schedule_state import ScheduleState
from torch_bridge.tuning.moving_ranges import RangeObserver

Schedule = Callable[[QuantSim, int], None]

_WIDEST = 16


def observe_ranges(steps: int, *, momentum: float = MOMENTUM) -> Schedule:
    """Return a schedule that lets the ranges of activations follow the data of the first optimizer steps.

    Each step moves them towards the extremes of its forward passes in train mode, as
    `calibrate(method="moving_average")` does; a step quantizes with the ranges that the step before has left. Under
    `torchrun` the extremes are those of all ranks. Learning the ranges of these sites starts when observing stops:
    until then their gradient is 0 and no optimizer moves them. A sim that is not calibrated starts with float
    activations, which have ranges from the first step on (with `learn_scales` under DistributedDataParallel, calibrate
    it first: learned parameters take no part in that first step). Fixed and frozen ranges stay.

    Args:
        steps: number of optimizer steps.
        momentum: weight of the newest extremes, 0 to 1.

    Raises:
        ConfigError: an option out of its bounds; when called, no training block.
        DataError: when called, NaN or inf at a site; the training block ends in order.

    Examples:
        >>> schedule = observe_ranges(500)  # with sim.training(learn_scales=True, schedules=[schedule]): ...
    """
    if steps < 1:
        raise ConfigError(f"observe_ranges({steps}) observes nothing; give the number of steps, from 1")
    _require_momentum(momentum)
    return _ObserveRanges(steps, momentum)


@contextmanager
def observing(sim: QuantSim, *, momentum: float = MOMENTUM) -> Iterator[None]:
    """Observe the ranges of activations on the data that is trained on inside the block; see `observe_ranges`.

    Args:
        sim: in a training block.
        momentum: weight of the newest extremes, 0 to 1.

    Raises:
        ConfigError: no training block, or ranges are observed already.
        DataError: NaN or inf at a site.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(4, 2), x := torch.randn(8, 4))
        >>> with sim.training() as model, qsdk.observing(sim):
        ...     _ = model(x)
        >>> len(sim.encodings)
        4
    """
    require_sim(sim)
    _require_momentum(momentum)
    state = schedule_state_of(sim)
    if state.observer is not None:
        raise ConfigError("ranges are being observed already; end that first")
    observer = _start(sim, state, momentum)

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        own = {id(parameter) for parameter in sim.model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            _moved(sim, state, observer)

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield
        _moved(sim, state, observer)
    finally:
        handle.remove()
        _stop(sim, state, observer)


def freeze_ranges(after: int, match: str = "*", *, until: int | None = None) -> Schedule:
    """Return a schedule that holds ranges from some optimizer step on: they are neither learned nor observed.

    It holds them inside the training block only; `sim.freeze` outside of it does so for good.

    Args:
        after: number of optimizer steps.
        match: as in `sim.freeze`: a pattern of owners or sites, `weights` or `activations`.
        until: the step after which they move again; None for never.

    Raises:
        ConfigError: an empty span; when called, nothing matches, or no training block.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x := torch.randn(64, 8))
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> with sim.training(learn_scales=True, schedules=[qsdk.freeze_ranges(after=100)]) as model:
        ...     _ = model(x)  # the loop of your training
    """
    if after < 0 or (until is not None and until <= after):
        raise ConfigError(f"freeze_ranges({after}, until={until}) holds nothing; give steps from 0, in order")
    return _FreezeRanges(after, match, until)


def anneal_bits(bits: Mapping[int, int], match: str = "weights") -> Schedule:
    """Return a schedule that narrows integer grids during training, down to those of the plan.

    Inside the training block a site may have a grid of more bits than its own, over the same range. Its encoding, also
    in a checkpoint, is always that of its own grid. A site with more bits than asked for keeps its own.

    Args:
        bits: step -> bits from there on, such as `{0: 8, 500: 6, 1000: 4}`; the last are those of the plan.
        match: as in `sim.freeze`: a pattern of owners or sites, `weights` or `activations`.

    Raises:
        ConfigError: no bits for step 0, or bits outside 2..16; when called, nothing with an integer grid matches, a
            site would not end on its own grid, or no training block.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x := torch.randn(64, 8), "w4a8")
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> with sim.training(schedules=[qsdk.anneal_bits({0: 8, 500: 6, 1000: 4})]) as model:
        ...     _ = model(x)  # the loop of your training
    """
    ordered = dict(sorted(bits.items()))
    if 0 not in ordered:
        raise ConfigError(f"anneal_bits({dict(bits)}) does not say how to start; give the bits from step 0 on")
    if min(ordered) < 0 or not all(2 <= some <= _WIDEST for some in ordered.values()):
        raise ConfigError(f"anneal_bits({dict(bits)}): steps count from 0, and grids have 2 to {_WIDEST} bits")
    return _AnnealBits(ordered, match)


def schedule_state_of(sim: QuantSim) -> ScheduleState:
    """Return the changes that schedules have made to a sim in training.

    Raises:
        ConfigError: it is not.
    """
    require_sim(sim)
    state = sim.runtime.schedule_state if isinstance(sim, QuantSim) else None
    if not isinstance(state, ScheduleState):
        raise ConfigError("a schedule changes a sim of an nn.Module while it is trained; use it inside sim.training()")
    return state


@dataclass(frozen=True, eq=False)
class _ObserveRanges:
    steps: int
    momentum: float

    def __call__(self, sim: QuantSim, step: int) -> None:
        state = schedule_state_of(sim)
        observer = state.observer
        if not isinstance(observer, RangeObserver):
            if step < self.steps:
                _start(sim, state, self.momentum).step = step
            return
        if step > observer.step:
            _moved(sim, state, observer)
        else:  # back to a checkpoint
            observer.forget()
        observer.step = step
        if step >= self.steps:
            _stop(sim, state, observer)


@dataclass(frozen=True, eq=False)
class _FreezeRanges:
    after: int
    match: str
    until: int | None

    def __call__(self, sim: QuantSim, step: int) -> None:
        state = schedule_state_of(sim)
        holding = step >= self.after and (self.until is None or step < self.until)
        if holding == (self in state.held) and step > 0:
            return
        matched = matched_owners(sim.plan, self.match, "freeze_ranges")  # also at step 0, for its errors
        if holding:
            state.held[self] = frozenset(matched)
        else:
            state.held.pop(self, None)


@dataclass(frozen=True, eq=False)
class _AnnealBits:
    bits: Mapping[int, int]
    match: str

    def __call__(self, sim: QuantSim, step: int) -> None:
        state = schedule_state_of(sim)
        now = self.bits[max(known for known in self.bits if known <= step)]
        if state.bits.get(self) == now:
            return
        matched = set(matched_owners(sim.plan, self.match, "anneal_bits"))
        last, grids = list(self.bits.values())[-1], []
        for quantizer in sim.quantizers.values():
            spec = quantizer.decision.spec
            if (
                quantizer.decision.encoding_site not in matched
                or quantizer.decision.bias_of is not None
                or spec is None
            ):
                continue
            if not spec.dtype.is_integer:
                continue
            if last > spec.dtype.bits:
                raise ConfigError(
                    f"anneal_bits ends at {last} bits, but {quantizer.site} has {spec.dtype.bits} in the plan; end "
                    "there, or leave it out of the match"
                )
            grids.append((quantizer, finer_grid(spec, now)))
        if not grids:
            raise ConfigError(f"anneal_bits: {self.match!r} matches no site with an integer grid")
        for quantizer, finer in grids:
            quantizer.finer_grid = finer
        state.bits[self] = now


def _require_momentum(momentum: float) -> None:
    if not 0 < momentum <= 1:
        raise ConfigError(f"momentum={momentum} is outside 0..1; 0.1 moves a range by a tenth of the way each step")


def _start(sim: QuantSim, state: ScheduleState, momentum: float) -> RangeObserver:
    observer = state.observer = RangeObserver(sim, momentum, all_reduce_max)
    state.held[observer] = frozenset(observer.ranges)
    return observer


def _moved(sim: QuantSim, state: ScheduleState, observer: RangeObserver) -> None:
    others = [sites for who, sites in state.held.items() if who is not observer]
    observer.update(sim, frozenset().union(*others))


def _stop(sim: QuantSim, state: ScheduleState, observer: RangeObserver) -> None:
    state.observer = None
    state.held.pop(observer, None)
    observer.close()
    install(sim, {})  # makes room for biases that narrower ranges may have left none
