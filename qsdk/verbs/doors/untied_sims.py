"""Sims whose layers have a copy each of a stored tensor that they shared."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from onnx_backend.opening.from_float import with_reasons_of_file
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.opening.untied_model import untied_model
from onnx_backend.qdq.marks import mark
from onnx_backend.sim import OnnxSim
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.ranges.too_coarse import left_float
from qsdk.core.sims.replan import require_config
from qsdk.core.sims.state import owns_encoding
from qsdk.verbs.doors.planned_sim import planned_sim
from torch_bridge.prepare import prepare
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.tied_parameters import sharing_paths, untie
from torch_bridge.wrapping.pretrained import link_sim
from torch_bridge.wrapping.wrapped_state import state_of

AnySim = TypeVar("AnySim", QuantSim, OnnxSim)


@contextmanager
def replaced_by(sim: AnySim, new: AnySim) -> Iterator[None]:
    """Make a sim what another one is; if the block raises, it is what it was."""
    before = dict(vars(sim))
    vars(sim).clear()
    vars(sim).update(vars(new))
    try:
        yield
    except BaseException:
        vars(sim).clear()
        vars(sim).update(before)
        raise


def untied_module_sim(sim: QuantSim, names: Collection[str]) -> QuantSim | None:
    """Return a sim of a copy of the module, in which each module has a parameter of its own in place of these.

    Returns:
        The sim; None where no modules share these parameters, or BatchNorms were folded into layers of the module.
    """
    paths = sim.stored_paths()
    groups = [sharing_paths(sim.model, paths[name]) for name in names if name in paths]
    if not any(len(group) > 1 for group in groups) or state_of(sim.model).folds:
        return None
    model, example = sim.unwrap(), sim.current_example
    untie(model, [path for group in groups for path in group[1:]])
    prepared = prepare(
        model,
        example,
        sim.config,
        in_place=True,
        fold_batch_norm=False,
        dynamic_shapes=example.dynamic_shapes,
    )
    new = planned_sim(prepared, sim.config, fold_batch_norm=False)
    new.fold_batch_norm, new.quantized_with = sim.fold_batch_norm, sim.quantized_with
    new.untied = (*sim.untied, *(path for group in groups for path in group[1:]))
    beside = state_of(sim.model).beside
    link_sim(new.model, sim, None if beside is None else beside.function)
    given = dict(sim.given.contents())
    for first, *others in groups:
        known = given.get((first.rpartition(".")[0], first.rpartition(".")[2]))
        if known is not None:
            given |= {(path.rpartition(".")[0], path.rpartition(".")[2]): known for path in others}
    new.given.restore_contents(given)
    _carry_over(sim, new)
    return new


def untied_onnx_sim(sim: OnnxSim, names: Collection[str]) -> OnnxSim | None:
    """Return a sim of a copy of the model, in which each node has an initializer of its own in place of these.

    Returns:
        The sim; None where the sim was opened from a Q/DQ file, whose plan is that of the file.
    """
    if sim.config is None:
        return None
    model, copies = untied_model(sim.traced().model, names)
    graph = read_graph(model, modules=True)
    plan = make_plan(graph, sim.config, extra_owners=(*sim.notes.folded, *sim.notes.unfolded))
    new = OnnxSim(mark(model, graph, in_place=True), graph, with_reasons_of_file(plan, sim.notes), sim.config)
    new.notes, new.in_memory, new.weights_folder = sim.notes, sim.in_memory, sim.weights_folder
    new.folded_norms.update(sim.folded_norms)
    new.run_on(sim.providers)
    for name, tensor in sim.given.before.items():
        for own in (name, *copies.get(name, ())):
            held = type(tensor)()
            held.CopyFrom(tensor)
            held.name = own
            new.given.before[own] = held
    _carry_over(sim, new)
    return new


def _carry_over(sim: QuantSim | OnnxSim, new: QuantSim | OnnxSim) -> None:
    """Give the new sim the encodings of the old one, and what else verbs have left there."""
    new.methods, new.frozen_values, new.original_biases = sim.methods, sim.frozen_values, dict(sim.original_biases)
    state = new.planned(require_config(new.config), coarse=left_float(sim.plan))
    known = state.plan.decisions
    own = {site: e for site, e in sim.snapshot().own.items() if site in known and owns_encoding(known[site])}
    new.restore(replace(state, own=own))
