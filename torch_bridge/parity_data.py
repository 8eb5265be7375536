"""What parity needs of a sim: per batch, the values at every site, the model's inputs and its outputs."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_bridge.batches import Forward, feed, progress_over
from torch_bridge.sim import QuantSim
from torch_bridge.wrapper import input_names

Array = npt.NDArray[Any]


def captures(
    sim: QuantSim, data: Iterable[Any], *, forward: Forward | None, progress: bool
) -> Iterator[tuple[dict[str, Array], list[Array]]]:
    """Yield per batch: site or input name -> NumPy values as simulated, and the outputs in order."""
    seen: dict[str, Array] = {}

    def note_inputs(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        # the exporter calls the second of `*args`, whose site is `args.1`, `args_1`
        names = [name.replace(".", "_") for name in input_names(module.forward, args)]
        seen.update(flat_inputs({**dict(zip(names, args, strict=True)), **kwargs}))

    handle = sim.model.register_forward_pre_hook(note_inputs, with_kwargs=True)
    try:
        for number, batch in progress_over(data, "parity", progress):
            seen.clear()
            with sim.captured() as found, torch.no_grad():
                outputs = feed(sim.model, batch, sim.example, forward, f"batch {number}")
            yield {**seen, **found}, flat_outputs(outputs)
    finally:
        handle.remove()


def flat_inputs(named: Mapping[str, Any]) -> dict[str, Array]:
    """Input name -> array; the tensors inside containers are `name_0`, `name_1`, as the exporter calls them."""
    found = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            found[name] = np.asarray(value.detach().cpu().numpy())
        elif isinstance(value, tuple | list):
            found.update(flat_inputs({f"{name}_{i}": item for i, item in enumerate(value)}))
        elif isinstance(value, Mapping):
            found.update(flat_inputs({f"{name}_{key}": item for key, item in value.items()}))
    return found


def flat_outputs(value: Any) -> list[Array]:
    """The tensors of a model's result in order."""
    if isinstance(value, Tensor):
        return [value.detach().cpu().numpy()]
    items: Sequence[Any] = list(value.values()) if isinstance(value, Mapping) else value
    return [
        array for item in items if isinstance(item, Tensor | tuple | list | Mapping) for array in flat_outputs(item)
    ]
