"""Whether two models compute the same, told from their nodes: what makes a difference, and what makes none."""

import numpy as np
import pytest
from onnx import ModelProto, helper
from qdq_models import make_model

from onnx_backend.parity.written import differences
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


def codes(zero: int, outputs: tuple[str, ...] = ("y",)) -> ModelProto:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"], "pair"), node("DequantizeLinear", ["q", "s", "z"], ["d"])]
    nodes += [node("Relu", ["d"], ["y"], "relu"), node("Neg", ["d"], ["n"], "neg")]
    stored = {"s": np.float32(0.5), "z": np.uint8(zero)}
    return make_model(nodes, {"x": [2, 4]}, {name: [2, 4] for name in outputs}, stored)


def test_another_zero_point_is_another_function_and_zero_may_be_written_or_not() -> None:
    assert different(codes(3), codes(3)) == []
    assert different(codes(3), codes(4))[0] == "pair"
    unwritten = codes(0)
    for pair in list(unwritten.graph.node)[:2]:
        del pair.input[2]
    assert different(unwritten, codes(0)) == different(codes(0), unwritten) == []


def test_outputs_are_compared_by_what_computes_them_and_by_their_number() -> None:
    swapped, fewer = codes(3, ("n",)), codes(3, ("y", "n"))
    (found,) = differences(swapped, LoweredModel(codes(3), {}, []), {})
    assert (found.node, found.problem) == ("n", "this output is not computed as the simulation's")
    (found,) = differences(fewer, LoweredModel(codes(3), {}, []), {})
    assert found.problem == "it has 2 outputs, the simulation 1"
