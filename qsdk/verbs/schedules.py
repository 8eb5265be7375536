"""Schedules for training: callables `schedule(sim, step)`, for `sim.training(schedules=[...])` or for one's own loop.

Each sets the state that belongs to a number of optimizer steps, and may be called with any number, so that training can
be resumed. Their changes end with the training block. A function of one's own can be a schedule as well.
"""

from collections.abc import Callable
from dataclasses import dataclass

from qsdk.core.errors import ConfigError
from qsdk.core.sims.state import matched_owners
from qsdk.core.sims.stateful import require_sim
from torch_bridge.sim import QuantSim
from torch_bridge.training.training import ScheduleState

Schedule = Callable[[QuantSim, int], None]


def freeze_ranges(after: int, match: str = "*", *, until: int | None = None) -> Schedule:
    """Return a schedule that holds ranges from some optimizer step on: they are not learned.

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
        >>> with sim.training(learn_scales=True, schedules=[qsdk.train.freeze_ranges(after=100)]) as model:
        ...     _ = model(x)  # the loop of your training
    """
    if after < 0 or (until is not None and until <= after):
        raise ConfigError(f"freeze_ranges({after}, until={until}) holds nothing; give steps from 0, in order")
    return _FreezeRanges(after, match, until)


@dataclass(frozen=True, eq=False)
class _FreezeRanges:
    after: int
    match: str
    until: int | None

    def __call__(self, sim: QuantSim, step: int) -> None:
        require_sim(sim)
        state = sim.runtime.schedule_state if isinstance(sim, QuantSim) else None
        if not isinstance(state, ScheduleState):
            raise ConfigError(
                "a schedule changes a sim of an nn.Module while it is trained; use it inside sim.training()"
            )
        holding = step >= self.after and (self.until is None or step < self.until)
        if holding == (self in state.held) and step > 0:
            return
        matched = matched_owners(sim.plan, self.match, "freeze_ranges")  # also at step 0, for its errors
        if holding:
            state.held[self] = frozenset(matched)
        else:
            state.held.pop(self, None)
