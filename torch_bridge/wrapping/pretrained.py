"""`sim.model.save_pretrained`, as models of Hugging Face have it: their own checkpoint, and the sim beside it."""

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.torch_values.parameters import STATE, STEPS
from torch_bridge.torch_values.rotated_modules import online_rotations
from torch_bridge.wrapping.wrapped_state import SimBeside, state_of


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

    Args:
        model: of the sim, wrapped.
        sim: held weakly.
        write: a function of a module, of the sim and the folder; None for that of the sim that this one is a copy of.
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
    """Refuse a model without some tensors of the float one: from its checkpoint another model would be read.

    Raises:
        ModelError: a BatchNorm or a computed weight is folded, or a rotation is in front of a layer.
    """
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
    """Refuse a model with rotations in front of layers, which its own class would not compute.

    Raises:
        ModelError: names the first of them.
    """
    for path in online_rotations(model):
        raise ModelError(
            f"{path} of this sim has a rotation in front of it, which the model's own class does not compute; write "
            "the sim with qsdk.save(sim, path), or as ONNX with qsdk.export"
        )
