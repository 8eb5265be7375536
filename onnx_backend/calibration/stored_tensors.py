"""The stored tensors of a marked model, which calibration and simulation read."""

from onnx import ModelProto

from onnx_backend.proto.external_data import float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.nodes import attributes, is_mark
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.planning.plan import Plan


def stored_tensors(marked: ModelProto, plan: Plan) -> LazyArrays:
    """Return site -> float32 value of every marked stored tensor."""
    stored, found = initializers(marked.graph), stored_names(marked, plan)
    return LazyArrays(found, lambda site: float_array(stored[found[site]]))


def stored_names(marked: ModelProto, plan: Plan) -> dict[str, str]:
    """Return site -> name of the stored tensor there, for every marked one."""
    stored = initializers(marked.graph)
    roots: dict[str, str] = {}
    found: dict[str, str] = {}
    for node in marked.graph.node:
        if is_mark(node):
            root = roots[node.output[0]] = roots.get(node.input[0], node.input[0])
            site = str(attributes(node)["key"])
            if root in stored and site in plan.decisions:
                found[site] = root
    return found
