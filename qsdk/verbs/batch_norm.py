"""The verb `reestimate_batch_norm`: statistics of the BatchNorms in a sim's model, measured in the simulation."""

import time
from collections.abc import Iterable
from typing import Any, Unpack

from qsdk.algorithms import ranks
from qsdk.core.ranges.statistics import ChannelStatistics, merge
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, run_of
from qsdk.core.sims.state import require_frozen_values
from qsdk.verbs.doors.choose import Sim, door_of


def reestimate_batch_norm(
    sim: Sim,
    data: Iterable[Any],
    **options: Unpack[DataOptions],
) -> Report:
    """Set the statistics of each BatchNorm in the model to those of its input over the data, in the simulation.

    The statistics that training left are moving averages over batches of a model that was still changing. Here they
    are those of all the data at once, whatever the sizes of its batches, and each BatchNorm reads the output of the
    updated ones before it. This costs one simulated pass, in which all batches are in flight. The variance is the
    unbiased one, as in PyTorch. Encodings stay as they are: parameters of a BatchNorm have none, and its output keeps
    its range; call `qsdk.calibrate` again to update that. To go back, take `sim.snapshot(weights=True)` beforehand.

    A BatchNorm that was folded is in the model inside `sim.training(freeze_bn_after=...)` only. There the scales of its
    layer's weight follow its factor, where each output channel has a scale of its own that may change, so that the
    stored integers stay as they are.

    Where `torch.distributed` is initialised, the data of all ranks counts.

    Args:
        sim: calibrated, of either side.
        data: batches as for `calibrate`.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows `site` (owner of the BatchNorm), `error_before` and `error_after` (how far the normalised values are from
        mean 0 and deviation 1, root mean square over channels), `seconds`, `note`: why it was skipped, or why stored
        integers change. Summary `layers`, `left`, `seconds`, `passes`.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: no data, data that the model does not take, or NaN or inf; the sim is unchanged.

    Examples:
        >>> import torch, qsdk
        >>> model, x = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.ReLU()), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(model, x), [x], progress=False)
        >>> qsdk.reestimate_batch_norm(sim, [x], progress=False).rows[0]["site"]
        '0'
    """
    run = run_of(reestimate_batch_norm, options)
    door, start = door_of(sim), time.perf_counter()
    _ = sim.encodings  # a missing calibration is reported before the data is used up
    with require_frozen_values(sim):
        rows, float_seconds = door.reestimate_batch_norm(data, _together, run.forward, run.progress)
    spent = time.perf_counter() - start
    left = sum(row["error_after"] is None for row in rows)
    passes = spent / float_seconds if float_seconds else None
    summary = {"layers": len(rows) - left, "left": left, "seconds": spent, "passes": passes}
    return Report("BatchNorm re-estimation", rows, summary)


def _together(owner: str, statistics: ChannelStatistics) -> ChannelStatistics:
    ranks.require_same_layers([owner])
    return merge(ranks.all_gather(statistics))
