"""Re-estimation of the running statistics of BatchNorms, from their inputs in the simulation."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.errors import DataError
from qsdk.core.ranges.statistics import ChannelStatistics, Together, deviation, merge
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import TrainableBatchNorm, factor_of, statistics_of
from torch_bridge.sim import QuantSim
from torch_bridge.stored_weights import copy_tensors, restore_tensors
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.torch_values.parameters import held_tensor
from torch_bridge.training.training import active_norms, eval_mode
from torch_bridge.walk.paused_forward import PausedForward, Scheduler
from torch_bridge.wrapping.wrapped_state import is_batch_norm

Rows = list[dict[str, Any]]


def reestimate(
    sim: QuantSim, data: Iterable[Any], together: Together, *, forward: Forward | None = None, progress: bool = True
) -> tuple[Rows, float]:
    """Set every BatchNorm's mean and variance to those of its inputs in the simulation, each after those before it.

    One simulated pass over the data: the forwards of all batches are paused in front of each BatchNorm until it has its
    new statistics. The scales of a weight that such a BatchNorm is folded into follow its factor, so that the stored
    integers stay. Returns one row per BatchNorm, and the seconds that the data would take in float.
    """
    norms = {module: path for path, module in sim.model.named_modules() if _has_statistics(module)}
    kept = [path for path, module in sim.model.named_modules() if is_batch_norm(module) and module not in norms]
    rows: Rows = [_row(path, note="it keeps no running statistics") for path in kept]
    trainable = {one.norm: one for one in active_norms(sim.model)}
    scheduler = Scheduler(sim.runtime)

    def pause(path: str, x: Tensor) -> None:
        scheduler.pause((path, x))

    def pause_before(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pause(path, args[0] if args else kwargs["input"])

    with sim.alone(), eval_mode(sim.model), torch.no_grad(), ExitStack() as hooks:
        passes, float_seconds = _passes_over(sim, scheduler, data, forward, progress)
        for module, path in norms.items():
            if module in trainable:  # its layer's call does its work
                trainable[module].input_hook = partial(pause, path)
                hooks.callback(setattr, trainable[module], "input_hook", None)
            else:
                hooks.callback(module.register_forward_pre_hook(partial(pause_before, path), with_kwargs=True).remove)
        rows = [*_estimate_in_turn(sim, scheduler, passes, together), *rows]
    reached = {row["site"] for row in rows}
    rows += [_row(path, note="no batch reaches it") for path in norms.values() if path not in reached]
    return rows, float_seconds


def _passes_over(
    sim: QuantSim, scheduler: Scheduler, data: Iterable[Any], forward: Forward | None, progress: bool
) -> tuple[list[PausedForward], float]:
    """Return a simulated forward of each batch, and the seconds that all would take in float, as the first one did."""

    def run(number: int, batch: Any) -> None:
        feed(sim.model, batch, sim.example, forward, f"batch {number}")

    def first() -> None:
        with sim.float_phase():
            run(*batches[0])

    batches, start = list(progress_over(data, "BatchNorm", progress)), time.perf_counter()
    scheduler.learn_attributes(sim.model, first)
    seconds = (time.perf_counter() - start) * len(batches)
    return [scheduler.add(number, partial(run, number, batch), "quantize") for number, batch in batches], seconds


def _estimate_in_turn(
    sim: QuantSim, scheduler: Scheduler, passes: Sequence[PausedForward], together: Together
) -> Iterable[dict[str, Any]]:
    """Run all forwards to their ends, each BatchNorm estimated when the first is paused there; return the rows."""
    rows: dict[str, dict[str, Any]] = {}
    seen: dict[str, ChannelStatistics] = {}  # statistics over all calls of a BatchNorm so far
    try:
        for one in passes:
            scheduler.resume(one)
        while paused := [one for one in passes if not one.finished]:
            path = paused[0].at[0]
            there, start = [one for one in paused if one.at[0] == path], time.perf_counter()
            try:
                parts = [_statistics(one.at[1]) for one in there]
                before = [seen[path]] if path in seen else []
                statistics = seen[path] = merge([*before, together(path, merge(parts))])
                error, note = _write(sim, path, statistics)
            except DataError as failed:
                raise DataError(f"{failed} (batches {', '.join(str(one.number) for one in there)})") from failed
            for one in there:
                scheduler.resume(one)
            spent = time.perf_counter() - start + (rows[path]["seconds"] if path in rows else 0.0)
            rows[path] = _row(path, rows[path]["error_before"] if path in rows else error, spent, note)
    finally:
        scheduler.close()
    return rows.values()


def _has_statistics(module: nn.Module) -> bool:
    return is_batch_norm(module) and module._buffers.get("running_mean") is not None


def _statistics(x: Tensor) -> ChannelStatistics:
    """Return the statistics of the channels of [N, C, ...]."""
    values = x.detach().double().transpose(0, 1).flatten(1)
    mean = values.mean(1) if values.shape[1] else values.new_zeros(len(values))
    squares = (values - mean[:, None]).square().sum(1)
    return ChannelStatistics(values.shape[1], mean.cpu().numpy(), squares.cpu().numpy())


def _write(sim: QuantSim, path: str, new_statistics: ChannelStatistics) -> tuple[float, str]:
    """Write statistics into a BatchNorm; return the deviation of the old ones, and a note on what did not follow."""
    norm = sim.model.get_submodule(path)
    trainable = next((one for one in active_norms(sim.model) if one.norm is norm), None)
    before = None if trainable is None else factor_of(statistics_of(norm), trainable.fold)
    mean, var = held_tensor(norm, "running_mean"), held_tensor(norm, "running_var")
    eps: Any = norm.eps
    new = new_statistics.variance(path)
    old = [buffer.detach().double().cpu().numpy() for buffer in (mean, var)]
    mean.copy_(torch.from_numpy(new_statistics.mean))
    var.copy_(torch.from_numpy(new))
    note = "" if trainable is None or before is None else _rescale_weight(sim, trainable, before)
    return deviation(new_statistics, old[0], np.asarray(old[1] + eps)), note


def _rescale_weight(sim: QuantSim, trainable: TrainableBatchNorm, before: Tensor) -> str:
    """Make the scales of a layer's weight follow its BatchNorm's factor, or return why they cannot."""
    trainable.copy_variance()
    quantizer = sim.quantizers.get(site_name(trainable.fold.layer, "weight"))
    if quantizer is None or not quantizer.decision.quantized:
        return ""
    scale = quantizer.owner._buffers[quantizer.buffer_names[0]] if quantizer.owns_encoding else None
    grouped = trainable.fold.kind == "conv_transpose" and trainable.fold.groups > 1
    if scale is None or quantizer.frozen or not quantizer.scales_are_free or scale.shape != before.shape or grouped:
        return "its layer's weight keeps its scales, so stored integers change"
    after = factor_of(statistics_of(trainable.norm), trainable.fold)
    scale.copy_(scale * torch.where(before == 0, 1.0, after / before))
    return ""


def same_everywhere(sim: QuantSim, of_first_rank: Callable[[Any], Any]) -> None:
    """Copy the first rank's statistics to all ranks: grids of weights depend on those of active BatchNorms."""
    buffers = [one.norm._buffers[name] for one in active_norms(sim.model) for name in ("running_mean", "running_var")]
    stored = [buffer for buffer in buffers if buffer is not None]
    if stored:
        for buffer, value in zip(stored, of_first_rank([x.cpu().numpy() for x in stored]), strict=True):
            buffer.copy_(torch.from_numpy(value))


@contextmanager
def put_back_on_error(sim: QuantSim) -> Iterator[None]:
    """Restore weights, statistics and scales if the block raises, also while scales are learned."""
    held = copy_tensors(sim.model)
    norms = [module._buffers for module in sim.model.modules() if _has_statistics(module)]
    statistics = [buffer for buffers in norms for buffer in buffers.values() if buffer is not None]
    stored = [q.owner._buffers[q.buffer_names[0]] for q in sim.quantizers.values() if q.owns_encoding]
    scales = [(scale, scale.clone()) for scale in stored if scale is not None]
    try:
        with sim.given.recording_changes(sim.model, statistics, rounds=True):
            yield
    except BaseException:
        restore_tensors(sim.model, held)
        for scale, before in scales:
            scale.copy_(before)
        for trainable in active_norms(sim.model):
            trainable.copy_variance()
        raise


def _row(path: str, error: float | None = None, seconds: float | None = None, note: str = "") -> dict[str, Any]:
    after = None if error is None else 0.0
    return {"site": path, "error_before": error, "error_after": after, "seconds": seconds, "note": note}
