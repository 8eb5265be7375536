"""Forward passes that pause where they reach a module, and go on later.

Each pass runs in a thread of its own, and the scheduler lets one run at a time. So a whole model is walked module by
module, side by side for many batches, with one pass for each batch: nothing runs twice, any Python control flow works,
and the memory in use is what the passes hold where they are paused.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _push_mode

from qsdk.core.errors import DataError
from torch_bridge.sites.calls import Frame, Phase, Visitor
from torch_bridge.sites.runtime import Runtime


class AbandonedError(BaseException):
    """Raised inside a paused forward that is to end; a model's `except Exception` does not catch it."""


class PausedForward:
    """A forward pass in a thread of its own, which runs only inside `Scheduler.resume`.

    Attributes:
        number: of its batch.
        at: where it is paused, as passed to `pause`; None before it begins and when it has finished.
        finished: whether the pass has come to its end.
        abandoned: whether it is to end instead of going on.
        state: the state it shares with other passes, as it left it: frame, phase and visitor of the runtime, the
            attributes it set on modules, and the state of the random numbers.
    """

    def __init__(self, number: int, run: Callable[[], None], state: "_SharedState") -> None:
        self.number = number
        self.at: Any = None
        self.finished = False
        self.abandoned = False
        self.state = state
        self._error: BaseException | None = None
        self._may_run, self._is_paused = threading.Event(), threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._main, run, _ThreadState()), daemon=True)

    def resume(self) -> None:
        """Run to the next pause or to the end, and raise what the pass raised."""
        self.at = None
        self._is_paused.clear()
        self._may_run.set()
        if self._thread.ident is None:
            _start(self._thread)
        self._is_paused.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    @property
    def quantized(self) -> bool:
        """Return whether it is a forward of the quantized model."""
        return self.state.phase != "float"

    def pause(self, at: Any) -> None:
        """Pause the pass, from inside it, until it is resumed."""
        self.at = at
        self._may_run.clear()
        if not self.abandoned:
            self._is_paused.set()
            self._may_run.wait()
        if self.abandoned:
            raise AbandonedError

    def abandon(self) -> None:
        """End the pass where it is paused, or at its next pause, and end its thread."""
        self.abandoned = True
        self._may_run.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.finished = True

    def _main(self, run: Callable[[], None], inherited: "_ThreadState") -> None:
        try:
            with inherited.entered(), torch.no_grad():
                run()
        except AbandonedError:
            pass
        except BaseException as error:  # raised again in the thread that waits
            self._error = error
        self.finished = True
        self._is_paused.set()


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise DataError(
            f"there are too many batches to keep a forward pass of each in flight ({error}); give fewer, larger ones"
        ) from error


class _ThreadState:
    """The state that torch keeps for each thread, copied from the thread that makes this object."""

    def __init__(self) -> None:
        self.inference = torch.is_inference_mode_enabled()
        self.modes: list[TorchFunctionMode] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        devices = ("cpu", "cuda") if on_gpu else ("cpu",)
        # without autocast's cache, which identifies weights by address, though their values change
        self.autocast = [
            torch.autocast(device, torch.get_autocast_dtype(device), cache_enabled=False)
            for device in devices
            if torch.is_autocast_enabled(device)
        ]
        self.stream = torch.cuda.current_stream() if on_gpu else None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply that state to the current thread inside the block."""
        for mode in self.modes:
            _push_mode(mode)  # type: ignore[no-untyped-call]
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            for context in self.autocast:
                stack.enter_context(context)
            if self.stream is not None:
                stack.enter_context(torch.cuda.stream(self.stream))
            yield


@dataclass(frozen=True)
class _SharedState:
    """The state that passes share, as one of them left it."""

    frame: Frame | None
    phase: Phase
    visitor: Visitor | None
    quantizes: bool
    attributes: tuple[Any, ...]
    random: Tensor


_ABSENT = object()


class Scheduler:
    """The scheduler that lets passes run one at a time, each with the shared state that it left.

    Attributes:
        running: the pass that runs now; None outside of passes.
        attributes: what forward passes set on modules, as (dictionary, key): each pass has its own value there.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Begin without passes, with the runtime of a sim."""
        self.running: PausedForward | None = None
        self.attributes: Sequence[tuple[dict[str, Any], str]] = ()
        self._runtime = runtime
        self._passes: list[PausedForward] = []
        self._before = self._current_state()

    def learn_attributes(self, model: nn.Module, run: Callable[[], Any]) -> None:
        """Run a function to find what forwards set on modules: each pass has its own values there from now on."""
        random = torch.get_rng_state()
        try:
            self.attributes = attributes_set_by(model, run)
        finally:
            torch.set_rng_state(random)

    def add(self, number: int, run: Callable[[], None], phase: Phase, visitor: Visitor | None = None) -> PausedForward:
        """Return a new pass that starts when it is first resumed; one with a visitor is of the quantized model."""
        now, quantizes = self._current_state(), visitor is not None
        state = replace(now, frame=None, phase=phase, visitor=visitor, quantizes=quantizes)
        added = PausedForward(number, self._as_this_thread(run), state)
        self._passes.append(added)
        return added

    def _as_this_thread(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs a pass in its own thread on behalf of this one."""
        runtime, thread = self._runtime, self._runtime.thread

        def acting() -> None:
            with runtime.acting_for(thread):
                run()

        return acting

    def resume(self, forward: PausedForward) -> None:
        """Run a pass to its next pause or to its end, and raise what it raises."""
        with self._switched_to(forward):
            forward.resume()
        if forward.finished:
            self._passes.remove(forward)

    def end(self, forward: PausedForward) -> None:
        """End a pass where it is paused."""
        with self._switched_to(forward):
            forward.abandon()
        self._passes.remove(forward)

    def pause(self, at: Any) -> None:
        """Pause the running pass, from inside it; outside of any pass do nothing."""
        if self.running is not None:
            self.running.pause(at)

    def close(self) -> None:
        """End every pass that has not finished, the latest first, and restore the state before the first pass."""
        while self._passes:
            forward = self._passes[-1]
            if forward.finished:
                self._passes.pop()
            else:
                self.end(forward)
        # an interrupt may have come while one state took the place of another
        now = self._current_state()
        self._apply_state(replace(self._before, attributes=now.attributes, random=now.random))

    @contextmanager
    def _switched_to(self, forward: PausedForward) -> Iterator[None]:
        outer, running = self._current_state(), self.running
        try:
            self.running = forward
            self._apply_state(forward.state)
            yield
        except BaseException:
            forward.abandon()  # an interrupt comes here while the pass still runs
            raise
        finally:
            forward.state = self._current_state()
            self._apply_state(outer)
            self.running = running

    def _current_state(self) -> _SharedState:
        runtime = self._runtime
        values = tuple(held.get(key, _ABSENT) for held, key in self.attributes)
        phase = runtime.phase, runtime.visitor, runtime.visitor_quantizes
        return _SharedState(runtime.frame, *phase, values, torch.get_rng_state())

    def _apply_state(self, state: _SharedState) -> None:
        runtime = self._runtime
        runtime.frame, runtime.phase, runtime.visitor = state.frame, state.phase, state.visitor
        runtime.visitor_quantizes = state.quantizes
        for (held, key), value in zip(self.attributes, state.attributes, strict=True):
            if value is _ABSENT:
                held.pop(key, None)
            else:
                held[key] = value
        torch.set_rng_state(state.random)


def same_input(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same values in the same memory, with the same layout."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
    )


def attributes_set_by(model: nn.Module, run: Callable[[], Any]) -> list[tuple[dict[str, Any], str]]:
    """Run a function and return what it set on the modules of a model, as (dictionary, key); undo these changes."""
    held = [part for module in model.modules() for part in (module.__dict__, module._buffers)]
    before = [dict(part) for part in held]
    try:
        run()
    finally:
        changed = [
            (part, key)
            for part, old in zip(held, before, strict=True)
            for key in {**part, **old}
            if part.get(key, _ABSENT) is not old.get(key, _ABSENT)
        ]
        for part, old in zip(held, before, strict=True):
            if part.keys() != old.keys() or any(part[key] is not value for key, value in old.items()):
                part.clear()
                part.update(old)
    return changed
