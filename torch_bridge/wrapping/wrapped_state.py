"""The state that wrapping adds to each module of a model, and `sim.model.save_pretrained`."""

import copy
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from qsdk.core.layers.expected_means import FoldedNorm
from torch_bridge.folding.batch_norm import Fold, TrainableBatchNorm
from torch_bridge.folding.computed_weights import ComputedTensor
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.layers import online_rotations
from torch_bridge.torch_values.parameters import STATE, STEPS


class SimBeside:
    """Writes the sim of a model beside a checkpoint of the model; in a copy of the model alone it writes nothing."""

    def __init__(
        self, function: Callable[[Any, str], None] | None = None, sim: Callable[[], object | None] = lambda: None
    ) -> None:
        self.function, self.sim = function, sim

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write the sim, if it still exists."""
        sim = self.sim()
        if sim is not None and self.function is not None:
            self.function(sim, os.fspath(folder))

    def __reduce__(self) -> tuple[Any, ...]:
        return SimBeside, (self.function,)


@dataclass
class ModuleState:
    """The state that wrapping adds to a module: its paths, its runtime and its own quantizers.

    Attributes:
        paths: all paths of the module in the model.
        leaf: whether the module is one op.
        has_output: whether a leaf returns a new tensor.
        runtime: shared by all modules of the sim.
        quantizers: those whose scale and zero point are buffers of this module.
        folds: of the root: the BatchNorms that were folded into layers.
        computed: of the root: the computed tensors that were folded into their values.
        norms: of the root: path of a layer -> statistics of its outputs, known from the BatchNorm folded into it.
        trainable_norms: of the root: the folded BatchNorms that training can bring back.
        frozen_values: of the root: sites whose stored values training does not change.
        active_norm: of a layer and its BatchNorm: the BatchNorm that is being trained with the layer.
        without_norm: of a folded BatchNorm with a forward of its own: `F.batch_norm` is left out of that.
        stays_in_eval: whether `train()` leaves this BatchNorm in eval mode.
        foreign: whether the module came into the model after wrapping.
        own_forward: a forward that was set on the object in place of the class's.
        beside: of the root: what `save_pretrained` writes beside a checkpoint.
    """

    paths: tuple[str, ...]
    leaf: bool
    has_output: bool
    runtime: Runtime
    quantizers: list[Quantizer]
    folds: tuple[Fold, ...] = ()
    computed: tuple[ComputedTensor, ...] = ()
    norms: dict[str, FoldedNorm] = field(default_factory=dict)
    trainable_norms: tuple[TrainableBatchNorm, ...] = ()
    frozen_values: frozenset[str] = frozenset()
    active_norm: TrainableBatchNorm | None = None
    without_norm: bool = False
    stays_in_eval: bool = False
    foreign: bool = False
    own_forward: Callable[..., Any] | None = None
    beside: SimBeside | None = None

    @property
    def path(self) -> str:
        """Return the first path of the module, which names its parameters."""
        return self.paths[0]

    def note_statistics(self, of_batch: bool) -> None:
        """Note while the dataflow is recorded that a folded BatchNorm's own forward uses the batch's statistics."""
        if of_batch and self.runtime.recorder is not None:
            self.runtime.batch_norms.add(self.path)


def state_of(module: nn.Module) -> ModuleState:
    """Return the state of a wrapped module."""
    state = module.__dict__[STATE]
    assert isinstance(state, ModuleState)
    return state


def is_wrapped(module: nn.Module) -> bool:
    """Return whether a module belongs to a sim."""
    return STATE in module.__dict__


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module of a sim normalizes by its own statistics: it is a BatchNorm that is not folded."""
    state = state_of(module)
    folded = state.without_norm and state.active_norm is None
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and not folded


def saving_with_sim(base: type[nn.Module]) -> Callable[..., Any]:
    """Return a `save_pretrained` for the wrapped class of a module class that has one.

    It calls the class's own on a module of that class, so that the checkpoint is that of the float model with its
    present weights, and writes the sim beside it. In a training block it writes a checkpoint of the training: all
    parameters and encodings, without a sim.
    """
    inner: Callable[..., Any] = base.save_pretrained  # type: ignore[attr-defined]

    @functools.wraps(inner)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Write the checkpoint by the class's own method, and the sim beside it."""
        given = inspect.signature(inner).bind(self, *args, **kwargs)
        plain, training = _plain(self, base), STEPS in self._buffers
        if not training:
            require_no_rotations(self)
        own = set() if training else encoding_keys(self)
        state = given.arguments.get("state_dict")
        kept = {name: x for name, x in (self.state_dict() if state is None else state).items() if name not in own}
        plain.__dict__["state_dict"] = lambda *_, **__: kept
        if "state_dict" in given.signature.parameters:
            given.arguments["state_dict"] = kept
        beside = state_of(self).beside
        if beside is not None and not training and given.arguments.get("is_main_process", True):
            require_nothing_folded(self)
            beside.write(given.arguments["save_directory"])
        return inner(plain, *given.args[1:], **given.kwargs)

    return save_pretrained


def link_sim(model: nn.Module, sim: object, write: Callable[[Any, str], None] | None = None) -> None:
    """Let a model's `save_pretrained` write this sim.

    The model holds the sim weakly. `write` is a function of the sim and the folder; None for that of the sim that this
    one is a copy of.
    """
    known = state_of(model).beside
    write = write or (None if known is None else known.function)
    state_of(model).beside = SimBeside(write, ref(sim))


def encoding_keys(model: nn.Module) -> set[str]:
    """Return the keys of encodings in a state_dict, and of the parameters that are learned for them."""
    result = {STEPS}
    for path, module in model.named_modules(remove_duplicate=False):
        for quantizer in state_of(module).quantizers:
            names = (*quantizer.buffer_names, *quantizer.learned_names)
            result.update(f"{path}.{name}" if path else name for name in names)
    return result


def weights_digest(model: nn.Module) -> str:
    """Return a hash of the names, types and values of a wrapped model's state, without encodings."""
    found, own = hashlib.sha256(), encoding_keys(model)
    state: Mapping[str, Any] = model.state_dict()
    for name in sorted(state.keys() - own):
        value = state[name]
        if isinstance(value, Tensor):
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _plain(module: nn.Module, base: type[nn.Module]) -> nn.Module:
    """Return a module of the float class that holds the same tensors and submodules, and a config of its own.

    The class's `save_pretrained` writes the name of the class into the config.
    """
    plain: nn.Module = base.__new__(base)
    plain.__dict__.update({name: value for name, value in module.__dict__.items() if name != STATE})
    if "config" in plain.__dict__:
        plain.__dict__["config"] = copy.deepcopy(plain.__dict__["config"])
    return plain


def require_nothing_folded(model: nn.Module) -> None:
    """Refuse a model without some tensors of the float one: from its checkpoint another model would be read."""
    require_no_rotations(model)
    state = state_of(model)
    folded = [fold.norm for fold in state.folds] + [f"{one.path}.{one.name}".lstrip(".") for one in state.computed]
    if folded:
        raise ModelError(
            f"{', '.join(folded[:4])}{', ...' if len(folded) > 4 else ''} of this sim is folded into other weights, so "
            "a checkpoint would hold another model; quantize with fold_batch_norm=False if all are BatchNorms, or "
            "write the sim with qsdk.save(sim, path)"
        )


def require_no_rotations(model: nn.Module) -> None:
    """Refuse a model with rotations in front of layers, which its own class would not compute."""
    for path in online_rotations(model):
        raise ModelError(
            f"{path} of this sim has a rotation in front of it, which the model's own class does not compute; write "
            "the sim with qsdk.save(sim, path), or as ONNX with qsdk.export"
        )
