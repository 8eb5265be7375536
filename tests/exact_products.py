"""Whether ONNX Runtime's kernels for uint8 x int8 are exact on this processor, and sessions in which they are."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

FUSION = "QDQSelectorActionTransformer"


@functools.cache
def products_saturate() -> bool:
    """On x86 without VNNI, pairs of products of uint8 and int8 are added in 16 bits, which saturate."""
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


@contextmanager
def exact_sessions() -> Iterator[None]:
    """Open every session without the step that puts those kernels in place of Q/DQ, where they saturate.

    A test compares what this project writes with what a runtime makes of it; what a processor cannot add up is not in
    it. (The runtime's own switch for this, session.x64quantprecision, refuses weights without a zero point.)
    """
    original = ort.InferenceSession.__init__

    def exact(self: ort.InferenceSession, *arguments: Any, **options: Any) -> None:
        options["disabled_optimizers"] = {*(options.get("disabled_optimizers") or ()), FUSION}
        original(self, *arguments, **options)

    if products_saturate():
        ort.InferenceSession.__init__ = exact
    try:
        yield
    finally:
        ort.InferenceSession.__init__ = original
