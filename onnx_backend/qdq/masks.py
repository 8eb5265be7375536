"""Masks of attention: which scores one hides, by the stored numbers that it is made of."""

from typing import Final

from onnx import NodeProto, TensorProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.weightless import is_large
from onnx_backend.readers import Readers
from qsdk.core.graph.op_facts import MOVEMENTS, RESHAPES

_HIDDEN: Final = -80.0  # what is added to a score so that its share is 0 in float32
_SAME_TRUTH = RESHAPES | {"Expand", "Identity", "Transpose"}
_LONGEST = 16  # nodes between a mask's numbers and a Softmax


def hides_scores(tensor: str, known: Readers, left: int = _LONGEST) -> bool:
    """Return True if the float32 values of a tensor hold, or may hold, scores that a mask hides."""
    stored, maker = known.stored.get(tensor), known.makers.get(tensor)
    if stored is not None:
        return _is_low(stored)
    if maker is None or left == 0:
        return False
    if maker.op_type == "Where":
        return any(_may_be(maker.input[0], at == 1, known) and _hides(maker, at, known, left) for at in (1, 2))
    if maker.op_type == "Mul":  # of the places that a mask leaves out
        return any(name in known.stored and _is_low(known.stored[name]) for name in maker.input)
    if maker.op_type == "Add":
        return any(_hides(maker, at, known, left) for at in (0, 1))
    return maker.op_type in (MOVEMENTS | {"Trilu"}) and _hides(maker, 0, known, left)


def _hides(node: NodeProto, at: int, known: Readers, left: int) -> bool:
    return hides_scores(node.input[at], known, left - 1)


def _is_low(stored: TensorProto) -> bool:
    if stored.data_type != TensorProto.FLOAT or is_large(stored.dims):
        return False
    values = array(stored)
    return bool(values.size) and float(values.min()) <= _HIDDEN


def _may_be(condition: str, truth: bool, known: Readers) -> bool:
    """Return False for a condition that is stored, and nowhere what is asked for."""
    while condition not in known.stored:
        maker = known.makers.get(condition)
        if maker is None or maker.op_type not in (_SAME_TRUTH | {"Not"}):
            return True
        truth ^= maker.op_type == "Not"
        condition = maker.input[0]
    stored = known.stored[condition]
    return is_large(stored.dims) or bool((array(stored) == truth).any())
