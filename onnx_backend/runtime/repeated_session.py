"""The session of a simulation for many runs: as fast as it can be, once that pays."""

import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.proto.model_io import load
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.repeated_pairs import drop_repeated_pairs
from onnx_backend.runtime.session import (
    computes_in_narrow_floats,
    is_small_convolutional,
    session_in_blocks,
    simulation_session,
)


class RepeatedSession:
    """A session like `simulation_session`, with the same values, that is opened again once it has run for long enough.

    The second time it stays in the layout of the runtime's convolutions (`session_in_blocks`), which takes longer to
    open: too long for a few pictures. It is opened when the runs have taken as long as opening the first
    one did, so that both together never cost much more than the better of them alone. Threads may run it at once.
    """

    def __init__(self, model: ModelProto, providers: Providers = CPU_ONLY, threads: int = 0) -> None:
        """Open the first session.

        Args:
            model: with Q/DQ.
            providers: to run on.
            threads: see `simulation_session`.

        Raises:
            FileFormatError: the runtime cannot load the model.
        """
        start = time.perf_counter()
        model = load(model)
        if not computes_in_narrow_floats(model):
            drop_repeated_pairs(model)
        self._session = simulation_session(model, providers=providers, threads=threads)
        self._threads, self._changing = threads, Lock()
        self._opening, self._running = time.perf_counter() - start, 0.0
        self._model = model if providers == CPU_ONLY and is_small_convolutional(model) else None

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, npt.NDArray[Any]]) -> list[Any]:
        """Run the model; return the outputs of these names, or all."""
        if self._running > self._opening:
            with self._changing:
                model, self._model = self._model, None
            if model is not None:
                self._session = session_in_blocks(model, self._threads) or self._session
        start = time.perf_counter()
        found: list[Any] = self._session.run(names, dict(feeds))
        self._running += time.perf_counter() - start
        return found

    def __getattr__(self, name: str) -> Any:
        """Return what the session has: its inputs and outputs, its providers."""
        if name == "_session":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._session, name)
