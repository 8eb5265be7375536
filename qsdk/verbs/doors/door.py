"""What a verb asks of a sim, whether it simulates an nn.Module or an ONNX model."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph
from qsdk.core.layers.layer_walk import Walk
from qsdk.core.ranges.channel_statistics import Together
from qsdk.core.report import Report

#: Calls a module on a batch: `(model, batch)`.
Forward = Callable[[Any, Any], Any]
#: Takes the float values at a site, as (site, values).
Visit = Callable[[str, npt.NDArray[Any]], None]


class Door(Protocol):
    """A sim as the verbs see it.

    `forward` is for modules alone: every method refuses it (ConfigError) for an ONNX model. Data that the model does
    not take is a DataError everywhere.
    """

    def calibrate(self, data: Iterable[Any], forward: Forward | None, **options: Any) -> Report:
        """Find an encoding for every site; `options` are those of `qsdk.calibrate`."""
        ...

    def layer_walk(
        self, data: Iterable[Any], forward: Forward | None, max_memory: int | None
    ) -> AbstractContextManager[tuple[Walk, dict[str, npt.NDArray[Any]]]]:
        """Open a walk over the layers, and the dict of `noting_shifts`; if the block raises, the sim stays as it was.

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
        """Run the float model over the data and hand the values at computed sites to `each`.

        Args:
            data: batches.
            each: is called with site and values, batch by batch.
            title: of the progress bar.
            sites: of interest; None for all that are no stored tensors.
            forward: calls the module on a batch.
            progress: show a progress bar.
        """
        ...

    def outputs(
        self, batches: Iterable[Any], forward: Forward | None, *, in_float: bool
    ) -> Iterator[list[npt.NDArray[np.float32]]]:
        """Yield the floating-point outputs of each batch, of the simulation or of the float model."""
        ...

    def as_given(self) -> AbstractContextManager[bool]:
        """Put back, inside the block, the stored tensors that the user gave; yields whether any were changed."""
        ...

    def stored_values(self) -> Mapping[str, npt.NDArray[Any]]:
        """Return every stored float32 tensor by its name in the graph."""
        ...

    def store_values(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Give stored tensors other values of the same shape."""
        ...

    def running_graph(self) -> Graph:
        """Return the sim's graph, with a Relu in the place of each ReLU6 that has lost its upper bound."""
        ...

    def why_bounded(self, clips: Mapping[str, int], wanted: Collection[str]) -> dict[str, str]:
        """Return why a ReLU6 cannot lose its upper bound, "" where it can.

        Args:
            clips: site -> op of every ReLU6.
            wanted: the sites in question.
        """
        ...

    def unbind(self, sites: Collection[str]) -> None:
        """Take the upper bound of the ReLU6 at these sites away."""
        ...

    def reestimate_batch_norm(
        self, data: Iterable[Any], together: Together, forward: Forward | None, progress: bool
    ) -> tuple[list[dict[str, Any]], float]:
        """Give BatchNorms the statistics of their inputs in the simulation; if it fails, the sim stays as it was.

        Returns:
            One row per BatchNorm, and the seconds that the data takes in float.
        """
        ...
