"""The stored tensors of an ONNX sim by name."""

from onnx import TensorProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.sim import OnnxSim
from qsdk.core.lazy_arrays import LazyArrays


def stored_by_name(sim: OnnxSim) -> LazyArrays:
    """Return the value of each stored float32 tensor by its name."""
    stored = initializers(sim.traced().model.graph)
    names = [name for name, tensor in stored.items() if tensor.data_type == TensorProto.FLOAT]
    return LazyArrays(names, lambda name: array(stored[name]))
