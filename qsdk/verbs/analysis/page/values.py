"""The values at sites beside their encodings: bounded samples, clipped shares, and their own noise."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.precision.advice import decibels, noise_to_signal
from qsdk.core.precision.samples import SiteSample
from qsdk.verbs.analysis.page.facts import ValueFacts
from qsdk.verbs.doors.choose import Sim, door_of
from qsdk.verbs.doors.door import Forward

Array = npt.NDArray[Any]


def stored_values(sim: Sim, sites: Collection[str], encodings: Mapping[str, Encoding]) -> dict[str, ValueFacts]:
    """Return the values of the stored tensors at sites, all of them compared with their range.

    Args:
        sim: of either side.
        sites: of weights and biases.
        encodings: of the sim.
    """
    return {site: _value_facts(x, x, encodings.get(site)) for site, x in sim.stored_floats(sites).items() if np.size(x)}


def computed_values(
    sim: Sim,
    data: Iterable[Any],
    sites: Collection[str],
    encodings: Mapping[str, Encoding],
    forward: Forward | None,
    progress: bool,
) -> dict[str, ValueFacts]:
    """Return samples of the float values at computed sites, from one pass over the data.

    Args:
        sim: of either side.
        data: batches.
        sites: to be looked at.
        encodings: of the sim.
        forward: calls the module on a batch.
        progress: show a progress bar.
    """
    samples: defaultdict[str, SiteSample] = defaultdict(SiteSample)
    door_of(sim).visit(
        data,
        lambda site, x: samples[site].add(x),
        title="values",
        sites=sites,
        forward=forward,
        progress=progress,
    )
    found = {}
    for site, sample in samples.items():
        encoding = encodings.get(site)
        if sample.values.size:
            # a sample has lost its shape, so nothing but one scale for all of it can be compared
            one = encoding if encoding is not None and encoding.axis is None else None
            found[site] = _value_facts(sample.values, np.array([sample.low, sample.high], np.float32), one)
    return found


def _value_facts(x: Array, ends: Array, encoding: Encoding | None) -> ValueFacts:
    """Return the facts about values.

    Args:
        x: to be compared with the encoding; in their own shape where that has an axis.
        ends: what the smallest and the largest value are taken from.
        encoding: None where the values stay float.
    """
    values = np.asarray(x, np.float32)
    sample = SiteSample()
    sample.add(values)
    low, high = float(np.min(ends)), float(np.max(ends))
    if encoding is None:
        return ValueFacts(low, high, sample.values)
    noise = decibels(noise_to_signal(values, encoding))
    return ValueFacts(low, high, sample.values, _clipped(values, encoding), noise)


def _clipped(x: Array, encoding: Encoding) -> float:
    """Return the share of values that are more than half a step beyond the ends of the grid."""

    def aligned(per_scale: Array) -> Array:
        return np.asarray(affine.align(per_scale, x.shape, encoding.axis, encoding.block_size))

    half = aligned(encoding.scale) / 2 if encoding.dtype.is_integer else 0.0
    beyond = (x > aligned(encoding.high) + half) | (x < aligned(encoding.low) - half)
    return float(np.mean(beyond))
