"""A graph with Q/DQ pairs: who makes and reads which tensor, and the names that tables of runtimes have for readers."""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import GraphIndex
from onnx_backend.proto.nodes import attributes, set_metadata
from qsdk.core.graph.op_facts import EXTREMES, LINEAR, MOVEMENTS

Form = Literal["output_dtype", "zero_point", "both"]
COPY_KEY = "qsdk.copy_of"  # metadata of a node that only repeats a tensor
_NBITS = frozenset({"int8", "uint8", "int4", "uint4", "int2", "uint2"})  # weights that MatMulNBits takes
BLOCK_KEY = "qsdk.input_block"  # metadata of a weight's DequantizeLinear: its layers round their input to int8
#: ops that move or choose elements, and so may be computed on codes between a pair and what reads it
_MOVES = MOVEMENTS | EXTREMES | {"Clip", "Concat", "Dropout", "Pad", "Relu"}
_BLOCKS = frozenset({16, 32, 64, 128, 256})


class Readers(GraphIndex):
    """An index of a graph with Q/DQ pairs."""

    def copy(self, tensor: str, op: str = "Sum", *more: str, end: str = "apart", **options: Any) -> NodeProto:
        """Return a node that repeats a tensor, so that a runtime does not see what reads it beside what makes it."""
        name = self.fresh(f"{tensor}/{end}")
        node = helper.make_node(op, [tensor, *more], [name], self.fresh(name), **options)
        set_metadata(node, copy_of=tensor)
        return node

    def store(self, name: str, value: npt.NDArray[Any]) -> str:
        """Store a tensor under a fresh name, and return that."""
        name = self.fresh(name)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def dtype(self, quantize: NodeProto) -> str:
        """Return the name of the dtype that a QuantizeLinear produces."""
        zero_point = self.stored.get(quantize.input[2]) if len(quantize.input) > 2 else None
        code = zero_point.data_type if zero_point is not None else attributes(quantize).get("output_dtype", 0)
        return type_name(code or TensorProto.UINT8)

    def form(self, quantize: NodeProto) -> Form:
        """Return how a QuantizeLinear states its type."""
        if len(quantize.input) < 3:
            return "output_dtype" if quantize.op_type == "QuantizeLinear" else "zero_point"
        return "both" if attributes(quantize).get("output_dtype") else "zero_point"

    def label(self, reader: NodeProto, tensor: str) -> str:
        """Return the name of an activation's reader in the tables of runtimes.

        It is the op; `op/weight` for a layer, by what its weight is stored in; `op>` where anything but a
        QuantizeLinear follows.
        """
        if reader.op_type in LINEAR and reader.input[0] == tensor:
            weight = self.weight(reader.input[1])
            return f"{reader.op_type}/{weight}" if weight else reader.op_type
        followers = [node for name in reader.output for node in self.readers.get(name, [])]
        leaves = any(name in self.outputs for name in reader.output)
        if leaves or any(node.op_type != "QuantizeLinear" for node in followers):
            return f"{reader.op_type}>"
        return reader.op_type

    def integer_type(self, node: NodeProto) -> str:
        """Return the type that a BitShift is computed in, by its stored operands; "" if none is stored."""
        types = [type_name(self.stored[name].data_type) for name in node.input if name in self.stored]
        return types[0] if types else ""

    def becomes_nbits(self, layer: NodeProto) -> bool:
        """Return True if the runtime turns a layer into MatMulNBits, which rounds its input to 8 bits.

        That are layers with stored matrices whose input is not on codes of 8 bits, directly or in another shape
        (measured, onnxruntime 1.31 and 1.32; the older does so behind no codes at all), and nothing else reads their
        codes or scales (of one scale, see `spread` of `fast_forms`).
        """
        if layer.op_type not in ("MatMul", "Gemm") or (layer.op_type == "Gemm" and attributes(layer).get("transB")):
            return False
        source, pair = self.makers.get(layer.input[0]), self.makers.get(layer.input[1])
        if source is not None and source.op_type == "Reshape":  # the runtime puts the pair behind it
            source = self.makers.get(source.input[0])
        codes = None if pair is None or pair.op_type != "DequantizeLinear" else self.stored.get(pair.input[0])
        if pair is None or codes is None or type_name(codes.data_type) not in _NBITS or len(codes.dims) != 2:
            return False
        if source is not None and source.op_type == "DequantizeLinear":
            quantize = self.makers.get(source.input[0])
            if quantize is None or self.dtype(quantize) in ("int8", "uint8"):
                return False
        facts = attributes(pair)
        axis, block = facts.get("axis", 1) % 2, facts.get("block_size", 0)
        per_tensor = len(self.stored[pair.input[1]].dims) == 0
        own = (pair.output[0], *pair.input[: 1 if per_tensor else 2])
        if any(len(self.readers.get(name, ())) > 1 for name in own):
            return False
        return per_tensor or (axis == 1 and not block) or (axis == 0 and block in _BLOCKS)

    def weight(self, name: str) -> str:
        """Return the type that the second operand of a layer is stored in; "" for an activation."""
        if name in self.stored:
            return type_name(self.stored[name].data_type)
        maker = self.makers.get(name)
        if maker is None or not maker.input or maker.input[0] not in self.stored:
            return ""
        name = type_name(self.stored[maker.input[0]].data_type)
        if name.startswith("float8"):
            return "float8e4m3fn"  # it stands for all of them, in blocks or not
        return f"{name} blocks" if attributes(maker).get("block_size") else name


def type_name(code: int) -> str:
    """Return the project's name of an ONNX element type."""
    name = str(TensorProto.DataType.Name(code)).lower()
    return {"float": "float32"}.get(name, name)


def quantizers(reader: NodeProto, known: Readers) -> list[NodeProto]:
    """Return the QuantizeLinear nodes behind a node."""
    followers = [node for name in reader.output for node in known.readers.get(name, [])]
    return [node for node in followers if node.op_type == "QuantizeLinear"]


def is_shifted(node: NodeProto, known: Readers) -> bool:
    """Return True if a QuantizeLinear or DequantizeLinear has a zero point other than 0."""
    zero_point = known.stored.get(node.input[2]) if len(node.input) > 2 else None
    return zero_point is not None and bool(array(zero_point).any())


def grid(quantizer: NodeProto, known: Readers) -> list[list[float]]:
    """Return the scales and zero points of a QuantizeLinear or DequantizeLinear, of those that are stored."""
    found = [known.stored.get(name) for name in quantizer.input[1:]]
    return [np.asarray(array(tensor), np.float64).reshape(-1).tolist() for tensor in found if tensor is not None]


def pair_before(node: NodeProto, known: Readers) -> NodeProto | None:
    """Return the DequantizeLinear of an activation that a node reads, itself or behind moves of elements.

    Pairs of 16 bits are none: the runtime removes them, and computes in floats.
    """
    maker = known.makers.get(node.input[0])
    while maker is not None and maker.op_type in _MOVES:
        maker = known.makers.get(maker.input[0])
    if maker is None or maker.op_type != "DequantizeLinear" or maker.input[0] in known.stored:
        return None
    quantize = known.makers.get(maker.input[0])
    is_wide = quantize is not None and quantize.op_type == "QuantizeLinear" and known.dtype(quantize).endswith("16")
    return None if is_wide else maker


def words(text: str) -> frozenset[str]:
    """Return the words of a text, such as names of ops."""
    return frozenset(text.split())
