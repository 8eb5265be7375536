"""The parameters and buffers of a wrapped model as they were at one moment, and how they are put back."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.torch_values.parameters import STEPS
from torch_bridge.wrapping.wrapper import state_of

Key = tuple[str, str]


@torch.no_grad()
def hold(model: nn.Module) -> dict[Key, Tensor]:
    """Copy every parameter and buffer but those of encodings: (path of the module, name) -> value.

    BatchNorms that were folded away and can come back are held as well.
    """
    return {key: tensor.detach().clone() for key, tensor in tensors_of(model)}


@torch.no_grad()
def put_back(model: nn.Module, held: Mapping[Key, Tensor]) -> None:
    """Copy held values into the same parameters and buffers; what came after stays.

    Raises:
        ModelError: they are those of another model, or a parameter is another one now; nothing is changed then.
    """
    there = dict(tensors_of(model))
    for (path, name), value in held.items():
        now = there.get((path, name))
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            found = "is gone" if now is None else f"has the shape {tuple(now.shape)} and type {now.dtype}"
            raise ModelError(
                f"{f'{path}.{name}'.lstrip('.')} {found}, where the snapshot holds {tuple(value.shape)} of "
                f"{value.dtype}; restore it in the model that it was taken of"
            )
    for key, value in held.items():
        there[key].copy_(value)


def tensors_of(model: nn.Module) -> Iterator[tuple[Key, Tensor]]:
    """Each tensor of the state once, also where several modules hold it."""
    seen = set()
    away = [kept for kept in state_of(model).kept if not kept.live]
    for kept in away:
        if kept.own_bias is not None:
            yield (kept.fold.layer, "bias before folding"), kept.own_bias
    for path, module in (*model.named_modules(), *((f"folded {kept.fold.norm}", kept.norm) for kept in away)):
        quantizers = state_of(module).quantizers
        own = {name for q in quantizers for name in (*q.buffer_names, *q.learned_names)}
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in own and name != STEPS and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (path, name), tensor
