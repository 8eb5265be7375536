"""From a module to its sim: prepare, trace, plan, and link the two."""

from typing import Any

from torch import nn

from qsdk.core.config.config import QuantConfig
from qsdk.verbs.doors.planned_sim import planned_sim
from qsdk.verbs.doors.saving import save_beside
from torch_bridge.prepare import prepare
from torch_bridge.sim import QuantSim
from torch_bridge.wrapping.wrapped_state import link_sim


def quantize_module(
    model: nn.Module, example: Any, config: QuantConfig, *, dynamic_shapes: Any, in_place: bool, fold_batch_norm: bool
) -> QuantSim:
    """Return the sim of a module; see `qsdk.quantize`."""
    prepared = prepare(
        model, example, config, dynamic_shapes=dynamic_shapes, in_place=in_place, fold_batch_norm=fold_batch_norm
    )
    try:
        sim = planned_sim(prepared, config, fold_batch_norm=fold_batch_norm)
    except BaseException:
        prepared.restore()  # matters in place: the caller's model is theirs again
        raise
    link_sim(sim.model, sim, save_beside)
    return sim
