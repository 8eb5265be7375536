"""The choice of a sim's door: the only place that checks its class."""

from typing import Any

from onnx_backend.sim import OnnxSim as OnnxSim
from qsdk.core.errors import ModelError
from qsdk.core.run_options import DEFAULTS, Run
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.doors.module_door import ModuleDoor
from qsdk.verbs.doors.onnx_door import OnnxDoor, require_no_forward
from torch_bridge.sim import QuantSim as QuantSim

Sim = QuantSim | OnnxSim
#: a sim as the verbs see it: the same methods at either side
Door = ModuleDoor | OnnxDoor


def door_of(sim: Any, run: Run = DEFAULTS) -> Door:
    """Return the door of a sim: the object by which verbs use it, with what a call of a verb has set.

    At the ONNX side `forward` is a ConfigError.
    """
    require_sim(sim)
    if not isinstance(sim, OnnxSim):
        return ModuleDoor(sim, run)
    require_no_forward(run.forward)
    return OnnxDoor(sim, run)


def module_sim(sim: Any, verb: str, instead: str) -> QuantSim:
    """Return the sim of an nn.Module, for a verb that needs gradients."""
    require_sim(sim)
    if isinstance(sim, OnnxSim):
        raise ModelError(
            f"{verb} needs gradients, which an ONNX model has not: quantize the nn.Module and export it, or {instead}"
        )
    return sim  # type: ignore[no-any-return]
