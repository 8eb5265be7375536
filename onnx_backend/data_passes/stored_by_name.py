"""The stored tensors of an ONNX sim by name."""

from onnx_backend.proto.external_data import FLOATS, float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.sim import OnnxSim
from qsdk.core.lazy_arrays import LazyArrays


def constants_by_name(sim: OnnxSim) -> LazyArrays:
    """Return the value of every stored tensor by its name, also of those of integers; float ones in float32."""
    stored = initializers(sim.traced().model.graph)
    return LazyArrays(stored, lambda name: float_array(stored[name]))


def stored_by_name(sim: OnnxSim) -> LazyArrays:
    """Return the value of each stored float tensor by its name, in float32."""
    stored = initializers(sim.traced().model.graph)
    names = [name for name, tensor in stored.items() if tensor.data_type in FLOATS]
    return LazyArrays(names, lambda name: float_array(stored[name]))
