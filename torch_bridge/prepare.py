"""Preparing a module: copy, check, fold and wrap it, and learn which sites one forward pass reaches."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ModelError
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import Fold, apply_fold, said_by, statistics_of
from torch_bridge.folding.computed_weights import Computed, fold_computed
from torch_bridge.folding.trainable_batch_norm import KeptNorm, keep
from torch_bridge.sites.runtime import Runtime
from torch_bridge.sites.source_lines import Call, ambiguous
from torch_bridge.torch_values.batches import Example, as_example
from torch_bridge.torch_values.module_state import Attributes, attributes_of, caches_of, put_back, renewed, tensors_in
from torch_bridge.torch_values.pytree import input_names, leaves_of, mapped, tensors_of
from torch_bridge.tracing.alias_check import require_followed
from torch_bridge.tracing.dynamic_shapes import plain_shapes
from torch_bridge.tracing.export_errors import Form, forms_of
from torch_bridge.tracing.training_path import look_in_training, set_training_path
from torch_bridge.training.training import restore_modes
from torch_bridge.wrapping.dataflow import watch
from torch_bridge.wrapping.find_folds import find_folds
from torch_bridge.wrapping.own_forward import drop_autocast, require_copied_forwards
from torch_bridge.wrapping.wrapper import is_wrapped, keep_norms, state_of, unwrap_model, wrap_model


@dataclass(frozen=True)
class Prepared:
    """A wrapped model before it is planned.

    Attributes:
        model: wrapped, in eval mode, folded.
        runtime: shared by its modules.
        example: normalised arguments.
        eager_sites: sites that one forward pass reached, in order.
        outputs: what it gives on the example.
        unfolded: BatchNorm path -> why it was not folded.
        folded: paths of the folded ones.
        notes: what else was folded, by name.
        calls: that this pass made, in order.
        undo: takes folds and modes back.
    """

    model: nn.Module
    runtime: Runtime
    example: Example
    eager_sites: tuple[str, ...]
    outputs: Sequence[Form]
    unfolded: Mapping[str, str]
    folded: tuple[str, ...]
    notes: Mapping[str, str]
    calls: tuple[Call, ...]
    undo: Callable[[], None]

    def give_back(self) -> None:
        """Make the model what it was before it was prepared."""
        unwrap_model(self.model)
        self.undo()


def prepare(
    model: nn.Module,
    example: Any,
    config: QuantConfig,
    *,
    in_place: bool,
    fold_batch_norm: bool,
    dynamic_shapes: Any = None,
) -> Prepared:
    """Copy (unless `in_place`), check, fold and wrap a model.

    Raises:
        ModelError: the model cannot be copied, wrapped or run on the example.
    """
    require_wrappable(model)
    given = replace(as_example(example), dynamic_shapes=plain_shapes(dynamic_shapes))
    own = model if in_place else _copied(model)
    modes = {module: module.training for module in own.modules()} if in_place else {}
    undone: list[Callable[[], None]] = []

    def undo() -> None:
        while undone:
            undone.pop()()
        restore_modes(modes)

    try:
        own.eval()
        attributes = attributes_of(own)
        undone.append(partial(_give_back, attributes))
        autocast = drop_autocast(own, undone)
        if not in_place:
            require_copied_forwards(own)
        computed = fold_computed(own, lambda: run_example(own, given), undone)
        if not in_place:
            undone.clear()  # nobody sees the copy
        prepared = _wrap_and_fold(
            own, given, config, fold_batch_norm, computed, undone if in_place else None, undo, attributes
        )
        said = "left out: mixed precision is of the training, the sim computes in the types of the parameters"
        return replace(
            prepared, notes={**prepared.notes, **{f"{path or 'self'} (autocast)": said for path in autocast}}
        )
    except BaseException:
        unwrap_model(own)  # matters in place: the caller's model is theirs again
        undo()
        raise


def _wrap_and_fold(
    own: nn.Module,
    given: Example,
    config: QuantConfig,
    fold_batch_norm: bool,
    computed: Sequence[Computed],
    undone: list[Callable[[], None]] | None,
    undo: Callable[[], None],
    attributes: Attributes,
) -> Prepared:
    declared = config.layers or {}
    runtime = wrap_model(own, declared)
    wiring = watch(own, runtime, lambda: run_example(own, given))
    unfolded: Mapping[str, str] = {}
    folds: list[Fold] = []
    if fold_batch_norm:
        folds, unfolded = find_folds(own, wiring, config)
    said = {f.layer: said_by(statistics_of(own.get_submodule(f.norm)), before=f.before) for f in folds}
    kept: list[KeptNorm] = []
    if folds:
        unwrap_model(own)
        for fold in folds:
            if not fold.before:
                kept.append(keep(own, fold))
            take_back = apply_fold(own, fold)
            if undone is not None:
                undone.append(take_back)
        runtime = wrap_model(own, declared)
    root = state_of(own)
    root.folds, root.computed, root.norms = tuple(folds), tuple(computed), said
    keep_norms(own, tuple(kept))
    aliases = wiring.aliases
    runtime.views, runtime.write_back = frozenset(aliases.views), frozenset(aliases.read_again)
    runtime.writes_inputs = aliases.inputs
    # what was written over a BatchNorm's result is written over that of the layer that took it
    layers = {site_name(fold.norm, "output"): site_name(fold.layer, "output") for fold in folds}
    runtime.overwritten = frozenset(layers.get(site, site) for site in wiring.overwritten)
    names = (*input_names(own.forward, given.args), *(name for name, x in given.kwargs.items() if tensors_of(x)))
    runtime.inputs = frozenset(name.partition(".")[0] for name in names)
    if wiring.writes:
        require_followed(runtime, lambda: tensors_of(run_example(own, given)), wiring.writes)
    sites, outputs, calls, failed = _learn_paths(own, runtime, given, attributes)
    folded = tuple(fold.norm for fold in folds)
    notes = {
        f"{c.path}.{c.name}" if c.path else c.name: f"{c.how} is folded into its value, which is a plain tensor now"
        for c in computed
    }
    if failed:
        notes["train mode"] = f"not looked at, because the model does not run on the example there: {failed}"
    return Prepared(own, runtime, given, sites, outputs, unfolded, folded, notes, calls, undo)


def _learn_paths(
    own: nn.Module, runtime: Runtime, given: Example, empty: Attributes
) -> tuple[tuple[str, ...], Sequence[Form], tuple[Call, ...], str]:
    """Run a wrapped model in both modes.

    Args:
        own: the model, which has run in eval mode.
        runtime: learns the path that training takes, and what modules cache.
        given: what it is run with.
        empty: its attributes before it ran.

    Returns:
        The sites of eval mode, its outputs and calls, and why train mode could not be looked at, if so.
    """
    look = look_in_training(own, runtime, lambda: run_example(own, given))
    for (module, name), image in look.emptied.items():
        vars(module)[name] = renewed(image)
    if look.emptied:
        with runtime.in_phase("float"), torch.no_grad():
            run_example(own, given)
    with runtime.in_phase("float"):
        runtime.caches = caches_of(own, {**empty, **look.emptied}, lambda: run_example(own, given))
    runtime.noted = []
    sites, outputs = visited(own, runtime, given)
    calls, runtime.noted = runtime.noted, None
    runtime.places = ambiguous({call.name: call.place for call in calls})
    set_training_path(runtime, calls, dict.fromkeys(sites), look)
    return tuple(dict.fromkeys(sites)), outputs, tuple(calls), look.failed


def visited(model: nn.Module, runtime: Runtime, example: Example) -> tuple[list[str], Sequence[Form]]:
    """Run a wrapped model on its example; gives the sites that it reaches, in order, and the forms of its outputs."""
    sites: list[str] = []

    def note(site: str, x: Tensor) -> Tensor:
        sites.append(site)
        return x

    with runtime.in_phase("visit", note), torch.no_grad():
        return sites, forms_of(leaves_of(run_example(model, example)))


def _give_back(attributes: Attributes) -> None:
    for (module, name), image in attributes.items():
        vars(module)[name] = put_back(image)


def require_wrappable(model: nn.Module) -> None:
    """Refuse what cannot be wrapped.

    Raises:
        ModelError: names the module and the remedy.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected an nn.Module, an ONNX path or an ONNX model, got {type(model).__name__}")
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{where} is a ScriptModule, whose code is fixed; quantize the nn.Module it came from")
        if is_wrapped(module):
            raise ModelError(f"{where} is already wrapped by a sim; quantize the float model, or take sim.unwrap()")
        if isinstance(module, nn.DataParallel):
            raise ModelError(f"{where} is a DataParallel; quantize model.module, and train with DDP")


def run_example(model: nn.Module, example: Example) -> Any:
    """Run the model on a copy of the example, since it may write over its inputs.

    Raises:
        ModelError: it does not run.
    """
    args, kwargs = mapped(
        (example.args, dict(example.kwargs)), lambda _, leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf
    )
    try:
        return model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        shapes = [tuple(v.shape) for v in (*example.args, *example.kwargs.values()) if isinstance(v, Tensor)]
        raise ModelError(
            f"the model does not run on the example (tensors of shape {shapes}): {error}; give an example the float "
            "model accepts"
        ) from error


def _copied(model: nn.Module) -> nn.Module:
    # weight norms leave their last result in the module, which copy refuses as part of a graph
    kept = [tensor for module in model.modules() for tensor in tensors_in(vars(module))]
    memo = {id(value): value.detach().clone() for value in kept if not value.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"the model cannot be copied: {error}; pass in_place=True to quantize it itself") from error
