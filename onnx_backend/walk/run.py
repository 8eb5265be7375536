"""Run the float and the quantized model side by side, from the inputs of one step to those of the next."""

import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, input_names
from onnx_backend.proto.lazy_tensors import LargeTensor, is_stub, release
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import is_large, types_of
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, batches_of, run_session
from onnx_backend.runtime.providers import Providers
from onnx_backend.runtime.session import bounded_session
from onnx_backend.workarounds.kernel_casts import has_other_floats
from qsdk.core.arrays import Array
from qsdk.core.graph.op_facts import RECURRENT, SHAPE_OPS

#: a stream, the number of a batch, the name of a tensor
Key = tuple[int, int, str]
FLOAT, QUANTIZED = 0, 1
_EXTEND_BY_REQUEST = 1
#: metadata that matches the nodes of two versions of a graph
TAG = "qsdk.walk"
#: ops that return sequences or optionals, which no caller can hold
_NO_TENSORS = frozenset({"SplitToSequence", "SequenceConstruct", "SequenceEmpty", "SequenceInsert"}) | {
    "SequenceErase",
    "SequenceMap",
    "Optional",
}


@dataclass(frozen=True)
class Section:
    """Part of a graph that is run at once.

    Attributes:
        nodes: indices, in order.
        inputs: tensors that exist already, or that the caller feeds.
        wanted: its outputs.
    """

    nodes: Sequence[int]
    inputs: Sequence[str]
    wanted: Sequence[str]


class Stream:
    """A model without its large stored tensors, and which of its nodes have been run.

    Attributes:
        nodes: of the graph, sorted.
        given: name -> an input that the caller feeds.
        at: tag -> index of a node.
        outputs: of the graph.
        bfloat16: the tensors of that type: between two sections they are float32 arrays.
        done: indices of the nodes that have been run.
    """

    def __init__(
        self,
        model: ModelProto,
        large: Mapping[str, LargeTensor],
        computed: Mapping[str, Callable[[], LargeTensor]],
        bfloat16: Collection[str] = (),
    ) -> None:
        """Read a model.

        `large` are the tensors that stubs stand for; those `computed` are computed anew for every section and replace
        the model's own.
        """
        self._model, self._large, self._computed = model, large, computed
        self._stored, self.bfloat16 = initializers(model.graph), frozenset(bfloat16)
        self.nodes: list[NodeProto] = list(model.graph.node)
        self._reads = [reads(node) for node in self.nodes]
        for index, node in enumerate(self.nodes):
            if node.op_type in RECURRENT and not node.output[0]:
                node.output[0] = f"{TAG}/{index}"  # the states after each step tell those before the next
        self._maker = {name: index for index, node in enumerate(self.nodes) for name in node.output if name}
        fed = set(input_names(model.graph))
        self.given = {value.name: value for value in model.graph.input if value.name in fed}
        self.at = {tag: index for index, node in enumerate(self.nodes) if (tag := metadata(node).get(TAG))}
        self.outputs = [value.name for value in model.graph.output]
        self.done: set[int] = set()
        no_tensors = {index for index, node in enumerate(self.nodes) if node.op_type in _NO_TENSORS}
        self._again = self._made_of_stored() | no_tensors

    def info(self, name: str, facts: Sequence[tuple[np.dtype[Any], tuple[int, ...]]]) -> ValueInfoProto:
        """Declare a tensor from the types and shapes of its arrays; sizes are fixed where all batches agree."""
        if name in self.given:
            given: ValueInfoProto = self.given[name]
            return given
        code = TensorProto.BFLOAT16 if name in self.bfloat16 else helper.np_dtype_to_tensor_dtype(facts[0][0])
        sizes = [set(column) for column in zip(*(shape for _, shape in facts), strict=True)]
        shape = [min(s) if len(s) == 1 else None for s in sizes]
        info: ValueInfoProto = helper.make_tensor_value_info(name, code, shape)
        return info

    def maker(self, name: str) -> int:
        """Return the index of the node that computes a tensor."""
        return self._maker[name]

    def depths(self, steps: Mapping[int, int]) -> Mapping[str, int]:
        """Return tensor -> the last step that it depends on, if any; `steps` maps a node to its step."""
        found: dict[str, int] = {}
        for index, node in enumerate(self.nodes):
            own = max([steps.get(index, -1), *(found.get(name, -1) for name in self._reads[index])])
            if own >= 0:
                found.update(dict.fromkeys(node.output, own))
        return found

    def section(self, wanted: Iterable[str]) -> Section:
        """Return the section to run for these tensors; those that exist already are among its inputs."""
        wanted = list(dict.fromkeys(wanted))
        nodes: set[int] = set()
        inputs: dict[str, None] = {}
        seen: set[str] = set()
        waiting = list(wanted)
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            index = self._maker.get(name)
            if index is None:
                if name in self.given:
                    inputs[name] = None
            elif index in self.done:
                inputs[name] = None
            elif index not in nodes:
                nodes.add(index)
                waiting.extend(self._reads[index])
        computed = [name for name in wanted if name not in inputs]
        return Section(sorted(nodes), sorted(inputs), computed)

    def sizes_in(self, section: Section, later: Section) -> list[str]:
        """Return shapes of the section's tensors that are wanted later, so that the tensors need not be kept."""
        known = {*section.inputs, *self.made_in(section)}
        shapes = (self.nodes[index] for index in later.nodes if self.nodes[index].op_type in SHAPE_OPS)
        return [node.output[0] for node in shapes if node.input[0] in known]

    def made_in(self, section: Section) -> set[str]:
        """Return every tensor that the nodes of a section compute."""
        return {name for index in section.nodes for name in self.nodes[index].output if name}

    def is_stored(self, name: str) -> bool:
        """Return True if a tensor is stored in the model."""
        return name in self._stored or name in self._computed

    def stored(self, name: str) -> Array:
        """Return the value of a stored tensor."""
        if name in self._computed:
            return self._computed[name]().value()
        return self._large[name].value() if name in self._large else array(self._stored[name])

    def finish(self, section: Section) -> None:
        """Record that a section was run; nodes over stored tensors alone run again in every section that reads them."""
        self.done.update(set(section.nodes) - self._again)

    def model(self, section: Section, inputs: Sequence[ValueInfoProto]) -> tuple[ModelProto, Mapping[str, LargeTensor]]:
        """Return the model of a section with stubs for its large stored tensors, and these by name."""
        found = ModelProto(ir_version=self._model.ir_version)
        found.opset_import.extend(self._model.opset_import)
        graph = found.graph
        graph.name = "section"
        graph.node.extend(self.nodes[index] for index in section.nodes)
        graph.input.extend(inputs)
        graph.output.extend(ValueInfoProto(name=name) for name in section.wanted)
        names = {name: None for index in section.nodes for name in self._reads[index]}
        large: dict[str, LargeTensor] = {}
        for name in names:
            if name in self._computed:
                _add(found, name, self._computed[name](), large)
            elif name in self._stored:
                _keep(found, self._stored[name], self._large, large)
        return found, large

    def _made_of_stored(self) -> frozenset[int]:
        """Return the nodes that read nothing but stored tensors, directly or through one another."""
        known = {*self._stored, *self._computed}
        found = set()
        for index, node in enumerate(self.nodes):
            if self._reads[index] and all(name in known for name in self._reads[index]):
                found.add(index)
                known.update(node.output)
        return frozenset(found)


def bfloat16_in(model: ModelProto) -> frozenset[str]:
    """Return the names of a model's bfloat16 tensors."""
    if not has_other_floats(model):
        return frozenset()
    return frozenset(name for name, (dtype, _) in types_of(model).items() if dtype == "bfloat16")


def _add(model: ModelProto, name: str, values: LargeTensor, large: dict[str, LargeTensor]) -> None:
    if is_large(values.dims):
        large[name] = values
        model.graph.initializer.append(values.stub(name))
    else:
        model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.value()), name))


def _keep(
    model: ModelProto, tensor: TensorProto, source: Mapping[str, LargeTensor], large: dict[str, LargeTensor]
) -> None:
    """Add a stored tensor as it is; one in a file stays there."""
    if is_stub(tensor):
        large[tensor.name] = source[tensor.name]
    model.graph.initializer.append(tensor)


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Open a pool for sessions that ask for it (`session.use_env_allocators`); at the end it frees what is unused.

    Fresh memory costs more than the convolution that fills it, and a session's own goes with it: without the pool, a
    walk through MobileNetV2 takes 1.3 times the processor time.
    Sessions and arrays may outlive the pool.
    """
    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(place, ort.OrtArenaCfg({"arena_extend_strategy": _EXTEND_BY_REQUEST}))
    try:
        yield
    finally:
        _shrink()


def _shrink() -> None:
    """Free the unused memory of the pool; the runtime does that only after a run."""
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "nothing", [value], [result])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options, run = ort.SessionOptions(), ort.RunOptions()
    options.add_session_config_entry("session.use_env_allocators", "1")
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, {"x": np.zeros(1, np.float32)}, run)


class LiveTensors:
    """The tensors that are alive between two sections: in memory (`held` bytes), or beyond a bound in a file."""

    def __init__(self, max_memory: int | None = None) -> None:
        """Start empty; arrays beyond `max_memory` bytes go to a temporary file, which no path leads to."""
        self.held = 0
        self._most = max_memory
        self._arrays: dict[Key, Array] = {}
        self._file: Any = None

    def __contains__(self, key: Key) -> bool:
        return key in self._arrays

    def put(self, key: Key, value: Array) -> None:
        """Keep an array."""
        self.drop(key)
        if self._most is None or self.held + value.nbytes <= self._most or value.nbytes == 0:
            self.held += value.nbytes
            self._arrays[key] = value
        else:
            self._arrays[key] = self._write_to_file(value)

    def get(self, key: Key) -> Array:
        """Return an array; one in the file is read from there."""
        value = self._arrays[key]
        if not isinstance(value, np.memmap):
            return value
        found = np.array(value)
        release(value)
        return found

    def facts(self, key: Key) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Return type and shape of an array."""
        return self._arrays[key].dtype, self._arrays[key].shape

    def drop(self, key: Key) -> None:
        """Drop an array."""
        value = self._arrays.pop(key, None)
        if value is not None and not isinstance(value, np.memmap):
            self.held -= value.nbytes

    def keep(self, wanted: Callable[[Key], bool]) -> None:
        """Drop all arrays that are not wanted, and begin a new file; the old one ends with its last array."""
        for key in [key for key in self._arrays if not wanted(key)]:
            self.drop(key)
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """Drop all arrays."""
        self.keep(lambda _: False)

    def _write_to_file(self, value: Array) -> Array:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="qsdk-")  # noqa: SIM115  # lives as long as its arrays
        file = self._file
        start = file.seek(0, 2)
        start += -start % 64
        file.seek(start)
        file.write(np.ascontiguousarray(value).tobytes())
        file.flush()
        return np.memmap(file, value.dtype, "r", start, value.shape)


class SteppedRun:
    """Models with one kind of input, all run from the tensors of one step to those of the next.

    Attributes:
        streams: the models; the first may be the float one.
        live: tensors that were computed and are read later on.
        batches: their number.
        float_seconds: spent in the first model.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        targets: Sequence[list[list[str]]],
        steps: Sequence[Mapping[int, int]],
        live: LiveTensors,
        in_memory: int,
        providers: Providers,
    ) -> None:
        """Begin before the first step.

        Args:
            streams: the models.
            targets: of each model, the tensors that each step needs.
            steps: of each model, node -> the step that changes what it computes.
            live: empty.
            in_memory: the most bytes of stored tensors that a section holds; more are written to a file.
            providers: to run on.
        """
        self.streams, self.live = streams, live
        self.batches, self.float_seconds = 0, 0.0
        self._in_memory, self._providers = in_memory, providers
        self._targets = targets
        self._depths = [stream.depths(own) for stream, own in zip(streams, steps, strict=True)]
        self._numbers = range(len(streams))

    @contextmanager
    def sharing_memory(self) -> Iterator[None]:
        """Let the sessions of the block reuse what earlier ones have freed, and drop all tensors at its end."""
        with _shared_memory():
            try:
                yield
            finally:
                self.live.clear()  # before the pool gives its memory back

    def start(self, data: Iterable[Any], title: str, *, progress: bool) -> Iterator[tuple[int, dict[str, Array]]]:
        """Run every batch up to the first step; yield its number and its inputs before that."""
        sections, kept = self._sections(0)
        sessions = [self._session(number, section) for number, section in enumerate(sections)]
        inputs = [DeclaredInput(value) for value in self.streams[FLOAT].given.values()]
        for place, values in batches_of(data, title, progress):
            feeds = {name: _writable(value) for name, value in as_feeds(values, inputs, f"batch {place}").items()}
            yield place, feeds
            batch = self.batches  # of those that count
            for number, section in enumerate(sections):
                for name in kept[number] & feeds.keys():
                    self.live.put((number, batch, name), feeds[name])
                self._run(number, batch, section, sessions[number], feeds)
            self.batches += 1

    def reach(self, step: int) -> None:
        """Run every batch up to the inputs of a step, and drop tensors that no later step needs."""
        missing = [self._missing(number, step, step + 1) for number in self._numbers]
        clean = [[name for name in names if self._depths[n].get(name, -1) < step] for n, names in enumerate(missing)]
        if any(clean):
            sections, kept = self._sections(step)
            self._run_all(sections)
        else:
            kept = [self._needed(number, step) for number in self._numbers]
        self.live.keep(lambda key: key[2] in kept[key[0]])
        # an input that depends on the step itself is computed by the current model, and again later
        ahead = [self._missing(number, step, step + 1) for number in self._numbers]
        self._run_all([stream.section(names) for stream, names in zip(self.streams, ahead, strict=True)])

    def finish(self) -> None:
        """Measure the float time behind the step before the last on one batch, and drop everything."""
        section = self.streams[FLOAT].section(self._missing(FLOAT, len(self._targets[FLOAT]) - 1))
        session = self._session(FLOAT, section)
        self._run(FLOAT, 0, section, session)  # warm up: the first run takes longer
        before = self.float_seconds
        self._run(FLOAT, 0, section, session)
        self.float_seconds += (self.float_seconds - before) * (self.batches - 1)
        self.live.clear()

    def _sections(self, step: int) -> tuple[list[Section], list[set[str]]]:
        """Return what to run now for this and later independent steps, and the tensors to keep then."""
        sections, kept = [], []
        for number, stream in enumerate(self.streams):
            wanted = [name for name in self._missing(number, step) if self._depths[number].get(name, -1) < step]
            later = stream.section(self._remaining(number, step))
            section = stream.section(wanted)
            section = stream.section([*wanted, *stream.sizes_in(section, later)])
            stream.finish(section)
            kept.append(self._needed(number, step))
            computed = stream.made_in(section) & kept[number]
            sections.append(Section(section.nodes, section.inputs, sorted(computed)))
        return sections, kept

    def _remaining(self, number: int, step: int) -> list[str]:
        return [name for names in self._targets[number][step:] for name in names]

    def _needed(self, number: int, step: int) -> set[str]:
        """Return the tensors that this step and all later ones need."""
        return set(self.streams[number].section(self._remaining(number, step)).inputs)

    def _missing(self, number: int, step: int, end: int | None = None) -> list[str]:
        names = (name for found in self._targets[number][step:end] for name in found)
        unavailable = (name for name in names if (number, 0, name) not in self.live)
        return [name for name in dict.fromkeys(unavailable) if not self.streams[number].is_stored(name)]

    def _run_all(self, sections: Sequence[Section]) -> None:
        for number, section in enumerate(sections):
            if section.wanted:
                session = self._session(number, section)
                for batch in range(self.batches):
                    self._run(number, batch, section, session)

    def _run(
        self,
        number: int,
        batch: int,
        section: Section,
        session: ort.InferenceSession | None,
        feeds: Mapping[str, Array] | None = None,
    ) -> None:
        if session is None:
            return
        read = {
            name: feeds[name] if feeds is not None and name in feeds else self.live.get((number, batch, name))
            for name in section.inputs
        }
        began = time.perf_counter()
        values = run_session(session, read, f"batch {batch}")
        if number == FLOAT:
            self.float_seconds += time.perf_counter() - began
        for name, value in zip(section.wanted, values, strict=True):
            self.live.put((number, batch, name), value)

    def _session(self, number: int, section: Section) -> ort.InferenceSession | None:
        """Return a session for a section, in the settings of the simulation; None where there is nothing to run."""
        if not section.wanted:
            return None
        stream, batches = self.streams[number], range(self.batches)
        infos = [
            stream.info(name, [self.live.facts((number, batch, name)) for batch in batches if name not in stream.given])
            for name in section.inputs
        ]
        model, large = stream.model(section, infos)
        return bounded_session(model, large, self._in_memory, providers=self._providers, shares_memory=True)


def _writable(value: Array) -> Array:
    """Return an array whose memory can become a tensor: read-only ones are copied."""
    return value if value.flags.writeable else np.array(value)
