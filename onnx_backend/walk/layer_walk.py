"""Walk through an ONNX sim layer by layer; the float and the quantized model each run once, in sections."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper
from onnx.numpy_helper import from_array

from onnx_backend.data_passes.passes import graph_as_it_runs
from onnx_backend.lower import lower
from onnx_backend.proto.external_data import FLOATS, array, float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import LargeTensor, LoweredModel, from_source, narrow, on_grid, without_large
from onnx_backend.proto.nodes import drop_unused_initializers, is_mark, metadata, replace_nodes
from onnx_backend.sim import OnnxSim
from onnx_backend.walk.run import FLOAT, QUANTIZED, TAG, LiveTensors, SteppedRun, Stream, bfloat16_in
from onnx_backend.workarounds.kernel_casts import remove_kernel_casts
from qsdk.core.arrays import Array
from qsdk.core.errors import ModelError
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import RECURRENT
from qsdk.core.layers.graph_layers import GraphLayer, graph_layers
from qsdk.core.layers.layer_problem import Layer, PatchGeometry
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.sims.biases import float_biases
from qsdk.core.sims.state import encoding_of, put_back_on_error

_NARROW = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
_STATES = 5  # where a recurrent op takes its first hidden state
_LENGTHS = 4


@dataclass(frozen=True)
class Reading:
    """The way in which one op reads a layer's input.

    Attributes:
        source: position of the tensor among the op's inputs; the hidden states of a recurrent op are its output 0.
        states: True if these hidden states are multiplied.
        swapped: True if the last two axes are swapped first.
        directions: of a recurrent op; each multiplies the whole input.
        reverse: which directions run backwards.
        lead: the pads of a convolution by `auto_pad`: kernel extents, strides, and whether the odd one comes first.
    """

    source: int
    states: bool = False
    swapped: bool = False
    directions: int = 0
    reverse: tuple[bool, ...] = ()
    lead: tuple[tuple[int, ...], tuple[int, ...], bool] | None = None

    def rows(self, value: Array, first: Array | None = None) -> Array:
        """Return the values that the layer multiplies.

        Args:
            value: the op's input, or its output where `states`.
            first: the hidden state that a recurrent op begins with, [directions, N, hidden]; zeros where None.

        Returns:
            float32, [..., K] for a linear layer, [..., directions * K] for a recurrent one, [N, C, *spatial] for a
            convolution.
        """
        if self.states:
            return self._hidden(value, first)
        if self.directions > 1:
            return np.concatenate([value] * self.directions, -1)
        if self.swapped and value.ndim > 1:
            return value.swapaxes(-1, -2)
        return value if self.lead is None else _padded(value, *self.lead)

    def _hidden(self, outputs: Array, first: Array | None) -> Array:
        """Return the states before each step, from the states after each: [length, directions, N, hidden]."""
        begin = np.zeros_like(outputs[:1]) if first is None else first[None]
        parts = []
        for direction, backwards in enumerate(self.reverse):
            start, after = begin[:, direction], outputs[:, direction]
            parts.append(np.concatenate([after[1:], start] if backwards else [start, after[:-1]]))
        return np.concatenate(parts, -1)


def readings(op: Op, found: GraphLayer, position: int) -> tuple[Reading, PatchGeometry | None] | str:
    """Return how an op reads the input of a layer, and the geometry of its patches; or why no solver can use it.

    `position` is that of the weight among the op's inputs.
    """
    geometry = found.layer.geometry
    if op.type == "Gather":
        return Reading(1), None
    if op.type in RECURRENT:
        read = _recurrent(op, position)
        return read if isinstance(read, str) else (read, None)
    if geometry is None:
        swapped = position == 0 if op.type == "MatMul" else bool(op.attributes.get("transA", 0))
        return Reading(1 - position if op.type == "MatMul" else 0, swapped=swapped), None
    auto = op.attributes.get("auto_pad", "NOTSET")
    if geometry.transposed and (op.attributes.get("output_shape") or auto not in ("NOTSET", "VALID")):
        return "ConvTranspose whose padding follows from the shape of its output"
    if auto == "NOTSET":
        return Reading(0), geometry
    bare = replace(geometry, padding=((0, 0),) * len(geometry.kernel))
    if auto == "VALID":
        return Reading(0), bare
    extents = tuple(d * (k - 1) + 1 for d, k in zip(geometry.dilation, geometry.kernel, strict=True))
    before = auto == "SAME_LOWER"
    if all(stride == 1 for stride in geometry.stride):
        pads = tuple(_split(extent - 1, before) for extent in extents)
        return Reading(0), replace(geometry, padding=pads)
    return Reading(0, lead=(extents, geometry.stride, before)), bare


def _recurrent(op: Op, position: int) -> Reading | str:
    direction = str(op.attributes.get("direction", "forward"))
    reverse = {"forward": (False,), "reverse": (True,)}.get(direction, (False, True))
    if op.attributes.get("layout", 0):
        return f"{op.type} with the batch first"
    if position == 1:
        return Reading(0, directions=len(reverse))
    if len(op.inputs) > _LENGTHS and op.inputs[_LENGTHS] is not None:
        return f"{op.type} with sequences of several lengths"
    if op.type == "GRU" and not op.attributes.get("linear_before_reset", 0):
        return "GRU that resets the hidden state before it is multiplied"
    return Reading(_STATES, states=True, directions=len(reverse), reverse=reverse)


def _padded(value: Array, extents: Sequence[int], strides: Sequence[int], before: bool) -> Array:
    pads = []
    for size, extent, stride in zip(value.shape[2:], extents, strides, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + extent - size, 0)
        pads.append(_split(total, before))
    return np.pad(value, [(0, 0), (0, 0), *pads])


def _split(total: int, before: bool) -> tuple[int, int]:
    less = total // 2
    return (total - less, less) if before else (less, total - less)


@dataclass(frozen=True)
class LayerCall:
    """An op that multiplies an input with the weights of a step's layers.

    Attributes:
        tag: of the op.
        reading: how it reads its input.
    """

    tag: str
    reading: Reading

    def value(self, stream: Stream) -> str:
        """Return the tensor that is multiplied."""
        node = stream.nodes[stream.at[self.tag]]
        return str(node.output[0] if self.reading.states else node.input[self.reading.source])

    def first(self, stream: Stream) -> str:
        """Return the first hidden state of a recurrent op; `""` for zeros, and for other ops."""
        inputs = stream.nodes[stream.at[self.tag]].input if self.reading.states else ()
        return str(inputs[self.reading.source]) if len(inputs) > self.reading.source else ""


@dataclass(frozen=True)
class LayerGroup:
    """The layers that read one input.

    Attributes:
        layers: at least one.
        calls: the ops that read it; more than one where a weight is used again.
    """

    layers: Sequence[Layer]
    calls: Sequence[LayerCall]

    def tensors(self, stream: Stream) -> list[str]:
        """Return the tensors that the step needs."""
        found = [name for call in self.calls for name in (call.value(stream), call.first(stream))]
        return [name for name in dict.fromkeys(found) if name]


def layer_groups(
    graph: Graph, plan: Plan, frozen: Iterable[str], tags: Mapping[str, str]
) -> tuple[list[LayerGroup], dict[str, str]]:
    """Return the steps in the order of the graph, and why the other weights are in none.

    `frozen` are the sites whose encodings must stay; `tags` name the node that makes a tensor.
    """
    found, left = graph_layers(graph, plan, frozenset(frozen))
    read: list[tuple[Layer, tuple[tuple[int, ...], tuple[LayerCall, ...]]]] = []
    for item in found:
        calls = _calls(graph, item, tags)
        if isinstance(calls, str):
            left[item.layer.site] = calls
        else:
            layer, found_calls = calls
            read.append((layer, (item.inputs, found_calls)))
    blocks = {layer.site: plan.decisions[layer.site].input_block for layer, _ in read}
    groups = groupby(read, key=lambda p: (p[1][0], tuple(call.reading for call in p[1][1]), blocks[p[0].site]))
    return [
        LayerGroup([layer for layer, _ in group], group[0][1][1]) for _, items in groups if (group := list(items))
    ], left


def _calls(graph: Graph, found: GraphLayer, tags: Mapping[str, str]) -> tuple[Layer, tuple[LayerCall, ...]] | str:
    calls, geometries = [], []
    for index, weight in zip(found.ops, found.weights, strict=True):
        op = graph.ops[index]
        read = readings(op, found, op.inputs.index(weight))
        if isinstance(read, str):
            return read
        calls.append(LayerCall(tags[graph.tensors[op.outputs[0]].name], read[0]))
        geometries.append(read[1])
    if any(geometry != geometries[0] for geometry in geometries):
        return "several convolutions with different pads read it"
    return replace(found.layer, geometry=geometries[0]), tuple(calls)


class WalkWeights:
    """The stored tensors and encodings of a sim during a walk: their original and their current values.

    Attributes:
        own: site -> encoding, of the sites that have one of their own.
        names: site -> name of the stored tensor there.
        before: name -> value in the float model; float tensors of any type in float32.
        typed: name -> the same in the type of the tensor.
        other: name -> value in the float model, where the sim stores another one.
        changed: name -> value in the quantized model, where it is another one.
    """

    def __init__(
        self,
        model: ModelProto,
        plan: Plan,
        own: Mapping[str, Encoding],
        names: Mapping[str, str],
        floats: Mapping[str, Array],
    ) -> None:
        """Read the stored tensors; `floats`, by site, replace them in the float model."""
        stored = initializers(model.graph)
        self.plan, self.own, self.names = plan, dict(own), names
        self.other = {names[site]: value for site, value in floats.items()}
        self._types = {name: tensor.data_type for name, tensor in stored.items()}
        self.typed: Mapping[str, Array] = LazyArrays(
            stored, lambda name: self._rounded(name, self.other[name]) if name in self.other else array(stored[name])
        )
        self.before: Mapping[str, Array] = LazyArrays(
            stored, lambda name: self.other[name] if name in self.other else float_array(stored[name])
        )
        self.changed: dict[str, Array] = {name: float_array(stored[name]) for name in self.other}
        self._dims = {name: tuple(tensor.dims) for name, tensor in stored.items()}

    def now(self, name: str) -> Array:
        """Return the value of a stored tensor in the quantized model, before it is quantized."""
        return self.changed[name] if name in self.changed else self.before[name]

    def write(self, site: str, encoding: Encoding | None, weight: Array | None) -> None:
        """Change an encoding, a value, or both; a value on a grid freezes its encoding."""
        if encoding is not None:
            self.own[site] = encoding
        if weight is not None:
            self.put(self.names[site], weight)
            self.own[site] = replace(self.own[site], frozen=True)

    def put(self, name: str, value: Array) -> None:
        """Change the value of a stored tensor; it is rounded to the tensor's type."""
        if tuple(value.shape) != self._dims[name]:
            raise ValueError(f"{name} has the shape {self._dims[name]}, not {value.shape}")
        self.changed[name] = np.ascontiguousarray(self._rounded(name, value), np.float32)

    def _rounded(self, name: str, value: Array) -> Array:
        with np.errstate(over="ignore"):
            return value.astype(helper.tensor_dtype_to_np_dtype(self._types[name]))

    def source(self, name: str, data_type: int | None = None) -> LargeTensor:
        """Return a stored float tensor whose current value is read on demand, in its own type or in another one."""
        values = from_source(partial(self.now, name), self._dims[name])
        return _in_type(values, self._types[name] if data_type is None else data_type)

    def fake_quantized(self, site: str, permutation: list[int] | None, data_type: int) -> LargeTensor:
        """Return the values that the simulation reads at a stored site, in the type of its scales."""
        encoding = encoding_of(self.plan.decisions[site], self.own)
        assert encoding is not None
        values = from_source(partial(self.now, self.names[site]), self._dims[self.names[site]])
        return _in_type(on_grid(encoding, values, permutation), data_type)


def _in_type(values: LargeTensor, data_type: int) -> LargeTensor:
    """Return float32 values in another float type."""
    return values if data_type == TensorProto.FLOAT else narrow(values, data_type)


def streams_of(marked: ModelProto, weights: WalkWeights, encodings: Mapping[str, Encoding]) -> tuple[Stream, Stream]:
    """Return the float and the quantized model; stored values are computed from `weights` for every section."""
    light = without_large(marked)
    for number, node in enumerate(light.graph.node):
        if not is_mark(node):
            node.metadata_props.add(key=TAG, value=str(number))
    stored = initializers(light.graph)
    for name, value in weights.other.items():
        stored[name].CopyFrom(from_array(value.astype(array(stored[name]).dtype), name))
    exact = _lowered(light, Plan({}, ()), {}, weights)
    computed: dict[str, Callable[[], LargeTensor]] = {}
    rounded = _lowered(light, weights.plan, encodings, weights)
    graph, bfloat16 = rounded.model.graph, bfloat16_in(rounded.model)
    stored = initializers(graph)
    computed |= {name: partial(weights.source, name) for name in weights.names.values() if name in stored}
    replace_nodes(graph, [node for node in graph.node if not _replaces_node(node, stored, weights, computed)])
    drop_unused_initializers(graph)
    return (
        Stream(exact.model, exact.large, {}, bfloat16_in(exact.model)),
        Stream(rounded.model, rounded.large, computed, bfloat16),
    )


def _lowered(light: ModelProto, plan: Plan, encodings: Mapping[str, Encoding], weights: WalkWeights) -> LoweredModel:
    found = lower(light, plan, encodings, weights=weights.typed)
    remove_kernel_casts(found.model)  # sessions insert them again; without them, layers read the tensors of the graph
    return found


def tags_of(marked: ModelProto) -> dict[str, str]:
    """Return tensor name -> tag of the node that computes it, for the names before and behind the tensor's mark."""
    found: dict[str, str] = {}
    for number, node in enumerate(marked.graph.node):
        if not is_mark(node):
            found.update(dict.fromkeys(node.output, str(number)))
        elif node.input[0] in found:
            found[node.output[0]] = found[node.input[0]]
    return found


def _replaces_node(
    node: NodeProto,
    stored: Mapping[str, TensorProto],
    weights: WalkWeights,
    computed: dict[str, Callable[[], LargeTensor]],
) -> bool:
    """Compute the value of a DequantizeLinear or Cast at a stored site; return True if the node can go."""
    facts = metadata(node)
    site = facts.get("qsdk.site", "")
    if site not in weights.names or not node.input or node.input[0] not in stored:
        return False
    if node.op_type == "DequantizeLinear":
        permutation = [int(axis) for axis in facts["qsdk.perm"].split(",")] if "qsdk.perm" in facts else None
        scale = stored.get(node.input[1])  # block scales of two levels are computed, in float32
        data_type = scale.data_type if scale is not None and scale.data_type in FLOATS else TensorProto.FLOAT
        computed[node.output[0]] = partial(weights.fake_quantized, site, permutation, data_type)
        return True
    if node.op_type == "Cast":
        computed[node.input[0]] = partial(weights.source, weights.names[site], _NARROW[facts["qsdk.dtype"]])
    return False


@contextmanager
def walk_layers(
    sim: OnnxSim, data: Iterable[Any], *, max_memory: int | None = None, progress: bool = True
) -> Iterator["OnnxWalk"]:
    """Walk through the layers of a calibrated sim; changes are committed to the sim when the block ends.

    Each batch runs once through the float and once through the quantized model. Both stop at the inputs of layers,
    where the tensors that are read later on are kept. A layer whose input depends on itself (a weight that is used
    again, the states of a recurrent layer) costs an extra run of the nodes in between. Beyond `max_memory` bytes, kept
    tensors go to a temporary file. If the block fails, the sim stays as it was.
    """
    walk = OnnxWalk(sim, max_memory)
    with walk.run.sharing_memory():
        for _ in walk.run.start(data, "first layers", progress=progress):
            pass
        yield walk
    walk.commit()


@dataclass(frozen=True)
class OnnxStep:
    """Layers that read one input; see `qsdk.core.layers.layer_problem.Step`."""

    place: LayerGroup
    run: SteppedRun

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
        """Find the layers; nothing is run yet."""
        marked, state, encodings = sim.traced().model, sim.snapshot(), sim.encodings
        frozen = [site for site, encoding in state.own.items() if encoding.frozen]
        self._sim = sim
        self._places, self._left = layer_groups(graph_as_it_runs(sim), sim.plan, frozen, tags_of(marked))
        self._layers = {layer.site: layer for place in self._places for layer in place.layers}
        self._weights = WalkWeights(marked, sim.plan, state.own, sim.stored_names(), float_biases(sim))
        streams = streams_of(marked, self._weights, encodings)
        targets = [[place.tensors(stream) for place in self._places] for stream in streams]
        targets[FLOAT].append(streams[FLOAT].outputs)  # whose time counts as well
        steps = [
            {stream.at[call.tag]: step for step, place in enumerate(self._places) for call in place.calls}
            for stream in streams
        ]
        self.run = SteppedRun(streams, targets, steps, LiveTensors(max_memory), sim.in_memory, sim.providers)
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
        """Change the quantized model at a layer; see `qsdk.core.layers.layer_problem.Walk.write`."""
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
