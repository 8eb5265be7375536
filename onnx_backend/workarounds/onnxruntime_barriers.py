"""Work-arounds for the runtime: a node that keeps it from fusing or moving ops that its default level gets wrong.

A Sum of one operand changes no value, and the runtime neither fuses nor moves it. `onnxruntime_table` lists where one
is needed: behind the DequantizeLinear of an activation whose reader would be wrong, and in front of a QuantizeLinear of
2 or 4 bits with a zero point, before which the runtime drops Relu and Clip and runs moves on codes. Nine more:
QLinearMatMul does not run with a stack of matrices (3 dimensions or more) whose scales are per channel; a float bias
beyond int32 (in float16, beyond float16) times the product of the scales is saturated from the basic level on; a
MatMulNBits of 2 bits is wrong wherever the number of output channels is no multiple of 4 (onnxruntime 1.31); a
MatMulNBits replaces MatMul and Gemm behind float activations and (from onnxruntime 1.32 on) those of 16 bits, which it
rounds to 8 bits; a Relu behind a layer whose weight alone is quantized would join a FusedGemm, which dequantizes that
weight in every run; the runtime puts a copy of the Q/DQ pair behind a Transpose in front of it too, also where the
tensor in front is an output of the model, which is then quantized; its QLinearAdd and QLinearMul end the process
where they broadcast an empty tensor (onnxruntime 1.32), such as a list of no detections; its QGemm and QLinearConv read
the codes of an int32 bias as if their scale were that of the input times that of the weight, which of a head that
reads several levels of a pyramid holds for one; its Softmax of 8 bits multiplies by the
whole part of `1 / scale`; its integer products take the scales of a weight for those of output channels, also where
they are of input channels; and it ends the process where a MatMul in float16 or bfloat16 reads a Transpose that moves
the first axis behind the others, with an open axis: its optimizers swap Transpose and Cast, and lose the shape that a
later one reads (onnxruntime 1.32).
"""

import json
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.lazy_tensors import LargeTensor
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import attributes, metadata, rename_inputs, replace_nodes, set_metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.readers import BLOCK_KEY, COPY_KEY, Readers
from onnx_backend.workarounds.kernel_casts import ONE_ROUNDING, has_other_floats
from onnx_backend.workarounds.onnxruntime_table import (
    NARROW,
    SOFTMAX_CLOSE,
    WRONG_FLOAT16,
    is_wrong,
    softmax_error,
    softmax_steps,
)
from qsdk.core.arrays import Array
from qsdk.core.graph.op_facts import LINEAR, MOVEMENTS, VIEWS

OPTIONS_KEY = "qsdk.session_options"  # property of a model: the configuration entries that a session needs, as JSON
EXACT_MATMUL = ("session.qdq_matmulnbits_accuracy_level", "0")
HALVES = ("float16", "bfloat16")
_TWO_BITS = (TensorProto.INT2, TensorProto.UINT2)
_EIGHT_BITS = frozenset({"int8", "uint8"})
_LARGEST_CODE = 255.0  # above a zero point of 8 bits
#: op -> the op in front with which the runtime makes a slow kernel of it
_SLOW_BEHIND = {"LayerNormalization": "Add", "Softmax": "DequantizeLinear"}
_MATRIX_LAYERS = frozenset({"MatMul", "Gemm"})
_WITH_CODES_OF_BIAS = frozenset({"Gemm", "Conv"})
_SELECT = frozenset({"NonZero", "NonMaxSuppression", "Unique", "Compress"})
#: op -> the input that decides the size of its result, unless that input is stored
_COUNTED = {"TopK": 1, "Loop": 0}
#: ops whose result has the size of the first input, wherever the others come from
_OF_FIRST_SIZE = frozenset({"ScatterElements", "ScatterND", "Scatter", "TensorScatter"})
_CARRYING = MOVEMENTS | {"Cast", "Dropout"}
_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})
_BROADCAST = frozenset({"Add", "Mul"})
#: ops of functions that the runtime has kernels for, those that every one of them has, and the most ops of one
_STEPS = frozenset({"Sigmoid", "Erf", "Tanh", "Sqrt", "Reciprocal", "Pow", "Mul", "Add", "Sub", "Div", "ReduceMean"})
_CORES = frozenset({"Sigmoid", "Erf", "Tanh", "Sqrt"})
_LONGEST = 12
#: float type of a bias -> where its integers, the bias over the product of both scales, overflow: the runtime divides
#: and rounds in the bias' own type before it casts to int32
_LARGEST_BIAS = {"float32": 2.0**31, "float16": 65504.0}


def _divides_by_more(node: NodeProto) -> bool:
    """Return True for a pool whose windows beyond the edge the runtime's 8-bit kernel takes for whole ones."""
    attrs = attributes(node) if node.op_type == "AveragePool" else {}
    return bool(attrs.get("ceil_mode") and attrs.get("count_include_pad"))


def reads_moved_batch(layer: NodeProto, tensor: str, makers: Mapping[str, NodeProto]) -> bool:
    """Return True if a MatMul reads, behind ops that move values, a Transpose that moves the first axis to the end.

    The runtime takes such a Transpose into the MatMul: `perm` counts up from 1, but for the first and the last axis.
    """
    maker = makers.get(tensor) if layer.op_type == "MatMul" else None
    while maker is not None and maker.op_type in _CARRYING:
        perm = list(attributes(maker).get("perm", ()))
        inner = [*range(1, len(perm) - 1)]
        if maker.op_type == "Transpose" and inner and perm in ([*inner, 0, len(perm) - 1], [*inner, len(perm) - 1, 0]):
            return True
        maker = makers.get(maker.input[0])
    return False


def insert_barriers(
    model: ModelProto, large: Mapping[str, LargeTensor] | None = None, *, only_weights: bool = False
) -> None:
    """Insert a Sum wherever the runtime's default level would go wrong without it, in place.

    With `only_weights`, or the note of it, a model keeps the fast form of layers whose weights alone are quantized,
    and notes the option with which a session computes them as simulated. `large` has the tensors of its stubs.
    """
    _BarrierInserter(model, large or {}, only_weights=only_weights or bool(needed_options(model))).insert()


def needed_options(model: ModelProto) -> dict[str, str]:
    """Return the session configuration entries (key -> value) that a model notes as needed to be exact."""
    options: dict[str, str] = json.loads(metadata(model).get(OPTIONS_KEY, "{}"))
    return options


def keep_sums_apart(model: ModelProto) -> None:
    """Insert a Sum between an Add of floats and a LayerNormalization, and between a pair and a Softmax, in place.

    The runtime would make one kernel of the two, which takes several times as long: a SkipLayerNormalization
    (onnxruntime 1.32: 105 us for 64 rows of 384, where Add, Sum and LayerNormalization take 22), and a QLinearSoftmax
    (1.5 to 2.7 times DequantizeLinear, Sum, Softmax and QuantizeLinear, for rows of 49 to 1000).
    """
    known, nodes = Readers(model.graph), list[NodeProto]()
    for node in model.graph.node:
        source = known.makers.get(node.input[0]) if node.op_type in _SLOW_BEHIND else None
        if source is not None and source.op_type == _SLOW_BEHIND[node.op_type]:
            nodes.append(known.copy(node.input[0]))
            node.input[0] = nodes[-1].output[0]
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def keep_functions_whole(model: ModelProto) -> None:
    """Insert a Sum between a pair and a function of its tensor that reads it more than once, in place.

    The runtime has a kernel for x * sigmoid(x), a GELU in several spellings and norms, but gives each reader of a pair
    a DequantizeLinear of its own and then finds none of them (onnxruntime 1.32: 0.67 of the time for a SiLU with its
    pairs, 0.70 and 0.54 for GELUs, 0.59 for an RMSNorm). A function is ops in floats between one pair and constants.
    """
    known, nodes = Readers(model.graph), [*model.graph.node]
    found: dict[str, tuple[str, frozenset[int]]] = {}  # tensor -> the pair's tensor that it is a function of, its nodes
    shared: dict[str, set[int]] = {}
    for at, node in enumerate(nodes):
        if node.op_type == "DequantizeLinear" and _is_float32_pair(node, known):
            found[node.output[0]] = node.output[0], frozenset()
        if node.op_type not in _STEPS or COPY_KEY in metadata(node):
            continue
        read = [found.get(name) for name in node.input if name and not known.weight(name)]
        sources = {part[0] for part in read if part is not None}
        if None in read or len(sources) != 1:
            continue
        source = sources.pop()
        inside = frozenset({at}.union(*(part[1] for part in read if part is not None)))
        readers = {place for place in inside if source in nodes[place].input}
        if len(inside) <= _LONGEST:
            found[node.output[0]] = source, inside
        if len(readers) > 1 and any(nodes[place].op_type in _CORES for place in inside):
            shared.setdefault(source, set()).update(readers)
    kept: list[NodeProto] = []
    for node in nodes:
        kept.append(node)
        for tensor in (name for name in node.output if name in shared):
            kept.append(known.copy(tensor, end="whole"))
            rename_inputs([nodes[place] for place in shared[tensor]], {tensor: kept[-1].output[0]})
    replace_nodes(model.graph, kept)


def _is_float32_pair(dequantize: NodeProto, known: Readers) -> bool:
    maker, scale = known.makers.get(dequantize.input[0]), known.stored.get(dequantize.input[1])
    return maker is not None and maker.op_type == "QuantizeLinear" and scale is not None and scale.data_type == 1


class _BarrierInserter(Readers):
    """A model while barriers are put into it."""

    def __init__(self, model: ModelProto, large: Mapping[str, LargeTensor], *, only_weights: bool) -> None:
        super().__init__(model.graph)
        self.model, self.large, self.only_weights = model, large, only_weights
        self.in_half = has_other_floats(model, HALVES)
        self.unsized = of_data_dependent_size(model.graph)

    def insert(self) -> None:
        """Insert the barriers, node by node."""
        nodes: list[NodeProto] = []
        for node in self.graph.node:
            drops = node.op_type == "QuantizeLinear" and self._drops_op_before(node)
            if drops or (node.op_type == "Relu" and self._would_join_gemm(node)):
                nodes += self._barrier(node.input[0], [node])
            if self.becomes_nbits(node) and not self._rounds_input(node) and not self._stays_packed():
                nodes += self._barrier(node.input[1], [node])
            for tensor in dict.fromkeys(node.input) if self.in_half else ():
                ends = reads_moved_batch(node, tensor, self.makers)
                nodes += self._barrier(tensor, [node] if ends or self._is_moved_pair(node, tensor) else [])
            nodes.append(node)
            if node.op_type == "DequantizeLinear" and node.input[0] not in self.stored:
                nodes += self._barrier(node.output[0], self._wrong_readers(node))
            elif node.op_type == "DequantizeLinear":
                nodes += self._barrier(node.output[0], [*self._packing_readers(node), *self._bias_readers(node)])
            else:
                for name in (name for name in node.output if name in self.outputs):
                    nodes += self._barrier(name, [n for n in self.readers.get(name, []) if self._is_quantized_move(n)])
        replace_nodes(self.graph, nodes)

    def _drops_op_before(self, quantize: NodeProto) -> bool:
        before = self.makers.get(quantize.input[0])
        if self.form(quantize) == "output_dtype" or before is None or COPY_KEY in metadata(before):
            return False
        return self.dtype(quantize) in NARROW

    def _would_join_gemm(self, relu: NodeProto) -> bool:
        """Return True if a Relu would join the Gemm before it, whose stored weight MatMulNBits should read."""
        layer = self.makers.get(relu.input[0])
        if layer is not None and layer.op_type == "Add":
            makers = (self.makers.get(name) for name in layer.input)
            layer = next((node for node in makers if node is not None and node.op_type == "MatMul"), None)
        return layer is not None and self.becomes_nbits(layer)

    def _packing_readers(self, dequantize: NodeProto) -> list[NodeProto]:
        """Return the layers that would read a stored weight of 2 bits wrong: the runtime needs whole bytes per row."""
        weight = self.stored[dequantize.input[0]]
        if weight.data_type not in _TWO_BITS or len(weight.dims) != 2 or weight.dims[1] % 4 == 0:
            return []
        return [reader for reader in self.readers.get(dequantize.output[0], []) if reader.op_type in LINEAR]

    def _stays_packed(self) -> bool:
        """Return True if layers may become MatMulNBits, and note with which option that leaves their input as it is."""
        if self.only_weights:
            set_properties(self.model, {OPTIONS_KEY: json.dumps(dict([EXACT_MATMUL]))})
        return self.only_weights

    def _rounds_input(self, layer: NodeProto) -> bool:
        """Return True if a layer is simulated as one that rounds its input to int8."""
        return BLOCK_KEY in metadata(self.makers[layer.input[1]])

    def _bias_readers(self, dequantize: NodeProto) -> list[NodeProto]:
        """Return the readers of an int32 bias whose scales are not those of its layer, which kernels take them for."""
        name = dequantize.output[0]
        if self.stored[dequantize.input[0]].data_type != TensorProto.INT32:
            return []
        return [reader for reader in self.readers.get(name, []) if self._has_other_scales(reader, name, dequantize)]

    def _has_other_scales(self, reader: NodeProto, bias: str, dequantize: NodeProto) -> bool:
        layer: NodeProto | None = reader
        if reader.op_type == "Add":  # the runtime makes a Gemm of a MatMul and an Add
            layer = self.makers.get(next((name for name in reader.input if name != bias), ""))
        fused = _MATRIX_LAYERS if reader.op_type == "Add" else _WITH_CODES_OF_BIAS
        if layer is None or layer.op_type not in fused or bias in layer.input[:2]:
            return False
        pairs = [self.makers.get(name) for name in layer.input[:2]]
        scales = [pair.input[1] for pair in pairs if pair is not None and pair.op_type == "DequantizeLinear"]
        if len(scales) < len(pairs) or any(name not in self.stored for name in (*scales, dequantize.input[1])):
            return False
        wanted = np.multiply(*(self._value(name).astype(np.float64) for name in scales))
        own = self._value(dequantize.input[1])
        return wanted.ndim < 2 and not np.allclose(own, wanted, rtol=1e-6, atol=0)  # blocks have no QGemm

    def _wrong_readers(self, dequantize: NodeProto) -> list[NodeProto]:
        quantize = self.makers.get(dequantize.input[0])
        if quantize is None or quantize.op_type not in ("QuantizeLinear", "DynamicQuantizeLinear"):
            return []
        dtype, form = self.dtype(quantize), self.form(quantize)
        tensor, scale = dequantize.output[0], self.stored.get(dequantize.input[1])
        float16 = scale is not None and scale.data_type == TensorProto.FLOAT16
        return [
            node
            for node in self.readers.get(tensor, [])
            if is_wrong(self.label(node, tensor), dtype, form, float16=float16)
            or self._is_stack(node)
            or self._scales_inputs(node)
            or (node.op_type in _BROADCAST and node.output[0] in self.unsized)
            or self._saturates_bias(node, dequantize)
            or (node.op_type == "Softmax" and dtype in _EIGHT_BITS and self._floors_steps(node))
            or _divides_by_more(node)
        ]

    def _is_moved_pair(self, reader: NodeProto, tensor: str) -> bool:
        """Return True if the runtime moves a pair of float16, which its reader must not read, through ops to there."""
        maker = self.makers.get(tensor)
        while maker is not None and maker.op_type in MOVEMENTS:
            maker = self.makers.get(maker.input[0])
            if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[0] not in self.stored:
                return self._is_wrong_in_half(reader, maker)
        return False

    def _is_wrong_in_half(self, reader: NodeProto, dequantize: NodeProto) -> bool:
        quantize, scale = self.makers.get(dequantize.input[0]), self.stored.get(dequantize.input[1])
        if quantize is None or quantize.op_type != "QuantizeLinear" or scale is None:
            return False
        known = self.dtype(quantize), self.form(quantize)
        return scale.data_type == TensorProto.FLOAT16 and reader.op_type in WRONG_FLOAT16.get(known, frozenset())

    def _is_stack(self, layer: NodeProto) -> bool:
        """Return True if a MatMul has a stack of stored matrices whose scales are per channel."""
        maker = self.makers.get(layer.input[1]) if layer.op_type == "MatMul" else None
        if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] not in self.stored:
            return False
        return len(self.stored[maker.input[0]].dims) > 2 and len(self.stored[maker.input[1]].dims) > 0

    def _scales_inputs(self, layer: NodeProto) -> bool:
        """Return True if a matrix product has one scale for each of its input channels, not its output channels."""
        if layer.op_type not in _MATRIX_LAYERS:
            return False
        maker, moves = self.makers.get(layer.input[1]), list[list[int]]()
        while maker is not None and maker.op_type == "Transpose":
            moves.append(list(attributes(maker).get("perm", ())) or [1, 0])
            maker = self.makers.get(maker.input[0])
        if maker is None or maker.op_type != "DequantizeLinear" or attributes(maker).get("block_size"):
            return False
        weight, scale = self.stored.get(maker.input[0]), self.stored.get(maker.input[1])
        if weight is None or scale is None or list(scale.dims) in ([], [1]):
            return False
        axis = attributes(maker).get("axis", 1) % len(weight.dims)
        for perm in reversed(moves):
            axis = perm.index(axis)
        return bool(axis != (0 if attributes(layer).get("transB") else len(weight.dims) - 1))

    def _saturates_bias(self, layer: NodeProto, source: NodeProto) -> bool:
        """Return True if a float bias is too large for the integers of the runtime's WeightBiasQuantization."""
        weight = self.makers.get(layer.input[1]) if layer.op_type in _BIASED and len(layer.input) > 2 else None
        if weight is None or weight.op_type != "DequantizeLinear" or layer.input[0] != source.output[0]:
            return False
        names = (layer.input[2], source.input[1], weight.input[1])
        if any(name not in self.stored for name in names):
            return False
        bias, *scales = (self._value(name) for name in names)
        if bias.dtype.name not in _LARGEST_BIAS or any(scale.ndim > 1 for scale in scales):
            return False
        # of a grouped ConvTranspose: of each group's channels
        product = np.multiply(*(scale.astype(np.float64) for scale in scales))
        return bool((np.abs(bias) >= _LARGEST_BIAS[bias.dtype.name] * np.resize(product, bias.shape)).any())

    def _floors_steps(self, softmax: NodeProto) -> bool:
        """Return True if the runtime takes another number of steps than `1 / scale` for a Softmax of 8 bits."""
        readers = list(self.readers.get(softmax.output[0], []))
        for reader in readers:
            if reader.op_type in VIEWS:  # the runtime moves the pair in front of it
                readers += self.readers.get(reader.output[0], [])
        quantizers = [reader for reader in readers if reader.op_type == "QuantizeLinear"]
        pairs = [node for node in quantizers if self.dtype(node) in _EIGHT_BITS and node.input[1] in self.stored]
        scales = [float(scale) for node in pairs for scale in self._value(node.input[1]).reshape(-1)]
        return any(softmax_error(softmax_steps(scale), scale, _LARGEST_CODE) > SOFTMAX_CLOSE for scale in scales)

    def _value(self, name: str) -> Array:
        return self.large[name].value() if name in self.large else array(self.stored[name])

    def _is_quantized_move(self, node: NodeProto) -> bool:
        following = self.readers.get(node.output[0], []) if node.op_type == "Transpose" else []
        return any(reader.op_type == "QuantizeLinear" for reader in following)

    def _barrier(self, tensor: str, read_by: Sequence[NodeProto]) -> list[NodeProto]:
        """Return a Sum that these nodes read in place of a tensor; nothing for no nodes."""
        if not read_by:
            return []
        barrier = self.copy(tensor)
        if self.in_half:  # a copy in float32 is that of the narrow values
            set_metadata(barrier, **{ONE_ROUNDING: "1"})
        rename_inputs(read_by, {tensor: barrier.output[0]})
        self.makers[barrier.output[0]] = barrier
        return [barrier]


def of_data_dependent_size(graph: GraphProto) -> set[str]:
    """Return the tensors whose size depends on the values of others, and which may be empty."""
    stored = {tensor.name for tensor in graph.initializer}
    stored |= {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    found: set[str] = set()
    for node in graph.node:
        names = node.input[:1] if node.op_type in _OF_FIRST_SIZE else reads(node)
        if _selects(node, stored) or any(name in found for name in names):
            found.update(name for name in node.output if name)
    return found


def _selects(node: NodeProto, stored: set[str]) -> bool:
    if node.op_type in _SELECT:
        return True
    place = _COUNTED.get(node.op_type)
    if place is None or len(node.input) <= place or not node.input[place]:
        return False
    return node.input[place] not in stored
