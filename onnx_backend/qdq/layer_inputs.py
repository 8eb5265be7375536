"""Layers whose weights alone are quantized and which round their input to int8, as ONNX Runtime's MatMulNBits does.

Nodes in front of such a layer compute what its kernel makes of the input: a scale for each block of each row, the
largest absolute value over 127, and the nearest multiples of it. In files for the runtime they are left out, because
the kernel itself rounds; `quantize_inputs` puts them back. An LSTM that rounds its input and its states is that
runtime's DynamicQuantizeLSTM, in simulations too. Measured on onnxruntime 1.32: the kernel multiplies by
127 over the largest value where these nodes divide, so that a code in thousands is its neighbour.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import nodes_reaching, producers
from onnx_backend.proto.nodes import (
    attributes,
    copied,
    drop_unused_initializers,
    metadata,
    rename_inputs,
    replace_nodes,
    retain,
    set_metadata,
)
from onnx_backend.readers import BLOCK_KEY, COPY_KEY, Readers
from qsdk.core.errors import ExportError
from qsdk.core.numerics import affine
from qsdk.core.planning.plan import WHOLE

PART_KEY = "qsdk.input_of"  # metadata of a node that rounds: the tensor that is rounded
_LAYERS = frozenset({"MatMul", "Gemm"})
_KERNEL = ("com.microsoft", "DynamicQuantizeLSTM")
_WEIGHTS = (1, 2)  # the places of an LSTM's weights
_PARAMETERS = ("kernel_scale", "kernel_zero_point")


def quantize_inputs(model: ModelProto) -> None:
    """Put nodes that round it in front of each layer whose weight says so, in place; those that have them keep them."""
    _round_states(model)
    quantize_in_front(model, whole=False)


def quantize_in_front(model: ModelProto, *, whole: bool) -> None:
    """Put nodes that round it, as a `whole` or in blocks, in front of each MatMul or Gemm whose weight says so."""
    graph, known = model.graph, Readers(model.graph)
    dims = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    rounds = {node.output[0] for node in graph.node if PART_KEY in metadata(node)}
    wanted: dict[str, tuple[int, int]] = {}  # first output of a layer -> length of blocks, input channels
    for node in graph.node:
        length = int(metadata(node).get(BLOCK_KEY, 0))
        wants = length and whole == (length == WHOLE)
        for layer, turned in _layers(node, known.readers, metadata(node)["qsdk.site"]) if wants else ():
            if layer.input[0] not in rounds:
                wanted[layer.output[0]] = length, dims[node.input[0]][1 if turned else 0]
    if not wanted:
        return
    made: dict[tuple[str, int], str] = {}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.output and node.output[0] in wanted:
            source, (block, channels) = node.input[0], wanted[node.output[0]]
            if (source, block) not in made:
                fresh = _WholeRounding(known, source) if block == WHOLE else _Rounding(known, source, block, channels)
                nodes += fresh.nodes
                made[source, block] = fresh.output
            node.input[0] = made[source, block]
        nodes.append(node)
    replace_nodes(graph, nodes)


def with_quantized_inputs(model: ModelProto) -> ModelProto:
    """Return a model, or a changed copy, with rounding nodes in front of all layers that round their input."""
    if not input_blocks(model.graph.node):
        return model
    result = copied(model)
    quantize_inputs(result)
    return result


def leave_inputs_to_kernels(model: ModelProto) -> None:
    """Take the rounding nodes away, in place, in front of the layers that the runtime makes MatMulNBits of."""
    known = Readers(model.graph)
    raw = {name: x for name, x in _raw_inputs(model).items() if known.makers[name].op_type != "DequantizeLinear"}
    if not raw:
        return
    for node in [node for node in model.graph.node if node.op_type in _LAYERS and node.input[0] in raw]:
        rounded, node.input[0] = node.input[0], raw[node.input[0]]
        if not known.becomes_nbits(node):
            node.input[0] = rounded
    _drop_unread(model)


def without_rounded_inputs(model: ModelProto) -> None:
    """Take all rounding nodes away, in place: the weights' nodes say where they were."""
    raw, made = _raw_inputs(model), producers(model.graph.node)
    rename_inputs(model.graph.node, raw)
    kernels = [node for node in model.graph.node if (node.domain, node.op_type) == _KERNEL]
    for node in kernels:
        del node.input[8:]
        for place in _WEIGHTS:
            while PART_KEY in metadata(made[node.input[place]]):
                node.input[place] = made[node.input[place]].input[0]
        while not node.input[-1]:
            del node.input[-1]
        node.op_type, node.domain = "LSTM", ""
    if raw or kernels:
        _drop_unread(model)


def input_blocks(nodes: Iterable[NodeProto]) -> dict[str, int]:
    """Return weight site -> length of the blocks in which its layers round their input."""
    found = (metadata(node) for node in nodes)
    return {facts["qsdk.site"]: int(facts[BLOCK_KEY]) for facts in found if BLOCK_KEY in facts}


def _round_states(model: ModelProto) -> None:
    """Make DynamicQuantizeLSTM of each LSTM whose recurrent weight says so, in place: its own function, by its codes.

    The nodes between a dequantized weight and the kernel find the codes again; a session computes them once.
    """
    known, nodes = Readers(model.graph), list[NodeProto]()
    for node in model.graph.node:
        pairs = [_pair_of(node.input[place], known) for place in _WEIGHTS] if node.op_type == "LSTM" else [None]
        if pairs[-1] is None or metadata(pairs[-1]).get(BLOCK_KEY) != str(WHOLE) or pairs[0] is None:
            nodes.append(node)
            continue
        kernel = NodeProto()
        kernel.CopyFrom(node)
        retain(kernel.attribute, lambda one: one.name != "layout")  # which it does not know; 0
        (kernel.domain, kernel.op_type), codes = (
            _KERNEL,
            [_Codes(known, node, at, pair) for at, pair in zip(_WEIGHTS, pairs, strict=True) if pair],
        )
        inputs = [*node.input, *[""] * (8 - len(node.input))]
        for place, one in zip(_WEIGHTS, codes, strict=True):
            inputs[place] = one.output
        kernel.input[:] = [*inputs, *(name for one in codes for name in one.parameters)]
        nodes += [*(part for one in codes for part in one.nodes), kernel]
    if len(nodes) > len(model.graph.node):
        replace_nodes(model.graph, nodes)
        if all(entry.domain != _KERNEL[0] for entry in model.opset_import):
            model.opset_import.append(helper.make_opsetid(_KERNEL[0], 1))


def _pair_of(name: str, known: Readers) -> NodeProto | None:
    """Return the DequantizeLinear that a stored weight comes from, itself or by a copy."""
    node = known.makers.get(name)
    while node is not None and COPY_KEY in metadata(node):
        node = known.makers.get(node.input[0])
    return node if node is not None and node.op_type == "DequantizeLinear" else None


class _Codes:
    """The nodes that give a kernel of LSTM the codes of a weight, [directions, columns, gates], and its parameters."""

    def __init__(self, known: Readers, node: NodeProto, place: int, pair: NodeProto) -> None:
        self.nodes, source = list[NodeProto](), node.input[place]
        code = known.stored[pair.input[0]].data_type
        scale, *zeros = (array(known.stored[name]) for name in pair.input[1:])
        zero = zeros[0] if zeros else np.zeros(scale.shape, helper.tensor_dtype_to_np_dtype(code))
        directions = known.stored[pair.input[0]].dims[0]
        shape = (directions, scale.size) if scale.ndim and scale.size > 1 else (directions,)
        stored = [np.broadcast_to(value.reshape(-1), shape) for value in (scale, zero)]
        self.parameters = [known.store(f"{source}/{end}", v) for end, v in zip(_PARAMETERS, stored, strict=True)]

        def add(op: str, *inputs: str, **options: Any) -> str:
            name = known.fresh(f"{source}/codes_{op.lower()}")
            self.nodes.append(helper.make_node(op, inputs, [name], name, **options))
            set_metadata(self.nodes[-1], **{PART_KEY.removeprefix("qsdk."): source})
            return name

        steps = known.store(f"{source}/steps", scale.reshape(-1))
        codes = add("Round", add("Div", add("Transpose", source, perm=[0, 2, 1]), steps))
        if zero.any():
            codes = add("Add", codes, known.store(f"{source}/middle", zero.reshape(-1).astype(np.float32)))
        self.output = add("Cast", codes, to=code)


def rounds_states(model: ModelProto) -> bool:
    """Return whether an LSTM of a model rounds its states."""
    return any((node.domain, node.op_type) == _KERNEL for node in model.graph.node)


def _raw_inputs(model: ModelProto) -> dict[str, str]:
    """Return rounded tensor -> the tensor that it was rounded from."""
    parts = {node.output[0]: metadata(node).get(PART_KEY) for node in model.graph.node if node.output}
    read = {node.input[0] for node in model.graph.node if node.op_type in _LAYERS}
    return {name: source for name, source in parts.items() if source is not None and name in read}


def _drop_unread(model: ModelProto) -> None:
    outputs = [value.name for value in model.graph.output]
    kept = {node.output[0] for node in nodes_reaching(model.graph.node, outputs)}
    nodes = [node for node in model.graph.node if PART_KEY not in metadata(node) or node.output[0] in kept]
    replace_nodes(model.graph, nodes)
    drop_unused_initializers(model.graph)


def _layers(
    weight: NodeProto, readers: Mapping[str, Sequence[NodeProto]], site: str, *, turned: bool = False
) -> Iterator[tuple[NodeProto, bool]]:
    """Yield the layers that multiply with a dequantized weight, and whether they read it with its axes swapped."""
    name = weight.output[0]
    for reader in readers.get(name, []):
        if reader.op_type == "Transpose" or COPY_KEY in metadata(reader):
            yield from _layers(reader, readers, site, turned=turned != (reader.op_type == "Transpose"))
        elif reader.op_type == "LSTM":
            continue  # its kernel rounds by itself
        elif reader.op_type in _LAYERS and reader.input[1] == name:
            yield reader, turned != bool(attributes(reader).get("transB", 0))
        else:
            raise ExportError(
                f"the layers of {site} are to round their input to int8, and the {reader.op_type} {reader.name!r} "
                'reads it too; choose compute="float32"'
            )


class _Nodes:
    """Nodes that round a tensor, and what they make."""

    output: str

    def __init__(self, known: Readers, source: str, prefix: str) -> None:
        self.known, self.source, self.prefix, self.nodes = known, source, prefix, list[NodeProto]()

    def _add(self, op: str, *inputs: str, **options: Any) -> str:
        name = self.known.fresh(f"{self.prefix}/{op.lower()}")
        self.nodes.append(helper.make_node(op, inputs, [name], name, **options))
        set_metadata(self.nodes[-1], **{PART_KEY.removeprefix("qsdk."): self.source})
        return name


class _WholeRounding(_Nodes):
    """The nodes that round a tensor to uint8, by the range of all of it."""

    def __init__(self, known: Readers, source: str) -> None:
        super().__init__(known, source, f"{source}/rounded")
        self._add("DynamicQuantizeLinear", source)
        codes = self.nodes[0].output
        codes.extend(known.fresh(f"{self.prefix}/{name}") for name in ("scale", "zero_point"))
        self.output = self._add("DequantizeLinear", *codes)


class _Rounding(_Nodes):
    """The nodes that round a tensor to int8 in blocks along its last axis."""

    def __init__(self, known: Readers, source: str, block: int, channels: int) -> None:
        super().__init__(known, source, f"{source}/blocks_of_{block}")
        count = -(-channels // block)
        rows = self._add("Reshape", source, self._numbers("rows", [-1, 1, channels]))
        if channels % block:
            end = self._numbers("pads", [0, 0, 0, 0, 0, count * block - channels])
            rows = self._add("Pad", rows, end)
        sizes = {"kernel_shape": [block], "strides": [block]}
        peak = self._add("MaxPool", self._add("Abs", rows), **sizes)
        scale = self._add("Div", peak, self._float("steps", 127.0))
        scale = self._add("Max", scale, self._float("smallest", affine.SMALLEST))
        scale = self._add("Reshape", scale, self._numbers("scales", [-1, count, 1]))
        blocks = self._add("Reshape", rows, self._numbers("blocks", [-1, count, block]))
        rounded = self._add("Mul", self._add("Round", self._add("Div", blocks, scale)), scale)
        if channels % block:
            rounded = self._add("Reshape", rounded, self._numbers("padded", [-1, count * block]))
            bounds = (self._numbers(name, [n]) for name, n in (("start", 0), ("end", channels), ("axis", 1)))
            rounded = self._add("Slice", rounded, *bounds)
        self.output = self._add("Reshape", rounded, self._add("Shape", source))

    def _numbers(self, name: str, values: list[int]) -> str:
        return self.known.store(f"{self.prefix}/{name}", np.array(values, np.int64))

    def _float(self, name: str, value: float) -> str:
        return self.known.store(f"{self.prefix}/{name}", np.array(value, np.float32))
