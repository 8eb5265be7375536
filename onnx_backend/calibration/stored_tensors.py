"""The stored tensors of a marked model, which calibration and simulation read."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper

from onnx_backend.proto.external_data import float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import fake_quantize
from onnx_backend.proto.nodes import attributes, is_mark
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan


def stored_tensors(marked: ModelProto, plan: Plan) -> LazyArrays:
    """Return site -> float32 value of every marked stored tensor."""
    stored, found = initializers(marked.graph), stored_names(marked, plan)
    return LazyArrays(found, lambda site: float_array(stored[found[site]]))


def simulated_tensors(marked: ModelProto, plan: Plan, encodings: Mapping[str, Encoding]) -> LazyArrays:
    """Return site -> fake-quantized value, float32, of every stored tensor that does not stay float32."""
    stored = stored_tensors(marked, plan)

    def value(site: str) -> npt.NDArray[np.float32]:
        if site in encodings:
            return fake_quantize(encodings[site], stored[site])
        spec = plan.decisions[site].spec
        narrow = spec is not None and spec.dtype.name == "float16"
        code = TensorProto.FLOAT16 if narrow else TensorProto.BFLOAT16
        return np.asarray(stored[site].astype(helper.tensor_dtype_to_np_dtype(code)), np.float32)

    narrowed = [site for site in stored if site in encodings or plan.decisions[site].spec is not None]
    return LazyArrays(narrowed, value)


def stored_names(marked: ModelProto, plan: Plan) -> dict[str, str]:
    """Return site -> name of the stored tensor there, for every marked one."""
    stored = initializers(marked.graph)
    roots: dict[str, str] = {}
    found: dict[str, str] = {}
    for node in marked.graph.node:
        if is_mark(node):
            root = roots[node.output[0]] = roots.get(node.input[0], node.input[0])
            if root in stored and (site := str(attributes(node)["key"])) in plan.decisions:
                found[site] = root
    return found
