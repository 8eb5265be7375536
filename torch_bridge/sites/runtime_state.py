"""What a runtime knows: how the modules of a sim are to run, and where the forward pass is."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.own_lock import OwnLock
from torch_bridge.quantizers.phases import Phase, Visitor
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.call_scopes import Frame, Naming, Watcher
from torch_bridge.sites.loss_inputs import LaterInputs
from torch_bridge.sites.source_lines import Call
from torch_bridge.torch_values.module_state import Cache


class _Pass(threading.local):
    """The forward pass of a thread."""

    frame: Frame | None = None
    later: LaterInputs | None = None
    runs: bool = False
    acts_for: int | None = None


class RuntimeState:
    """Shared by all wrapped modules of a sim; each thread has a forward pass of its own.

    Attributes:
        phase: `float` does nothing, `quantize` simulates, `visit` hands every site's tensor to `visitor`, `mark`
            writes the site's name into a graph that is being traced.
        quantizers: by site; None where the plan keeps float32.
        visitor: what `visit` calls with (site, tensor); it gives the tensor to go on with.
        watcher: told of every torch function and in-place result while the model's wiring is learned.
        views: sites of views that share what is written into them, and stay what the model has there.
        write_back: sites of in-place ops whose tensor is read again by its old name.
        overwritten: sites whose tensor something is written over after they were quantized.
        marked: the sites written into the graph by the last `mark` phase.
        reused: paths of the modules that one forward pass calls more than once.
        attention: paths of the nn.MultiheadAttention modules, whose packed projection is read part by part.
        recurrent: told of each recurrent layer before it runs: module, number of the layer, its input and states.
        told: is given the values of every site that is simulated, with its name.
        ddp: id of the DistributedDataParallel that is known to know all parameters that are trained.
        places: call -> place in the user's code, for those that nothing else tells apart (`source_lines.ambiguous`).
        noted: all calls, while they are being noted.
        numbers: names calls where a run leaves out some that the trace makes.
        training_names: call as it is numbered in train mode -> its name, where that is another.
        training_places: as `places`, for calls as they are numbered in train mode.
        placed: whether there is any of these three.
        only_training: site -> kind of what only train mode has; it is float.
        caches: what modules keep of their parameters in eval mode.
        caching: held by the thread that runs a model with caches.
        inputs: names of those that the example had.
        writes_inputs: whether the model writes over its inputs.
        owner: the thread that has the sim alone for a while, in which others cannot run the model.
        course: what schedules have changed, while the model is trained (`schedule_state.Course`).
    """

    def __init__(self) -> None:
        self.phase: Phase = "float"
        self.quantizers: dict[str, Quantizer | None] = {}
        self.visitor: Visitor | None = None
        self.watcher: Watcher | None = None
        self.views: frozenset[str] = frozenset()
        self.write_back: frozenset[str] = frozenset()
        self.overwritten: frozenset[str] = frozenset()
        self.marked: list[str] = []
        self.reused: frozenset[str] = frozenset()
        self.attention: frozenset[str] = frozenset()
        self.recurrent: Callable[[nn.RNNBase, int, Tensor, list[Tensor]], None] | None = None
        self.told: Callable[[str, Tensor], None] | None = None
        self.ddp: int | None = None
        self.course: object | None = None
        self.inputs: frozenset[str] = frozenset()
        self.writes_inputs = False
        self.places: dict[str, str] = {}
        self.noted: list[Call] | None = None
        self.numbers: Naming | None = None
        self.training_names: dict[str, str] = {}
        self.training_places: dict[str, str] = {}
        self.placed = False
        self.only_training: dict[str, str] = {}
        self.caches: tuple[Cache, ...] = ()
        self.caching = OwnLock()
        self.owner: int | None = None
        self._forwards: dict[int, int] = {}  # thread in the middle of a forward pass -> thread it acts for
        self._turn = OwnLock()
        self._pass = _Pass()
        self._compiled: Frame | None = None  # a compiler cannot read what differs by thread
        self._compiled_later: LaterInputs | None = None

    @property
    def frame(self) -> Frame | None:
        """Where the forward pass of this thread is."""
        return self._compiled if torch.compiler.is_compiling() else self._pass.frame

    @frame.setter
    def frame(self, frame: Frame | None) -> None:
        if torch.compiler.is_compiling():
            self._compiled = frame
        else:
            self._pass.frame = frame

    @property
    def later(self) -> LaterInputs | None:
        """What comes from other inputs than the example's, while the forward pass of this thread has them."""
        return self._compiled_later if torch.compiler.is_compiling() else self._pass.later

    @later.setter
    def later(self, later: LaterInputs | None) -> None:
        if torch.compiler.is_compiling():
            self._compiled_later = later
        else:
            self._pass.later = later

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_pass"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _pass=_Pass(), owner=None, _forwards={})

    @property
    def thread(self) -> int:
        """The thread that runs, or the one that it acts for."""
        return self._pass.acts_for or threading.get_ident()

    @contextmanager
    def acting_for(self, thread: int) -> Iterator[None]:
        """Let this thread run the model while the other one has the sim alone."""
        self._pass.acts_for = thread
        try:
            yield
        finally:
            self._pass.acts_for = None

    def is_first_call(self) -> bool:
        """Return whether this thread is in no forward pass yet."""
        return not self._pass.runs

    def forward_pass(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return what a call gives that is the whole forward pass of this thread.

        Raises:
            ModelError: another thread has the sim alone.
        """
        thread = threading.get_ident()
        with self._turn:
            self.require_this_thread()
            self._forwards[thread] = self.thread
        self._pass.runs = True
        try:
            return call(*args)
        finally:
            self._pass.runs = False
            del self._forwards[thread]

    def require_this_thread(self) -> None:
        """Refuse a forward pass while another thread calibrates, tunes or exports the sim.

        Raises:
            ModelError: says what to do.
        """
        elsewhere = self.owner not in (None, self.thread)
        if elsewhere and torch._C._current_graph_task_id() == -1:  # a backward pass has threads of its own
            raise ModelError(
                f"another thread calibrates, tunes or traces the sim (phase {self.phase}), so this one cannot run it; "
                "run it when that has ended, or give the threads copies of the sim made before"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the sim to this thread for a while, so that no forward pass sees half of a change.

        Raises:
            ModelError: another thread has it, or is in the middle of a forward pass.
        """
        with self._turn:
            self.require_this_thread()
            if any(thread != self.thread for thread in list(self._forwards.values())):
                raise ModelError(
                    "another thread is in the middle of a forward pass of the sim, which cannot be calibrated, tuned, "
                    "traced or changed meanwhile; let that pass end first, or work on a copy of the sim"
                )
            before, self.owner = self.owner, self.thread
        try:
            yield
        finally:
            self.owner = before

    @contextmanager
    def in_phase(self, phase: Phase, visitor: Visitor | None = None) -> Iterator[None]:
        """Set the phase for a while."""
        with self.alone():
            before = self.phase, self.visitor
            self.phase, self.visitor = phase, visitor
            try:
                yield
            finally:
                self.phase, self.visitor = before

    @contextmanager
    def telling(self, told: Callable[[str, Tensor], None]) -> Iterator[None]:
        """Tell of the values of every site for a while."""
        self.told = told
        try:
            yield
        finally:
            self.told = None
