"""Sims of modules: from a module, from a checkpoint folder whose weights stay in their files, and into a file."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from onnx_backend.opening.from_trace import open_traced
from onnx_backend.sim import OnnxSim
from qsdk.core.config.config import QuantConfig
from qsdk.core.layers.expected_means import norms_to_json
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.sims.biases import biases_to_json
from qsdk.core.sims.sim_file import write_sim
from qsdk.core.sims.state import methods_to_json
from qsdk.verbs.doors.read_checkpoint import default_example, read_model
from torch_bridge import saved
from torch_bridge.attach import compare_sites
from torch_bridge.prepare import PreparedModel, prepare, trace_and_number
from torch_bridge.sim import QuantSim
from torch_bridge.stored_weights import WeightFiles
from torch_bridge.torch_values.adapters import with_float_adapters
from torch_bridge.torch_values.batches import as_example
from torch_bridge.torch_values.layers import online_rotations, unbounded_paths
from torch_bridge.wrapping.wrapped_state import link_sim, weights_digest

#: the name of a sim beside the checkpoint of its model
SIM_FILE = "sim.qsdk"


def facts_to_save(sim: QuantSim | OnnxSim) -> dict[str, Any]:
    """Return what verbs have noted about a sim, as plain values."""
    return {
        "biases": biases_to_json(sim),
        "methods": methods_to_json(sim.methods),
        "frozen_values": sorted(sim.frozen_values),
    }


def save_module_sim(
    sim: QuantSim, path: str | os.PathLike[str], facts: Mapping[str, Any], *, weights: bool = True
) -> None:
    """Write the state_dict, or its digest alone, and the example that the model was traced with."""
    own = {"quantized_with": sim.quantized_with.to_dict(), "fold_batch_norm": sim.fold_batch_norm}
    own |= {"norms": norms_to_json(sim.folded_norms), "relu6_as_relu": unbounded_paths(sim.model)}
    own |= saved.dtype_facts(sim) | ({"untied": list(sim.untied)} if sim.untied else {})
    own |= {"online_rotations": online} if (online := online_rotations(sim.model)) else {}
    parts = saved.parts_of(sim)
    if not weights:
        del parts[saved.WEIGHTS]
        own |= {"weights_digest": weights_digest(sim.model)}
    write_sim(path, "torch", sim.snapshot(), {**facts, **own}, parts)


def save_beside(sim: QuantSim, folder: str) -> None:
    """Write a sim without its weights into the folder of a checkpoint that has them."""
    attention = getattr(getattr(sim.model, "config", None), "_attn_implementation", None)
    facts = {"attn_implementation": attention} if isinstance(attention, str) else {}
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_module_sim(sim, Path(folder) / SIM_FILE, {**facts_to_save(sim), **facts}, weights=False)


def planned_sim(prepared: PreparedModel, config: QuantConfig, *, fold_batch_norm: bool) -> QuantSim:
    """Return the sim of a wrapped model."""
    traced, prepared = trace_and_number(prepared)
    graph = open_traced(traced.model, traced.stored.values_in(prepared.model)).graph
    plan = make_plan(graph, config, extra_owners=(*prepared.folded, *prepared.unfolded))
    dead, not_exercised = compare_sites(prepared.eager_sites, prepared.runtime.marked, graph.sites)
    return QuantSim(prepared, graph, config, plan, dead, not_exercised, traced=traced, fold_batch_norm=fold_batch_norm)


def quantize_module(
    model: nn.Module, example: Any, config: QuantConfig, *, dynamic_shapes: Any, in_place: bool, fold_batch_norm: bool
) -> QuantSim:
    """Return the sim of a module; see `qsdk.quantize`."""
    config = with_float_adapters(config, model)
    prepared = prepare(
        model, example, config, dynamic_shapes=dynamic_shapes, in_place=in_place, fold_batch_norm=fold_batch_norm
    )
    try:
        sim = planned_sim(prepared, config, fold_batch_norm=fold_batch_norm)
    except BaseException:
        prepared.restore()  # matters in place: the caller's model is theirs again
        raise
    link_sim(sim.model, sim, save_beside)
    return sim


#: Bytes of the weights' files that may be in memory at a time.
RESIDENT = 128 << 20


def quantize_folder(
    folder: str | os.PathLike[str],
    example: Any,
    config: QuantConfig,
    *,
    dynamic_shapes: Any = None,
    fold_batch_norm: bool = True,
    scratch: Path | None = None,
) -> QuantSim:
    """Return the sim of the model in a checkpoint folder of the transformers library.

    Weights are read when they are needed, and their pages given back to the system; those that a verb changes lie in
    files of their own. The memory that a model takes does not grow with its weights, but with its scales. An exported
    file takes and gives float32 where the model has bfloat16 or float16, because NumPy knows no bfloat16.
    """
    path = Path(folder)
    model = read_model(path, "read it yourself, and give quantize the module", {"dtype": "auto"}).eval()
    files = WeightFiles(path, resident=RESIDENT, scratch=scratch)
    if example is None:
        example, axes = default_example(model, path, step=config.has_kv_cache)
        dynamic_shapes = axes if dynamic_shapes is None else dynamic_shapes
    given = replace(as_example(example), float32_edges=True)
    options = {"dynamic_shapes": dynamic_shapes, "fold_batch_norm": fold_batch_norm}
    sim = quantize_module(model, given, config, in_place=True, **options)
    sim.weight_files = files
    return sim
