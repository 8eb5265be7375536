"""The values of stored tensors at the sites of a sim, also of those that no module keeps as a parameter or buffer."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qsdk.core.lazy_arrays import LazyArrays
from torch_bridge.prepare import run_example
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import find_stored, stored_tensor, to_float32
from torch_bridge.training.training import eval_mode


def stored_values(sim: QuantSim) -> LazyArrays:
    """Return site -> fake-quantized value, float32, of every stored tensor, as the simulation reads it."""
    of_kind = [site for site, quantizer in sim.quantizers.items() if quantizer.decision.kind in ("weight", "bias")]
    constants = constants_at(sim, [site for site in of_kind if sim.quantizers[site].owns_encoding])

    def value(site: str) -> npt.NDArray[np.float32]:
        raw = constants[site] if site in constants else stored_tensor(sim.model, site).detach()
        with torch.no_grad():
            return to_float32(sim.quantizers[site](raw))

    named = [site for site in of_kind if site in constants or find_stored(sim.model, site) is not None]
    return LazyArrays(named, value)


def constants_at(sim: QuantSim, sites: Iterable[str]) -> dict[str, Tensor]:
    """Return the float values at those of the sites where no parameter or buffer is stored.

    A module may keep a tensor as a plain attribute, such as the coordinates of a detector's grid: it is a constant of
    the trace, and its value is found by a run on the sim's example.
    """
    wanted = {site for site in sites if find_stored(sim.model, site) is None}
    result: dict[str, Tensor] = {}

    def visit(site: str, x: Tensor) -> Tensor:
        if site in wanted:
            result[site] = x.detach().clone()
        return x

    if wanted:
        with eval_mode(sim.model), sim.runtime.in_phase("visit", visit), torch.no_grad():
            run_example(sim.model, sim.current_example)
    return result
