"""Passes of an ONNX sim over data, and what they need of it: outputs, values at sites, stored tensors, ReLU6."""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, helper

from onnx_backend.lower import lower
from onnx_backend.proto.external_data import FLOATS, array, float_array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import MARK_DOMAIN, attributes, is_mark, replace_nodes
from onnx_backend.qdq.graph_editor import type_of_mark
from onnx_backend.qdq.read import FLOAT_CODES
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.session import bounded_session, simulation_session
from onnx_backend.sim import OnnxSim
from qsdk.core.graph.graph import Graph, as_relu, clips_at_six
from qsdk.core.lazy_arrays import LazyArrays
from qsdk.core.planning.plan import Plan


def outputs(sim: OnnxSim, batches: Iterable[Any], *, in_float: bool) -> Iterator[list[npt.NDArray[np.float32]]]:
    """Yield the floating-point outputs of each batch, in order, of the simulation or of the float model."""
    session = _in_float(sim) if in_float else None
    for number, batch in enumerate(batches):
        where = f"batch {number}"
        if session is None:
            found = sim.run(batch)
        else:
            found = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        yield [np.asarray(y, np.float32) for y in found if np.issubdtype(y.dtype, np.floating)]


def _in_float(sim: OnnxSim) -> ort.InferenceSession:
    exact = lower(sim.traced().model, Plan({}, ()), {})
    return bounded_session(exact.model, exact.large, sim.in_memory, providers=sim.providers)


@contextmanager
def quantizing_only(sim: OnnxSim, sites: Collection[str]) -> Iterator[None]:
    """Let the sim quantize at these sites alone inside the block; afterwards it is as before, sessions included."""
    with sim.alone():
        before, state = dict(vars(sim)), sim.snapshot()
        kept = {
            site: decision
            if site in sites
            else replace(decision, spec=None, tied_to=None, passes_through=False, bias_of=None, computes_in="")
            for site, decision in state.plan.decisions.items()
        }
        try:
            sim.restore(replace(state, plan=replace(state.plan, decisions=kept)))
            yield
        finally:
            vars(sim).update(before)


def visit_sites(
    sim: OnnxSim,
    data: Iterable[Any],
    each: Callable[[str, npt.NDArray[Any]], None],
    *,
    title: str,
    sites: Collection[str] | None = None,
    progress: bool = True,
) -> None:
    """Run the float model and call `each(site, values)`, batch by batch, with float32 values.

    Args:
        sim: is left as it is.
        data: batches.
        each: the visitor.
        title: of the progress bar.
        sites: to be visited; None for all that are computed.
        progress: show a progress bar.
    """
    model, tensors = with_sites_as_outputs(sim.traced().model, sites)
    session = simulation_session(model, providers=sim.providers)
    names = [output.name for output in session.get_outputs()]
    for number, batch in batches_of(data, title, progress):
        where = f"batch {number}"
        values = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        for name, value in zip(names, values, strict=True):
            each(tensors[name], np.asarray(value, np.float32))


def with_sites_as_outputs(marked: ModelProto, sites: Container[str] | None = None) -> tuple[ModelProto, dict[str, str]]:
    """Return the float model with these computed sites (None for all) as outputs; and tensor name -> site."""
    model = load(marked)
    stored = {tensor.name for tensor in model.graph.initializer}
    tensors: dict[str, str] = {}
    types: dict[str, int] = {}
    nodes = []
    for node in model.graph.node:
        if not is_mark(node):
            nodes.append(node)
            continue
        nodes.append(helper.make_node("Identity", node.input, node.output))
        if node.input[0] in stored:
            stored.add(node.output[0])
        elif sites is None or attributes(node)["key"] in sites:
            tensors[node.output[0]] = str(attributes(node)["key"])
            types[node.output[0]] = FLOAT_CODES[type_of_mark(node)]
    replace_nodes(model.graph, nodes)
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, types[name], None) for name in tensors)
    kept = [entry for entry in model.opset_import if entry.domain != MARK_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model, tensors


def constants_by_name(sim: OnnxSim) -> LazyArrays:
    """Return the value of every stored tensor by its name, also of those of integers; float ones in float32."""
    stored = initializers(sim.traced().model.graph)
    return LazyArrays(stored, lambda name: float_array(stored[name]))


def stored_by_name(sim: OnnxSim) -> LazyArrays:
    """Return the value of each stored float tensor by its name, in float32."""
    stored = initializers(sim.traced().model.graph)
    names = [name for name, tensor in stored.items() if tensor.data_type in FLOATS]
    return LazyArrays(names, lambda name: float_array(stored[name]))


def unbounded_sites(sim: OnnxSim, clips: Mapping[str, int]) -> list[str]:
    """Return the sites of those Clips (site -> op) whose upper bound was removed."""
    stored = {tensor.name: tensor for tensor in sim.traced().model.graph.initializer}
    found = []
    for site, op in clips.items():
        bound = stored.get(_bound(sim, op))
        if bound is not None and bool(np.isposinf(array(bound)).all()):
            found.append(site)
    return found


def graph_as_it_runs(sim: OnnxSim) -> Graph:
    """Return the sim's graph, with a Relu in place of each ReLU6 whose upper bound was removed."""
    return as_relu(sim.graph, unbounded_sites(sim, clips_at_six(sim.graph)))


def remove_bounds(sim: OnnxSim, clips: Mapping[str, int], sites: Iterable[str]) -> None:
    """Remove the upper bound at these sites."""
    stored = stored_by_name(sim)
    names = {_bound(sim, clips[site]) for site in sites}
    sim.change_stored({name: np.full_like(stored[name], np.inf) for name in names})


def shared_bound_reasons(sim: OnnxSim, clips: Mapping[str, int], wanted: Collection[str]) -> dict[str, str]:
    """Return site -> why the bound there cannot be removed, `""` where it can."""
    free = {name for site in wanted for name in [_bound(sim, clips[site])] if name}
    readers = {op for name in free for op in _readers(sim, name)}
    kept = readers - {clips[site] for site in wanted}
    shared = {name for name in free if kept & set(_readers(sim, name))}
    return {
        site: "the bound of its Clip is that of another op, too" if _bound(sim, clips[site]) in shared else ""
        for site in wanted
    }


def _bound(sim: OnnxSim, op: int) -> str:
    tensor = sim.graph.ops[op].inputs[2]
    return "" if tensor is None else sim.graph.tensors[tensor].name


def _readers(sim: OnnxSim, name: str) -> list[int]:
    return [
        reader for t, facts in enumerate(sim.graph.tensors) if facts.name == name for reader in sim.graph.consumers[t]
    ]
