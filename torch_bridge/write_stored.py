"""Writing of stored tensors in a wrapped model, with a record of the values that the user gave."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.errors import ModelError
from torch_bridge.given_weights import GivenWeights
from torch_bridge.torch_values.parameters import stored_tensor
from torch_bridge.weight_files.weight_files import WeightFiles


@contextmanager
def writing(
    model: nn.Module, given: GivenWeights, files: WeightFiles | None, tensors: Sequence[Tensor]
) -> Iterator[None]:
    """Write to these parameters and buffers inside the block: those that lie in files get new files first."""
    in_files = [tensor for tensor in tensors if files is not None and files.hold(tensor)]
    with given.recording_changes(model, tensors, replaced=in_files):
        for tensor in in_files:
            assert files is not None
            tensor.data = files.empty_like(tensor).copy_(tensor.data)
        yield


@torch.no_grad()
def write_stored(
    model: nn.Module, given: GivenWeights, files: WeightFiles | None, values: Mapping[str, npt.NDArray[Any]]
) -> None:
    """Write values of the same shape into the stored tensors at sites, in place.

    Raises:
        ModelError: nothing is stored at a site, or in another shape; nothing is changed then.
    """
    places: dict[int, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        places.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
    written: dict[int, Tensor] = {}
    for site in values:
        stored = stored_tensor(model, site)
        owners = places.get(stored.untyped_storage().data_ptr())
        if owners is None:
            raise ModelError(f"{site} is put together from several parameters, and cannot be written as one")
        written.update((id(owner), owner) for owner in owners)
    for site, value in values.items():
        shape = tuple(stored_tensor(model, site).shape)
        if shape != value.shape:
            raise ModelError(f"what is stored at {site} has the shape {shape}, not {value.shape}")
    with writing(model, given, files, list(written.values())):
        for site, value in values.items():
            stored_tensor(model, site).copy_(torch.from_numpy(np.ascontiguousarray(value)))
