"""The verb that learns the ranges of activations by gradient; it is for the PyTorch side."""

import time
from collections.abc import Iterable
from typing import Any, Unpack

import torch

from qsdk.core.errors import CalibrationError, ConfigError, DataError
from qsdk.core.report import Report
from qsdk.core.run_options import SeededOptions, run_of
from qsdk.progress import progress_of
from qsdk.verbs.doors.choose import Sim, module_sim
from qsdk.verbs.doors.same_on_ranks import same_on_ranks
from torch_bridge.calibrate import install
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import progress_over
from torch_bridge.training.training import eval_mode, fixed_parameters
from torch_bridge.tuning.range_tuning import RangeTuner

_EVERY = 4  # one batch of so many is held back
_NOTHING_TO_LEARN = (
    "no activation has a range that may be learned: each is float, dynamic, per channel, of a fixed range or frozen; "
    'choose integer activations (activation="uint8"), or unfreeze some (sim.unfreeze)'
)


@same_on_ranks
def tune_ranges(
    sim: Sim,
    data: Iterable[Any],
    *,
    steps: int = 100,
    lr: float = 0.1,
    **options: Unpack[SeededOptions],
) -> Report:
    """Learn the ranges of all activations together, by the error of the model's outputs; weights stay as they are.

    Each step goes forward and back over one batch. Every fourth batch is held back (where there are fewer, all are
    used for both); if the error on those has not fallen, the old ranges stay.

    Args:
        sim: of an nn.Module, calibrated. Sites that are frozen, tied to a fixed range, dynamic, per channel, in a
            minifloat or with restricted scales stay as they are.
        data: batches as for `calibrate`, read once and kept; small ones make cheap steps.
        steps: of Adam.
        lr: how far the first steps move log2 of an end of a range; it falls linearly to 0.
        options: `forward`, `progress`, `seed`; see `qsdk.options`.

    Returns:
        Rows `site`, `low_before`, `high_before`, `low`, `high`; summary `error_before`, `error_after` (of the outputs
        on what was held back, relative to their energy), `kept`, `steps`, `seconds`, and `passes`: the same in float
        passes over the data.

    Raises:
        ModelError: the sim is of an ONNX model.
        ConfigError: an option out of its bounds.
        CalibrationError: the sim is not calibrated, or no range may be learned.
        DataError: no data, data the model does not take, or outputs that are not finite. In every case the sim stays
            as it was.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.train.tune_ranges(sim, [x], steps=5, progress=False).summary["steps"]
        5
    """
    run = run_of(tune_ranges, options)
    sim = module_sim(sim, "tune_ranges", "choose another method of calibrate here")
    if steps < 1 or not lr > 0:
        raise ConfigError(f"steps={steps} must be 1 at least, and lr={lr} positive")
    _ = sim.encodings  # names the sites that have none
    batches = [batch for _, batch in progress_over(data, "ranges", progress=False)]
    start = time.perf_counter()
    with eval_mode(sim.model), fixed_parameters(sim.model):
        tuner = RangeTuner(sim, run.forward)
        if not tuner.learned:
            raise CalibrationError(_NOTHING_TO_LEARN)
        held_back_numbers = list(range(len(batches)))[_EVERY - 1 :: _EVERY] or list(range(len(batches)))
        training_numbers = [n for n in range(len(batches)) if n not in held_back_numbers] or held_back_numbers
        before, float_seconds = _held_back(tuner, batches, held_back_numbers)
        _learn(tuner, batches, training_numbers, steps=steps, lr=lr, progress=run.progress, seed=run.seed)
        after, _ = _held_back(tuner, batches, held_back_numbers)
    return _install(sim, tuner, before, after, steps, (time.perf_counter() - start, float_seconds * len(batches)))


def _held_back(tuner: RangeTuner, batches: list[Any], numbers: list[int]) -> tuple[float, float]:
    """Return the mean error, and the seconds that a float pass over one batch takes."""
    errors, seconds = [], 0.0
    for number in numbers:
        begun = time.perf_counter()
        wanted = tuner.wanted(batches[number], f"batch {number}")
        seconds += time.perf_counter() - begun
        with torch.no_grad():
            errors.append(float(tuner.error(batches[number], wanted, f"batch {number}")))
    return sum(errors) / len(errors), seconds / len(numbers)


def _learn(
    tuner: RangeTuner, batches: list[Any], numbers: list[int], *, steps: int, lr: float, progress: bool, seed: int
) -> None:
    optimizer = torch.optim.Adam(tuner.parameters, lr=lr)
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    with progress_of("tune_ranges", steps, show=progress, unit="step") as bar:
        for step in range(steps):
            if not order:
                shuffled = torch.randperm(len(numbers), generator=generator, device=generator.device)
                order = [numbers[n] for n in shuffled.tolist()]
            number = order.pop()
            wanted = tuner.wanted(batches[number], f"batch {number}")
            error = tuner.error(batches[number], wanted, f"batch {number}")
            if not bool(torch.isfinite(error)):
                raise DataError(f"the outputs are not finite in batch {number}; clean the data, or calibrate again")
            optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
            optimizer.zero_grad()
            error.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            bar.log(error=float(error.detach()))
            bar.done()


def _install(
    sim: QuantSim, tuner: RangeTuner, before: float, after: float, steps: int, seconds: tuple[float, float]
) -> Report:
    kept = after < before
    encodings = {site: one.encoding() if kept else one.before for site, one in tuner.learned.items()}
    if kept:
        install(sim, encodings)
    ends = {site: (tuner.learned[site].before, encoding) for site, encoding in encodings.items()}
    rows = [
        {
            "site": site,
            "low_before": float(old.low[0]),
            "high_before": float(old.high[0]),
            "low": float(new.low[0]),
            "high": float(new.high[0]),
        }
        for site, (old, new) in ends.items()
    ]
    spent, one_pass = seconds
    summary = {"error_before": before, "error_after": min(before, after), "kept": kept, "steps": steps}
    return Report("Learned ranges", rows, {**summary, "seconds": spent, "passes": spent / one_pass})
