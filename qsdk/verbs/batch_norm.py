"""The verb `reestimate_batch_norm`: statistics of the BatchNorms in a sim's model, as the simulation has them."""

import time
from collections.abc import Iterable
from typing import Any

from onnx_backend.sim import OnnxSim
from onnx_backend.walk import batch_norm_statistics as onnx_norms
from qsdk.algorithms import ranks
from qsdk.core.ranges.channel_statistics import ChannelStatistics, merged
from qsdk.core.report import Report
from qsdk.core.sims.frozen_values import values_stay
from qsdk.core.sims.state import put_back_on_error
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.quantize import Forward, Sim, refuse_forward
from torch_bridge.walk import batch_norm_statistics as torch_norms


def reestimate_batch_norm(
    sim: Sim,
    data: Iterable[Any],
    *,
    forward: Forward | None = None,
    progress: bool = True,
) -> Report:
    """Give each BatchNorm in the model the mean and variance of its input over the data, in the simulation.

    The statistics that training left are moving averages over batches of a model that was still changing. Here they
    are those of all the data at once, whatever the sizes of its batches, and each BatchNorm sees what the new ones
    before it make. This costs one simulated pass, in which all batches are in flight. The variance is the unbiased one,
    as PyTorch keeps it. Encodings stay as they are: parameters of a BatchNorm have none, and what it gives keeps its
    range; call `qsdk.calibrate` again if that is to follow. `sim.snapshot(weights=True)` beforehand leads back.

    A BatchNorm that was folded is in the model inside `sim.training(freeze_bn_after=...)` only. There the scales of its
    layer's weight follow its factor, where each output channel has a scale of its own that is free to, so that the
    stored integers stay as they are.

    Where `torch.distributed` is initialised, the data of all ranks counts.

    Args:
        sim: of either door, calibrated.
        data: batches as for `calibrate`.
        forward: `(model, batch)`, to call the model yourself (PyTorch door).
        progress: show a progress bar.

    Returns:
        Rows `site` (owner of the BatchNorm), `error_before` and `error_after` (how far the normalised values are from
        mean 0 and deviation 1, root mean square over channels), `seconds`, `note`: why it was left, or why stored
        integers change. Summary `layers`, `left`, `seconds`, `passes`.

    Raises:
        CalibrationError: the sim is not calibrated.
        DataError: no data, data that the model does not take, or NaN or inf; the sim stays as it was.
    """
    require_sim(sim)
    start = time.perf_counter()
    _ = sim.encodings  # what is not calibrated is said before the data is spent
    door = put_back_on_error(sim, weights=True) if isinstance(sim, OnnxSim) else torch_norms.put_back_on_error(sim)
    with door, values_stay(sim):
        if isinstance(sim, OnnxSim):
            refuse_forward(forward)
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
