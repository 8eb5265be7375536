"""Accumulators of few bits: which layers have them, which limit their weights get, and what they need now."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.graph_layers import graph_layers
from qsdk.core.layers.layer_problem import Layer, WeightLayout
from qsdk.core.numerics.block_scales import round_up_to_digits
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import PerBlock, Spec
from qsdk.core.numerics.sum_limits import SumLimit
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report

#: factors that a scale may grow by, in halves of a power of two, and around the best of them
_GROWTH, _FINE = tuple(2.0 ** (k / 2) for k in range(21)), (2**-0.25, 2**0.25)


class HasWeights(Protocol):
    """The part of a sim, of either side, that concerns its weights."""

    plan: Plan
    graph: Graph

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """Return the present encodings by site."""
        ...

    def stored_floats(self, sites: Collection[str]) -> Mapping[str, Array]:
        """Return the stored tensors at sites."""
        ...


def require_bits(bits: int | None, tile: int | None) -> None:
    """Refuse what is no number of bits, and no number of products."""
    if bits is None:
        if tile is not None:
            raise ConfigError(f"accumulator_tile={tile} is of no use without accumulator_bits")
        return
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 32:
        raise ConfigError(f"accumulator_bits={bits!r} is no number of bits of an accumulator; give 2 to 32")
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ConfigError(f"accumulator_tile={tile!r} is no number of products; give at least 1, or None for all")


def limit_of(
    site: str, spec: Spec, layout: WeightLayout, steps: int | None, bits: int, tile: int | None = None
) -> SumLimit | None:
    """Return the limit of a layer's codes for accumulators of some bits; None where it has no sum of integers.

    Args:
        site: of the weight.
        spec: of the weight.
        layout: of the weight.
        steps: of the grid of the layer's input; None for an input in floats.
        bits: of the accumulator, with its sign.
        tile: products that it adds up; None for all of an output.

    Raises:
        ConfigError: no weight but 0 fits, or the weight has zero points or blocks.
    """
    if steps is None or layout.kind == "embedding" or not spec.dtype.is_integer:
        return None
    if not spec.symmetric or isinstance(spec.granularity, PerBlock):
        what, remedy = (
            ("zero points", "symmetric_weights=True") if not spec.symmetric else ("blocks", "block_size=None")
        )
        raise ConfigError(
            f"{site}: accumulators of few bits are for weights without {what}; override({site!r}, {remedy})"
        )
    most = ((1 << (bits - 1)) - 1) // steps
    if most < 1:
        raise ConfigError(
            f"{site}: beside an input of {steps + 1} levels no weight but 0 fits accumulators of {bits} bits; give "
            f"accumulator_bits={steps.bit_length() + 1} or more, or inputs of fewer bits"
        )
    _, _, columns = layout.matrix_shape
    shared = layout.groups if layout.kind == "conv_transpose" else 1
    return SumLimit(most, columns, layout.shape[layout.input_axis] // shared, tile)


def limited_layers(sim: HasWeights, bits: int, tile: int | None) -> dict[str, tuple[Layer, SumLimit]]:
    """Return the layers of a sim whose sums have a limit, with it, by the site of the weight."""
    layers = [found.layer for found in graph_layers(sim.graph, sim.plan, frozen=())[0]]
    limits = {layer.site: (layer, _limit(layer, bits, tile)) for layer in layers}
    return {site: (layer, limit) for site, (layer, limit) in limits.items() if limit is not None}


def _limit(layer: Layer, bits: int, tile: int | None) -> SumLimit | None:
    return limit_of(layer.site, layer.spec, layer.layout, layer.input_steps, bits, tile)


def fitted_encoding(encoding: Encoding, weight: Array, layout: WeightLayout, spec: Spec, limit: SumLimit) -> Encoding:
    """Return an encoding with the scales that leave a weight [groups, outputs, K] the least error within a limit."""
    cells = layout.cells(encoding)[..., 0]
    lo, hi, start = encoding.dtype.lo, encoding.dtype.hi, encoding.scale.reshape(-1)
    nearest = (weight / start[cells][..., None]).round().clip(lo, hi)
    if limit.largest(nearest) <= limit.most:
        return encoding  # as for most layers with tiles

    def error_of(scales: Array) -> Array:
        own = scales[cells][..., None]
        codes = (limit.within(weight, own, lo, hi) / own).round().clip(lo, hi)
        return np.bincount(cells.reshape(-1), np.square(codes * own - weight).sum(-1).reshape(-1), start.size)

    best, least = start, np.full(start.shape, np.inf)
    for factors in (_GROWTH, _FINE):
        for at, factor in [(best if factors is _FINE else start, factor) for factor in factors]:
            tried = (at * np.float32(factor)).astype(np.float32)
            tried = tried if spec.scale_bits is None else round_up_to_digits(tried, spec.scale_bits)
            found = error_of(tried)
            if factors is _GROWTH and not (found < least).any():
                break
            best, least = np.where(found < least, tried, best), np.minimum(found, least)
    return replace(encoding, scale=best.astype(np.float32).reshape(encoding.scale.shape))


def accumulator_rows(sim: HasWeights, tile: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield what the accumulator of each layer needs: `site`, `products`, `input_levels`, `bound` and `bits`."""
    layers = limited_layers(sim, 32, tile)
    encodings, stored = sim.encodings, sim.stored_floats(list(layers))
    for site, (layer, limit) in layers.items():
        if site not in encodings or site not in stored or layer.input_steps is None:
            continue
        codes = encodings[site].quantize(stored[site]).astype(np.int64)
        bound = limit.largest(layer.layout.to_matrix(codes)) * layer.input_steps
        products = min(limit.columns, tile or limit.columns)
        steps = layer.input_steps + 1
        yield {"site": site, "products": products, "input_levels": steps, "bound": bound, "bits": bits_for(bound)}


def bits_for(bound: int) -> int:
    """Return the bits of the smallest signed accumulator that holds the numbers from -bound to bound."""
    return bound.bit_length() + 1


def require_room(sim: HasWeights, bits: int, tile: int | None) -> None:
    """Refuse layers that cannot have accumulators of some bits, and those that do not and whose encoding is frozen."""
    limited_layers(sim, bits, tile)
    require_fits(sim, bits, tile, [site for site, encoding in sim.encodings.items() if encoding.frozen])


def require_fits(sim: HasWeights, bits: int, tile: int | None, sites: Collection[str] | None = None) -> Report:
    """Return a report of the rows; refuse a layer, of some (frozen) sites or of all, that needs more bits."""
    rows = list(accumulator_rows(sim, tile))
    wide = [row for row in rows if row["bits"] > bits and (sites is None or row["site"] in sites)]
    if wide:
        named = ", ".join(f"{row['site']} ({row['bits']} bits)" for row in wide[:5])
        remedy = f"sim.unfreeze({wide[0]['site']!r})" if sites is not None else "give data that reaches them"
        why = "and are frozen" if sites is not None else "since no data has reached them"
        raise ConfigError(f"{named}: layers that do not fit accumulators of {bits} bits, {why}; {remedy}")
    return Report("Accumulators", rows, {"bits": max((row["bits"] for row in rows), default=0)})
