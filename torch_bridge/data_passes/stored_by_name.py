"""The stored tensors of a wrapped model by their names in its graph."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qsdk.core.lazy_arrays import LazyArrays
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import to_float32
from torch_bridge.training.batch_norm_training import require_folded
from torch_bridge.write_stored import writing


def stored_by_name(sim: QuantSim) -> LazyArrays:
    """Return the float32 value of each float parameter and buffer by its name in the graph, where it has only one."""
    tensors = _tensors(sim)
    return LazyArrays(tensors, lambda name: to_float32(tensors[name]))


@torch.no_grad()
def change_stored(sim: QuantSim, values: Mapping[str, npt.NDArray[Any]]) -> None:
    """Copy values of the same shape into the parameters and buffers of these names."""
    tensors = _tensors(sim)
    with writing(sim.model, sim.given, sim.weight_files, [tensors[name] for name in values]):
        for name, value in values.items():
            tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(value, np.float32)))


def _tensors(sim: QuantSim) -> dict[str, Tensor]:
    require_folded(sim.model)
    paths = sim.stored_paths()
    state = {
        path: tensor
        for path, tensor in (
            *sim.model.named_parameters(remove_duplicate=False),
            *sim.model.named_buffers(remove_duplicate=False),
        )
        if path in set(paths.values()) and tensor.is_floating_point()
    }
    by_name = {name: state[path] for name, path in paths.items() if path in state}
    places = [tensor.data_ptr() for tensor in by_name.values()]
    return {name: tensor for name, tensor in by_name.items() if places.count(tensor.data_ptr()) == 1}
