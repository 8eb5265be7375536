"""What the accumulators of a quantized model need."""

from qsdk.core.errors import CalibrationError, ConfigError
from qsdk.core.layers.accumulators import accumulator_rows
from qsdk.core.report import Report
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.doors.choose import Sim


def accumulators(sim: Sim, *, tile: int | None = None) -> Report:
    """List how many bits the accumulator of each layer needs, whatever its input on the grid is.

    The bound is the larger sum of codes of one sign of an output's weights, times the steps of the input's grid: no sum
    of products leaves it, in any order, with the zero point subtracted before or after. Biases are not part of it.

    Args:
        sim: calibrated, of either side.
        tile: products that are added up in one accumulator, position by position of a kernel with the input channels
            side by side; None for all of an output.

    Returns:
        Rows `site` (of the weight), `products` (that are added up), `input_levels`, `bound` and `bits` (of the smallest
        signed accumulator with room for it), for each layer with integer weights and integer inputs. Summary `bits`:
        the most.

    Raises:
        CalibrationError: the sim is not calibrated.
        ConfigError: a weight with zero points or blocks, or no number of products.

    Source: Colbert et al. 2024, A2Q+, section 3.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x, "w4a8"), [x], progress=False)
        >>> qsdk.analysis.accumulators(sim).rows[0]["products"]
        8
    """
    require_sim(sim)
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ConfigError(f"tile={tile!r} is no number of products; give at least 1, or None for all")
    rows = list(accumulator_rows(sim, tile))
    missing = [
        site for site, decision in sim.plan.decisions.items() if decision.quantized and site not in sim.encodings
    ]
    if missing:
        raise CalibrationError(f"{missing[0]} has no encoding yet; call qsdk.calibrate(sim, batches) first")
    return Report("Accumulators", rows, {"bits": max((row["bits"] for row in rows), default=0)})
