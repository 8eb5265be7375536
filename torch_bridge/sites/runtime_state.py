"""The state of a runtime: how the modules of a sim run now, and where each thread's forward pass is."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from qsdk.core.errors import ModelError
from qsdk.core.shared_folder import PerCopyLock
from qsdk.core.site import owner_of, site_name
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.calls import CallNames, DataflowRecorder, Frame, Phase, Visitor, is_recomputing
from torch_bridge.torch_values.module_state import Cache
from torch_bridge.torch_values.pytree import is_cache, map_leaves, tensors_of

_REENTRANT = CheckpointFunction.forward.__code__


def is_recording_gradients() -> bool:
    """Return whether gradients are recorded call by call; torch.compile sees recomputation as part of its graph."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def saved_tensors_hook() -> Any:
    """Return the hook that now saves tensors for the backward pass; each checkpoint has its own."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def refuse_unreachable_site(path: str, hook: Any, site: str) -> None:
    """Refuse a site in a checkpoint that began after the call of its module and calls no module of the sim.

    `hook` is the saved-tensors hook when the module was called, with gradients recorded.
    """
    if torch.is_grad_enabled():
        now = saved_tensors_hook()
        inside = now is not hook and getattr(now, "__qualname__", "").startswith("_checkpoint_hook.")
    else:
        inside = _is_called_by(_REENTRANT, sys._getframe(1))  # or the model's own no_grad
    if inside:
        raise ModelError(
            f"the site {site} is in an activation checkpoint of a function that is no module, and its recomputation "
            f"would not find it; make the function an nn.Module that {path or 'the model'} owns, and checkpoint that"
        )


def _is_called_by(code: Any, frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def refuse_reused(path: str) -> None:
    """Refuse a module that is called several times, when the backward pass calls it again."""
    if is_recomputing():
        raise ModelError(
            f"{path} is called several times in one forward pass, so its recomputation cannot tell its sites apart; "
            "checkpoint the module that calls it instead"
        )


# ops that a loss applies to the model's results before comparing them with labels; no value changes
_MOVES = frozenset({"view", "reshape", "flatten", "squeeze", "unsqueeze", "transpose", "permute", "getitem"})


class LossInputs:
    """The tensors of one forward pass that come from inputs which the example did not have."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self.names = ", ".join(inputs)
        self._tensors = tensors_of(list(inputs.values()))
        self._constants: list[Tensor] = []

    def is_read_by(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether any of these tensors is among the arguments of a call."""
        given = tensors_of([*args, *(kwargs or {}).values()])
        return any(x is mine for x in given for mine in self._tensors)

    def reads_floats(self, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether any of these tensors that is an argument of a call has floating-point values."""
        given = [x for x in tensors_of([*args, *(kwargs or {}).values()]) if x.is_floating_point()]
        return any(x is mine for x in given for mine in self._tensors if not _is_among(x, self._constants))

    def add_constant(self, result: Tensor) -> Tensor:
        """Add floats that were chosen by these tensors, such as the 0 and -inf of a mask, and return them."""
        self._tensors.append(result)
        self._constants.append(result)
        return result

    def add_result(self, result: Any, site: str | None, sites: Mapping[str, Any]) -> Any:
        """Add what a call computed from these tensors, and return it."""
        if site in sites:
            raise ModelError(
                f"{site} depends on {self.names}, which the example did not have; call qsdk.quantize with an example "
                "that has it"
            )
        self._tensors += tensors_of(result)
        return result


def own_tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return inputs whose tensors are no other input's: the tokens of a text are often given as its labels too."""
    result: dict[str, Any] = map_leaves(dict(inputs), lambda _, x: x.view_as(x) if isinstance(x, Tensor) else x)
    return result


def _is_among(x: Tensor, tensors: Iterable[Tensor]) -> bool:
    return any(x is one for one in tensors)


def moves_values_only(site: str) -> bool:
    """Return whether the op of a site returns the values that it gets."""
    return op_of_site(site) in _MOVES


def op_of_site(site: str) -> str:
    """Return the name of the op that a site belongs to: `cat` of `layers.0/cat.2:output`."""
    return owner_of(site).rpartition("/")[2].partition(".")[0]


@dataclass(eq=False)
class ForwardPass:
    """Where a forward pass is.

    Attributes:
        frame: the innermost running call; None outside of a pass.
        loss_inputs: the tensors of inputs that the example did not have, if the pass has any.
        reads_cache: whether it is a step with a cache of keys and values. Such a pass leaves calls out and makes
            others, from lines of their own, that only move cached values.
        runs: whether the pass has begun.
        acts_for: id of the thread on whose behalf it runs.
    """

    frame: Frame | None = None
    loss_inputs: LossInputs | None = None
    reads_cache: bool = False
    runs: bool = False
    acts_for: int | None = None


class _PassOfThread(threading.local, ForwardPass):
    """The forward pass of one thread."""


@dataclass(frozen=True)
class WrittenSites:
    """The sites of a model that share memory with what is written in place.

    Attributes:
        views: of views that share memory with a tensor that is written later; they are not quantized.
        write_back: of in-place ops whose tensor is read again by its old name.
        overwritten: whose tensor is written over after it was quantized.
        aliased: whose tensor is given out under another name too, by which it is written over later.
        made_anew: of buffers that each pass writes over as a whole before it reads them; they have no quantizer.
    """

    views: frozenset[str] = frozenset()
    write_back: frozenset[str] = frozenset()
    overwritten: frozenset[str] = frozenset()
    aliased: frozenset[str] = frozenset()
    made_anew: frozenset[str] = frozenset()

    def renamed(self, names: Mapping[str, str]) -> "WrittenSites":
        """Return the same sites by other names."""
        parts = (self.views, self.write_back, self.overwritten, self.aliased, self.made_anew)
        return WrittenSites(*(frozenset(names.get(site, site) for site in part) for part in parts))


class RuntimeState:
    """The state that all wrapped modules of a sim share; each thread has a forward pass of its own.

    Attributes:
        phase: `float` does nothing, `quantize` simulates, `visit` hands every site's tensor to `visitor`, `mark`
            writes the site's name into a graph that is being traced.
        quantizers: by site; None where the plan keeps float32.
        narrow_regions: site of a result -> the narrow float type in which its op computes.
        visitor: called in the phase `visit` with (site, tensor); returns the tensor to go on with.
        visitor_quantizes: whether it does what the phase `quantize` does, and more.
        recorder: notified of every torch function and every write in place while the dataflow is recorded.
        written: the sites that share memory with what is written in place.
        marked: the sites written into the graph by the last `mark` phase.
        reused_modules: paths of the modules that one forward pass calls more than once.
        attention_modules: paths of the nn.MultiheadAttention modules, whose packed projection is read part by part.
        recurrent_hook: called before each recurrent layer runs, with the module, the layer's number, input and states.
        site_observer: called with the name and the values of every site that is simulated.
        ddp: id of the DistributedDataParallel that was found to know all parameters that are trained.
        schedule_state: the `ScheduleState` while the model is trained, else None.
        inputs: names of the inputs that the example has.
        has_cache: whether a cache of keys and values is among them.
        batch_norms: paths of folded BatchNorms whose own forwards use the statistics of the batch in train mode.
        writes_inputs: whether the model writes over its inputs.
        calls: which call of the example a call is.
        written_in_training: tensors that a forward pass in train mode writes and reads -> the line that writes.
        only_training: site -> kind, for sites that only train mode has; they stay float.
        caches: attributes in which modules cache values computed from their parameters in eval mode.
        cache_lock: held by the thread that runs a model with caches.
        owner_thread: id of the thread that has the sim alone for a while; others cannot run the model then.
    """

    def __init__(self) -> None:
        self.phase: Phase = "float"
        self.quantizers: dict[str, Quantizer | None] = {}
        self.narrow_regions: dict[str, torch.dtype] = {}
        self.visitor: Visitor | None = None
        self.visitor_quantizes = False
        self.recorder: DataflowRecorder | None = None
        self.written = WrittenSites()
        self.marked: list[str] = []
        self.reused_modules: frozenset[str] = frozenset()
        self.attention_modules: frozenset[str] = frozenset()
        self.recurrent_hook: Callable[[nn.RNNBase, int, Tensor, list[Tensor]], None] | None = None
        self.site_observer: Callable[[str, Tensor], None] | None = None
        self.ddp: int | None = None
        self.schedule_state: object | None = None
        self.inputs: frozenset[str] = frozenset()
        self.has_cache = False
        self.batch_norms: set[str] = set()
        self.writes_inputs = False
        self.calls = CallNames()
        self.written_in_training: dict[str, str] = {}
        self.only_training: dict[str, str] = {}
        self.caches: tuple[Cache, ...] = ()
        self.cache_lock = PerCopyLock()
        self.owner_thread: int | None = None
        self._forwards: dict[int, int] = {}  # thread in the middle of a forward pass -> thread it acts for
        self._turn = PerCopyLock()
        self._pass = _PassOfThread()
        self._compiled_pass = ForwardPass()  # torch.compile cannot trace a thread-local value

    @property
    def now(self) -> ForwardPass:
        """Return where this thread's forward pass is."""
        return self._compiled_pass if torch.compiler.is_compiling() else self._pass

    @property
    def frame(self) -> Frame | None:
        """Return the innermost running call of this thread's forward pass; None outside of one."""
        return self.now.frame

    @frame.setter
    def frame(self, frame: Frame | None) -> None:
        self.now.frame = frame

    @property
    def takes_own_path(self) -> bool:
        """Return whether this thread's forward pass got more than the example, so that it may take another path."""
        if self.phase == "mark" or torch.compiler.is_compiling():
            return False
        return self._pass.reads_cache or self._pass.loss_inputs is not None

    def is_input(self, name: str) -> bool:
        """Return whether the example had an input of this name, or `name.0`."""
        return name.partition(".")[0] in self.inputs

    def is_loss_input(self, name: str, value: Any) -> bool:
        """Return whether an input holds tensors and the example had no such input."""
        if self.phase != "quantize" or self.is_input(name) or is_cache(value):
            return False
        # beside a cache, a model gets the positions and the mask of the step, and what its encoder has returned
        reads = isinstance(value, Tensor) and value.is_floating_point() if self.now.reads_cache else True
        return reads and bool(tensors_of(value))

    def is_of_loss(self, owner: str, frame: Frame, args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> bool:
        """Return whether a call reads inputs that the example did not have, and is not one of the example's calls.

        One that is, made from the same line, reads a mask or positions that were left out of the example.
        """
        loss_inputs = self.now.loss_inputs
        if loss_inputs is None or not loss_inputs.is_read_by(args, kwargs):
            return False
        known = self.takes_own_path and not frame.training and site_name(owner, "output") in self.quantizers
        return not known or loss_inputs.reads_floats(args, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pass"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pass=_PassOfThread(), owner_thread=None, _forwards={})

    @property
    def thread(self) -> int:
        """Return the id of the running thread, or of the thread that it acts for."""
        return self._pass.acts_for or threading.get_ident()

    @contextmanager
    def acting_for(self, thread: int) -> Iterator[None]:
        """Let this thread run the model inside the block while the other one has the sim alone."""
        self._pass.acts_for = thread
        try:
            yield
        finally:
            self._pass.acts_for = None

    def is_first_call(self) -> bool:
        """Return whether this thread is in no forward pass yet."""
        return not self._pass.runs

    def forward_pass(self, call: Callable[..., Any], *args: Any) -> Any:
        """Run a call as the whole forward pass of this thread and return its result."""
        thread = threading.get_ident()
        with self._turn:
            self.require_owner_thread()
            self._forwards[thread] = self.thread
        before = self._pass.frame, self._pass.loss_inputs, self._pass.reads_cache
        self._pass.runs = True
        try:
            return call(*args)
        finally:
            # an interrupt may have come inside the setters that reset them
            self._pass.frame, self._pass.loss_inputs, self._pass.reads_cache = before
            self._pass.runs = False
            del self._forwards[thread]

    def require_owner_thread(self) -> None:
        """Refuse a forward pass while another thread calibrates, tunes or exports the sim."""
        elsewhere = self.owner_thread not in (None, self.thread)
        if elsewhere and not is_recomputing():  # a backward pass has threads of its own
            raise ModelError(
                f"another thread calibrates, tunes or traces the sim (phase {self.phase}), so this one cannot run it; "
                "run it when that has ended, or give the threads copies of the sim made before"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the sim to this thread inside the block, so that no forward pass sees half of a change."""
        with self._turn:
            self.require_owner_thread()
            if any(thread != self.thread for thread in list(self._forwards.values())):
                raise ModelError(
                    "another thread is in the middle of a forward pass of the sim, which cannot be calibrated, tuned, "
                    "traced or changed meanwhile; let that pass end first, or work on a copy of the sim"
                )
            before, self.owner_thread = self.owner_thread, self.thread
        try:
            yield
        finally:
            self.owner_thread = before

    @contextmanager
    def in_phase(self, phase: Phase, visitor: Visitor | None = None, *, quantizes: bool = False) -> Iterator[None]:
        """Set the phase, the visitor and whether that quantizes for a while."""
        with self.alone():
            before = self.phase, self.visitor, self.visitor_quantizes
            self.phase, self.visitor, self.visitor_quantizes = phase, visitor, quantizes
            try:
                yield
            finally:
                self.phase, self.visitor, self.visitor_quantizes = before

    @contextmanager
    def observing_sites(self, observer: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Call an observer with the values of every simulated site inside the block."""
        self.site_observer = observer
        try:
            yield
        finally:
            self.site_observer = None
