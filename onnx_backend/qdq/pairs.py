"""Pairs of a graph: their grids and codes, and what between two of them changes no code."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes
from onnx_backend.readers import Readers


class Pairs(Readers):
    """An index of a graph that knows the grids of its pairs."""

    def multiplied(self, pair: NodeProto) -> list[NodeProto]:
        """Return the nodes from a DequantizeLinear to a QuantizeLinear of the same codes, before a pair; else none."""
        quantize = self.makers.get(pair.input[0])
        product = (
            None if quantize is None or quantize.op_type != "QuantizeLinear" else self.makers.get(quantize.input[0])
        )
        if quantize is None or product is None or product.op_type not in ("Mul", "Div"):
            return []
        source, number = self.makers.get(product.input[0]), self.stored.get(product.input[1])
        if source is None or number is None or number.dims or number.data_type != TensorProto.FLOAT:
            return []
        dtype, chain = self.dtype(quantize), [source, product, quantize]
        if dtype not in ("int8", "uint8") or self.codes_behind(source) != dtype:
            return []
        if None in [self.operands(node) for node in (source, quantize)]:
            return []
        once = all(self.is_read_once(node.output[0]) for node in chain[1:])
        return chain if once and self._keeps_codes(chain, np.dtype(dtype)) else []

    def _keeps_codes(self, chain: Sequence[NodeProto], dtype: np.dtype[Any]) -> bool:
        """Return True if each code comes out of a DequantizeLinear, a product and a QuantizeLinear as it was."""
        source, product, quantize = chain
        scale, factor, own = (array(self.stored[node.input[1]]).reshape(()) for node in chain)
        if not scale.dtype == factor.dtype == own.dtype == np.float32:
            return False
        zero, last = (self.operands(node) for node in (source, quantize))
        codes = np.arange(np.iinfo(dtype).min, np.iinfo(dtype).max + 1)
        values = (codes - (zero or (b"", 0))[1]).astype(np.float32) * scale
        scaled = values * factor if product.op_type == "Mul" else values / factor
        return bool((np.rint(scaled / own) + (last or (b"", 0))[1] == codes).all())

    def operands(self, node: NodeProto) -> tuple[bytes, int] | None:
        """Return the scale and zero point of a node of a pair, comparable; None where they are not stored numbers."""
        stored = [self.stored.get(name) for name in node.input[1:]]
        values = [array(tensor) for tensor in stored if tensor is not None and not any(n != 1 for n in tensor.dims)]
        if not stored or len(values) < len(stored):  # such as an op that is no pair
            return None
        return values[0].tobytes(), int(values[1].reshape(-1)[0]) if len(values) > 1 else 0

    def codes_behind(self, pair: NodeProto) -> str:
        """Return the type of the codes that a DequantizeLinear of an activation reads; "" for any other node."""
        quantize = self.makers.get(pair.input[0]) if pair.op_type == "DequantizeLinear" else None
        return "" if quantize is None else self.dtype(quantize)

    def zeros_of(self, pad: NodeProto) -> list[int]:
        """Return the sizes, as a convolution has them, of a Pad that puts zeros behind the channels; else nothing."""
        names, mode = [name for name in pad.input[1:] if name], attributes(pad).get("mode", "constant")
        if mode != "constant" or len(pad.input) > 3 or any(name not in self.stored for name in names):
            return []
        sizes, *value = (array(self.stored[name]).reshape(-1).tolist() for name in names)
        rank = len(sizes) // 2
        beside = [*sizes[:2], *sizes[rank : rank + 2], *(value[0] if value else ())]
        return [*sizes[2:rank], *sizes[rank + 2 :]] if not any(beside) and min(sizes) >= 0 else []
