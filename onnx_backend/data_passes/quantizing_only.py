"""A sim of an ONNX model that quantizes at chosen sites alone, for a while."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from onnx_backend.sim import OnnxSim


@contextmanager
def quantizing_only(sim: OnnxSim, sites: Collection[str]) -> Iterator[None]:
    """Let the sim quantize at these sites alone inside the block; afterwards it is as before, sessions included."""
    with sim.alone():
        before, state = dict(vars(sim)), sim.snapshot()
        kept = {
            site: decision
            if site in sites
            else replace(decision, spec=None, tied_to=None, passes_through=False, bias_of=None, computes_in="")
            for site, decision in state.plan.decisions.items()
        }
        try:
            sim.restore(replace(state, plan=replace(state.plan, decisions=kept)))
            yield
        finally:
            vars(sim).update(before)
