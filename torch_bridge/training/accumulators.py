"""Training under a limit of the sums of a weight's codes, so that accumulators may have few bits (A2Q+)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import numpy.typing as npt
import torch

from qsdk.core.errors import ConfigError
from qsdk.core.layers.accumulators import HasWeights, fitted_encoding, limited_layers, require_bits, require_fits
from qsdk.core.numerics.stored_codes import reason_codes_get_lost
from torch_bridge.quantizers.quantizer import Quantizer


class _Sim(HasWeights, Protocol):
    frozen_values: frozenset[str]

    @property
    def quantizers(self) -> Mapping[str, Quantizer]:
        """Return the quantizers by site."""
        ...

    def store_floats(self, values: Mapping[str, npt.NDArray[Any]]) -> None:
        """Store other values at sites."""
        ...


@contextmanager
def limited_sums(sim: _Sim, bits: int | None, tile: int | None) -> Iterator[None]:
    """Have weights read within the limit for accumulators of some bits inside the block, and stored so at its end.

    Scales that are not frozen are fitted to it first. The gradient passes straight through to the weights, also to
    those that lose their codes.

    Raises:
        ConfigError: a layer that cannot have such accumulators; nothing is changed then.
    """
    require_bits(bits, tile)
    if bits is None:
        yield
        return
    _limit(sim, bits, tile)
    try:
        yield
        write_limited(sim)
    finally:
        for quantizer in sim.quantizers.values():
            quantizer.limit = None


def _limit(sim: _Sim, bits: int, tile: int | None) -> None:
    layers = limited_layers(sim, bits, tile)
    for layer, _ in layers.values():
        if reason := reason_codes_get_lost(layer.spec, layer.dtype):
            raise ConfigError(f"{layer.site}: accumulators of {bits} bits cannot be promised: {reason}")
    require_fits(sim, bits, tile, sim.frozen_values)
    encodings, stored = sim.encodings, sim.stored_floats(list(layers))
    for site, (layer, limit) in layers.items():
        if site in sim.frozen_values:
            continue
        quantizer = sim.quantizers[site]
        if site in encodings and not quantizer.is_frozen and quantizer.owns_encoding:
            weight = layer.layout.to_matrix(stored[site])
            quantizer.replace_encoding(fitted_encoding(encodings[site], weight, layer.layout, layer.spec, limit))
        quantizer.limit = layer.layout, limit


def write_limited(sim: _Sim) -> None:
    """Store what weights with a limit are read as, and freeze their encodings: others would have other codes."""
    limited = {site: quantizer for site, quantizer in sim.quantizers.items() if quantizer.limit is not None}
    stored = sim.stored_floats(list(limited))
    for site, values in stored.items():
        quantizer = limited[site]
        with torch.no_grad():
            read = quantizer(torch.from_numpy(values).to(quantizer.scale_and_zero_point()[0].device))
        sim.store_floats({site: read.cpu().numpy()})
        quantizer.replace_encoding(replace(quantizer.encoding(), frozen=True))
        quantizer.limit = None
