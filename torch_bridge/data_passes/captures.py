"""The tensors that parity compares: per batch, the values at every site, the model's inputs and its outputs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, as_example, feed, progress_over
from torch_bridge.torch_values.decoder_step import as_step
from torch_bridge.torch_values.parameters import to_numpy
from torch_bridge.torch_values.pytree import argument_leaves, name_leaves, tensors_of
from torch_bridge.training.training import eval_mode

Array = npt.NDArray[Any]


def captures(
    sim: QuantSim, data: Iterable[Any], *, forward: Forward | None, progress: bool
) -> Iterator[tuple[dict[str, Array], list[Array]]]:
    """Yield per batch: site or input name -> NumPy values as simulated, and the outputs in order."""
    with _noted_inputs(sim) as seen:
        for number, batch in progress_over(data, "parity", progress, skip_empty=False):
            with sim.captured() as captured:
                outputs = _run(sim, batch, forward, f"batch {number}", seen, captured)
            yield {**seen, **captured}, outputs


def run_once(sim: QuantSim, batch: Any) -> tuple[dict[str, Array], list[Array]]:
    """Run a sim on a batch; return input name -> values, and the outputs in order.

    Raises:
        DataError: the model does not take it.
    """
    with _noted_inputs(sim) as seen:
        outputs = _run(sim, batch, None, "the example", seen, {})
        return dict(seen), outputs


@contextmanager
def _noted_inputs(sim: QuantSim) -> Iterator[dict[str, Array]]:
    """Yield a mapping into which every call of the model writes its inputs, by name."""
    seen: dict[str, Array] = {}

    def note_inputs(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        leaves = argument_leaves(module.forward, args, kwargs)
        given = name_leaves((path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor))
        seen.update({name: to_numpy(tensor) for name, tensor in given.items()})

    handle = sim.model.register_forward_pre_hook(note_inputs, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def _run(
    sim: QuantSim, batch: Any, forward: Forward | None, where: str, seen: dict[str, Array], captured: dict[str, Array]
) -> list[Array]:
    with eval_mode(sim.model), torch.no_grad():
        whole = batch if forward is not None else _with_cache(sim, batch)
        seen.clear()
        captured.clear()  # what filled the cache was a call of its own
        outputs = feed(sim.model, whole, sim.example, forward, where)
    return [to_numpy(tensor) for tensor in tensors_of(outputs, caches=sim.example.has_cache)]


def _with_cache(sim: QuantSim, batch: Any) -> Any:
    """Return a batch as the file takes it: tokens alone become a step with a cache, as `quantize` makes one."""
    given = as_example(batch)
    if not sim.example.has_cache or given.has_cache or given.args or "input_ids" not in given.kwargs:
        return batch
    return dict(as_step(sim.model, given).kwargs)
