"""Re-estimating the running statistics of the BatchNorms that were not folded, on what they meet in the simulation."""

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsdk.core.channel_statistics import ChannelStatistics, Together, deviation, merged
from qsdk.core.errors import DataError
from torch_bridge.batches import Forward, feed, progress_over
from torch_bridge.sim import QuantSim
from torch_bridge.suspended import Baton, Suspended, attributes_set_by, before_modules
from torch_bridge.training import eval_mode

Rows = list[dict[str, Any]]


def reestimate(
    sim: QuantSim, data: Iterable[Any], together: Together, *, forward: Forward | None = None, progress: bool = True
) -> tuple[Rows, float]:
    """Give every BatchNorm the mean and variance of its inputs in the simulation, each after those before it.

    One simulated pass over the data: the forwards of all batches are suspended in front of each BatchNorm until it has
    its new statistics.

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
    with eval_mode(sim.model), torch.no_grad():
        walk = _Walk(sim, forward)
        walk.look_at(data, progress)
        with before_modules({module: partial(walk.stop, path) for module, path in norms.items()}):
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
        self._baton.stop((path, args[0] if args else kwargs["input"]))

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
                    error = _write(self._sim.model.get_submodule(path), path, found)
                except DataError as failed:
                    raise DataError(f"{failed} (batches {', '.join(str(one.number) for one in there)})") from failed
                for one in there:
                    self._baton.resume(one)
                spent = time.perf_counter() - start + (rows[path]["seconds"] if path in rows else 0.0)
                rows[path] = _row(path, rows[path]["error_before"] if path in rows else error, spent)
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


def _write(norm: nn.Module, path: str, found: ChannelStatistics) -> float:
    """Put statistics into a BatchNorm, and give how far the old ones were off."""
    mean, var = norm._buffers["running_mean"], norm._buffers["running_var"]
    assert mean is not None
    assert var is not None
    eps: Any = norm.eps
    new = found.variance(path)
    old = [buffer.detach().double().cpu().numpy() for buffer in (mean, var)]
    mean.copy_(torch.from_numpy(found.mean))
    var.copy_(torch.from_numpy(new))
    return deviation(found, old[0], np.asarray(old[1] + eps))


def _row(path: str, error: float | None = None, seconds: float | None = None, note: str = "") -> dict[str, Any]:
    after = None if error is None else 0.0
    return {"site": path, "error_before": error, "error_after": after, "seconds": seconds, "note": note}
