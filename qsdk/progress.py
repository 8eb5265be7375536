"""The progress of long verbs: a bar in a terminal or a notebook, lines in a log; and the numbers beside it."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from operator import length_hint
from typing import Any, TextIO

from tqdm.std import tqdm as in_text

from qsdk.core.callbacks import log
from qsdk.core.errors import DataError

if find_spec("ipywidgets") is None:  # in a notebook without it, tqdm.auto warns and draws in text all the same
    tqdm: Any = in_text
else:
    from tqdm.auto import tqdm

#: seconds between two lines in a log, and before the first
EVERY = 30.0


class _Lines:
    """What a bar draws over itself as lines of a stream."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> None:
        line = text.replace("\x1b[A", "").strip()
        if line:
            self.stream.write(f"{line}\n")

    def flush(self) -> None:
        self.stream.flush()


class _InLog(in_text):  # type: ignore[type-arg]
    """A bar for what keeps every character, such as a log file: a line now and then, none for what takes no time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        rare = {"delay": EVERY, "mininterval": EVERY, "maxinterval": EVERY}
        super().__init__(*args, **{**options, **rare, "file": _Lines(sys.stderr)})

    def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
        """Change the text of the next line."""
        super().set_description(desc, refresh=False)


def bar(*args: Any, **options: Any) -> Any:
    """Return a bar of tqdm that suits where it is drawn; the arguments are those of tqdm."""
    return (tqdm if draws_over_itself() else _InLog)(*args, **options)


def draws_over_itself() -> bool:
    """Return whether a bar can be drawn over what it drew before: in a terminal or a notebook."""
    widgets = any("notebook" in cls.__module__ for cls in tqdm.__mro__)
    return widgets or sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel")


@dataclass(frozen=True)
class Progress:
    """A bar of a verb over a number of things."""

    verb: str
    bar: Any

    def now(self, what: str) -> None:
        """Show what the verb does now."""
        self.bar.set_description(f"{self.verb}: {what}")

    def done(self, count: int = 1) -> None:
        """Move the bar on."""
        self.bar.update(count)

    def log(self, **values: float) -> None:
        """Pass numbers on to the callbacks, and show the last ones beside the bar."""
        for name, value in values.items():
            log(f"{self.verb}/{name}", value)
        self.bar.set_postfix({name: f"{value:.3g}" for name, value in values.items()}, refresh=False)


@contextmanager
def progress_of(verb: str, total: int, *, show: bool, unit: str = "layer") -> Iterator[Progress]:
    """Yield the bar of a verb, which disappears at the end."""
    with bar(total=total, desc=verb, unit=unit, disable=not show, leave=False) as drawn:
        yield Progress(verb, drawn)


def over_batches(data: Iterable[Any], title: str, show: bool) -> Iterator[Any]:
    """Yield batches behind a bar, which tells the time left where the data know or guess how many there are."""
    yield from bar(data, title, _count(data), disable=not show, leave=False, unit="batch")


def numbered_batches(
    data: Iterable[Any],
    title: str,
    show: bool,
    *,
    one: tuple[type, ...],
    other: tuple[type, ...] = (str, bytes),
    has_no_rows: Callable[[Any], bool] | None,
) -> Iterator[tuple[int, Any]]:
    """Number the batches, behind a bar; `one` and `other` are types of one batch, and of what holds none.

    From batches without rows statistics learn nothing, so they are left out; None keeps them.
    """
    if isinstance(data, one):
        raise DataError("data must be an iterable of batches, got one batch; wrap it in a list: [batch]")
    if isinstance(data, other) or not (isinstance(data, Iterable) or hasattr(data, "__getitem__")):
        raise DataError(f"data must be an iterable of batches, got {type(data).__name__}; give a list or a DataLoader")
    count = used = 0
    for count, batch in enumerate(over_batches(data, title, show), start=1):
        if has_no_rows is None or not has_no_rows(batch):
            used += 1
            yield count - 1, batch
    if count == 0:
        raise DataError("the data holds no batch; a generator that was used before is empty, give a list or DataLoader")
    if used == 0:
        raise DataError(f"no batch has rows ({count} batches of 0 samples); give batches of one sample at least")


def _count(data: Any) -> int | None:
    try:
        return length_hint(data, 0) or None
    except AttributeError:  # a __len__ that asks what it holds for its length
        return None
