"""From a prepared module to its sim: trace, read the graph, plan."""

from onnx_backend.opening.from_trace import open_traced
from qsdk.core.config.config import QuantConfig
from qsdk.core.planning.make_plan import make_plan
from torch_bridge.attach import compare_sites
from torch_bridge.prepare import PreparedModel, trace_and_number
from torch_bridge.sim import QuantSim


def planned_sim(prepared: PreparedModel, config: QuantConfig, *, fold_batch_norm: bool) -> QuantSim:
    """Return the sim of a wrapped model."""
    traced, prepared = trace_and_number(prepared)
    graph = open_traced(traced.model, traced.stored.values_in(prepared.model)).graph
    plan = make_plan(graph, config, extra_owners=(*prepared.folded, *prepared.unfolded))
    dead, not_exercised = compare_sites(prepared.eager_sites, prepared.runtime.marked, graph.sites)
    return QuantSim(prepared, graph, config, plan, dead, not_exercised, traced=traced, fold_batch_norm=fold_batch_norm)
