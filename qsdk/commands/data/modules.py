"""A PyTorch module for the command line, made by a function of the user, and batches for it."""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onnx_backend.proto.inputs import ModelInput
from qsdk.commands.data.user_functions import load_function
from qsdk.core.errors import ConfigError


@dataclass(frozen=True)
class MadeModule:
    """A module, and what its inputs are.

    Attributes:
        module: as the user's function returned it.
        inputs: by the names of the arguments of its forward; without a shape where there is no example.
        keywords: whether the example is a mapping.
    """

    module: nn.Module
    inputs: Sequence[ModelInput]
    keywords: bool


@dataclass(frozen=True)
class TensorBatches:
    """Batches of arrays as a module takes them, made on demand."""

    batches: Iterable[Mapping[str, npt.NDArray[Any]]]
    made: MadeModule

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            tensors = {item.name: _tensor(batch[item.name], item.dtype) for item in self.made.inputs}
            yield tensors if self.made.keywords else tuple(tensors.values())


def made_module(text: str) -> MadeModule:
    """Call a function without arguments that returns a module, or `(module, example)`."""
    try:
        made = load_function(text, "the model")()
    except (ImportError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{text} raises {type(error).__name__}: {error}; it is called without arguments") from error
    module, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{text} returns {type(module).__name__}; return an nn.Module, or (module, example)")
    if isinstance(example, Mapping):
        return MadeModule(module.eval(), [_input(name, value) for name, value in example.items()], True)
    names = list(inspect.signature(module.forward).parameters) or ["input"]
    if example is None:
        return MadeModule(module.eval(), [ModelInput(names[0], np.dtype(np.float32), None)], False)
    values = example if isinstance(example, tuple | list) else (example,)
    names += [f"input{place}" for place in range(len(names), len(values))]
    return MadeModule(module.eval(), [_input(*pair) for pair in zip(names, values, strict=False)], False)


def arrays_of(outputs: Any) -> list[npt.NDArray[Any]]:
    """Return the tensors that a module returned, in order, as arrays."""
    return [leaf.detach().float().cpu().numpy() for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _input(name: str, value: Any) -> ModelInput:
    """Return an input with an open first axis: the batch."""
    tensor = torch.as_tensor(value)
    dtype = np.dtype(np.float32) if tensor.is_floating_point() else tensor.numpy().dtype
    return ModelInput(name, dtype, ("", *tensor.shape[1:]) if tensor.ndim else ())


def _tensor(array: npt.NDArray[Any], dtype: np.dtype[Any]) -> Tensor:
    wanted = array.dtype if array.dtype.kind != dtype.kind else dtype
    return torch.from_numpy(np.array(array, wanted))  # a copy: an array in a mapped file cannot be written
