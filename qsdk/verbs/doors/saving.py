"""The file of a whole sim: the facts that are the same at both sides, and the form that lies beside a checkpoint."""

from pathlib import Path
from typing import Any

from qsdk.core.sims.biases import biases_to_json
from qsdk.core.sims.state import methods_to_json
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.doors.module_door import ModuleDoor
from torch_bridge.sim import QuantSim

#: the name of a sim beside the checkpoint of its model
SIM_FILE = "sim.qsdk"


def facts_to_save(sim: Sim) -> dict[str, Any]:
    """Return what verbs have noted about a sim, as plain values."""
    return {
        "biases": biases_to_json(sim),
        "methods": methods_to_json(sim.methods),
        "frozen_values": sorted(sim.frozen_values),
    }


def save_beside(sim: QuantSim, folder: str) -> None:
    """Write a sim without its weights into the folder of a checkpoint that has them.

    Raises:
        ConfigError: the config holds patterns, which are Python.
        ExportError: the folder cannot be written, or the example is no plain data.
    """
    attention = getattr(getattr(sim.model, "config", None), "_attn_implementation", None)
    facts = {"attn_implementation": attention} if isinstance(attention, str) else {}
    Path(folder).mkdir(parents=True, exist_ok=True)
    ModuleDoor(sim).save(Path(folder) / SIM_FILE, {**facts_to_save(sim), **facts}, weights=False)
