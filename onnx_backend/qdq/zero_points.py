"""Zero points that are zero and that ONNX Runtime nevertheless asks for before it computes an op on codes.

Its default level makes a QGemm of a Gemm (and of a MatMul with a bias, which it takes for one where all sizes are
known) only if the input and the weight have zero-point tensors. Else it dequantizes the weight in every run, which
takes several times as long as the float layer. A MaxPool between two pairs it runs on codes in the layout of the
convolutions around it, if both have zero points; else in another layout, which takes two transpositions. What moves
values (Transpose, Reshape, DepthToSpace, nearest Resize) moves codes with zero points, mostly in 0.25 to 0.75 of the
time, and floats between two pairs without. Measured on onnxruntime 1.32; which ops these are, `fast_table` says.
"""

from collections.abc import Iterator

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.nodes import attributes
from onnx_backend.readers import Readers, quantizers
from qsdk.core.graph.op_facts import MOVEMENTS
from qsdk.core.planning.fast_table import NEED_ZERO_POINTS

_EIGHT_BITS = frozenset({"int8", "uint8"})
_BOUNDED = frozenset({"Relu", "Clip"})
_MOVING = NEED_ZERO_POINTS & (MOVEMENTS | {"MaxPool", "ReduceMax", "Resize"})
_TO_FLOAT = NEED_ZERO_POINTS - {"MaxPool>"}  # on codes it takes eight times as long, but between convolutions


def write_zero_points(model: ModelProto) -> list[NodeProto]:
    """Write the zero points that the runtime asks for, in place; return the DequantizeLinear nodes that got one."""
    writer = _Writer(model.graph)
    for node in model.graph.node:
        for pair in writer.operands(node):
            writer.write(pair)
    return writer.written


class _Writer(Readers):
    """A graph whose pairs get zero points; `written` are the DequantizeLinear nodes that got one."""

    def __init__(self, graph: GraphProto) -> None:
        super().__init__(graph)
        self.written: list[NodeProto] = []

    def operands(self, layer: NodeProto) -> Iterator[NodeProto]:
        """Yield the QuantizeLinear of a layer's input and the DequantizeLinear of its weight.

        Of what moves codes, those of its input and of its result. Nothing unless the runtime computes the op on codes
        as soon as both have zero points.
        """
        if layer.op_type in _MOVING and (before := self._moved(layer)) is not None:
            behind = [q for q in quantizers(layer, self) if self.dtype(q) == "uint8"]
            if len(behind) == 1 or f"{layer.op_type}>" in _TO_FLOAT:
                yield from (before, *behind[:1])
            return
        if layer.op_type not in ("Gemm", "MatMul") or self.weight(layer.input[1]) not in _EIGHT_BITS:
            return
        source, weight = (self.makers.get(name) for name in layer.input[:2])
        given = self._quantizer(source)
        if given is None or weight is None or not self._in_float32(weight):
            return
        last = layer if layer.op_type == "Gemm" else self._bias_behind(layer)
        if last is not None and self._has_kernel(last):
            yield from (given, weight)

    def _moved(self, layer: NodeProto) -> NodeProto | None:
        """Return the QuantizeLinear of what a node moves, through the moves in front of it, else None."""
        source = self.makers.get(layer.input[0])
        while source is not None and source.op_type in MOVEMENTS:
            source = self.makers.get(source.input[0])
        return self._quantizer(source)

    def write(self, node: NodeProto) -> None:
        """Give a QuantizeLinear and those who read its codes, or the DequantizeLinear of a weight, a zero point."""
        if len(node.input) > 2:
            return
        if node.op_type == "QuantizeLinear":
            code = int(helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype(node))))
            readers = [r for r in self.readers.get(node.output[0], []) if r.op_type == "DequantizeLinear"]
        else:
            code, readers = self.stored[node.input[0]].data_type, [node]
        zero = self._zero(code, self.stored[node.input[1]])
        for item in readers if node in readers else [node, *readers]:
            item.input.append(zero)
        self.written += readers

    def _bias_behind(self, layer: NodeProto) -> NodeProto | None:
        """Return the Add that makes a Gemm of a MatMul, else None."""
        following = self.readers.get(layer.output[0], [])
        if len(following) != 1 or following[0].op_type != "Add" or layer.output[0] in self.outputs:
            return None
        return following[0]

    def _quantizer(self, source: NodeProto | None) -> NodeProto | None:
        """Return the QuantizeLinear, to 8 bits, whose codes a DequantizeLinear reads, else None."""
        if source is None or source.op_type != "DequantizeLinear":
            return None
        found = self.makers.get(source.input[0])
        if found is None or found.op_type != "QuantizeLinear" or not self._in_float32(found):
            return None
        return found if self.dtype(found) in _EIGHT_BITS else None

    def _has_kernel(self, last: NodeProto) -> bool:
        """Return True unless the result of a layer is quantized to more or fewer than 8 bits."""
        following = self.readers.get(last.output[0], [])
        while len(following) == 1 and following[0].op_type in _BOUNDED:
            following = self.readers.get(following[0].output[0], [])
        quantizers = [node for node in following if node.op_type == "QuantizeLinear"]
        return len(following) != 1 or all(self.dtype(node) in _EIGHT_BITS for node in quantizers)

    def _in_float32(self, node: NodeProto) -> bool:
        """Return True if a node of a pair has stored float32 scales, not in blocks."""
        scale = self.stored.get(node.input[1])
        return scale is not None and scale.data_type == TensorProto.FLOAT and not attributes(node).get("block_size")

    def _zero(self, code: int, scale: TensorProto) -> str:
        """Return the name of a new tensor of zeros beside these scales.

        Each layer has its own: `session.x64quantprecision` moves them in place, so that the runtime would not load a
        second layer with the same ones.
        """
        zeros = np.zeros(tuple(scale.dims), helper.tensor_dtype_to_np_dtype(code))
        return self.store(f"{scale.name.removesuffix('/scale')}/zero_point", zeros)
