"""One float pass over the data that hands the values at sites to a visitor."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed, progress_over
from torch_bridge.training.training import eval_mode


def visit_sites(
    sim: QuantSim,
    data: Iterable[Any],
    each: Callable[[str, npt.NDArray[Any]], None],
    *,
    title: str,
    sites: Collection[str] | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> None:
    """Run the float model and call `each(site, values)`, values as float32, batch by batch.

    Args:
        sim: is left as it is.
        data: batches.
        each: the visitor.
        title: of the progress bar.
        sites: to be visited; None for all that are computed.
        forward: calls the model on a batch.
        progress: show a progress bar.

    Raises:
        DataError: no data, or data the model does not take.
    """
    stored = {site for site, decision in sim.plan.decisions.items() if decision.kind in ("weight", "bias")}

    def visit(site: str, x: Tensor) -> Tensor:
        if site not in stored if sites is None else site in sites:
            each(site, x.detach().float().cpu().numpy())
        return x

    with eval_mode(sim.model), sim.runtime.in_phase("visit", visit), torch.no_grad():
        for number, batch in progress_over(data, title, progress):
            feed(sim.model, batch, sim.example, forward, f"batch {number}")
