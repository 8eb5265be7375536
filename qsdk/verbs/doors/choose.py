"""Which door a sim has: the one place that asks for its class."""

from typing import Any

from onnx_backend.sim import OnnxSim
from qsdk.core.errors import ModelError
from qsdk.core.sims.stateful import require_sim
from qsdk.verbs.doors.door import Door
from qsdk.verbs.doors.module_door import ModuleDoor
from qsdk.verbs.doors.onnx_door import OnnxDoor
from torch_bridge.sim import QuantSim

Sim = QuantSim | OnnxSim


def door_of(sim: Any) -> Door:
    """Return the door of a sim.

    Raises:
        ConfigError: it is no sim; the message says what it is and where a sim comes from.
    """
    require_sim(sim)
    return OnnxDoor(sim) if isinstance(sim, OnnxSim) else ModuleDoor(sim)


def module_sim(sim: Any, verb: str, instead: str) -> QuantSim:
    """Return the sim of an nn.Module, for a verb that needs gradients.

    Args:
        sim: what the user gave.
        verb: its name, for the message.
        instead: what does the same for an ONNX model, for the message.

    Raises:
        ConfigError: it is no sim.
        ModelError: it simulates an ONNX model, which has no gradients.
    """
    require_sim(sim)
    if isinstance(sim, OnnxSim):
        raise ModelError(
            f"{verb} needs gradients, which an ONNX model has not: quantize the nn.Module and export it, or {instead}"
        )
    return sim  # type: ignore[no-any-return]
