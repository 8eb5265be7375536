"""Work-arounds for OpenVINO (2026.4): nodes that keep it from computing wrong, and the stack for signals.

Operators that OpenVINO computes on the codes behind a pair, and then wrong without a word (2026.4, measured).

It moves the DequantizeLinear behind them. A sum or a mean along the middle of three axes, such as that of tokens, is 0
but for the first sample; a sum keeps one zero point for all of its elements where two pairs share their constants; a
pool that counts its padding takes the code 0 for the number 0; a Pad of a single axis changes the zero point of the
pair in front in place, and so that of every pair that shares it; a Clip behind the pair of a layer moves in front of
that pair, and its bounds to the next code. Those are right behind a Max with minus
infinity; a GRU and an LSTM behind 8 bits are not: they do not compile, or are wrong.

With open axes it takes one constant for all channels: its CPU plug-in merges a product or a sum with constants into the
rounding behind it (FusePerformedAsScaleShiftAndFakeQuantize), which then stands alone and reads the first of them. A
layer adds its bias so where something else reads its product, and what reads sizes may be moved there from anywhere.
All of it is right with a LeakyRelu of slope 1 in front of the QuantizeLinear, which joins the layer's kernel.
"""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes, replace_nodes
from onnx_backend.readers import Readers, is_shifted, pair_before
from qsdk.core.graph.op_facts import LINEAR, MOVEMENTS

#: ops that are right behind 16 bits alone
RECURRENT = frozenset({"GRU", "LSTM"})
#: ops between constants and a rounding that do not keep the runtime from merging them
_MERGED = MOVEMENTS | {"Clip", "Dropout"}
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Div"})
_STACK_SIZE = 64  # bytes, more than any system's `stack_t`
_SWITCH_STACK = getattr(ctypes.CDLL(None), "sigaltstack", None) if os.name == "posix" else None
_BIAS = 2  # input of a layer
_ON_A_CODE = 1e-3  # steps
_LARGEST_CODE = 255  # of 8 bits; what lies beyond bounds nothing
_LAST_OF_THREE = 2  # an axis beyond it is that of a tensor of four axes or more, whose means are right


def is_wrong_on_codes(node: NodeProto, known: Readers) -> bool:
    """Return True if OpenVINO computes a node wrong on codes, for all that is known of its sizes."""
    attrs = attributes(node)
    if node.op_type == "AveragePool":
        return bool(attrs.get("count_include_pad")) and (any(attrs.get("pads", ())) or "auto_pad" in attrs)
    if node.op_type == "ReduceMean":
        stored = known.stored.get(node.input[1]) if len(node.input) > 1 else None
        axes = attrs.get("axes", ()) if stored is None else array(stored).reshape(-1)
        return max(axes, default=0) <= _LAST_OF_THREE
    if node.op_type == "Clip":
        return _has_bounds_between_codes(node, known)
    if node.op_type == "Pad":
        is_constant = attrs.get("mode", "constant") == "constant"
        return is_constant and _pads_one_axis(node, known) and _shares_constants(node, known)
    return node.op_type == "ReduceSum"


def is_behind_constants(quantize: NodeProto, known: Readers) -> bool:
    """Return True if with open axes OpenVINO may add the first of several biases or constants in front of a pair.

    It removes pairs of 16 bits.
    """
    if known.dtype(quantize).endswith("16"):
        return False
    maker = known.makers.get(quantize.input[0])
    while maker is not None and maker.op_type in _MERGED:
        maker = known.makers.get(maker.input[0])
    if maker is None or maker.op_type in LINEAR:
        return maker is not None and len(maker.input) > _BIAS and bool(maker.input[_BIAS])
    return maker.op_type in _ARITHMETIC and any(_is_vector(name, known) for name in maker.input)


def _is_vector(name: str, known: Readers) -> bool:
    """Return True for a stored tensor, quantized or not, of more than one element."""
    maker = known.makers.get(name)
    stored = known.stored.get(maker.input[0] if maker is not None and maker.op_type == "DequantizeLinear" else name)
    return stored is not None and math.prod(stored.dims) > 1


def _has_bounds_between_codes(node: NodeProto, known: Readers) -> bool:
    """Return True if a Clip reads the pair of a layer, which has no code for one of its bounds."""
    pair = known.makers.get(node.input[0])
    quantize = None if pair is None or pair.op_type != "DequantizeLinear" else known.makers.get(pair.input[0])
    layer = None if quantize is None else known.makers.get(quantize.input[0])
    scale = None if pair is None or len(pair.input) < 2 else known.stored.get(pair.input[1])
    if layer is None or layer.op_type not in LINEAR or scale is None:
        return False
    bounds = [known.stored[name] for name in node.input[1:] if name in known.stored]
    codes = [float(array(bound)) / float(array(scale).reshape(-1)[0]) for bound in bounds]
    return any(abs(code - round(code)) > _ON_A_CODE for code in codes if abs(code) <= _LARGEST_CODE)


def _pads_one_axis(node: NodeProto, known: Readers) -> bool:
    stored = known.stored.get(node.input[1]) if len(node.input) > 1 else None
    if stored is None:
        return True  # nothing says otherwise
    before, after = array(stored).reshape(2, -1)
    return sum(bool(one or other) for one, other in zip(before, after, strict=True)) == 1


def _shares_constants(node: NodeProto, known: Readers) -> bool:
    """Return True if the pair in front of a node has a scale or zero point that another pair reads too."""
    before = pair_before(node, known)
    if before is None or not is_shifted(before, known):
        return False
    own = {before.output[0], before.input[0]}
    return any(reader.output[0] not in own for name in before.input[1:] for reader in known.readers.get(name, []))


def keep_off_codes(model: ModelProto) -> None:
    """Insert a Max with minus infinity in front of what OpenVINO would compute wrong on codes, in place.

    It changes no value, and the runtime neither removes it nor computes it on codes.
    """
    known, nodes = Readers(model.graph), list[NodeProto]()
    for node in model.graph.node:
        pair = pair_before(node, known) if is_wrong_on_codes(node, known) else None
        if pair is not None:
            scale, tensor = known.stored.get(pair.input[1]), node.input[0]
            code = TensorProto.FLOAT if scale is None else scale.data_type
            smallest = np.asarray(-np.inf).astype(helper.tensor_dtype_to_np_dtype(code))
            nodes.append(known.copy(tensor, "Max", known.store(f"{tensor}/lowest", smallest)))
            node.input[0] = nodes[-1].output[0]
        nodes.append(node)
    replace_nodes(model.graph, nodes)


def keep_constants_apart(model: ModelProto) -> None:
    """Insert a LeakyRelu of slope 1 where OpenVINO would take the first of several constants for all, in place."""
    known, nodes = Readers(model.graph), list[NodeProto]()
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and is_behind_constants(node, known):
            nodes.append(known.copy(node.input[0], "LeakyRelu", alpha=1.0))
            node.input[0] = nodes[-1].output[0]
        nodes.append(node)
    replace_nodes(model.graph, nodes)


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Put the alternate signal stack of this thread (`sigaltstack(2)`) back at the end of the block.

    OpenVINO 2026.4 sets one of its own for each model that it compiles, and puts the one before back when the model is
    freed. Models that are not freed in reverse order leave one that is gone, and the next signal with a Python handler,
    such as the end of a DataLoader's worker, ends the process. With the stack put back after each compilation, all
    models find the same one, and every order is right.
    """
    before = signal_stack()
    try:
        yield
    finally:
        if _SWITCH_STACK is not None:
            _SWITCH_STACK(ctypes.create_string_buffer(before, _STACK_SIZE), None)


def signal_stack() -> bytes:
    """Return the system's description of this thread's alternate signal stack; empty where systems have none."""
    if _SWITCH_STACK is None:
        return b""
    found = ctypes.create_string_buffer(_STACK_SIZE)
    _SWITCH_STACK(None, found)
    return found.raw
