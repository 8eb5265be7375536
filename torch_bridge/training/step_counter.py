"""The step counter of a training: it counts steps of the user's own optimizer and calls schedules."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torch_bridge.torch_values.parameters import STEPS

Schedule = Callable[[int], None]


def steps_of(model: nn.Module) -> int:
    """Return the optimizer steps of this training so far; those of a checkpoint that was loaded count."""
    buffer = model._buffers[STEPS]
    assert buffer is not None
    return int(buffer)


class _LoadHook:
    """A hook that is called when a checkpoint was loaded; in a copy of the model it does nothing."""

    def __init__(self, notify: Callable[[], None] | None = None) -> None:
        self._notify = notify

    def __call__(self, *_: Any) -> None:
        if self._notify is not None:
            self._notify()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LoadHook, ()


@contextmanager
def counting_steps(model: nn.Module, schedules: Sequence[Schedule]) -> Iterator[None]:
    """Call every schedule with 0 now, and with the number of steps after each step and after a checkpoint is loaded.

    Only the first optimizer that steps any parameter of the model is counted: neither gradient accumulation, nor a step
    that a GradScaler leaves out, nor a second optimizer for the scales changes the count.
    """
    counted_optimizer: list[ref[torch.optim.Optimizer]] = []

    def notify(*_: Any) -> None:
        if schedules:  # reading the count waits for a GPU
            steps = steps_of(model)
            for schedule in schedules:
                schedule(steps)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step of the first optimizer that steps the model, and tell the schedules."""
        counted = counted_optimizer[0]() if counted_optimizer else None
        if counted is None:
            own = {id(parameter) for parameter in model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
            counted_optimizer[:] = [ref(optimizer)]
        elif counted is not optimizer:
            return
        buffer = model._buffers[STEPS]
        assert buffer is not None
        buffer += 1
        notify()

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.register_buffer(STEPS, torch.zeros((), dtype=torch.int64, device=device))
    loaded = model.register_load_state_dict_post_hook(_LoadHook(notify))  # type: ignore[no-untyped-call]
    handles = [register_optimizer_step_post_hook(after_step), loaded]
    try:
        notify()
        yield
    finally:
        for handle in handles:
            handle.remove()
        del model._buffers[STEPS]
