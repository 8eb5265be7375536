"""Test if the runtime's kernels for uint8 activations and int8 weights are exact on this processor."""

import functools

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper


@functools.cache
def products_saturate() -> bool:
    """Ask the runtime for sums of 64 products 255 * 127: x86 without VNNI adds pairs of them in 16 bits, saturating."""
    constants = {"one": np.float32(1), "zero": np.uint8(0), "point": np.int8(0), "scale": np.float32(8192)}
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    stored.append(numpy_helper.from_array(np.full((64, 16), 127, np.int8), "weight"))
    node = helper.make_node("QLinearMatMul", ["x", "one", "zero", "weight", "one", "point", "scale", "zero"], ["y"])
    edges = [helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in "xy"]
    graph = helper.make_graph([node], "probe", edges[:1], edges[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((16, 64), 255, np.uint8)})
    return not np.all(found == round(64 * 127 * 255 / 8192))
