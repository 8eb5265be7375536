"""What a rotation changes in a module: each layer gets a copy of what it shared, or a rotation in front of it."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor, nn

#: name of the submodule of a layer that turns its input
ROTATION = "rotation"
#: its ops between the products with two factors, as sites name them, and the first product
BETWEEN = ("unflatten", "matmul", "transpose")


class OnlineRotation(nn.Module):
    """A product of vectors with a fixed orthogonal matrix, or with the Kronecker product of two.

    `first` turns runs of channels, and `second`, if there is one, what is in the same place of all runs.
    """

    first: Tensor
    second: Tensor | None

    def __init__(self, first: Tensor, second: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, x: Tensor) -> Tensor:
        """Return the turned vectors, in the shape of x."""
        if self.second is None:
            return x @ self.first
        runs = torch.unflatten(x, -1, (self.second.shape[0], self.first.shape[0])) @ self.first
        turned: Tensor = (runs.transpose(-1, -2) @ self.second).flatten(-2)
        return turned


def online_rotations(model: nn.Module) -> dict[str, list[int]]:
    """Return path of each layer with a rotation in front of it -> the sizes of its factors."""
    return {
        path.removesuffix(f".{ROTATION}"): [
            len(matrix) for matrix in (module.first, module.second) if matrix is not None
        ]
        for path, module in model.named_modules()
        if isinstance(module, OnlineRotation)
    }


def rotate_input(layer: nn.Module, factors: Sequence[npt.ArrayLike]) -> None:
    """Put a rotation in front of a layer, in place; its weight is to take up the inverse.

    Args:
        layer: a Linear, called as a module.
        factors: `first` and perhaps `second` of the rotation.
    """
    weight = layer.get_parameter("weight")
    own = (torch.as_tensor(matrix).to(weight.device, weight.dtype) for matrix in factors)
    layer.add_module(ROTATION, OnlineRotation(*own))
    layer.register_forward_pre_hook(_turned)


def _turned(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (layer.get_submodule(ROTATION)(args[0]), *args[1:])


def sharing_paths(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the parameter at a path, that one and all under which other modules hold it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = parameters.get(path)
    return [] if shared is None else [other for other, held in parameters.items() if held is shared]


def untie(model: nn.Module, paths: Collection[str]) -> None:
    """Give each of these modules a copy of the parameter that it shares, in place.

    A config of transformers that says that embeddings are tied says it no more: else `from_pretrained` would tie them.

    Raises:
        AttributeError: there is no module or parameter at a path.
    """
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner)
        shared = module.get_parameter(name)
        module.register_parameter(name, nn.Parameter(shared.detach().clone(), shared.requires_grad))
    for module in model.modules() if paths else ():
        config: Any = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", None) is True:
            config.tie_word_embeddings = False
