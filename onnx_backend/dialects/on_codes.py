"""Operators that OpenVINO computes on the codes behind a pair, and then wrong without a word (2026.4, measured).

It moves the DequantizeLinear behind them. A sum or a mean along the middle of three axes, such as that of tokens, is 0
but for the first sample; a sum keeps one zero point for all of its elements where two pairs share their constants; a
pool that counts its padding takes the code 0 for the number 0. Those are right behind a Max with minus infinity; a
GRU and an LSTM behind 8 bits are not: they do not compile, or are wrong.
"""

from onnx import NodeProto

from onnx_backend.dialects.readers import Readers
from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes
from qsdk.core.graph.op_facts import EXTREMES, MOVEMENTS

#: ops that move or choose elements, and so may be computed on codes between a pair and what reads it
_MOVES = MOVEMENTS | EXTREMES | {"Clip", "Concat", "Dropout", "Pad", "Relu"}
#: ops that are right behind 16 bits alone
RECURRENT = frozenset({"GRU", "LSTM"})
_LAST_OF_THREE = 2  # an axis beyond it is that of a tensor of four axes or more, whose means are right


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


def is_wrong_on_codes(node: NodeProto, known: Readers) -> bool:
    """Return True if OpenVINO computes a node wrong on codes, for all that is known of its sizes."""
    attrs = attributes(node)
    if node.op_type == "AveragePool":
        return bool(attrs.get("count_include_pad")) and (any(attrs.get("pads", ())) or "auto_pad" in attrs)
    if node.op_type == "ReduceMean":
        stored = known.stored.get(node.input[1]) if len(node.input) > 1 else None
        axes = attrs.get("axes", ()) if stored is None else array(stored).reshape(-1)
        return max(axes, default=0) <= _LAST_OF_THREE
    return node.op_type == "ReduceSum"
