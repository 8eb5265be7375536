"""The options that verbs share, declared once: a call takes them as keywords, a block sets them for all its calls."""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict, Unpack, get_args

#: Calls a module on a batch: `(model, batch)`.
Forward = Callable[[Any, Any], Any]


class ProgressOptions(TypedDict, total=False):
    """What verbs take that draw a bar."""

    progress: bool


class DataOptions(ProgressOptions, total=False):
    """What verbs take that run a model on data."""

    forward: Forward | None


class SeededOptions(DataOptions, total=False):
    """What verbs take that also sample or draw numbers."""

    seed: int


class RunOptions(SeededOptions, total=False):
    """What `qsdk.options` takes."""

    max_memory: int | None


class WalkOptions(RunOptions, total=False):
    """What verbs take that solve layers one after the other."""

    checkpoint: str | os.PathLike[str] | None


class LayerOptions(WalkOptions, total=False):
    """What verbs take that solve a problem for each layer, and so for each expert of a mixture."""

    all_experts: bool


@dataclass(frozen=True)
class Run:
    """The shared options of one call of a verb, each as given, else as the block around it says."""

    progress: bool = True
    forward: Forward | None = None
    seed: int = 0
    max_memory: int | None = None
    checkpoint: str | os.PathLike[str] | None = None
    all_experts: bool = False


DEFAULTS = Run()
_IN_FORCE: ContextVar[Run] = ContextVar("options", default=DEFAULTS)


@contextmanager
def options(**given: Unpack[RunOptions]) -> Iterator[None]:
    """Set, for all verbs called in a block, what most of them take; a keyword of a call goes before it.

    Blocks may be nested. A thread that is started in a block has a context of its own, without these.

    Args:
        given: `progress` shows bars (True). `forward` is a callable `(model, batch)` that calls a module for the verbs,
            for batches that are not simply its arguments. `seed` is of whatever a verb samples or draws (0).
            `max_memory` is how many bytes the kept activations of verbs that go through the layers may take; the rest
            goes to temporary files (None: no bound). Verbs that have no use for one of them pass over it.

    Raises:
        TypeError: another keyword.

    Examples:
        >>> import torch, qsdk
        >>> sim = qsdk.quantize(torch.nn.Linear(8, 4), x := torch.randn(64, 8))
        >>> with qsdk.options(progress=False, forward=lambda model, batch: model(batch[0])):
        ...     _ = qsdk.calibrate(sim, [(x, "a label")])
    """
    _require_known("options", given, sorted(RunOptions.__optional_keys__), RunOptions.__optional_keys__)
    token = _IN_FORCE.set(replace(_IN_FORCE.get(), **given))
    try:
        yield
    finally:
        _IN_FORCE.reset(token)


def run_of(verb: Callable[..., Any], given: Mapping[str, Any]) -> Run:
    """Return the shared options of a call of a verb, whose `**options` say which ones it takes."""
    require_keywords(verb, given)
    shared, in_force = _in_options(verb), _IN_FORCE.get()
    values = {field.name: getattr(in_force, field.name) for field in fields(Run) if field.name in shared}
    return Run(**{**values, **{name: value for name, value in given.items() if name in values}})


def require_keywords(verb: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse keywords that a verb does not take in its `**options`."""
    _require_known(verb.__name__, given, keywords_of(verb), _in_options(verb))


def _require_known(name: str, given: Iterable[str], takes: Iterable[str], known: Collection[str]) -> None:
    unknown = [keyword for keyword in given if keyword not in known]
    if unknown:
        raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}; it takes {', '.join(takes)}")


def keywords_of(verb: Callable[..., Any]) -> list[str]:
    """Return the names of all arguments of a verb, those in its `**options` last."""
    declared = inspect.signature(verb).parameters.values()
    own = [one.name for one in declared if one.kind is not inspect.Parameter.VAR_KEYWORD]
    return [*own, *_in_options(verb)]


def _in_options(verb: Callable[..., Any]) -> list[str]:
    """Return the names that `**keywords: Unpack[...]` of a verb stand for."""
    keywords = (one for one in inspect.signature(verb).parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD)
    annotated = get_args(next((one.annotation for one in keywords), None))
    return sorted(annotated[0].__optional_keys__) if annotated else []
