"""The verbs that improve a calibrated sim, by the names that the command line gives them."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from qsdk.core.errors import ConfigError
from qsdk.core.report import Report
from qsdk.core.run_options import keywords_of
from qsdk.verbs.batch_norm import reestimate_batch_norm
from qsdk.verbs.bias import correct_bias
from qsdk.verbs.blocks import tune_blocks
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.layers import adaround, gptq, seq_mse
from qsdk.verbs.ranges import tune_ranges
from qsdk.verbs.rotate import rotate
from qsdk.verbs.scaling import awq, equalize, smooth_quant

VERBS: dict[str, Callable[..., Report]] = {
    "rotate": rotate,
    "equalize": equalize,
    "smooth_quant": smooth_quant,
    "awq": awq,
    "reestimate_batch_norm": reestimate_batch_norm,
    "correct_bias": correct_bias,
    "seq_mse": seq_mse,
    "adaround": adaround,
    "gptq": gptq,
    "tune_blocks": tune_blocks,
    "tune_ranges": tune_ranges,
}


def require_verbs(names: Iterable[str], *, given_as: str = "verbs") -> list[str]:
    """Return the names of verbs, with underscores; `given_as` is where the user wrote them.

    Raises:
        ConfigError: there is no verb of a name.
    """
    chosen = [name.strip().replace("-", "_") for name in names if name.strip()]
    unknown = [name for name in chosen if name not in VERBS]
    if unknown:
        raise ConfigError(f"{given_as}: {unknown[0]!r} is none of {', '.join(VERBS)}")
    return chosen


def apply_verbs(
    sim: Sim,
    data: Iterable[Any],
    names: Sequence[str],
    *,
    run: Path | None = None,
) -> list[Report]:
    """Apply verbs to a calibrated sim in order, with checkpoints in the folder `run`, and return their reports."""
    result = []
    for number, name in enumerate(names):
        checkpointed = run is not None and "checkpoint" in keywords_of(VERBS[name])
        options = {"checkpoint": run / f"{number}-{name}"} if run is not None and checkpointed else {}
        result.append(VERBS[name](sim, data, **options))
    return result
