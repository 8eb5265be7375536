"""The sim of an nn.Module: model, plan and quantizers."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from qsdk.core.coverage import coverage_report, explanation
from qsdk.core.encoding import Encoding
from qsdk.core.errors import CalibrationError, ConfigError
from qsdk.core.plan import Plan
from qsdk.core.report import Report
from qsdk.core.site import matches, nearest_owners, owner_of
from torch_bridge.batches import Example, as_example
from torch_bridge.prepare import Prepared
from torch_bridge.quantizer import Quantizer
from torch_bridge.runtime import Runtime
from torch_bridge.training import parameter_groups, training
from torch_bridge.wrapper import state_of, unwrap_model


class QuantSim:
    """A simulated quantized model.

    `sim(x)` runs the model as the exported file would; `sim.model` is an ordinary nn.Module.

    Attributes:
        model: the wrapped module.
        plan: what was decided for every site.
        example: the arguments it was traced with.
        not_exercised: sites that exist only in the traced graph.
    """

    def __init__(self, prepared: Prepared, plan: Plan, dead: Sequence[str], not_exercised: Sequence[str]) -> None:
        self.model: nn.Module = prepared.model
        self.plan = plan
        self.example: Example = prepared.example
        self.not_exercised = tuple(not_exercised)
        self._dead = tuple(dead)
        self._folded = prepared.folded
        self._unfolded = dict(prepared.unfolded)

    @property
    def runtime(self) -> Runtime:
        """What the wrapped modules share (a deep copy of the sim has its own)."""
        return state_of(self.model).runtime

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Site -> quantizer, for every site that does not keep float32."""
        return {site: quantizer for site, quantizer in self.runtime.quantizers.items() if quantizer is not None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Simulate: the module's own outputs, without gradients."""
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def run(self, batch: Any) -> Any:
        """Simulate a batch: a tensor, a tuple of arguments or a mapping of keywords."""
        given = as_example(batch)
        return self(*given.args, **given.kwargs)

    def coverage(self) -> Report:
        """List every tensor: quantized, tied to another, or float and why."""
        report = coverage_report(self.plan, not_exercised=self.not_exercised, dead=self._dead)
        notes = {f"{path} (BatchNorm) not folded": reason for path, reason in self._unfolded.items()}
        return Report(report.title, report.rows, {**report.summary, "folded": len(self._folded), **notes})

    def explain(self, site: str) -> str:
        """Say which rule decided a site and why.

        Raises:
            ConfigError: there is no such site.
        """
        return explanation(self.plan, site)

    def __repr__(self) -> str:
        counts = self.coverage().summary
        calibrated = sum(q.calibrated for q in self.quantizers.values())
        return (
            f"QuantSim({type(self.model).__mro__[2].__name__}: {counts['quantized']} quantized, {counts['tied']} tied, "
            f"{counts['float']} float; {calibrated} of {len(self.quantizers)} quantizers ready)"
        )

    @property
    def encodings(self) -> dict[str, Encoding]:
        """Site -> encoding for every quantized site: own, shared and derived.

        Raises:
            CalibrationError: lists the sites that have none.
        """
        missing = [site for site, ready in self.ready().items() if not ready]
        if missing:
            shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            raise CalibrationError(f"these sites have no encoding: {shown}; call qsdk.calibrate(sim, batches) first")
        return self.encodings_where_ready()

    def ready(self) -> dict[str, bool]:
        """Site -> whether its encoding has been found, for every quantized site."""
        return {site: q.calibrated for site, q in self.quantizers.items() if q.decision.quantized}

    def encodings_where_ready(self) -> dict[str, Encoding]:
        """The encodings found so far."""
        return {site: self.quantizers[site].encoding() for site, ready in self.ready().items() if ready}

    def freeze(self, match: str = "*") -> int:
        """Freeze the encodings of all owners that match: neither calibrated, trained nor searched; gives their number.

        Raises:
            ConfigError: nothing matches.
        """
        found = [q for q in self.quantizers.values() if q.owns_encoding and matches(match, owner_of(q.site))]
        if not found:
            near = ", ".join(nearest_owners(match, [owner_of(site) for site in self.quantizers]))
            raise ConfigError(f"freeze({match!r}) matches no owner in the model; the nearest are: {near}")
        for quantizer in found:
            quantizer.frozen = True
        return len(found)

    @contextmanager
    def training(self, *, learn_scales: bool = False) -> Iterator[nn.Module]:
        """Train: inside the block `sim.model` is in train mode; afterwards in eval mode with ranges fixed."""
        with training(self.model, list(self.quantizers.values()), learn_scales=learn_scales) as model:
            yield model

    def parameter_groups(self, *, lr: float, scale_lr: float | None = None) -> list[dict[str, Any]]:
        """Optimizer groups: the model's parameters, and its learned scales at `scale_lr`."""
        return parameter_groups(self.model, list(self.quantizers.values()), lr=lr, scale_lr=scale_lr)

    @contextmanager
    def float_phase(self) -> Iterator[nn.Module]:
        """Run the model in float: no site does anything."""
        with self.runtime.in_phase("float"):
            yield self.model

    @contextmanager
    def captured(self) -> Iterator[dict[str, npt.NDArray[Any]]]:
        """While inside, every forward pass leaves site -> fake-quantized values in the mapping that this gives."""
        found: dict[str, npt.NDArray[Any]] = {}
        quantizers = self.runtime.quantizers

        def keep(site: str, x: Tensor) -> Tensor:
            quantizer = quantizers.get(site)
            result = x if quantizer is None else quantizer(x)
            if quantizer is not None and quantizer.decision.kind not in ("weight", "bias"):
                found[site] = result.detach().cpu().numpy().copy()
            return result

        with self.runtime.in_phase("visit", keep):
            yield found

    def unwrap(self) -> nn.Module:
        """Give the current float model: a copy in plain classes."""
        copied = copy.deepcopy(self.model)
        unwrap_model(copied)
        return copied


def stored_values(sim: QuantSim) -> dict[str, npt.NDArray[np.float32]]:
    """Site -> fake-quantized value of every stored tensor, as the simulation reads it."""
    found = {}
    modules = dict(sim.model.named_modules())
    for site, quantizer in sim.quantizers.items():
        if quantizer.decision.kind in ("weight", "bias"):
            owner, _, port = site.rpartition(":")
            module = modules.get(owner, sim.model)
            raw = {**module._parameters, **module._buffers}.get(port)
            if raw is not None:
                with torch.no_grad():
                    found[site] = quantizer(raw.detach()).cpu().numpy().copy()
    return found
