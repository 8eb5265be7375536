"""The door of a sim of an ONNX model."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto
from torch import Tensor

from onnx_backend.data_passes import passes
from onnx_backend.data_passes.written_file import ExampleRun
from onnx_backend.opening.from_trace import TracedModel
from onnx_backend.parity import parity
from onnx_backend.parity.teacher import RunOn
from onnx_backend.parity.written import ExpectedModel
from onnx_backend.proto.inputs import noted_example, with_shapes
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, batches_of, random_feeds
from onnx_backend.runtime.providers import CPU_ONLY
from onnx_backend.sim import OnnxSim
from onnx_backend.walk import batch_norm_statistics, layer_walk
from qsdk.algorithms import ranks
from qsdk.algorithms.graph_in_torch.run_graph import fake_quantize, run_graph, unsupported_ops
from qsdk.core.arrays import Array, Floats
from qsdk.core.errors import ConfigError, QsdkError
from qsdk.core.graph.graph import Graph, clips_at_six
from qsdk.core.layers.layer_problem import Walk
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.ranges.statistics import Together
from qsdk.core.report import Report
from qsdk.core.run_options import Forward, Run
from qsdk.core.sims.biases import noting_shifts
from qsdk.core.sims.state import put_back_on_error


@dataclass(frozen=True)
class OnnxDoor:
    """The door of a sim of an ONNX model. Data that does not fit the model is a DataError."""

    sim: OnnxSim
    run: Run

    def calibrate(self, data: Iterable[Any], **options: Any) -> Report:
        """Calibrate with statistics inside the graph."""
        return self.sim.calibrate(data, progress=self.run.progress, **options)

    @contextmanager
    def layer_walk(self, data: Iterable[Any]) -> Iterator[tuple[Walk, dict[str, Array]]]:
        """Open a layer walk under a snapshot of the sim, which costs nothing: it refers to the replaced tensors."""
        if self.run.all_experts:
            raise ConfigError("all_experts routes tokens in modules; quantize the nn.Module, or leave it out")
        begun = layer_walk.walk_layers(self.sim, data, max_memory=self.run.max_memory, progress=False)
        with put_back_on_error(self.sim, weights=True), noting_shifts(self.sim) as rounded, begun as walk:
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
        passes.visit_sites(self.sim, data, each, title=title, sites=sites, progress=self.run.progress)

    def outputs(self, batches: Iterable[Any], *, in_float: bool) -> Iterator[list[Floats]]:
        """Yield the floating-point outputs of each batch, of the simulation or of the float model."""
        return passes.outputs(self.sim, batches, in_float=in_float)

    def quantizing_only(self, sites: Collection[str]) -> AbstractContextManager[None]:
        """Let the sim quantize at these sites alone inside the block."""
        return passes.quantizing_only(self.sim, sites)

    def visited_outputs(
        self, batch: Any, visitor: Callable[[str, Tensor], Tensor], where: str, *, everywhere: bool = False
    ) -> list[Tensor] | None:
        """Run the graph in PyTorch through `visitor`; return its floating-point outputs, None where it lacks an op."""
        graph = self.sim.graph
        if unsupported_ops(graph):
            return None
        inputs = [DeclaredInput(value) for value in self.sim.traced().model.graph.input]
        found = run_graph(graph, self.constants(), as_feeds(batch, inputs, where), visitor)
        return [y for y in found if y.is_floating_point()]

    def fake_quantizer(self) -> Callable[[str, Tensor], Tensor | None]:
        """Return a function of (site, values): the values on its grid; None where float, or on it already."""
        decisions = self.sim.plan.decisions
        encodings = {s: encoding for s, encoding in self.sim.encodings.items() if not decisions[s].passes_through}
        return lambda site, x: fake_quantize(x, encodings[site]) if site in encodings else None

    def as_given(self) -> AbstractContextManager[bool]:
        """Restore the user's stored tensors inside the block, and yield whether any had changed."""
        return self.sim.with_given_weights()

    def stored_values(self) -> Mapping[str, Array]:
        """Return every stored float32 tensor by its name in the graph."""
        return passes.stored_by_name(self.sim)

    def constants(self) -> Mapping[str, Array]:
        """Return all initializers, also those of integers."""
        return passes.constants_by_name(self.sim)

    def store_values(self, values: Mapping[str, Array]) -> None:
        """Replace initializers."""
        self.sim.change_stored(values)

    def running_graph(self) -> Graph:
        """Return the sim's graph, with a Relu in place of each ReLU6 whose upper bound was removed."""
        return passes.graph_as_it_runs(self.sim)

    def why_bounded(self, clips: Mapping[str, int], wanted: Collection[str]) -> dict[str, str]:
        """Return why the upper bound of a ReLU6 cannot be removed, by site; "" where it can."""
        return passes.shared_bound_reasons(self.sim, clips, wanted)

    def unbind(self, sites: Collection[str]) -> None:
        """Store infinity as the bound."""
        passes.remove_bounds(self.sim, clips_at_six(self.sim.graph), sites)

    def reestimate_batch_norm(self, data: Iterable[Any], together: Together) -> tuple[list[dict[str, Any]], float]:
        """Set the statistics of BatchNorms to those of their inputs; return a row of each, and the seconds in float."""
        with put_back_on_error(self.sim, weights=True):
            result = batch_norm_statistics.reestimate(self.sim, data, together, progress=self.run.progress)
            ranks.require_same_layers([])
            return result

    def traced(self) -> TracedModel:
        """Return the model that the sim marked when it was made."""
        return self.sim.traced()

    def encodings(self, sites: Collection[str]) -> Mapping[str, Encoding]:
        """Return the encodings of calibrated sites, made one at a time where that saves memory."""
        held = self.sim.encodings_where_ready()
        return {site: held[site] for site in sites}

    def files_read(self) -> Collection[Path]:
        """Return the files that hold weights of the sim; they must not be written over."""
        return self.sim.files_read()

    def check_parity(self, model: ModelProto, data: Iterable[Any], runtime: str | None) -> Report:
        """Compare in a session of the sim per batch."""
        sim, runs = self.sim, self.simulated(data)
        expected = ExpectedModel(sim.traced(), sim.plan, sim.encodings, sim.opened)
        return parity.check(model, runs, sim.stored_values(), sim.encodings, expected, RunOn(sim.providers, runtime))

    def simulated(self, data: Iterable[Any]) -> Iterator[parity.Run]:
        """Yield values by site, inputs by name, and the outputs, of each batch."""
        for _, batch in batches_of(data, "parity", self.run.progress, skip_empty=False):
            yield self.sim.capture(batch), self.sim.run(batch)

    def simulated_example(self, model: ModelProto) -> Iterator[parity.Run]:
        """Yield the same of random values, of the sizes that a file has."""
        feeds = next(random_feeds(model), {})
        yield self.sim.capture(feeds), self.sim.run(feeds)

    def stored_at_sites(self) -> Mapping[str, Array]:
        """Return the fake-quantized weights and biases by site."""
        return self.sim.stored_values()

    def run_example(self, model: ModelProto) -> ExampleRun | str:
        """Run the sim on its example, or on values of its sizes in the file; or return why that does not go."""
        problem = "no values of the types of its inputs can be made"
        for feeds in random_feeds(with_shapes(model, noted_example(model), least=0)):
            try:
                place = "cpu" if self.sim.providers == CPU_ONLY else self.sim.providers.names[0]
                return ExampleRun(feeds, feeds, self.sim.run(feeds), place)
            except QsdkError as error:
                problem = str(error)
        return problem


def require_no_forward(forward: Forward | None) -> None:
    """Raise an error for `forward=` on the ONNX side."""
    if forward is not None:
        raise ConfigError("forward= calls an nn.Module; an ONNX model is fed by name: give mappings of arrays")
