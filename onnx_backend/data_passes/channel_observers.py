"""The stored tensors of an ONNX sim by name, and looks at its activations in use."""

from collections.abc import Iterable, Mapping
from typing import Any

from onnx import TensorProto

from onnx_backend.data_passes.site_samples import exposed
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.session import simulation_session
from onnx_backend.sim import OnnxSim
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.scaling.channel_observer import ChannelObserver


def stored_by_name(sim: OnnxSim) -> LazyArrays:
    """Name -> value of each stored float32 tensor."""
    stored = initializers(sim.traced().model.graph)
    names = [name for name, tensor in stored.items() if tensor.data_type == TensorProto.FLOAT]
    return LazyArrays(names, lambda name: array(stored[name]))


def look(sim: OnnxSim, data: Iterable[Any], looks: Mapping[str, ChannelObserver], *, progress: bool) -> None:
    """Show the float values at these sites to the looks, in one pass over the data.

    Raises:
        DataError: no data, or data the model does not take.
    """
    model, tensors = exposed(sim.traced().model, looks)
    session = simulation_session(model)
    names = [output.name for output in session.get_outputs()]
    for number, batch in batches_of(data, "scaling", progress):
        where = f"batch {number}"
        values = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        for name, value in zip(names, values, strict=True):
            looks[tensors[name]].add(value)
