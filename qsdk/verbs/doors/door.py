"""The operations on a sim that verbs need, the same for an nn.Module and an ONNX model."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from onnx import ModelProto
from torch import Tensor

from onnx_backend.data_passes.written_file import ExampleRun
from onnx_backend.opening.from_trace import TracedModel
from qsdk.core.channel_maps.rotated_weights import InputRotation
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.layer_problem import Walk
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.ranges.statistics import Together
from qsdk.core.report import Report

#: Calls a module on a batch: `(model, batch)`.
Forward = Callable[[Any, Any], Any]
#: replaces the values at a site, as (site, values)
Visitor = Callable[[str, Tensor], Tensor]
#: receives the float values at a site, as (site, values)
Visit = Callable[[str, npt.NDArray[Any]], None]


class Door(Protocol):
    """A sim as the verbs see it.

    `forward` is for modules alone: for an ONNX model every method raises a ConfigError. Data that does not fit the
    model is a DataError everywhere.
    """

    def calibrate(self, data: Iterable[Any], forward: Forward | None, **options: Any) -> Report:
        """Find an encoding for every site; `options` are those of `qsdk.calibrate`."""
        ...

    def layer_walk(
        self, data: Iterable[Any], forward: Forward | None, max_memory: int | None
    ) -> AbstractContextManager[tuple[Walk, dict[str, npt.NDArray[Any]]]]:
        """Open a layer walk, with the dict of `noting_shifts`; if the block raises, the sim is unchanged.

        Args:
            data: batches.
            forward: calls the module on a batch.
            max_memory: bytes that kept activations may take; None for no bound.
        """
        ...

    def visit(
        self,
        data: Iterable[Any],
        each: Visit,
        *,
        title: str,
        sites: Collection[str] | None = None,
        forward: Forward | None,
        progress: bool,
    ) -> None:
        """Run the float model over the data and pass the values at computed sites to `each`.

        Args:
            data: batches.
            each: is called with site and values, batch by batch.
            title: of the progress bar.
            sites: the ones to visit; None for all computed ones.
            forward: calls the module on a batch.
            progress: show a progress bar.
        """
        ...

    def outputs(
        self, batches: Iterable[Any], forward: Forward | None, *, in_float: bool
    ) -> Iterator[list[npt.NDArray[np.float32]]]:
        """Yield the floating-point outputs of each batch, of the simulation or of the float model."""
        ...

    def quantizing_only(self, sites: Collection[str]) -> AbstractContextManager[None]:
        """Let the sim quantize at these sites alone inside the block."""
        ...

    def visited_outputs(
        self, batch: Any, visitor: Visitor, forward: Forward | None, where: str, *, everywhere: bool = False
    ) -> list[Tensor] | None:
        """Run the float model with gradients, and return its floating-point outputs.

        Args:
            batch: of the data.
            visitor: sees every site's values, stored ones too; what it returns goes on in their place.
            forward: calls the module on a batch.
            where: names the batch in messages.
            everywhere: also take gradients through what a module runs under `torch.no_grad`.

        Returns:
            The outputs; None where the model has ops without gradients.
        """
        ...

    def fake_quantizer(self) -> Callable[[str, Tensor], Tensor | None]:
        """Return a function of (site, values): the values on the site's grid; None where float, or on it already."""
        ...

    def as_given(self) -> AbstractContextManager[bool]:
        """Restore the user's stored tensors inside the block, and yield whether any had changed."""
        ...

    def stored_values(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return every stored float32 tensor by its name in the graph."""
        ...

    def store_values(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Store other values of the same shape."""
        ...

    def untied(self, names: Collection[str]) -> AbstractContextManager[bool]:
        """Give each layer a copy of its own of these stored tensors, for good; if the block raises, nothing changed.

        Yields whether it was possible. At the PyTorch side `sim.model` is another module afterwards.
        """
        ...

    def rotated(self, rotations: Mapping[str, InputRotation]) -> AbstractContextManager[bool]:
        """Put rotations in front of layers, by the names of their weights, for good; see `untied` for the rest."""
        ...

    def why_caches_stay(self) -> str:
        """Return why keys and values that cross from step to step must stay as they are; "" if none come from outside.

        A rotation would turn what a cache holds, so that one which the float model has filled would be read wrong.
        """
        ...

    def running_graph(self) -> Graph:
        """Return the sim's graph, with a Relu in place of each ReLU6 whose upper bound was removed."""
        ...

    def why_bounded(self, clips: Mapping[str, int], wanted: Collection[str]) -> dict[str, str]:
        """Return why the upper bound of a ReLU6 cannot be removed, by site; "" where it can.

        Args:
            clips: site -> op of every ReLU6.
            wanted: the sites in question.
        """
        ...

    def unbind(self, sites: Collection[str]) -> None:
        """Remove the upper bound of the ReLU6 at these sites."""
        ...

    def reestimate_batch_norm(
        self, data: Iterable[Any], together: Together, forward: Forward | None, progress: bool
    ) -> tuple[list[dict[str, Any]], float]:
        """Set the statistics of BatchNorms to those of their inputs in the simulation, or leave the sim unchanged.

        Returns:
            One row per BatchNorm, and the seconds that the data takes in float.
        """
        ...

    def traced(self) -> TracedModel:
        """Return the float model as it is now, with a mark at every site; it is to be read only.

        Raises:
            ExportError: the module cannot be traced, or has changed since it was quantized.
        """
        ...

    def encodings(self, sites: Collection[str]) -> Mapping[str, Encoding]:
        """Return the encodings of calibrated sites, made one at a time where that saves memory."""
        ...

    def files_read(self) -> Collection[Path]:
        """Return the files that hold weights of the sim; they must not be written over."""
        ...

    def check_parity(
        self, model: ModelProto, data: Iterable[Any], forward: Forward | None, progress: bool, runtime: str | None
    ) -> Report:
        """Compare an opened Q/DQ model with the sim, site by site."""
        ...

    def run_example(self, model: ModelProto) -> ExampleRun | str:
        """Run the sim on its example, or on values of the sizes that it had; or return why that does not go.

        Args:
            model: a file of the sim, which says what it takes.
        """
        ...

    def save(self, path: str | os.PathLike[str], facts: Mapping[str, Any]) -> None:
        """Write the whole sim to one file, with the facts that sims of both sides have."""
        ...
