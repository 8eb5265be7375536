"""Re-estimating the running statistics of the BatchNorms that are in a model, on what they meet in the simulation."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.errors import DataError
from qsdk.core.ranges.channel_statistics import ChannelStatistics, Together, deviation, merged
from qsdk.core.site import site_name
from torch_bridge.folding.batch_norm import factor_of, statistics_of
from torch_bridge.folding.trainable_batch_norm import KeptNorm
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.training.batch_norm_training import live_in
from torch_bridge.training.training import eval_mode
from torch_bridge.walk.paused_forward import Baton, Suspended, attributes_set_by, before_modules
from torch_bridge.weight_snapshot import hold, put_back

Rows = list[dict[str, Any]]


def reestimate(
    sim: QuantSim, data: Iterable[Any], together: Together, *, forward: Forward | None = None, progress: bool = True
) -> tuple[Rows, float]:
    """Give every BatchNorm the mean and variance of its inputs in the simulation, each after those before it.

    One simulated pass over the data: the forwards of all batches are suspended in front of each BatchNorm until it has
    its new statistics. The scales of a weight that such a BatchNorm is folded into follow its factor, so that the
    stored integers stay.

    Args:
        sim: calibrated.
        data: batches; the forwards of all are in flight at once.
        together: puts together what all ranks have found.
        forward: calls the model on a batch.
        progress: show a bar while the data is read.

    Returns:
        One row per BatchNorm, and the seconds that the data would take in float.

    Raises:
        DataError: no data, data that the model does not take, or values that are not finite.
    """
    norms = {module: path for path, module in sim.model.named_modules() if _has_statistics(module)}
    kept = [path for path, module in sim.model.named_modules() if _is_norm(module) and module not in norms]
    rows: Rows = [_row(path, note="it keeps no running statistics") for path in kept]
    live = {one.norm: one for one in live_in(sim.model)}
    apart = {module: path for module, path in norms.items() if module not in live}
    with sim.alone(), eval_mode(sim.model), torch.no_grad():
        walk = _Walk(sim, forward)
        walk.look_at(data, progress)
        with (
            before_modules({module: partial(walk.stop, path) for module, path in apart.items()}),
            _meeting({one: partial(walk.stop_at, norms[module]) for module, one in live.items() if module in norms}),
        ):
            rows = [*walk.run(together), *rows]
    found = {row["site"] for row in rows}
    rows += [_row(path, note="no batch reaches it") for path in norms.values() if path not in found]
    return rows, walk.float_seconds


class _Walk:
    """The forwards of all batches, each standing in front of a BatchNorm."""

    def __init__(self, sim: QuantSim, forward: Forward | None) -> None:
        self._sim, self._forward = sim, forward
        self._baton = Baton(sim.runtime)
        self._passes: list[Suspended] = []
        self.float_seconds = 0.0

    def look_at(self, data: Iterable[Any], progress: bool) -> None:
        """Take in the batches, and run the first one to see what forwards set on modules: each has its own."""
        batches = list(progress_over(data, "BatchNorm", progress))
        random, start = torch.get_rng_state(), time.perf_counter()

        def first() -> None:
            with self._sim.float_phase():
                self._feed(*batches[0])

        try:
            self._baton.attributes = attributes_set_by(self._sim.model, first)
        finally:
            torch.set_rng_state(random)
        self.float_seconds = (time.perf_counter() - start) * len(batches)
        for number, batch in batches:
            self._passes.append(self._baton.add(number, partial(self._feed, number, batch), "quantize"))

    def stop(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Inside a forward: wait in front of a BatchNorm."""
        self.stop_at(path, args[0] if args else kwargs["input"])

    def stop_at(self, path: str, x: Tensor) -> None:
        """Inside a forward: wait in front of a BatchNorm that is about to get this."""
        self._baton.stop((path, x))

    def run(self, together: Together) -> Rows:
        """Bring all forwards to their ends."""
        rows: dict[str, dict[str, Any]] = {}
        seen: dict[str, ChannelStatistics] = {}  # by the calls of a BatchNorm so far
        try:
            for one in self._passes:
                self._baton.resume(one)
            while standing := [one for one in self._passes if not one.finished]:
                path = standing[0].at[0]
                there, start = [one for one in standing if one.at[0] == path], time.perf_counter()
                try:
                    parts = [_statistics(one.at[1]) for one in there]
                    before = [seen[path]] if path in seen else []
                    found = seen[path] = merged([*before, together(path, merged(parts))])
                    error, note = _write(self._sim, path, found)
                except DataError as failed:
                    raise DataError(f"{failed} (batches {', '.join(str(one.number) for one in there)})") from failed
                for one in there:
                    self._baton.resume(one)
                spent = time.perf_counter() - start + (rows[path]["seconds"] if path in rows else 0.0)
                rows[path] = _row(path, rows[path]["error_before"] if path in rows else error, spent, note)
        finally:
            self._baton.close()
        return list(rows.values())

    def _feed(self, number: int, batch: Any) -> None:
        feed(self._sim.model, batch, self._sim.example, self._forward, f"batch {number}")


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _has_statistics(module: nn.Module) -> bool:
    return _is_norm(module) and module._buffers.get("running_mean") is not None


def _statistics(x: Tensor) -> ChannelStatistics:
    """Of [N, C, ...]."""
    values = x.detach().double().transpose(0, 1).flatten(1)
    mean = values.mean(1) if values.shape[1] else values.new_zeros(len(values))
    squares = (values - mean[:, None]).square().sum(1)
    return ChannelStatistics(values.shape[1], mean.cpu().numpy(), squares.cpu().numpy())


def _write(sim: QuantSim, path: str, found: ChannelStatistics) -> tuple[float, str]:
    """Put statistics into a BatchNorm, and give how far the old ones were off, and what did not follow them."""
    norm = sim.model.get_submodule(path)
    live = next((one for one in live_in(sim.model) if one.norm is norm), None)
    before = None if live is None else factor_of(statistics_of(norm), live.fold)
    mean, var = norm._buffers["running_mean"], norm._buffers["running_var"]
    assert mean is not None
    assert var is not None
    eps: Any = norm.eps
    new = found.variance(path)
    old = [buffer.detach().double().cpu().numpy() for buffer in (mean, var)]
    mean.copy_(torch.from_numpy(found.mean))
    var.copy_(torch.from_numpy(new))
    note = "" if live is None or before is None else _follow(sim, live, before)
    return deviation(found, old[0], np.asarray(old[1] + eps)), note


def _follow(sim: QuantSim, live: KeptNorm, before: Tensor) -> str:
    """Let the scales of a layer's weight follow its BatchNorm's factor, or say that they cannot."""
    live.hold_variance()
    quantizer = sim.quantizers.get(site_name(live.fold.layer, "weight"))
    if quantizer is None or not quantizer.decision.quantized:
        return ""
    scale = quantizer.owner._buffers[quantizer.buffer_names[0]] if quantizer.owns_encoding else None
    grouped = live.fold.kind == "conv_transpose" and live.fold.groups > 1
    if scale is None or quantizer.frozen or not quantizer.scales_are_free or scale.shape != before.shape or grouped:
        return "its layer's weight keeps its scales, so stored integers change"
    after = factor_of(statistics_of(live.norm), live.fold)
    scale.copy_(scale * torch.where(before == 0, 1.0, after / before))
    return ""


def same_everywhere(sim: QuantSim, of_first_rank: Callable[[Any], Any]) -> None:
    """Have the first rank's statistics on all ranks: grids of weights hang on those of live BatchNorms."""
    buffers = [one.norm._buffers[name] for one in live_in(sim.model) for name in ("running_mean", "running_var")]
    stored = [buffer for buffer in buffers if buffer is not None]
    if stored:
        for buffer, value in zip(stored, of_first_rank([x.cpu().numpy() for x in stored]), strict=True):
            buffer.copy_(torch.from_numpy(value))


@contextmanager
def _meeting(stops: Mapping[KeptNorm, Callable[[Tensor], None]]) -> Iterator[None]:
    """Tell these of what live BatchNorms get."""
    try:
        for live, stop in stops.items():
            live.meet = stop
        yield
    finally:
        for live in stops:
            live.meet = None


@contextmanager
def put_back_on_error(sim: QuantSim) -> Iterator[None]:
    """Be as before if the block raises: weights, statistics and scales, also while these are learned."""
    held = hold(sim.model)
    norms = [module._buffers for module in sim.model.modules() if _has_statistics(module)]
    statistics = [buffer for buffers in norms for buffer in buffers.values() if buffer is not None]
    stored = [q.owner._buffers[q.buffer_names[0]] for q in sim.quantizers.values() if q.owns_encoding]
    scales = [(scale, scale.clone()) for scale in stored if scale is not None]
    try:
        with sim.given.changing(sim.model, statistics):
            yield
    except BaseException:
        put_back(sim.model, held)
        for scale, before in scales:
            scale.copy_(before)
        for live in live_in(sim.model):
            live.hold_variance()
        raise


def _row(path: str, error: float | None = None, seconds: float | None = None, note: str = "") -> dict[str, Any]:
    after = None if error is None else 0.0
    return {"site": path, "error_before": error, "error_after": after, "seconds": seconds, "note": note}
