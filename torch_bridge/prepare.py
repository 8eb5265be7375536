"""Preparation of a module: copy, check, fold and wrap it, and find the sites that one forward pass reaches."""

import copy
import pickle
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ModelError
from qsdk.core.site import owner_of, port_of, site_name
from torch_bridge.folding.batch_norm import (
    Fold,
    TrainableBatchNorm,
    apply_fold,
    fold_of,
    fold_tensors,
    output_statistics_of,
    reason_not_to_fold,
    statistics_of,
    trainable_norm_of,
)
from torch_bridge.folding.computed_weights import ComputedTensor, fold_computed_tensors
from torch_bridge.sites.calls import RecordedCall, TrainingCalls, Visitor
from torch_bridge.sites.runtime import Runtime
from torch_bridge.sites.runtime_state import WrittenSites
from torch_bridge.torch_values.batches import Example, as_example, as_step, require_whole_caches
from torch_bridge.torch_values.layers import is_leaf
from torch_bridge.torch_values.module_state import (
    Attributes,
    attributes_of,
    emptied_attributes,
    find_caches,
    rebuild,
    restore_attributes,
    restoring_state,
    tensors_in,
)
from torch_bridge.torch_values.parameters import held_tensor
from torch_bridge.torch_values.pytree import clone_tensors, input_names, leaves_of, tensors_of
from torch_bridge.tracing.dynamic_shapes import plain_shapes
from torch_bridge.tracing.export_errors import OutputForm, error_in_compiled_part, output_forms
from torch_bridge.tracing.trace import Trace, trace_marked
from torch_bridge.training.training import restore_modes
from torch_bridge.wrapping.dataflow import Dataflow, WrittenStateError, record_dataflow
from torch_bridge.wrapping.own_forward import drop_autocast, is_dispatched, require_copied_forwards, undispatched
from torch_bridge.wrapping.wrapped_state import is_wrapped, state_of
from torch_bridge.wrapping.wrapper import unwrap_model, wrap_model, wrap_trainable_norms


@dataclass(frozen=True)
class PreparedModel:
    """A wrapped model before it is planned.

    It is in eval mode; `eager_sites` and `calls` are those of one forward pass, in order.
    """

    model: nn.Module
    runtime: Runtime
    example: Example
    eager_sites: tuple[str, ...]
    outputs: Sequence[OutputForm]
    unfolded: Mapping[str, str]
    folded: tuple[str, ...]
    notes: Mapping[str, str]
    calls: tuple[RecordedCall, ...]
    undo: Callable[[], None]

    def restore(self) -> None:
        """Restore the model to what it was before it was prepared."""
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
) -> PreparedModel:
    """Copy (unless `in_place`), check, fold and wrap a model."""
    require_wrappable(model)
    dispatched = is_dispatched(model)
    if dispatched:
        if in_place:
            raise ModelError(
                "accelerate's device_map put hooks on the model, which bring weights from elsewhere; leave out "
                "in_place=True, and the sim holds a whole copy, or load the model without device_map"
            )
        model = undispatched(model)
    given = as_example(example)
    if config.has_kv_cache and not given.has_cache:
        given = as_step(model, given)
    require_whole_caches(given)
    given = replace(given, dynamic_shapes=plain_shapes(dynamic_shapes)).beside(model)
    own = model if in_place or dispatched else _copy_model(model)
    modes = {module: module.training for module in own.modules()} if in_place else {}
    undo_steps: list[Callable[[], None]] = []

    def undo() -> None:
        while undo_steps:
            undo_steps.pop()()
        restore_modes(modes)

    try:
        own.eval()
        attributes = attributes_of(own)
        undo_steps.append(partial(restore_attributes, attributes))
        autocast = drop_autocast(own, undo_steps)
        if not in_place:
            require_copied_forwards(own)
        computed = fold_computed_tensors(own, lambda: run_example(own, given), undo_steps)
        if not in_place:
            undo_steps.clear()  # the copy is the sim's own, so nothing needs to be undone
        prepared = _fold_and_wrap(
            own, given, config, fold_batch_norm, computed, undo_steps if in_place else None, undo, attributes
        )
        note = "left out: mixed precision is of the training, the sim computes in the types of the parameters"
        return replace(
            prepared, notes={**prepared.notes, **{f"{path or 'self'} (autocast)": note for path in autocast}}
        )
    except BaseException:
        unwrap_model(own)  # in place, the model is the caller's
        undo()
        raise


def _fold_and_wrap(
    own: nn.Module,
    given: Example,
    config: QuantConfig,
    fold_batch_norm: bool,
    computed: Sequence[ComputedTensor],
    undo_steps: list[Callable[[], None]] | None,
    undo: Callable[[], None],
    attributes: Attributes,
) -> PreparedModel:
    declared = config.layers or {}
    runtime = wrap_model(own, declared)
    dataflow = record_dataflow(own, runtime, lambda: run_example(own, given))
    unfolded: Mapping[str, str] = {}
    folds: list[Fold] = []
    if fold_batch_norm:
        folds, unfolded = find_folds(own, dataflow, config)
    output_stats = {
        f.layer: output_statistics_of(statistics_of(own.get_submodule(f.norm)), before=f.before) for f in folds
    }
    trainable: list[TrainableBatchNorm] = []
    if folds:
        unwrap_model(own)
        for fold in folds:
            norm = own.get_submodule(fold.norm)
            if not fold.before and isinstance(norm, nn.modules.batchnorm._BatchNorm):
                trainable.append(trainable_norm_of(own, fold))
            undo_fold = apply_fold(own, fold)
            if undo_steps is not None:
                undo_steps.append(undo_fold)
        runtime = wrap_model(own, declared)
    root = state_of(own)
    root.folds, root.computed, root.norms = tuple(folds), tuple(computed), output_stats
    for fold in folds:
        state_of(own.get_submodule(fold.norm)).without_norm = fold.has_own_forward
    wrap_trainable_norms(own, tuple(trainable))
    aliases = dataflow.aliases
    runtime.writes_inputs = aliases.inputs
    # what was written over a BatchNorm's result is now written over that of the layer it is folded into
    layers = {site_name(fold.norm_op, "output"): site_name(fold.op, "output") for fold in folds}
    overwritten = frozenset(layers.get(site, site) for site in dataflow.overwritten)
    write_back = frozenset(aliases.read_again)
    aliased = write_back | dataflow.aliased
    runtime.written = WrittenSites(frozenset(aliases.views), write_back, overwritten, aliased, aliases.made_anew())
    names = (
        *input_names(own.forward, given.args),
        *(name for name, x in given.kwargs.items() if tensors_of(x, caches=True)),
    )
    runtime.has_cache = given.has_cache
    runtime.inputs = frozenset(name.partition(".")[0] for name in names)
    if dataflow.writes:
        _require_traceable_writes(runtime, lambda: tensors_of(run_example(own, given)), dataflow.writes)
    sites, outputs, calls, failed = _learn_paths(own, runtime, given, attributes)
    folded = tuple(fold.norm for fold in folds)
    notes = {
        f"{c.path}.{c.name}" if c.path else c.name: f"{c.how} is folded into its value, which is a plain tensor now"
        for c in computed
    }
    if failed:
        notes["train mode"] = f"not looked at, because the model does not run on the example there: {failed}"
    return PreparedModel(own, runtime, given, sites, outputs, unfolded, folded, notes, calls, undo)


def _learn_paths(
    own: nn.Module, runtime: Runtime, given: Example, empty: Attributes
) -> tuple[tuple[str, ...], Sequence[OutputForm], tuple[RecordedCall, ...], str]:
    """Run a wrapped model in both modes; return eval mode's sites, outputs and calls, and why train mode failed."""
    training = _record_training_path(own, runtime, lambda: run_example(own, given))
    for (module, name), image in training.emptied.items():
        vars(module)[name] = rebuild(image)
    if training.emptied:
        with runtime.in_phase("float"), torch.no_grad():
            run_example(own, given)
    with runtime.in_phase("float"):
        runtime.caches = find_caches(own, {**empty, **training.emptied}, lambda: run_example(own, given))
    with runtime.calls.recording() as calls:
        sites, outputs = record_sites(own, runtime, given)
    runtime.calls.set_example(calls)
    if training.failed:
        runtime.written_in_training = dict(training.written)
    else:
        _set_training_path(runtime, calls, dict.fromkeys(sites), training)
    return tuple(dict.fromkeys(sites)), outputs, tuple(calls), training.failed


@dataclass(frozen=True)
class TrainingPath:
    """What one forward pass in train mode has shown.

    Attributes:
        calls: of modules and ops, in order, numbered as they came.
        sites: that it reached.
        overwritten: sites whose tensor is written over.
        aliased: those of them that are views.
        emptied: snapshots of the caches that train mode has emptied.
        failed: why the pass failed; empty where it did not.
        written: parameters and buffers that it writes and reads -> the line that writes.
    """

    calls: Sequence[RecordedCall] = ()
    sites: Sequence[str] = ()
    overwritten: frozenset[str] = frozenset()
    aliased: frozenset[str] = frozenset()
    emptied: Attributes = field(default_factory=dict)
    failed: str = ""
    written: Mapping[str, str] = field(default_factory=dict)


def _record_training_path(model: nn.Module, runtime: Runtime, run: Callable[[], Any]) -> TrainingPath:
    """Run a wrapped model in train mode once, and restore all but the caches that this empties.

    BatchNorms stay in eval mode: they compute the same ops, and accept no batch of one in train mode.
    """
    before = attributes_of(model)
    emptied: Attributes = {}
    try:
        with restoring_state(model), warnings.catch_warnings(), runtime.calls.recording() as calls:
            warnings.simplefilter("ignore")  # warnings of the user's code make no sense here: nothing is trained
            model.train()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase) and not state_of(module).without_norm:
                    module.training = False
            dataflow = record_dataflow(model, runtime, run)
            emptied = emptied_attributes(before, attributes_of(model))
        overwritten, aliased = frozenset(dataflow.overwritten), frozenset(dataflow.aliased)
        result = TrainingPath(calls, tuple(dataflow.sites), overwritten, aliased, emptied)
    except WrittenStateError as error:
        result = TrainingPath(failed=str(error), written=error.lines)
    except Exception as error:  # the user's code may raise anything, for missing labels for example
        result = TrainingPath(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return result


def _set_training_path(
    runtime: Runtime, example: Sequence[RecordedCall], sites: Collection[str], training: TrainingPath
) -> None:
    """Set in a runtime the names of training's calls on the example, and the sites that training alone has."""
    matched = TrainingCalls(example, training.calls)
    runtime.calls.set_training(matched)
    reached = [matched.site(site) for site in training.sites]
    runtime.only_training = {site: _kind(site) for site in reached if site not in sites}
    written = runtime.written
    runtime.written = replace(
        written,
        overwritten=written.overwritten | {matched.site(site) for site in training.overwritten},
        aliased=written.aliased | {matched.site(site) for site in training.aliased},
    )


def _kind(site: str) -> str:
    port = port_of(site)
    return "activation" if port.startswith("output") else "bias" if port == "bias" else "weight"


def record_sites(model: nn.Module, runtime: Runtime, example: Example) -> tuple[list[str], Sequence[OutputForm]]:
    """Run a wrapped model on its example; return the sites that it reaches, in order, and the forms of its outputs."""
    sites: list[str] = []

    def note(site: str, x: Tensor) -> Tensor:
        sites.append(site)
        return x

    with runtime.in_phase("visit", note), torch.no_grad():
        return sites, output_forms(leaves_of(run_example(model, example), caches=example.has_cache))


def trace_and_number(prepared: PreparedModel) -> tuple[Trace, PreparedModel]:
    """Trace a prepared model; return the trace, and the model with its sites named as in the trace."""
    runtime = prepared.runtime
    with runtime.calls.recording() as recorded:
        traced = trace_marked(prepared.model, runtime, prepared.example, prepared.outputs)
    # torch may run a model more than once to trace it
    last = max((index for index, call in enumerate(recorded) if not call.name), default=0)
    shifted = runtime.calls.set_trace(prepared.calls, recorded[last:])
    if not shifted:
        return traced, prepared
    written, runtime.written = runtime.written, replace(runtime.written, views=frozenset())  # their names will change
    before, _ = record_sites(prepared.model, runtime, prepared.example)
    runtime.calls.renumber(shifted)
    sites, _ = record_sites(prepared.model, runtime, prepared.example)
    moved = dict(zip(before, sites, strict=True))
    runtime.written = written.renamed(moved)
    runtime.calls.rename({owner_of(one): owner_of(other) for one, other in moved.items()})
    return traced, replace(prepared, eager_sites=tuple(dict.fromkeys(sites)))


def _require_traceable_writes(runtime: Runtime, run: Callable[[], list[Tensor]], places: Sequence[str]) -> None:
    """Compare a pass whose sites return new tensors, as in a trace, with one whose sites return their input."""

    def results(visitor: Visitor) -> list[Tensor]:
        with runtime.in_phase("visit", visitor), torch.no_grad():
            return run()

    def same(site: str, x: Tensor) -> Tensor:
        return x

    def another(site: str, x: Tensor) -> Tensor:
        return x if isinstance(x, nn.Parameter) else x.clone()

    want = results(same)
    # two passes of a model that draws random numbers differ anyway
    if _are_close(want, results(another)) or not _are_close(want, results(same)):
        return
    raise ModelError(
        f"a tensor that is written in place ({'; '.join(dict.fromkeys(places))}) is read through another name in a way "
        "that cannot be followed, so an exported file would miss what is written; compute a new tensor there with "
        "torch.cat, torch.where or the op that is not in place"
    )


def _are_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether results are equal, but for the rounding of other kernels."""
    for a, b in zip(one, other, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if a.is_floating_point():
            size = float(a.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if a.numel() else 0.0
            error = max(torch.finfo(a.dtype).eps * 64, 1e-5)
            if not torch.allclose(a, b, rtol=error, atol=error * size, equal_nan=True):
                return False
        elif not torch.equal(a, b):
            return False
    return True


def require_wrappable(model: nn.Module) -> None:
    """Refuse a model that cannot be wrapped."""
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected an nn.Module, an ONNX path or an ONNX model, got {type(model).__name__}{_what_instead(model)}"
        )
    for path, module in model.named_modules():
        where = f"{path or 'the model'} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(f"{where} is a ScriptModule, whose code is fixed; quantize the nn.Module it came from")
        if is_wrapped(module):
            raise ModelError(f"{where} is already wrapped by a sim; quantize the float model, or take sim.unwrap()")
        if isinstance(module, nn.DataParallel):
            raise ModelError(f"{where} is a DataParallel; quantize model.module, and train with DDP")


def _what_instead(given: object) -> str:
    """Return what to give in place of something that is no model, where that can be told."""
    if isinstance(given, Tensor):
        return "; the model comes first, then the example"
    if isinstance(given, Mapping):
        return "; weights without their network: load them into the module (load_state_dict), and quantize that"
    if hasattr(given, "coverage"):
        return "; quantize the float model, or take sim.unwrap()"
    return ""


def run_example(model: nn.Module, example: Example) -> Any:
    """Run the model on a copy of the example, since it may write over its inputs."""
    args, kwargs = clone_tensors((example.args, dict(example.kwargs)))
    try:
        return model(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        compiled = error_in_compiled_part(error)
        if compiled is not None:
            raise compiled from error
        shapes = [tuple(v.shape) for v in (*example.args, *example.kwargs.values()) if isinstance(v, Tensor)]
        raise ModelError(
            f"the model does not run on the example (tensors of shape {shapes}): {error}; give an example the float "
            "model accepts" + (" (the inputs alone, without labels: batch[0])" if len(example.args) > 1 else "")
        ) from error


def _copy_model(model: nn.Module) -> nn.Module:
    # weight norms keep their last result in the module; copy refuses it because it is part of a graph
    kept = [tensor for module in model.modules() for tensor in tensors_in(vars(module))]
    memo = {id(value): value.detach().clone() for value in kept if not value.is_leaf}
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, pickle.PickleError) as error:
        raise ModelError(f"the model cannot be copied: {error}; pass in_place=True to quantize it itself") from error


# --- The BatchNorms that can be folded, found from one forward pass, so that functional code counts too ---------------

_LINEAR = (nn.Linear, nn.modules.conv._ConvNd)


def find_folds(model: nn.Module, dataflow: Dataflow, config: QuantConfig) -> tuple[list[Fold], dict[str, str]]:
    """Return the folds to make, and path -> reason for every BatchNorm that stays.

    A module with running statistics whose forward calls `F.batch_norm` is a BatchNorm too, whatever its class.
    """
    modules = dict(model.named_modules())
    folds, kept = [], {}
    for path, norm in modules.items():
        foreign = path in dataflow.norm_calls and "running_mean" in norm._buffers
        if not foreign and not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            continue
        fold_or_reason = _fold_or_reason(path, norm, modules, dataflow, config)
        if isinstance(fold_or_reason, Fold):
            folds.append(fold_or_reason)
        else:
            kept[path] = fold_or_reason
    return folds, kept


def _fold_or_reason(
    path: str, norm: nn.Module, modules: dict[str, nn.Module], dataflow: Dataflow, config: QuantConfig
) -> Fold | str:
    if config.names(path, "BatchNormalization"):
        return "a rule names it"
    norm_op, reason = _norm_op(path, norm, dataflow)
    if reason:
        return reason
    source: Tensor | None
    if norm_op == path:
        source = next(
            (t for t in dataflow.tensors if path in dataflow.readers.get(id(t), ()) and id(t) in dataflow.maker), None
        )
    else:
        source = dataflow.norm_calls[path][0]["input"]
        source = source if id(source) in dataflow.maker else None
    op = "" if source is None else dataflow.maker[id(source)]
    maker = op.partition("/")[0]  # the layer `conv` of `conv/conv2d.0`, a function that the layer's own forward calls
    reason = "no Linear or convolution stands directly before or after it"
    if source is not None and isinstance(modules.get(maker), _LINEAR):
        fold = fold_of(norm_op, norm, op, modules[maker], before=False)
        reason = _sharing_reason(maker, op, modules, dataflow, dataflow.readers[id(source)])
        reason = reason or _axis_reason(maker, modules[maker], source)
        reason = reason or reason_not_to_fold(norm, modules[maker], before=False) or ""
        if not reason and op != maker and not _follows_weight(modules[maker], dataflow.read_by_maker[id(source)], fold):
            reason = f"{maker} computes something else than its weight and bias say"
        if not reason:
            return fold
    readers = dataflow.readers.get(id(dataflow.result_of[norm_op]), [])
    after = readers[0] if len(readers) == 1 else None
    if after is not None and isinstance(modules.get(after), _LINEAR) and is_leaf(modules[after]):
        reason = _sharing_reason(after, after, modules, dataflow, readers) or _axis_reason(
            after, modules[after], dataflow.result_of[norm_op]
        )
        reason = reason or reason_not_to_fold(norm, modules[after], before=True) or ""
        if not reason:
            return fold_of(norm_op, norm, after, modules[after], before=True)
    return reason


def _norm_op(path: str, norm: nn.Module, dataflow: Dataflow) -> tuple[str, str]:
    """Return the op that normalizes: the module, or `bn/batch_norm.0` inside a forward of its own; and why not to fold.

    A forward of its own may do more before and after, which stays.
    """
    state = state_of(norm)
    if state.leaf:
        count = dataflow.calls[path]
        times = "does not run" if count == 0 else f"runs {count} times"
        return path, "" if count == 1 else f"it {times} in one forward pass"
    calls = dataflow.norm_calls.get(path, [])
    if len(calls) != 1:
        how_often = f"{len(calls)} times" if calls else "never"
        return path, f"its forward calls F.batch_norm {how_often} in one forward pass"
    if state.own_forward is not None:
        return path, "its forward is set on the object; write it in a subclass to have it folded"
    own = {**norm._parameters, **norm._buffers}
    names = ("running_mean", "running_var", "weight", "bias")
    given = calls[0]
    if any(given[name] is not own.get(name) for name in names) or given["training"] or given["eps"] != norm.eps:
        return path, "its forward normalizes with something else than its own weight, bias, statistics and eps"
    return f"{path}/batch_norm.0", ""


def _axis_reason(layer: str, module: nn.Module, between: Tensor) -> str:
    """Return why channels are on another axis, or nothing.

    BatchNorm counts channels on axis 1; a Linear on the last axis, an unbatched convolution on axis 0.
    """
    ranks = 2 if isinstance(module, nn.Linear) else held_tensor(module, "weight").ndim
    return "" if between.ndim == ranks else f"its channels are not those of {layer}"


@torch.no_grad()
def _follows_weight(layer: nn.Module, x: Tensor, fold: Fold) -> bool:
    """Return whether a layer with a forward of its own (padding, a standardised weight) computes what a fold relies on.

    Its weight and bias are changed for two calls, as a fold would change them: each output channel must follow.
    """
    weight, bias = layer._parameters["weight"], layer._parameters.get("bias")
    assert weight is not None
    count = int(getattr(layer, "out_features", getattr(layer, "out_channels", 0)))
    factor, shift = torch.linspace(0.5, 2, count).to(weight), torch.linspace(-1, 1, count).to(weight)
    unit = {"running_mean": torch.zeros_like(shift), "running_var": torch.ones_like(shift) - fold.eps}
    try:
        before = _only_tensor(layer(x))
        new_weight, new_bias = fold_tensors(weight, bias, {**unit, "weight": factor, "bias": shift}, fold)
        layer._parameters |= {"weight": nn.Parameter(new_weight), "bias": nn.Parameter(new_bias)}
        after = _only_tensor(layer(x))
        along = (-1,) if isinstance(layer, nn.Linear) else (-1, *[1] * (before.ndim - 2))
        expected = before * factor.view(along) + shift.view(along)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False  # it needs more tensors, or one of another shape, or gives more than one
    finally:
        layer._parameters |= {"weight": weight, "bias": bias}
    return bool((after - expected).abs().max() <= 1e-3 * expected.abs().max())


def _only_tensor(result: Any) -> Tensor:
    """Return the tensor that a layer gives, in whatever container."""
    (tensor,) = tensors_of(result)
    return tensor


def _sharing_reason(layer: str, op: str, modules: dict[str, nn.Module], dataflow: Dataflow, readers: list[str]) -> str:
    if len(readers) != 1:
        return f"the result of {layer} is also read elsewhere"
    if dataflow.calls[op] != 1:
        return f"{layer} runs {dataflow.calls[op]} times in one forward pass"
    weight = modules[layer]._parameters.get("weight")
    sharing = [p for p, m in modules.items() if weight is not None and any(q is weight for q in m._parameters.values())]
    return f"{layer} shares its weight with {sharing[1]}" if len(sharing) > 1 else ""
