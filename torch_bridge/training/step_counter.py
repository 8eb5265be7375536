"""The clock of a training: it counts the steps of the user's own optimizer and tells schedules of them."""

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
    """The optimizer steps that a model has had in this training; those of a checkpoint that was loaded count."""
    buffer = model._buffers[STEPS]
    assert buffer is not None
    return int(buffer)


class _Told:
    """Is told that a checkpoint was loaded; the one of a copy of the model tells nobody."""

    def __init__(self, tell: Callable[[], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, *_: Any) -> None:
        if self._tell is not None:
            self._tell()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Told, ()


@contextmanager
def counting(model: nn.Module, schedules: Sequence[Schedule]) -> Iterator[None]:
    """Call every schedule with 0 now, and with the number of steps after each one and after a checkpoint is loaded.

    The first optimizer that steps any parameter of the model is the clock, so that neither gradient accumulation, nor
    a step that a GradScaler leaves out, nor a second optimizer for the scales is counted.
    """
    clocks: list[ref[torch.optim.Optimizer]] = []

    def tell(*_: Any) -> None:
        if schedules:  # reading the count waits for a GPU
            steps = steps_of(model)
            for schedule in schedules:
                schedule(steps)

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        clock = clocks[0]() if clocks else None
        if clock is None:
            own = {id(parameter) for parameter in model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
            clocks[:] = [ref(optimizer)]
        elif clock is not optimizer:
            return
        buffer = model._buffers[STEPS]
        assert buffer is not None
        buffer += 1
        tell()

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.register_buffer(STEPS, torch.zeros((), dtype=torch.int64, device=device))
    loaded = model.register_load_state_dict_post_hook(_Told(tell))  # type: ignore[no-untyped-call]
    handles = [register_optimizer_step_post_hook(stepped), loaded]
    try:
        tell()
        yield
    finally:
        for handle in handles:
            handle.remove()
        del model._buffers[STEPS]
