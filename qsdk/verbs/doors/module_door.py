"""The door of a sim of an nn.Module."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto
from torch import Tensor

from onnx_backend.data_passes.written_file import ExampleRun
from onnx_backend.opening.from_trace import TracedModel, open_traced
from onnx_backend.parity import parity
from onnx_backend.parity.parity import Run as SimulatedRun
from onnx_backend.parity.teacher import RunOn
from onnx_backend.parity.written import ExpectedModel
from qsdk.algorithms import ranks
from qsdk.core.arrays import Array, Floats
from qsdk.core.errors import ExportError, QsdkError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.layer_problem import Walk
from qsdk.core.lazy_arrays import LazyMapping
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.ranges.statistics import Together
from qsdk.core.report import Report
from qsdk.core.run_options import Run
from qsdk.core.sims.biases import noting_shifts
from qsdk.core.site import owner_of, without_calls
from qsdk.verbs.doors.parts import parts_of
from torch_bridge import calibrate, data_passes, stored_weights
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values import layers
from torch_bridge.torch_values.module_state import restoring_state
from torch_bridge.walk import batch_norm_statistics, layer_walk


@dataclass(frozen=True)
class ModuleDoor:
    """The door of a sim of an nn.Module. Data that does not fit the model is a DataError."""

    sim: QuantSim
    run: Run

    def calibrate(self, data: Iterable[Any], **options: Any) -> Report:
        """Calibrate, without another thread running the model."""
        with self.sim.alone():
            return calibrate.calibrate(self.sim, data, forward=self.run.forward, progress=self.run.progress, **options)

    @contextmanager
    def layer_walk(self, data: Iterable[Any]) -> Iterator[tuple[Walk, dict[str, Array]]]:
        """Open a layer walk, which undoes by itself what was written if it does not end."""
        run = self.run
        begun = layer_walk.walk_layers(
            self.sim, data, forward=run.forward, max_memory=run.max_memory, all_experts=run.all_experts
        )
        with begun as walk, noting_shifts(self.sim) as rounded:
            yield walk, rounded

    def visit(
        self,
        data: Iterable[Any],
        each: Callable[[str, Array], None],
        *,
        title: str,
        sites: Collection[str] | None = None,
    ) -> None:
        """Run the float model over the data and pass the values at computed sites (None: all) to `each`."""
        shared: dict[str, Any] = {"forward": self.run.forward, "progress": self.run.progress}
        data_passes.visit_sites(self.sim, data, each, title=title, sites=sites, **shared)

    def outputs(self, batches: Iterable[Any], *, in_float: bool) -> Iterator[list[Floats]]:
        """Yield the floating-point outputs of each batch, of the simulation or of the float model."""
        return data_passes.outputs(self.sim, batches, self.run.forward, in_float=in_float)

    @contextmanager
    def quantizing_only(self, sites: Collection[str]) -> Iterator[None]:
        """Let the sim quantize at these sites alone inside the block."""
        runtime = self.sim.runtime

        def visit(site: str, x: Tensor) -> Tensor:
            return runtime.quantize(site, x) if site in sites else x

        narrow = any(site in runtime.narrow_regions for site in sites)
        with runtime.in_phase("visit", visit, quantizes=narrow):
            yield

    def visited_outputs(
        self, batch: Any, visitor: Callable[[str, Tensor], Tensor], where: str, *, everywhere: bool = False
    ) -> list[Tensor] | None:
        """Return the floating outputs of the float model, with gradients, whose sites all go through `visitor`."""
        return data_passes.visit_tensors(self.sim, batch, visitor, self.run.forward, where, everywhere=everywhere)

    def fake_quantizer(self) -> Callable[[str, Tensor], Tensor | None]:
        """Return a function of (site, values): the values on its grid; None where float, or on it already."""
        quantizers = {
            site: quantizer
            for site, quantizer in self.sim.quantizers.items()
            if quantizer.decision.spec is not None and not quantizer.decision.passes_through
        }
        return lambda site, x: quantizers[site](x) if site in quantizers else None

    def as_given(self) -> AbstractContextManager[bool]:
        """Restore the user's stored tensors inside the block, and yield whether any had changed."""
        return stored_weights.as_given(self.sim)

    def stored_values(self) -> Mapping[str, Array]:
        """Return every stored float32 tensor by its name in the graph."""
        return data_passes.stored_by_name(self.sim)

    def store_values(self, values: Mapping[str, Array]) -> None:
        """Copy the values into parameters and buffers."""
        data_passes.change_stored(self.sim, values)

    def running_graph(self) -> Graph:
        """Return the sim's graph, with a Relu in place of each ReLU6 whose upper bound was removed."""
        return layers.graph_as_it_runs(self.sim.model, self.sim.graph)

    def why_bounded(self, clips: Mapping[str, int], wanted: Collection[str]) -> dict[str, str]:
        """Return why the upper bound of a ReLU6 cannot be removed, by site; "" where it can."""
        owners = {site: without_calls(owner_of(site)) for site in clips}
        return layers.shared_bound_reasons(self.sim.model, owners, wanted)

    def unbind(self, sites: Collection[str]) -> None:
        """Replace ReLU6 modules by ReLU."""
        layers.remove_bounds(self.sim.model, {without_calls(owner_of(site)) for site in sites})

    def reestimate_batch_norm(self, data: Iterable[Any], together: Together) -> tuple[list[dict[str, Any]], float]:
        """Set the statistics of BatchNorms to those of their inputs; return a row of each, and the seconds in float."""
        with batch_norm_statistics.put_back_on_error(self.sim):
            batch_norm_statistics.same_everywhere(self.sim, lambda own: ranks.all_gather(own)[0])
            run = self.run
            result = batch_norm_statistics.reestimate(
                self.sim, data, together, forward=run.forward, progress=run.progress
            )
            ranks.require_same_layers([])
            return result

    def traced(self) -> TracedModel:
        """Trace the model as it is now, and compare its sites with the plan's."""
        opened = open_traced(*self.sim.traced())
        different = sorted(set(opened.graph.sites).symmetric_difference(self.sim.plan.decisions))
        if not different and [op.type for op in opened.graph.ops] != [op.type for op in self.sim.graph.ops]:
            # the sites may agree although an op has changed: the plan would not be the changed model's
            different = ["its ops"]
        if different:
            raise ExportError(
                f"the model has changed since it was quantized: {', '.join(different[:5])} differ; quantize the "
                "changed model instead"
            )
        return opened

    def encodings(self, sites: Collection[str]) -> Mapping[str, Encoding]:
        """Return the encodings of calibrated sites, made one at a time where that saves memory."""
        quantizers = self.sim.quantizers
        return LazyMapping(sites, lambda site: quantizers[site].encoding())

    def files_read(self) -> Collection[Path]:
        """Return the files that hold weights of the sim; they must not be written over."""
        return ()

    def check_parity(self, model: ModelProto, data: Iterable[Any], runtime: str | None) -> Report:
        """Compare in one forward pass per batch, whose outputs wait until the sites are compared."""
        runs = self.simulated(data)
        encodings = self.sim.encodings
        expected = ExpectedModel(self.traced(), self.sim.plan, encodings)
        stored = calibrate.stored_values(self.sim)
        moves = (d.site for d in self.sim.plan.decisions.values() if d.passes_through or d.tied_dynamically)
        moving = frozenset(moves if self.sim.example.has_cache else ())
        return parity.check(model, runs, stored, encodings, expected, RunOn(runtime=runtime), moving)

    def simulated(self, data: Iterable[Any]) -> Iterator[SimulatedRun]:
        """Yield values by site, inputs by name, and the outputs, of each batch."""
        return data_passes.captures(self.sim, data, forward=self.run.forward, progress=self.run.progress)

    def simulated_example(self, model: ModelProto) -> Iterator[SimulatedRun]:
        """Yield the same of the example, in parts of the sizes that a file has."""
        sizes = [[one.dim_value for one in value.type.tensor_type.shape.dim] for value in model.graph.input]
        example = self.sim.current_example
        parts = parts_of([(example.args, example.kwargs)], sizes)
        return data_passes.captures(self.sim, parts, forward=_call_example, progress=False)

    def stored_at_sites(self) -> Mapping[str, Array]:
        """Return the fake-quantized weights and biases by site."""
        return calibrate.stored_values(self.sim)

    def run_example(self, model: ModelProto) -> ExampleRun | str:
        """Run the sim on its example, or on values of its sizes in the file; or return why that does not go."""
        example = self.sim.current_example
        try:
            with restoring_state(self.sim.model):
                feeds, outputs = data_passes.run_once(self.sim, example)
        except QsdkError as error:
            return str(error)
        places = {tensor.device.type for tensor in self.sim.model.parameters()} - {"cpu", "meta"}
        return ExampleRun(example, feeds, outputs, ", ".join(sorted(places)) or "cpu")


def _call_example(model: Any, example: Any) -> Any:
    args, kwargs = example
    return model(*args, **kwargs)
