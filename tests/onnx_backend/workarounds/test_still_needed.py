"""Each barrier is still needed: without it the installed runtime is wrong, with it right. One that is not may go."""

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from qdq_models import make_model, run

from onnx_backend.workarounds.onnxruntime_barriers import insert_barriers

node = helper.make_node
LEVELS = ort.GraphOptimizationLevel
RNG = np.random.default_rng(0)
PAIR = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"])]
AFTER = [node("QuantizeLinear", ["t", "s2", "z"], ["q2"]), node("DequantizeLinear", ["q2", "s2", "z"], ["y"])]
GRID = {"s": np.float32(0.02), "s2": np.float32(0.3), "z": np.uint8(128)}


def codes(*shape):
    return np.random.default_rng(1).integers(-60, 60, shape).astype(np.int8)


def weight(shape, scale, axis):
    stored = {"wq": codes(*shape), "ws": np.asarray(scale, np.float32), "wz": np.zeros(np.shape(scale), np.int8)}
    return [node("DequantizeLinear", ["wq", "ws", "wz"], ["w"], axis=axis)], stored


def stack_of_matrices():
    """MatMulIntegerToFloat does not run with scales per channel of a stack."""
    nodes, stored = weight((3, 8, 4), RNG.uniform(0.01, 0.02, 4), 2)
    return make_model([*PAIR, *nodes, node("MatMul", ["d", "w"], ["y"])], {"x": [3, 2, 8]}, {"y": None}, GRID | stored)


def scales_of_inputs():
    """A scale for each input channel is taken for that of an output channel."""
    nodes, stored = weight((8, 8), RNG.uniform(0.001, 0.1, 8), 0)
    return make_model([*PAIR, *nodes, node("MatMul", ["d", "w"], ["y"])], {"x": [4, 8]}, {"y": None}, GRID | stored)


def bias_of_another_scale():
    """QGemm reads the codes of a bias as if their scale were that of the input times that of the weight."""
    nodes, stored = weight((8, 4), 0.01, 1)
    stored |= {"bq": codes(4).astype(np.int32), "bs": np.float32(0.05)}
    nodes.append(node("DequantizeLinear", ["bq", "bs"], ["b"]))
    return make_model(
        [*PAIR, *nodes, node("Gemm", ["d", "w", "b"], ["t"]), *AFTER], {"x": [4, 8]}, {"y": None}, GRID | stored
    )


def bias_beyond_int32():
    """A float bias over the product of the scales is saturated."""
    nodes, stored = weight((4, 8, 1, 1), 1e-7, 0)
    stored |= {"b": np.float32([6, -6, 7, 9]), "s": np.float32(0.001)}
    conv = node("Conv", ["d", "w", "b"], ["t"])
    return make_model([*PAIR, *nodes, conv, *AFTER], {"x": [1, 8, 3, 3]}, {"y": None}, GRID | stored)


def pair_in_front_of_a_transpose():
    """The runtime puts a copy of the pair in front of the Transpose too, where the tensor leaves the model."""
    nodes = [node("Mul", ["x", "x"], ["h"]), node("Transpose", ["h"], ["t"], perm=[1, 0]), *AFTER]
    return make_model(nodes, {"x": [4, 8]}, {"h": None, "y": None}, GRID)


def input_of_a_float_layer():
    """MatMulNBits rounds what it reads to 8 bits."""
    nodes, stored = weight((64, 16), np.full((2, 16), 0.01), 0)
    nodes[0].attribute.append(helper.make_attribute("block_size", 32))
    return make_model([*nodes, node("MatMul", ["x", "w"], ["y"])], {"x": [4, 64]}, {"y": None}, stored)


def softmax_of_part_steps():
    """Softmax multiplies by the whole part of one over the scale."""
    scale = {"s2": np.float32(1 / 100.5), "z2": np.uint8(0)}
    after = [node("QuantizeLinear", ["t", "s2", "z2"], ["q2"]), node("DequantizeLinear", ["q2", "s2", "z2"], ["y"])]
    return make_model([*PAIR, node("Softmax", ["d"], ["t"]), *after], {"x": [50, 3]}, {"y": None}, GRID | scale)


CASES = [stack_of_matrices, scales_of_inputs, bias_of_another_scale, bias_beyond_int32, pair_in_front_of_a_transpose]
CASES += [input_of_a_float_layer, softmax_of_part_steps]


@pytest.mark.parametrize("build", CASES)
def test_the_runtime_is_wrong_without_it_and_right_with_it(build):
    model = build()
    shape = [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    x = {"x": np.random.default_rng(2).normal(size=shape).astype(np.float32)}
    wanted = run(model, x, LEVELS.ORT_DISABLE_ALL)

    def is_right():
        try:
            found = run(model, x, LEVELS.ORT_ENABLE_ALL)
        except Exception:  # the runtime's own types are private
            return False
        return all(np.allclose(one, other, atol=1e-4) for one, other in zip(found, wanted, strict=True))

    assert not is_right()
    insert_barriers(model)
    assert is_right()
