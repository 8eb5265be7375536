"""The progress bars of long verbs, in a terminal or a notebook, and the numbers that the verbs log beside them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from operator import length_hint
from typing import Any

from tqdm.std import tqdm as in_text

from qsdk.core.callbacks import log

if find_spec("ipywidgets") is None:  # in a notebook without it, tqdm.auto warns and draws in text all the same
    tqdm: Any = in_text
else:
    from tqdm.auto import tqdm


@dataclass(frozen=True)
class Progress:
    """A bar of a verb over a number of things.

    Attributes:
        verb: its name.
        bar: of tqdm.
    """

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
    """Yield the bar of a verb, which disappears at the end.

    Args:
        verb: its name.
        total: how many things there are.
        show: draw the bar.
        unit: what is counted.
    """
    with tqdm(total=total, desc=verb, unit=unit, disable=not show, leave=False) as bar:
        yield Progress(verb, bar)


def over_batches(data: Iterable[Any], title: str, show: bool) -> Iterator[Any]:
    """Yield batches behind a bar, which tells the time left where the data know or guess how many there are.

    Args:
        data: the user's.
        title: of the bar.
        show: draw it.
    """
    yield from tqdm(data, title, _count(data), disable=not show, leave=False, unit="batch")


def _count(data: Any) -> int | None:
    try:
        return length_hint(data, 0) or None
    except AttributeError:  # a __len__ that asks what it holds for its length
        return None
