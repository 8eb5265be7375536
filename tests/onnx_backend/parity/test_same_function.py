"""Whether two models compute the same, told from their nodes: what makes a difference, and what makes none."""

import numpy as np
import pytest
from onnx import ModelProto, helper
from qdq_models import make_model

from onnx_backend.parity.same_function import differences
from onnx_backend.proto.lazy_tensors import LoweredModel

node = helper.make_node


def channels(**options: int) -> ModelProto:
    """A square weight with a scale per channel, in front of a MatMul."""
    nodes = [node("DequantizeLinear", ["w", "s"], ["d"], "weight", **options), node("MatMul", ["x", "d"], ["y"], "mm")]
    stored = {"w": np.arange(16, dtype=np.int8).reshape(4, 4), "s": np.float32([1, 2, 3, 4])}
    return make_model(nodes, {"x": [2, 4]}, {"y": [2, 4]}, stored)


def different(model: ModelProto, wanted: ModelProto) -> list[str]:
    return [found.node for found in differences(model, LoweredModel(wanted, {}, []), {})]


def test_an_axis_that_is_left_out_is_the_second() -> None:
    assert different(channels(), channels(axis=1)) == different(channels(axis=1), channels()) == []
    assert different(channels(), channels(axis=0)) == different(channels(axis=0), channels()) == ["weight"]


def summed(*inputs: str) -> ModelProto:
    nodes = [node("Sum", list(inputs), ["s"], "sum"), node("Relu", ["s"], ["y"], "relu")]
    return make_model(nodes, {"x": [2, 4], "z": [2, 4]}, {"y": [2, 4]}, {})


@pytest.mark.parametrize(("inputs", "others", "found"), [(["x", "z"], ["x"], ["sum"]), (["x"], ["x"], [])])
def test_a_sum_of_one_repeats_it_and_one_of_two_does_not(inputs, others, found) -> None:
    assert different(summed(*inputs), summed(*others)) == found
