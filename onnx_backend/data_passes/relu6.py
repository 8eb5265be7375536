"""The ReLU6 layers of an ONNX sim, and the removal of their upper bounds."""

from collections.abc import Collection, Iterable, Mapping

import numpy as np

from onnx_backend.data_passes.stored_by_name import stored_by_name
from onnx_backend.proto.external_data import array
from onnx_backend.sim import OnnxSim
from qsdk.core.channel_maps.scalings import as_relu, clips_at_six
from qsdk.core.graph.graph import Graph


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
