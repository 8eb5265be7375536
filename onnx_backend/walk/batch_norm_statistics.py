"""Re-estimate the statistics of BatchNormalization nodes from their inputs in the simulation."""

import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.lower import lower
from onnx_backend.proto.external_data import FLOATS, float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.lazy_tensors import LargeTensor, from_source, narrow
from onnx_backend.proto.nodes import attributes, node_label
from onnx_backend.runtime.feeds import run_session
from onnx_backend.runtime.session import bounded_session
from onnx_backend.sim import OnnxSim
from onnx_backend.walk.run import LiveTensors, SteppedRun, Stream, bfloat16_in
from onnx_backend.workarounds.kernel_casts import remove_kernel_casts
from qsdk.core.arrays import Array
from qsdk.core.errors import DataError
from qsdk.core.planning.plan import Plan
from qsdk.core.ranges.statistics import ChannelStatistics, Together, deviation, merge

Rows = list[dict[str, Any]]


def reestimate(sim: OnnxSim, data: Iterable[Any], together: Together, *, progress: bool = True) -> tuple[Rows, float]:
    """Set the mean and variance of every BatchNormalization to those of its simulated input, one after the other.

    One simulated pass over the data, in sections that end at the BatchNormalizations; tensors that are read later on
    are kept in between. The rows come with the seconds that the data would take in float.
    `together` merges the statistics of all ranks.
    """
    model = sim.qdq_model()
    remove_kernel_casts(model)  # a statistic behind a Cast is a stored one
    stored = initializers(model.graph)
    rows: Rows = []
    nodes: list[NodeProto] = []
    statistics: dict[str, Array] = {}
    for node in model.graph.node:
        if node.op_type != "BatchNormalization" or node.domain != "":
            continue
        reason = _reason(node, stored, statistics)
        if reason:
            rows.append(_row(node, note=reason))
            continue
        nodes.append(node)
        statistics |= {name: float_array(stored[name]) for name in node.input[3:5]}
    types = {name: stored[name].data_type for name in statistics}
    current = {name: partial(_current_value, statistics, name, types[name]) for name in statistics}
    stream = Stream(model, {}, current, bfloat16_in(model))
    targets = [node.input[0] for node in nodes]
    steps = {stream.maker(node.output[0]): step for step, node in enumerate(nodes)}
    run = SteppedRun([stream], [[[name] for name in targets]], [steps], LiveTensors(), sim.in_memory, sim.providers)
    with run.sharing_memory():
        first: dict[str, Array] = {}
        for number, feeds in run.start(data, "BatchNorm", progress=progress):
            broken = [name for name, value in feeds.items() if value.dtype.kind == "f" and np.isnan(value).any()]
            if broken:  # quantized, it would pass for a number
                raise DataError(f"batch {number} holds NaN in {', '.join(broken)}; give data that is finite")
            first = first or feeds
        float_seconds = run.batches * _seconds_in_float(sim, first)
        for step, node in enumerate(nodes):
            start = time.perf_counter()
            run.reach(step)
            inputs = (run.live.get((0, batch, targets[step])) for batch in range(run.batches))
            found = together(node_label(node), merge([_statistics(x) for x in inputs]))
            variance = found.variance(node_label(node))
            mean_name, variance_name = node.input[3:5]
            old = statistics[variance_name].astype(np.float64) + float(attributes(node).get("epsilon", 1e-5))
            error = deviation(found, statistics[mean_name].astype(np.float64), old)
            for name, value in ((mean_name, found.mean), (variance_name, variance)):
                rounded = value.astype(helper.tensor_dtype_to_np_dtype(types[name]))
                statistics[name] = rounded.astype(np.float32)
            rows.append(_row(node, error, time.perf_counter() - start))
    sim.change_stored(statistics)
    return rows, float_seconds


def _current_value(now: Mapping[str, Array], name: str, data_type: int) -> LargeTensor:
    return narrow(from_source(partial(now.__getitem__, name), now[name].shape), data_type)


def _reason(node: NodeProto, stored: Mapping[str, TensorProto], taken: Collection[str]) -> str:
    """Return why the statistics of a node cannot be estimated, or ""."""
    if attributes(node).get("training_mode", 0):
        return "it is in training mode"
    names = list(node.input[3:5])
    if len(names) < 2 or any(name not in stored for name in names):
        return "its statistics are computed"
    if any(stored[name].data_type not in FLOATS for name in names):
        return "its statistics are not float"
    return "it shares its statistics with another one" if any(name in taken for name in names) else ""


def _statistics(x: Array) -> ChannelStatistics:
    """Return the statistics of each channel of an array [N, C, ...]."""
    values = np.moveaxis(x.astype(np.float64), 1, 0).reshape(x.shape[1], -1)
    mean = values.mean(1) if values.shape[1] else np.zeros(len(values))
    return ChannelStatistics(values.shape[1], mean, np.square(values - mean[:, None]).sum(1))


def _seconds_in_float(sim: OnnxSim, feeds: Mapping[str, Array]) -> float:
    """Return the seconds that one batch takes in float."""
    lowered = lower(sim.traced().model, Plan({}, ()), {})
    session = bounded_session(lowered.model, lowered.large, sim.in_memory, providers=sim.providers)
    start = time.perf_counter()
    run_session(session, feeds, "batch 0")
    return time.perf_counter() - start


def _row(node: NodeProto, error: float | None = None, seconds: float | None = None, note: str = "") -> dict[str, Any]:
    after = None if error is None else 0.0
    return {"site": node_label(node), "error_before": error, "error_after": after, "seconds": seconds, "note": note}
