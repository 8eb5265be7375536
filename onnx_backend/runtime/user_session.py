"""Sessions as an application opens them, in a process of their own: ONNX Runtime's default level can end its process.

One process serves them all. It starts with the first session and ends with this process; where a file has ended it, the
next session starts another.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from onnx import ModelProto, helper

from onnx_backend.runtime import session_server
from onnx_backend.runtime.session_input import handed_over
from onnx_backend.runtime.session_server import WITHOUT_NUMPY, receive, send
from qsdk.core.arrays import Array
from qsdk.core.errors import ModelError

Level = Literal["none", "basic", "extended", "all"]
#: the runtime's numbers of its levels of graph optimization
LEVELS: Mapping[Level, int] = {"none": 0, "basic": 1, "extended": 2, "all": 99}
_BITS = {kind: np.dtype(helper.tensor_dtype_to_np_dtype(number)) for kind, number in WITHOUT_NUMPY.items()}


class EndedProcessError(ModelError):
    """A model that ends the process of its session."""


@dataclass(frozen=True)
class Edge:
    """An input or output of a session.

    Attributes:
        name: in the model.
        type: in the runtime's words, `tensor(float)`.
        shape: sizes; the name of an open axis, or None.
    """

    name: str
    type: str
    shape: Sequence[Any]


class UserSession:
    """A session in the other process, with those methods of the runtime's own that are needed.

    Attributes:
        seconds: that the last run took.
    """

    def __init__(self, process: "_Process", answer: Mapping[str, Any]) -> None:
        self._process, self._number = process, answer["number"]
        self._inputs, self._outputs = ([Edge(*edge) for edge in answer[kind]] for kind in ("inputs", "outputs"))
        self.seconds = 0.0
        self.close = weakref.finalize(self, _close, process, self._number)

    def get_inputs(self) -> list[Edge]:
        """Return the inputs."""
        return self._inputs

    def get_outputs(self) -> list[Edge]:
        """Return the outputs."""
        return self._outputs

    def run(self, names: None, feeds: Mapping[str, Array]) -> list[Array]:
        """Return all outputs; those in bfloat16 come as float32, which is also taken for such inputs."""
        types = {edge.name: edge.type for edge in self._inputs}
        arrays = [_as_bits(np.asarray(value), types.get(name, "")) for name, value in feeds.items()]
        answer, values = self._process.ask({"do": "run", "number": self._number, "names": [*feeds]}, arrays)
        self.seconds = float(answer["seconds"])
        return [_from_bits(value, edge.type) for value, edge in zip(values, self._outputs, strict=True)]

    def end_profiling(self) -> str:
        """End the profile, and return the path of its file."""
        return str(self._process.ask({"do": "end_profiling", "number": self._number})[0]["file"])


def user_session(
    model: ModelProto | Path,
    *,
    level: Level | None = None,
    entries: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> UserSession:
    """Open a session as an application does: on the CPU, with the runtime's own settings but for those given.

    `model` is a file, which is opened as it is, or a model, which is changed as `session_of` says; `options` are
    attributes of the runtime's `SessionOptions`.
    """
    number = None if level is None else LEVELS[level]
    asked = {"do": "open", "options": dict(options or {}), "entries": dict(entries or {}), "level": number}
    if isinstance(model, Path):
        return _opened({**asked, "path": os.fspath(model)}, [])
    with handed_over(model) as (given, own):
        return _opened({**asked, "path": "", "entries": {**(entries or {}), **own}}, [np.frombuffer(given, np.uint8)])


def _opened(asked: Mapping[str, Any], arrays: Sequence[Array], disabled: Sequence[str] = ()) -> UserSession:
    process = _server(os.getpid()).running()
    return UserSession(process, process.ask({**asked, "disabled": [*disabled]}, arrays)[0])


def _close(process: "_Process", number: int) -> None:
    process.closed.append(number)
    if process.owner == os.getpid() and process.runs:
        process.close_sessions()


class _Process:
    """A process that has sessions."""

    def __init__(self) -> None:
        self.asking, self.owner = threading.Lock(), os.getpid()
        self.closed: list[int] = []  # numbers of sessions that nobody has any more
        paths = os.pathsep.join(path for path in sys.path if path)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", session_server.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": paths},
                start_new_session=True,  # an interrupt is for this process
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        self.end = weakref.finalize(self, _end, self.process, self.owner)
        try:
            self._answer()
        except EndedProcessError as error:
            raise _not_started(str(error)) from error

    @property
    def runs(self) -> bool:
        """Return whether it can be asked."""
        return self.end.alive and self.process.poll() is None

    def ask(self, message: Mapping[str, Any], arrays: Sequence[Array] = ()) -> tuple[dict[str, Any], list[Array]]:
        """Send a message, and return the answer."""
        self.close_sessions()
        with self.asking:
            answer, values = self._exchange(message, arrays)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer, values

    def close_sessions(self) -> None:
        """Close what nobody has any more, unless a message is on its way: garbage is collected at any time."""
        while self.closed and self.asking.acquire(blocking=False):
            try:
                with contextlib.suppress(EndedProcessError):
                    self._exchange({"do": "close", "number": self.closed.pop()}, [])
            finally:
                self.asking.release()

    def _exchange(self, message: Mapping[str, Any], arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Array]]:
        if not self.end.alive:
            raise EndedProcessError("the process of this session has ended; open it again")
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, which the answer says
                send(self.process.stdin, message, arrays)  # type: ignore[arg-type]
            return self._answer()
        except BaseException:
            self.end()  # half of an answer may be on its way
            raise

    def _answer(self) -> tuple[dict[str, Any], list[Array]]:
        try:
            return receive(self.process.stdout)  # type: ignore[arg-type]
        except EOFError:
            raise EndedProcessError(f"ONNX Runtime ends its process ({_cause(self.process.wait())})") from None


def _not_started(why: str) -> ModelError:
    return ModelError(f"no process for a session can be started: {why}; check that {sys.executable} runs")


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork: the process is not its own
    process.kill()
    for file in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not sent
            file.close()  # type: ignore[union-attr]
    process.wait()


def _cause(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


class _Server:
    """The process that runs now, if there is one."""

    def __init__(self) -> None:
        self.process: _Process | None = None
        self.starting = threading.Lock()

    def running(self) -> _Process:
        """Return the process, which starts if there is none."""
        with self.starting:
            if self.process is None or not self.process.runs:
                self.process = _Process()
            return self.process


@cache
def _server(owner: int) -> _Server:
    """Return the server of a process: a fork has its own."""
    return _Server()


def _as_bits(array: Array, kind: str) -> Array:
    if kind not in _BITS:
        return array
    narrow = array.astype(_BITS[kind])
    return narrow.view(f"u{narrow.itemsize}")


def _from_bits(array: Array, kind: str) -> Array:
    if kind not in _BITS:
        return array
    return array.view(_BITS[kind]).astype(np.float32 if kind == "tensor(bfloat16)" else _BITS[kind])
