"""Sampling: one float pass that looks at the values of every site."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qsdk.core.precision.samples import SiteSample
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.training.training import eval_mode


def sample_sites(
    sim: QuantSim, data: Iterable[Any], *, forward: Forward | None = None, progress: bool = True
) -> dict[str, SiteSample]:
    """Take a bounded sample of the float values at every computed site.

    Raises:
        DataError: no data, or data the model does not take.
    """
    found: defaultdict[str, SiteSample] = defaultdict(SiteSample)
    stored = {site for site, decision in sim.plan.decisions.items() if decision.kind in ("weight", "bias")}

    def visit(site: str, x: Tensor) -> Tensor:
        if site not in stored:
            found[site].add(x.detach().float().cpu().numpy())
        return x

    with eval_mode(sim.model), sim.runtime.in_phase("visit", visit), torch.no_grad():
        for number, batch in progress_over(data, "sample", progress):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
    return dict(found)
