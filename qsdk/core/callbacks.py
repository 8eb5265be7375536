"""What long verbs tell while they run: numbers, for TensorBoard and its kin."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

#: called with a name such as `adaround/error_after`, a value, and how many values of that name came before
Callback = Callable[[str, float, int], object]


@dataclass(frozen=True)
class _Listeners:
    """The callbacks of one block, and how many values of each name they have had.

    Steps count on from verb to verb: trackers draw a curve by its steps, and some drop a step that goes back.
    """

    functions: tuple[Callback, ...]
    counts: Counter[str] = field(default_factory=Counter)


_LISTENING: ContextVar[tuple[_Listeners, ...]] = ContextVar("listening", default=())


@contextmanager
def callbacks(*functions: Callback) -> Iterator[None]:
    """Call these functions with every number that a verb logs inside the block.

    Each takes `(name, value, step)`, as `SummaryWriter.add_scalar` of TensorBoard does: the verb and what is measured,
    such as `adaround/error_after`; the number; and the count of the values of that name in the block so far, from 0.
    An error that a function raises ends the verb, which leaves the sim as after any other error.

    Args:
        functions: to be called, in this order; one inside another block is called as well as the outer ones.

    Example:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(4, 2), x := torch.randn(8, 4))
        >>> with qsdk.train.callbacks(lambda name, value, step: print(step, name, value)):
        ...     _ = qsdk.calibrate(sim, [x, x], progress=False)
        0 calibrate/moved_ranges 1.0
        1 calibrate/moved_ranges 0.0
    """
    token = _LISTENING.set((*_LISTENING.get(), _Listeners(functions)))
    try:
        yield
    finally:
        _LISTENING.reset(token)


def log(name: str, value: float) -> None:
    """Pass a number on to the callbacks of the blocks around."""
    for listeners in _LISTENING.get():
        step = listeners.counts[name]
        listeners.counts[name] += 1
        for function in listeners.functions:
            function(name, value, step)
