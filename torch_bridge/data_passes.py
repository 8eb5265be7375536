"""Passes over the data: values at sites, outputs, the tensors that parity compares, and stored tensors by name."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsdk.core.lazy_arrays import LazyArrays
from torch_bridge.sim import QuantSim
from torch_bridge.stored_weights import writing
from torch_bridge.torch_values.batches import Forward, as_example, as_step, feed, progress_over
from torch_bridge.torch_values.module_state import snapshot_of, tensors_in
from torch_bridge.torch_values.parameters import to_float32, to_numpy
from torch_bridge.torch_values.pytree import argument_leaves, floats_of, name_leaves, tensors_of
from torch_bridge.training.batch_norm_training import require_folded
from torch_bridge.training.training import eval_mode, fixed_parameters

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
    """Run a sim on a batch; return input name -> values, and the outputs in order."""
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


def outputs(
    sim: QuantSim, batches: Iterable[Any], forward: Forward | None, *, in_float: bool
) -> Iterator[list[npt.NDArray[np.float32]]]:
    """Yield the floating-point outputs of each batch, in order, of the simulation or in float."""
    for number, batch in enumerate(batches):
        with eval_mode(sim.model), torch.no_grad(), sim.float_phase() if in_float else nullcontext():
            result = feed(sim.model, batch, sim.example, forward, f"batch {number}")
            tensors = floats_of(result, caches=sim.example.has_cache)
        yield [y.float().cpu().numpy() for y in tensors]


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


def visit_sites(
    sim: QuantSim,
    data: Iterable[Any],
    each: Callable[[str, npt.NDArray[Any]], None],
    *,
    title: str,
    sites: Collection[str] | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> None:
    """Run the float model and call `each(site, values)`, values as float32, batch by batch.

    Where `sites` is None, all that are computed are visited.
    """
    stored = {site for site, decision in sim.plan.decisions.items() if decision.kind in ("weight", "bias")}

    def visit(site: str, x: Tensor) -> Tensor:
        if site not in stored if sites is None else site in sites:
            each(site, x.detach().float().cpu().numpy())
        return x

    with eval_mode(sim.model), sim.runtime.in_phase("visit", visit), torch.no_grad():
        for number, batch in progress_over(data, title, progress):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")


def visit_tensors(
    sim: QuantSim,
    batch: Any,
    visitor: Callable[[str, Tensor], Tensor],
    forward: Forward | None,
    where: str,
    *,
    everywhere: bool = False,
) -> list[Tensor]:
    """Return the floating-point outputs of the float model for a batch, with the graph of their gradients.

    What the visitor returns goes on in place of the values, and the sim's parameters get no gradients. With
    `everywhere`, gradients also go through what the model runs under `torch.no_grad`; what it does there, such as
    writing to a tensor that a gradient needs, may be an error then.
    """
    through = _Gradients() if everywhere else nullcontext()
    with (
        eval_mode(sim.model),
        sim.runtime.in_phase("visit", visitor),
        fixed_parameters(sim.model),
        _without_graphs_in(sim.model),
        torch.enable_grad(),
        through,
    ):
        return floats_of(feed(sim.model, batch, sim.example, forward, where), caches=sim.example.has_cache)


class _Gradients(TorchFunctionMode):
    """The function mode in which gradients cannot be switched off, as `torch.no_grad` does."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, unless it switches gradients off."""
        if func is torch._C._set_grad_enabled and not args[0]:
            return None
        return func(*args, **(kwargs or {}))


@contextmanager
def _without_graphs_in(model: nn.Module) -> Iterator[None]:
    """Put back the modules that have kept a tensor with a graph in the block, such as a table that grows on demand."""
    before = {module: snapshot_of(vars(module)) for module in model.modules()}
    try:
        yield
    finally:
        for module, image in before.items():
            if any(tensor.grad_fn is not None for tensor in tensors_in(vars(module))):
                image.restore()
        for buffer in model.buffers():
            if buffer.grad_fn is not None:  # written in place
                buffer.detach_()
