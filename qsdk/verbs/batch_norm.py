"""The verb `reestimate_batch_norm`: statistics of the BatchNorms in a sim's model, measured in the simulation."""

import time
from collections.abc import Iterable
from typing import Any

from onnx_backend.sim import OnnxSim
from onnx_backend.walk import batch_norm_statistics as onnx_norms
from qsdk.algorithms import ranks
from qsdk.core.ranges.channel_statistics import ChannelStatistics, merged
from qsdk.core.report import Report
from qsdk.core.sims.frozen_values import require_frozen_values
from qsdk.core.sims.state import put_back_on_error
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.quantize import Forward, Sim, require_no_forward
from torch_bridge.walk import batch_norm_statistics as torch_norms


def reestimate_batch_norm(
    sim: Sim,
    data: Iterable[Any],
    *,
    forward: Forward | None = None,
    progress: bool = True,
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
        forward: `(model, batch)`, to call the model yourself (PyTorch side).
        progress: show a progress bar.

    Returns:
        Rows `site` (owner of the BatchNorm), `error_before` and `error_after` (how far the normalised values are from
        mean 0 and deviation 1, root mean square over channels), `seconds`, `note`: why it was skipped, or why stored
        integers change. Summary `layers`, `left`, `seconds`, `passes`.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: no data, data that the model does not take, or NaN or inf; the sim is unchanged.
    """
    require_sim(sim)
    start = time.perf_counter()
    _ = sim.encodings  # a missing calibration is reported before the data is used up
    on_error = put_back_on_error(sim, weights=True) if isinstance(sim, OnnxSim) else torch_norms.put_back_on_error(sim)
    with on_error, require_frozen_values(sim):
        if isinstance(sim, OnnxSim):
            require_no_forward(forward)
            rows, float_seconds = onnx_norms.reestimate(sim, data, _together, progress=progress)
        else:
            torch_norms.same_everywhere(sim, lambda own: ranks.gathered(own)[0])
            rows, float_seconds = torch_norms.reestimate(sim, data, _together, forward=forward, progress=progress)
        ranks.require_same_layers([])
    spent = time.perf_counter() - start
    left = sum(row["error_after"] is None for row in rows)
    passes = spent / float_seconds if float_seconds else None
    summary = {"layers": len(rows) - left, "left": left, "seconds": spent, "passes": passes}
    return Report("BatchNorm re-estimation", rows, summary)


def _together(owner: str, found: ChannelStatistics) -> ChannelStatistics:
    ranks.require_same_layers([owner])
    return merged(ranks.gathered(found))
