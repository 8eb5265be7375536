"""Learning of activation ranges by gradient: both ends of every site together, by the error of the outputs.

The range that changes a site's own values least need not be the best one for what reads them: where a few huge values
go into a LayerNorm, cutting them off costs little and makes the grid finer for all others. The gradients of scale and
zero point are those of LSQ+ (Bhalgat et al. 2020, section 3.1); the ends are learned as powers of two times the
calibrated ones, so that they keep their signs (Jain et al. 2020, TQT).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerTensor, Spec
from qsdk.core.ranges.ranges import Range, encoding_from_range
from torch_bridge.quantizers.fake_quant import FakeQuantGrid, fake_quantize
from torch_bridge.quantizers.quantizer import Quantizer
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed
from torch_bridge.torch_values.pytree import floats_of


class LearnedRange:
    """The range of a site whose ends are 2**p times those of its present encoding, p being learned from 0 on.

    A symmetric range has one p, an asymmetric one a p for each end.
    """

    def __init__(self, quantizer: Quantizer, spec: Spec) -> None:
        self.spec = spec
        self.before = quantizer.encoding()
        scale, self.zero_point = (value.detach().clone() for value in quantizer.scale_and_zero_point())
        self.scale = scale
        lo, hi = spec.dtype.lo, spec.dtype.hi
        self.ends = torch.cat([(lo - self.zero_point) * scale, (hi - self.zero_point) * scale]).to(scale)
        self.log2 = nn.Parameter(torch.zeros(1 if spec.symmetric else 2, device=scale.device))

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Return x on the site's grid as it is now."""
        spec = self.spec
        if spec.symmetric:
            scale, zero_point = self.scale * torch.exp2(self.log2), self.zero_point
        else:
            ends = self.ends * torch.exp2(self.log2)
            low, high = ends[:1], ends[1:]
            scale = (high - low) / (spec.dtype.hi - spec.dtype.lo)
            exact = spec.dtype.lo - low / scale
            zero_point = exact + (exact.round() - exact).detach()
        return fake_quantize(x.float(), scale, zero_point, FakeQuantGrid(spec.dtype.lo, spec.dtype.hi)).to(x.dtype)

    def encoding(self) -> Encoding:
        """Return the encoding of the range as it is now; the one from before where nothing was learned."""
        if not bool(self.log2.detach().any()):
            return self.before
        low, high = (self.ends * torch.exp2(self.log2.detach())).float().cpu().numpy().reshape(2, 1)
        return encoding_from_range(Range(low, high), self.spec)


class RangeTuner:
    """A sim whose activations have learned ranges for a while; its weights stay as they are."""

    def __init__(self, sim: QuantSim, forward: Forward | None) -> None:
        self.sim, self.forward = sim, forward
        self.learned = {
            site: LearnedRange(q, spec) for site, q in sim.quantizers.items() if (spec := _learnable_spec(q))
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are learned."""
        return [one.log2 for one in self.learned.values()]

    def wanted(self, batch: Any, where: str) -> list[Tensor]:
        """Return the float model's outputs."""
        with self.sim.float_phase() as model, torch.no_grad():
            result = feed(model, batch, self.sim.example, self.forward, where)
            return floats_of(result, caches=self.sim.example.has_cache)

    def error(self, batch: Any, wanted: Sequence[Tensor], where: str) -> Tensor:
        """Return the squared error of the outputs, relative to their energy, with the present ranges."""
        with self.sim.runtime.in_phase("visit", self._visit, quantizes=True):
            result = feed(self.sim.model, batch, self.sim.example, self.forward, where)
            outputs = floats_of(result, caches=self.sim.example.has_cache)
        errors = [
            (x - y).float().square().sum() / y.float().square().sum().clamp(min=torch.finfo(torch.float32).tiny)
            for x, y in zip(outputs, wanted, strict=True)
        ]
        return torch.stack(errors).mean()

    def _visit(self, site: str, x: Tensor) -> Tensor:
        quantizer = self.sim.runtime.quantizers.get(site)
        if quantizer is None or quantizer.decision.passes_through:
            return x
        home = quantizer.decision.encoding_site
        learned = None if quantizer.decision.bias_of is not None else self.learned.get(home)
        return quantizer(x) if learned is None else learned.fake_quantize(x)


def _learnable_spec(quantizer: Quantizer) -> Spec | None:
    """Return the spec of a site whose range may be learned, else None."""
    decision, spec = quantizer.decision, quantizer.spec
    computed = decision.kind in ("activation", "input", "output") and not decision.passes_through
    if not computed or not quantizer.owns_encoding or quantizer.frozen:
        return None
    plain = spec.granularity == PerTensor() and spec.dtype.is_integer and spec.scales_are_fine
    return spec if plain and spec.fixed_range is None and not spec.dynamic else None
