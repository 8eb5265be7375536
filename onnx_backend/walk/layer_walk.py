"""Walk through an ONNX sim layer by layer; the float and the quantized model each run once, in sections."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.data_passes.relu6 import graph_as_it_runs
from onnx_backend.runtime.session_memory import shared_memory
from onnx_backend.sim import OnnxSim
from onnx_backend.walk.live_tensors import LiveTensors
from onnx_backend.walk.models import WalkWeights, streams_of, tags_of
from onnx_backend.walk.run import FLOAT, QUANTIZED, PairedRun
from onnx_backend.walk.steps import LayerCall, LayerGroup, layer_groups
from qsdk.core.errors import ModelError
from qsdk.core.layers.layer_problem import Layer
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.sims.biases import float_biases
from qsdk.core.sims.state import put_back_on_error

Array = npt.NDArray[Any]


@contextmanager
def walk_layers(
    sim: OnnxSim, data: Iterable[Any], *, max_memory: int | None = None, progress: bool = True
) -> Iterator["OnnxWalk"]:
    """Walk through the layers of a calibrated sim; changes are committed to the sim when the block ends.

    Each batch runs once through the float and once through the quantized model. Both stop at the inputs of layers,
    where the tensors that are read later on are kept. A layer whose input depends on itself (a weight that is used
    again, the states of a recurrent layer) costs an extra run of the nodes in between.

    Args:
        sim: calibrated. If the block fails, it stays as it was.
        data: batches as `OnnxSim.run` takes them; read once.
        max_memory: bytes of kept tensors; beyond them, tensors go to a temporary file. None for no bound.
        progress: show a bar while the data is read.

    Raises:
        CalibrationError: sites have no encoding.
        DataError: no data, or data the model does not take.
    """
    walk = OnnxWalk(sim, max_memory)
    with shared_memory():
        try:
            walk.run.start(data, progress=progress)
            yield walk
        finally:
            walk.run.live.clear()  # before the pool gives its memory back
    walk.commit()


@dataclass(frozen=True)
class OnnxStep:
    """Layers that read one input; see `qsdk.core.layers.layer_problem.Step`."""

    place: LayerGroup
    run: PairedRun

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers that read this input."""
        return self.place.layers

    @property
    def reached(self) -> Sequence[int]:
        """Return the numbers of the batches: all call the layers."""
        return range(self.run.batches)

    def inputs(self) -> Iterator[tuple[Array, Array]]:
        """Yield the float and the quantized input of every call, batch by batch, until the walk goes on."""
        for batch in range(self.run.batches):
            for call in self.place.calls:
                exact, rounded = (self._read(call, number, batch) for number in (FLOAT, QUANTIZED))
                rows = _in_float32(call.reading.rows(*exact))
                same = all(one is other for one, other in zip(exact, rounded, strict=True))
                yield rows, rows if same else _in_float32(call.reading.rows(*rounded))

    def _read(self, call: LayerCall, number: int, batch: int) -> tuple[Array, Array | None]:
        stream, live = self.run.streams[number], self.run.live

        def value(name: str) -> Array:
            return stream.stored(name) if stream.is_stored(name) else live.get((number, batch, name))

        first = call.first(stream)
        return value(call.value(stream)), value(first) if first else None


def _in_float32(rows: Array) -> Array:
    return rows if rows.dtype.kind in "iub" else rows.astype(np.float32, copy=False)  # an embedding reads indices


class OnnxWalk:
    """The layers of a sim in the order they run; see `qsdk.core.layers.layer_problem.Walk`."""

    def __init__(self, sim: OnnxSim, max_memory: int | None) -> None:
        """Find the layers; nothing is run yet.

        Raises:
            CalibrationError: sites have no encoding.
        """
        marked, state, encodings = sim.traced().model, sim.snapshot(), sim.encodings
        frozen = [site for site, encoding in state.own.items() if encoding.frozen]
        self._sim = sim
        self._places, self._left = layer_groups(graph_as_it_runs(sim), sim.plan, frozen, tags_of(marked))
        self._layers = {layer.site: layer for place in self._places for layer in place.layers}
        self._weights = WalkWeights(marked, sim.plan, state.own, sim.stored_names(), float_biases(sim))
        streams = streams_of(marked, self._weights, encodings)
        self.run = PairedRun(streams, self._places, LiveTensors(max_memory), sim.in_memory, sim.providers)
        self._steps = iter(range(len(self._places)))

    @property
    def layers(self) -> Sequence[Layer]:
        """Return all layers, in order."""
        return list(self._layers.values())

    @property
    def left(self) -> Mapping[str, str]:
        """Return weight site -> why it cannot be solved."""
        return self._left

    @property
    def batches(self) -> int:
        """Return the number of batches."""
        return self.run.batches

    @property
    def float_seconds(self) -> float:
        """Return the seconds spent in the float model so far."""
        return self.run.float_seconds

    def __iter__(self) -> Iterator[OnnxStep]:
        """Yield the steps; each once, since a walk does not go back."""
        for step in self._steps:
            self.run.reach(step)
            yield OnnxStep(self._places[step], self.run)
        self.run.finish()

    def weight(self, site: str) -> Array:
        """Return the stored weight in the float model, float32, in its stored shape."""
        return np.array(self._weights.before[self._weights.names[self._layer(site).site]])

    def bias(self, site: str) -> Array | None:
        """Return the stored bias of a layer in the float model, float32; None where it has none."""
        bias = self._layer(site).bias
        return np.array(self._weights.before[self._weights.names[bias]], np.float32) if bias else None

    def encoding(self, site: str) -> Encoding:
        """Return the current encoding of a weight."""
        return self._weights.own[self._layer(site).site]

    def write(
        self, site: str, *, encoding: Encoding | None = None, weight: Any | None = None, bias_shift: Any | None = None
    ) -> None:
        """Change the quantized model at a layer; see `qsdk.core.layers.layer_problem.Walk.write`.

        Raises:
            ModelError: the walk has no such layer, or the layer has no bias to shift.
        """
        layer, weights = self._layer(site), self._weights
        if bias_shift is not None:
            if not layer.bias:
                raise ModelError(f"{site} has no bias of its own that could be shifted")
            name = weights.names[layer.bias]
            weights.put(name, weights.before[name] + np.asarray(bias_shift, np.float32).reshape(-1))
        weights.write(site, encoding, None if weight is None else np.asarray(weight))

    def commit(self) -> None:
        """Write the changes into the sim."""
        changed, own = self._weights.changed, self._weights.own
        if not changed and own == self._sim.snapshot().own:
            return
        with put_back_on_error(self._sim, weights=True):
            if changed:
                self._sim.change_stored(changed)
            self._sim.restore(replace(self._sim.snapshot(), own=own))

    def _layer(self, site: str) -> Layer:
        if site not in self._layers:
            raise ModelError(f"{site} is no layer of this walk: {self._left.get(site, 'there is no such weight')}")
        return self._layers[site]
