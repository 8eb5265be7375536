"""Norms and shares of scores in the forms that ONNX Runtime has fast kernels for; what is measured: `fast_forms`."""

from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes
from onnx_backend.proto.weightless import is_large
from onnx_backend.qdq.form_writer import FormWriter, changed
from onnx_backend.readers import Readers
from qsdk.core.graph.op_facts import MOVEMENTS, RESHAPES

_HIDDEN: Final = -80.0  # what is added to a score so that its share is 0 in float32
_SAME_TRUTH = RESHAPES | {"Expand", "Identity", "Transpose"}
_LONGEST = 16  # nodes between a mask's numbers and a Softmax
_AXES_AS_INPUT = 18  # the opset from which a ReduceMax reads its axes
_DEPTH = 60.0  # of scores below the largest, from which on a share is nothing
_GAIN_OF_CHANNEL = 21  # the opset from which a GroupNormalization has a gain for each channel
_LEAST_AXES = 3  # of an InstanceNormalization


class NormForms(FormWriter):
    """The forms of norms and Softmax."""

    def is_in_norm(self, reciprocal: NodeProto) -> bool:
        """Return True for 1 over the root of a sum with a stored float32."""
        root = self.makers.get(reciprocal.input[0])
        total = None if root is None or root.op_type != "Sqrt" else self.makers.get(root.input[0])
        if total is None or total.op_type != "Add":
            return False
        stored = [self.stored[name] for name in total.input if name in self.stored]
        return any(tensor.data_type == TensorProto.FLOAT for tensor in stored)

    def divide(self, reciprocal: NodeProto) -> None:
        """Write a Reciprocal as a Div of 1, the same number."""
        one = self._store_once(f"{reciprocal.output[0]}/one", np.ones((), np.float32))
        inputs = [one, reciprocal.input[0]]
        self._last(helper.make_node("Div", inputs, [*reciprocal.output], reciprocal.name), [reciprocal])

    def is_masked(self, softmax: NodeProto) -> bool:
        """Return True for a Softmax of scores of which a mask hides some."""
        return self._opset >= _AXES_AS_INPUT and hides_scores(softmax.input[0], self)

    def keep_normal(self, softmax: NodeProto) -> None:
        """Write a Softmax whose scores are no more than 60 below the largest one of their row."""
        last, scores = softmax.output[0], softmax.input[0]
        axes = self._numbers(f"{last}/axes", [attributes(softmax).get("axis", -1)])
        most = self._part(last, "ReduceMax", [scores, axes])
        least = self._part(last, "Sub", [most, self._store_once(f"{last}/depth", np.array(_DEPTH, np.float32))])
        self._last(changed(softmax, [self._part(last, "Max", [scores, least])]), [softmax])

    def is_sized_group_norm(self, norm: NodeProto) -> bool:
        """Return True for a GroupNormalization of float32 channels, of whose other sizes one is open at most."""
        sizes = self._sizes.get(norm.input[0], ())
        if self._opset < _GAIN_OF_CHANNEL or self.types.get(norm.input[0], ("",))[0] != "float32":
            return False
        if len(sizes) <= 1 or sizes[1] is None or 0 in sizes or sizes[1:].count(None) > 1:
            return False
        pair = self.makers.get(norm.input[0])
        # the runtime does not load a Reshape beside signed codes
        beside = "" if pair is None or pair.op_type != "DequantizeLinear" else self.codes_behind(pair)
        return self._is_of_channels(norm) or beside in ("", "uint8")

    def _is_of_channels(self, norm: NodeProto) -> bool:
        sizes = self._sizes[norm.input[0]]
        return bool(attributes(norm)["num_groups"] == sizes[1]) and len(sizes) >= _LEAST_AXES

    def normalize_groups(self, norm: NodeProto) -> None:
        """Write a GroupNormalization, which has no kernel, as the InstanceNormalization of its groups."""
        last, (source, gain, bias), facts = norm.output[0], norm.input, attributes(norm)
        groups, sizes, epsilon = facts["num_groups"], self._sizes[source], {"epsilon": facts.get("epsilon", 1e-5)}
        if self._is_of_channels(norm):
            whole = helper.make_node("InstanceNormalization", [source, gain, bias], [last], norm.name, **epsilon)
            self._last(whole, [norm])
            return
        rows = self._shaped(last, "groups", source, [0, groups, -1])
        one, zero = (
            self._store_once(f"{last}/{end}", np.full(groups, value, np.float32))
            for end, value in (("gains", 1), ("biases", 0))
        )
        normal = self._part(last, "InstanceNormalization", [rows, one, zero], **epsilon)
        shape = [0, *(-1 if size is None else size for size in sizes[1:])]
        along = [-1, *[1] * (len(sizes) - 2)]
        product = [self._shaped(last, "whole", normal, shape), self._shaped(last, "along", gain, along)]
        inputs = [self._part(last, "Mul", product), self._shaped(last, "along", bias, along)]
        self._last(helper.make_node("Add", inputs, [last], norm.name), [norm])


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
