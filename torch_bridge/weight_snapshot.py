"""Snapshots of the parameters and buffers of a wrapped model, and how they are restored."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.torch_values.parameters import STEPS
from torch_bridge.wrapping.wrapped_state import state_of

Key = tuple[str, str]


@torch.no_grad()
def copy_tensors(model: nn.Module) -> dict[Key, Tensor]:
    """Return a copy of every parameter and buffer except encodings: (path of the module, name) -> value.

    BatchNorms that were folded and can come back are included.
    """
    return {key: tensor.detach().clone() for key, tensor in state_tensors(model)}


@torch.no_grad()
def restore_tensors(model: nn.Module, held: Mapping[Key, Tensor]) -> None:
    """Copy values into the same parameters and buffers; parameters that are newer keep theirs.

    Raises:
        ModelError: they are those of another model, or a parameter is another one now; nothing is changed then.
    """
    there = dict(state_tensors(model))
    for (path, name), value in held.items():
        now = there.get((path, name))
        if now is None or now.shape != value.shape or now.dtype != value.dtype:
            difference = "is gone" if now is None else f"has the shape {tuple(now.shape)} and type {now.dtype}"
            raise ModelError(
                f"{f'{path}.{name}'.lstrip('.')} {difference}, where the snapshot holds {tuple(value.shape)} of "
                f"{value.dtype}; restore it in the model that it was taken of"
            )
    for key, value in held.items():
        there[key].copy_(value)


def state_tensors(model: nn.Module) -> Iterator[tuple[Key, Tensor]]:
    """Yield each tensor of the state once, also where several modules hold it."""
    seen = set()
    folded = [trainable for trainable in state_of(model).trainable_norms if not trainable.is_active]
    for trainable in folded:
        if trainable.own_bias is not None:
            yield (trainable.fold.layer, "bias before folding"), trainable.own_bias
    for path, module in (
        *model.named_modules(),
        *((f"folded {trainable.fold.norm}", trainable.norm) for trainable in folded),
    ):
        quantizers = state_of(module).quantizers
        own = {name for q in quantizers for name in (*q.buffer_names, *q.learned_names)}
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in own and name != STEPS and id(tensor) not in seen:
                seen.add(id(tensor))
                yield (path, name), tensor
