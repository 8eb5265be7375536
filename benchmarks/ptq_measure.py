"""Costs in float forward passes over the same data, in the same process: what the `ptq_*` benchmarks share.

Processor time of one thread, so that neither other programs nor waiting threads count.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import qsdk

Clock = Callable[[], float]


def one_thread() -> None:
    """Run torch's kernels on one thread from now on."""
    torch.set_num_threads(1)


def seconds(work: Callable[[], object], clock: Clock = time.process_time) -> float:
    """Processor time that some work takes, or the time of another clock."""
    start = clock()
    work()
    return clock() - start


def float_pass(model: nn.Module, batches: Iterable[Any], rounds: int = 3, *, clock: Clock = time.process_time) -> float:
    """Seconds of one pass of a float model over the batches, the median of some rounds."""

    def run() -> None:
        with torch.no_grad():
            for batch in batches:
                _call(model, batch)

    run()
    return sorted(seconds(run, clock) for _ in range(rounds))[rounds // 2]


def _call(model: Callable[..., Any], batch: Any) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(batch)


def outputs(model: Callable[..., Any], batches: Iterable[Any]) -> Tensor:
    """What a model or a sim gives for the batches, joined."""
    with torch.no_grad():
        return torch.cat([_call(model, batch) for batch in batches])


def decibels(exact: Tensor, found: Tensor) -> float:
    """Signal to noise ratio of an approximation, in dB."""
    return round(float(10 * torch.log10(exact.pow(2).sum() / (found - exact).pow(2).sum())), 2)


def calibrated(model: nn.Module, batches: list[Any], config: qsdk.QuantConfig, **how: Any) -> Any:
    """A sim of the model, its activations and weights calibrated by min-max or as `how` says."""
    sim = qsdk.quantize(model, batches[0], config)
    qsdk.calibrate(sim, batches, progress=False, **how)
    return sim
