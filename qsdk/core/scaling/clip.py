"""Clipping weights: narrower ranges where they bring a block's part of the output closer (Lin et al. 2024, AWQ)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.bias import with_room_for
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.exact_sums import with_exact_sums
from qsdk.core.numerics.spec import PerBlock, Spec
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of
from qsdk.core.scaling.edits import input_axis, is_linear
from qsdk.core.scaling.layers import ObservedLayer, observed_layer
from qsdk.core.scaling.scalings import FloatArray
from qsdk.core.scaling.search import ObservedRegions
from qsdk.core.sims.state import SimState, owns_encoding


@dataclass(frozen=True)
class ClippedWeight:
    """The encoding of a weight with narrower ranges.

    Attributes:
        encoding: the new one.
        error_before: relative error of its layer's output with the full range.
        error_after: the same with this encoding.
    """

    encoding: Encoding
    error_before: float
    error_after: float


_STEPS, _LEAST = 20, 0.5  # shares of the range that are tried, and the smallest of them
Array = npt.NDArray[np.floating]


def clip_all(seen: ObservedRegions, state: SimState, stored: Callable[[str], Array | None]) -> dict[str, ClippedWeight]:
    """Return a narrower encoding by site, for each weight of a layer that improves by it.

    Args:
        seen: the factors, which the stored tensors contain by now, and the observed activations.
        state: of the sim, calibrated with these factors.
        stored: returns the values at the site of a weight or bias, None where the model stores nothing. A site may be
            part of a parameter (the queries' rows of a packed projection), which no name of the graph leads to.
    """
    graph, result = seen.graph, {}
    for index in range(len(graph.ops)):
        layer = observed_layer(graph, index, seen.specs, seen.blocks) if is_linear(graph, index) else None
        if layer is None or layer.tensor not in seen.observers:
            continue
        site = graph.tensors[layer.root].site or ""
        decision, now = state.plan.decisions.get(site), state.own.get(site)
        if decision is None or now is None or now.frozen or not owns_encoding(decision) or site in result:
            continue
        weight = stored(site)
        if weight is None:
            continue
        rows = seen.observers[layer.tensor].rows
        scaled = rows * seen.scalings.activation_factors(layer.tensor, input_axis(graph, index))
        better = clip(layer, np.asarray(weight, np.float32), np.asarray(scaled, np.float32))
        if better is not None and better.error_after < better.error_before:
            wide = with_exact_sums(better.encoding, weight)
            result[site] = replace(better, encoding=_with_room(site, wide, state, stored))
    return result


def _with_room(site: str, encoding: Encoding, state: SimState, stored: Callable[[str], Array | None]) -> Encoding:
    """Return the encoding, wide enough for the int32 biases that depend on it."""
    for bias, decision in state.plan.decisions.items():
        if decision.bias_of is not None and decision.bias_of[1] == site and decision.bias_of[0] in state.own:
            spec = state.plan.decisions[site].spec
            bits = None if spec is None else spec.scale_bits
            values = stored(bias)
            if values is not None:
                encoding = with_room_for(values, state.own[decision.bias_of[0]], encoding, bits)
    return encoding


def clip(layer: ObservedLayer, weight: FloatArray, rows: FloatArray) -> ClippedWeight | None:
    """Return the encoding whose ranges have the least error of each block's part of the output.

    Args:
        layer: a plain one, with a quantized weight.
        weight: as it is stored, scaled.
        rows: its inputs, float32 [n, in], scaled.

    Returns:
        The encoding with its errors; None where a layer has another form.
    """
    spec = layer.weight_spec
    if spec is None or not layer.plain or weight.ndim != 2:
        return None
    observed = range_of(weight, spec)
    second = rows.T.astype(np.float64) @ rows / max(len(rows), 1)
    best, least = np.ones(observed.low.shape, np.float32), None
    for step in range(_STEPS):
        share = np.float32(1 - (1 - _LEAST) * step / _STEPS)
        errors = _errors(layer, spec, weight, _encoding(observed, spec, np.full_like(best, share)), second)
        if least is None:
            least = errors
            continue
        best, least = np.where(errors < least, share, best), np.minimum(errors, least)
    energy = float(np.einsum("oi,ij,oj->", _matrix(layer, weight), second, _matrix(layer, weight), optimize=True))
    plain, chosen = (_encoding(observed, spec, share) for share in (np.ones_like(best), best))
    first, last = (_whole(layer, weight, encoding, second) / max(energy, 1e-30) for encoding in (plain, chosen))
    return ClippedWeight(chosen, first, last) if last < first else ClippedWeight(plain, first, first)


def _encoding(observed: Range, spec: Spec, share: FloatArray) -> Encoding:
    return encoding_from_range(Range(observed.low * share, observed.high * share), spec)


def _matrix(layer: ObservedLayer, weight: Array) -> Array:
    """Return the weight as [out, in]."""
    return weight if layer.channel_axis == 0 else weight.T


def _whole(layer: ObservedLayer, weight: FloatArray, encoding: Encoding, second: Array) -> float:
    off = _matrix(layer, encoding.fake_quantize(weight) - weight).astype(np.float64)
    return float(((off @ second) * off).sum())


def _errors(layer: ObservedLayer, spec: Spec, weight: FloatArray, encoding: Encoding, second: Array) -> Array:
    """Return the error of the outputs that each scale affects, of the scales' shape."""
    off = _matrix(layer, encoding.fake_quantize(weight) - weight).astype(np.float64)
    granularity = spec.granularity
    if isinstance(granularity, PerBlock) and granularity.axis % 2 == layer.input_axis:
        size = granularity.size
        blocks = range(0, off.shape[1], size)
        parts = [
            ((off[:, i : i + size] @ second[i : i + size, i : i + size]) * off[:, i : i + size]).sum(1) for i in blocks
        ]
        stacked = np.stack(parts, axis=1)
        return stacked if layer.channel_axis == 0 else stacked.T
    by_output: Array = ((off @ second) * off).sum(1)
    if encoding.scale.size == by_output.size:
        return by_output.reshape(encoding.scale.shape)
    return np.full(encoding.scale.shape, by_output.sum())
