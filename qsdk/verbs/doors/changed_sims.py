"""Sims of a changed copy of the model: layers with a copy each of what they shared, or a rotation in front of them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from onnx import ModelProto, TensorProto, numpy_helper
from torch import Tensor, nn

from onnx_backend.opening.changed_models import rotated_model, untied_model
from onnx_backend.opening.from_float import with_reasons_of_file
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.qdq.marks import mark
from onnx_backend.sim import OnnxSim
from qsdk.algorithms.rotation.orthogonal import turned_online
from qsdk.core.channel_maps.rotated_weights import InputRotation, with_online_rules
from qsdk.core.config.config import QuantConfig
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.ranges.unrepresentable import left_float
from qsdk.core.sims.replan import require_config
from qsdk.core.sims.state import owns_encoding
from qsdk.core.site import site_name
from qsdk.verbs.doors.module_sims import planned_sim
from torch_bridge.prepare import prepare
from torch_bridge.sim import QuantSim, plain_copy
from torch_bridge.stored_weights import Before
from torch_bridge.torch_values.layers import BETWEEN, ROTATION, rotate_input, sharing_paths, untie
from torch_bridge.wrapping.wrapped_state import link_sim, state_of

Factors = Sequence[npt.NDArray[np.float64]]
#: name of the stored weight of a layer -> the rotation in front of it
Rotations = Mapping[str, InputRotation]


@contextmanager
def replaced_by(sim: QuantSim | OnnxSim, new: QuantSim | OnnxSim) -> Iterator[None]:
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


@contextmanager
def untied(sim: QuantSim | OnnxSim, names: Collection[str]) -> Iterator[bool]:
    """Give each layer a copy of its own of these stored tensors, for good; if the block raises, nothing changed.

    Yields whether it was possible. At the PyTorch side `sim.model` is another module afterwards.
    """
    new = untied_module_sim(sim, names) if isinstance(sim, QuantSim) else untied_onnx_sim(sim, names)
    with nullcontext() if new is None else replaced_by(sim, new):
        yield new is not None


@contextmanager
def rotated(sim: QuantSim | OnnxSim, rotations: Rotations) -> Iterator[bool]:
    """Put rotations in front of layers, by the names of their weights, for good; see `untied` for the rest."""
    new = rotated_module_sim(sim, rotations) if isinstance(sim, QuantSim) else rotated_onnx_sim(sim, rotations)
    with nullcontext() if new is None else replaced_by(sim, new):
        yield new is not None


def untied_module_sim(sim: QuantSim, names: Collection[str]) -> QuantSim | None:
    """Return a sim of a copy of the module, in which each module has a parameter of its own in place of these.

    Returns:
        The sim; None where no modules share these parameters, or BatchNorms were folded into layers of the module.
    """
    paths = sim.stored_paths()
    groups = [sharing_paths(sim.model, paths[name]) for name in names if name in paths]
    if not any(len(group) > 1 for group in groups) or state_of(sim.model).folds:
        return None
    model = plain_copy(sim, in_float=False)
    untie(model, [path for group in groups for path in group[1:]])
    new = _sim_of_module(sim, model, require_config(sim.config))
    new.untied = (*sim.untied, *(path for group in groups for path in group[1:]))
    given = dict(sim.given.contents())
    for first, *others in groups:
        known = given.get(_key(first))
        if known is not None:
            given |= {_key(path): known for path in others}
    new.given.restore_contents(given)
    _carry_over(sim, new)
    return new


def rotated_module_sim(sim: QuantSim, rotations: Rotations) -> QuantSim | None:
    """Return a sim of a copy of the module with rotations in front of layers, whose weights have taken up the inverse.

    Returns:
        The sim; None where one of these is no weight of a Linear that is called as a module, or is in a file, or where
        BatchNorms were folded.
    """
    paths, modules = sim.stored_paths(), dict(sim.model.named_modules())
    layers = {paths[name].removesuffix(".weight"): one.factors for name, one in rotations.items() if name in paths}
    called = [isinstance(modules.get(path), nn.Linear) and f"{path}:output" in sim.plan.decisions for path in layers]
    in_files = any(modules[path].get_parameter("weight").is_meta for path in layers if path in modules)
    if len(layers) < len(rotations) or not all(called) or in_files or state_of(sim.model).folds:
        return None
    model = plain_copy(sim, in_float=False)
    for path, factors in layers.items():
        layer = model.get_submodule(path)
        rotate_input(layer, factors)
        with torch.no_grad():
            layer.get_parameter("weight").copy_(_turned(layer.get_parameter("weight"), factors))
    matrices, between = [], []
    for path, factors in layers.items():
        owner = f"{path}.{ROTATION}"
        matrices += [site_name(owner, name) for name, _ in zip(("first", "second"), factors, strict=False)]
        between += [site_name(f"{owner}/{op}.0", "output") for op in BETWEEN] if len(factors) == 2 else []
    rules = with_online_rules(require_config(sim.config), rotations.values(), matrices, between)
    new = _sim_of_module(sim, model, rules)
    new.untied = sim.untied
    new.given.load(
        new.model, {key: _turned_before(key, one, layers) for key, one in sim.given.changed(sim.model).items()}
    )
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
    new = _sim_of_onnx(sim, model, sim.config)
    for name, tensor in sim.given.before.items():
        for own in (name, *copies.get(name, ())):
            new.given.before[own] = _named(tensor, own)
    _carry_over(sim, new)
    return new


def rotated_onnx_sim(sim: OnnxSim, rotations: Rotations) -> OnnxSim | None:
    """Return a sim of a copy of the model with rotations in front of layers, whose weights have taken up the inverse.

    Returns:
        The sim; None where the sim was opened from a Q/DQ file, whose plan is that of the file.
    """
    if sim.config is None:
        return None
    rotated = rotated_model(sim.traced().model, {name: one.factors for name, one in rotations.items()})
    rules = with_online_rules(sim.config, rotations.values(), rotated.matrices, rotated.between)
    stored = initializers(rotated.model.graph)

    def turned(tensor: TensorProto) -> TensorProto:
        return _turned_tensor(tensor, rotated.axes[tensor.name], rotations[tensor.name].factors)

    for name in rotations:
        stored[name].CopyFrom(turned(stored[name]))
    new = _sim_of_onnx(sim, rotated.model, rules)
    for name, tensor in sim.given.before.items():
        new.given.before[name] = turned(tensor) if name in rotations else _named(tensor, name)
    _carry_over(sim, new)
    return new


def _sim_of_module(sim: QuantSim, model: nn.Module, config: QuantConfig) -> QuantSim:
    example = sim.current_example
    prepared = prepare(
        model, example, config, in_place=True, fold_batch_norm=False, dynamic_shapes=example.dynamic_shapes
    )
    new = planned_sim(prepared, config, fold_batch_norm=False)
    new.fold_batch_norm, new.quantized_with = sim.fold_batch_norm, sim.quantized_with
    beside = state_of(sim.model).beside
    link_sim(new.model, sim, None if beside is None else beside.function)
    return new


def _sim_of_onnx(sim: OnnxSim, model: ModelProto, config: QuantConfig) -> OnnxSim:
    graph = read_graph(model, modules=True)
    plan = make_plan(graph, config, extra_owners=(*sim.notes.folded, *sim.notes.unfolded))
    new = OnnxSim(mark(model, graph, in_place=True), graph, with_reasons_of_file(plan, sim.notes), config)
    new.notes, new.in_memory, new.weights_folder = sim.notes, sim.in_memory, sim.weights_folder
    new.folded_norms.update(sim.folded_norms)
    new.run_on(sim.providers)
    return new


def _key(path: str) -> tuple[str, str]:
    owner, _, name = path.rpartition(".")
    return owner, name


def _turned_before(key: tuple[str, str], before: Before, layers: Mapping[str, Factors]) -> Before:
    path, name = key
    if path not in layers or name != "weight":
        return before
    floats = before.in_float
    return Before(_turned(before.given, layers[path]), None if floats is None else _turned(floats, layers[path]))


def _turned(weight: Tensor, factors: Factors) -> Tensor:
    """Return the weight of a Linear [out, in] whose input is turned."""
    values = turned_online(weight.detach().double().cpu().numpy(), factors)
    return torch.from_numpy(values).to(weight.device, weight.dtype)


def _turned_tensor(stored: TensorProto, axis: int, factors: Factors) -> TensorProto:
    value = array(stored)
    turned = np.moveaxis(turned_online(np.moveaxis(value, axis, -1), factors), -1, axis)
    return numpy_helper.from_array(np.ascontiguousarray(turned.astype(value.dtype)), stored.name)


def _named(tensor: TensorProto, name: str) -> TensorProto:
    held = type(tensor)()
    held.CopyFrom(tensor)
    held.name = name
    return held


def _carry_over(sim: QuantSim | OnnxSim, new: QuantSim | OnnxSim) -> None:
    """Give the new sim the encodings of the old one, and what else verbs have left there."""
    new.methods, new.frozen_values, new.original_biases = sim.methods, sim.frozen_values, dict(sim.original_biases)
    state = new.planned(require_config(new.config), kept_float=left_float(sim.plan))
    known = state.plan.decisions
    own = {site: e for site, e in sim.snapshot().own.items() if site in known and owns_encoding(known[site])}
    new.restore(replace(state, own=own))
