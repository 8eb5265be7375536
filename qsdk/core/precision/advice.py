"""Advice: the sites that one scale serves badly, with the cheapest remedy for each, and where bits buy nothing.

Signal-to-quantization-noise ratios (SQNR) are those of a site's own float values, in decibels, on a sample of one pass.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.numerics.dtypes import DTYPES, tensor_dtype_named, uint16
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.ranges.ranges import Range, encoding_from_range
from qsdk.core.report import EXACT_DB, Report
from qsdk.core.site import owner_of, port_of

FloatArray = npt.NDArray[np.float32]
#: what is wrong at a site, the first remedy to try, and the SQNR after it
Remedy = tuple[str, str, float]
_LARGEST = 32_768  # values kept per site
_CHANNELS = 8_192  # longer axes are no channels
_ENOUGH = 20.0  # dB; sites below it are listed
_NARROW = 8.0  # a member of a tie this many times narrower than its class loses three bits
_OUTLIER = 16.0  # a channel this many times larger than the median one ...
_LEVELS = 8.0  # ... which is left fewer steps of the grid than this
_DOMINANT = 0.5  # of the stored bytes
_NAMED = 3  # tensors in a sentence
_EXACT_BITS = 7  # of weights in kernels that add pairs of products in 16 bits


@dataclass
class SiteSample:
    """The sample of one site.

    Attributes:
        low: the smallest value.
        high: the largest value.
        values: at most 32,768 of the values, taken evenly.
        channels: axis -> largest magnitude per index, for the axes that may be channels (the second and the last).
        elements: number of values of the largest batch.
    """

    low: float = np.inf
    high: float = -np.inf
    values: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    channels: dict[int, FloatArray] = field(default_factory=dict)
    elements: int = 0

    def add(self, x: npt.NDArray[np.floating]) -> None:
        """Add the values of one batch; those that are not finite are left out."""
        flat = x.reshape(-1)
        if flat.size == 0:
            return
        finite = flat[np.isfinite(flat)]
        if finite.size == 0:
            return
        self.low, self.high = min(self.low, float(finite.min())), max(self.high, float(finite.max()))
        self.elements = max(self.elements, flat.size)
        self.values = _thinned(np.concatenate([self.values, _thinned(finite)]))
        if finite.size == flat.size:
            self._add_channels(np.abs(x))

    def _add_channels(self, magnitudes: npt.NDArray[np.floating]) -> None:
        for axis in {1, magnitudes.ndim - 1} if magnitudes.ndim > 1 else ():
            if 1 < magnitudes.shape[axis] <= _CHANNELS:
                others = tuple(i for i in range(magnitudes.ndim) if i != axis)
                largest = magnitudes.max(axis=others).astype(np.float32)
                before = self.channels.get(axis)
                fits = before is not None and before.shape == largest.shape
                self.channels[axis] = np.maximum(before, largest) if before is not None and fits else largest


def _thinned(values: npt.NDArray[np.floating]) -> FloatArray:
    """Return at most `_LARGEST` values, evenly spaced. An odd step visits more than one channel."""
    step = -(-values.size // _LARGEST)
    return values[:: step + (step > 1 and step % 2 == 0)].astype(np.float32)


def noise_to_signal(values: FloatArray, encoding: Encoding) -> float:
    """Return the power of the quantization error over the power of the values; 0 where there is no signal."""
    exact = values.astype(np.float64)
    power = float(np.square(exact).sum())
    error = float(np.square(encoding.fake_quantize(values).astype(np.float64) - exact).sum())
    return error / power if power > 0.0 else 0.0


def decibels(noise: float) -> float:
    """Return a noise-to-signal ratio as SQNR; at most 200 dB."""
    return EXACT_DB if noise <= 1e-20 else -10.0 * float(np.log10(noise))


def advise(
    plan: Plan, encodings: Mapping[str, Encoding], samples: Mapping[str, SiteSample], noise: Mapping[str, float]
) -> Report:
    """Return the activations that their encoding serves badly, worst first, each with the cheapest remedy.

    Args:
        plan: of the sim.
        encodings: site -> encoding, ties resolved.
        samples: site -> sample of its float values.
        noise: site -> power of its noise at the model's outputs.

    Returns:
        Rows `site`, `dtype`, `sqnr_db` (of its own values), `share` (of all noise at the outputs), `finding`, `remedy`
        (to paste into the config), `sqnr_db_then`, the largest share first.
    """
    rows, total = list[dict[str, Any]](), sum(noise.values()) or 1.0
    for site, sample in samples.items():
        decision = plan.decisions.get(site)
        if decision is None or site not in encodings or not sample.values.size or decision.passes_through:
            continue
        now = decibels(noise_to_signal(sample.values, encodings[site]))
        remedy = _remedy_for(plan, decision, encodings[site], sample, now)
        if remedy is not None:
            row = {"site": site, "dtype": encodings[site].dtype.name, "sqnr_db": now}
            row["share"] = noise.get(site, 0.0) / total
            rows.append(row | dict(zip(("finding", "remedy", "sqnr_db_then"), remedy, strict=True)))
    rows.sort(key=lambda row: (-row["share"], row["sqnr_db"]))
    return Report("Precision advice", rows, {"sites": len(rows)})


def _remedy_for(plan: Plan, decision: Decision, encoding: Encoding, sample: SiteSample, now: float) -> Remedy | None:
    spec = decision.spec
    assert spec is not None
    outlier = _outlier_channel(sample, encoding)
    if outlier is not None:
        return _widen(decision, spec, encoding, sample, outlier)
    if now >= _ENOUGH:
        return None
    held = Range(np.array([sample.low], np.float32), np.array([sample.high], np.float32))
    own = encoding_from_range(held, replace(spec, fixed_range=None))
    alone, what = decibels(noise_to_signal(sample.values, own)), "its values spread too widely for one scale"
    if bool((encoding.scale > _NARROW * own.scale).all()):
        what = (
            f"its range {sample.low:.3g}..{sample.high:.3g} shares a scale with {float(encoding.low[0]):.3g}.."
            f"{float(encoding.high[0]):.3g} of {decision.encoding_site}"
        )
        joint = _joint_of(plan, decision)
        if alone >= _ENOUGH and joint is not None:
            return what, f"config.override({joint!r}, tie=False)", alone
    return _widen(decision, spec, encoding, sample, what)


def _widen(decision: Decision, spec: Spec, encoding: Encoding, sample: SiteSample, what: str) -> Remedy:
    owner = owner_of(decision.site)
    held = Range(encoding.low, encoding.high)
    if spec.dtype.bits < 16:
        wide = encoding_from_range(held, replace(spec, dtype=uint16, symmetric=False, fixed_range=None))
        after = decibels(noise_to_signal(sample.values, wide))
        if after >= _ENOUGH:
            return what, f'config.override({owner!r}, activation="uint16")', after
    rounded = sample.values.astype(np.float16).astype(np.float64)
    error = float(np.square(rounded - sample.values).sum())
    power = float(np.square(sample.values.astype(np.float64)).sum())
    after = decibels(error / power) if np.isfinite(error) else 0.0
    return what, f'config.override({owner!r}, activation="float16")', after


def _joint_of(plan: Plan, decision: Decision) -> str | None:
    """Return the owner of the Concat that ties a site to wider ones."""
    home = decision.encoding_site
    members = [d for d in plan.decisions.values() if d.encoding_site == home and d.op_type == "Concat"]
    return owner_of(members[0].site) if members else None


def _outlier_channel(sample: SiteSample, encoding: Encoding) -> str | None:
    """Return the channel that widens the grid for all others. SQNR does not show it, since its own power is large."""
    for axis, largest in sample.channels.items():
        middle, top = float(np.median(largest)), int(largest.argmax())
        levels = middle / float(encoding.scale.max())
        if middle > 0.0 and largest[top] > _OUTLIER * middle and levels < _LEVELS:
            ratio = float(largest[top]) / middle
            return (
                f"channel {top} of axis {axis} is {ratio:.0f} times larger than the median channel, to which it leaves "
                f"{levels:.1f} steps"
            )
    return None


def where_bits_buy_nothing(plan: Plan, encodings: Mapping[str, Encoding]) -> list[str]:
    """Return a remark for each width of weights that takes no byte less than a wider one, and for dominant floats.

    Bytes are those of stored tensors, without scales; `export` has those of the whole file.
    """
    stored = [d for d in plan.decisions.values() if d.kind in ("weight", "bias") and _elements(d)]
    return [*wide_containers(encodings), *_dominant_floats(stored)]


def wide_containers(encodings: Mapping[str, Encoding]) -> list[str]:
    """Return a remark for each dtype of weights whose values are stored in wider ones.

    Seven bits are no waste: they keep 8-bit kernels exact on processors where eight overflow.
    """
    sites = Counter(e.dtype for site, e in encodings.items() if port_of(site) == "weight")
    return [
        f"{dtype.name} (weights: {count}) is stored in {dtype.container}: no byte less than {dtype.container}, "
        "which is more exact"
        for dtype, count in sites.items()
        if dtype.is_integer and dtype.bits < DTYPES[dtype.container].bits and dtype.bits != _EXACT_BITS
    ]


def _dominant_floats(stored: Sequence[Decision]) -> list[str]:
    in_float = sorted((d for d in stored if not d.quantized and not d.dynamic), key=lambda d: -_bytes(d))
    quantized = any(d.quantized for d in stored)
    total, of_floats = sum(map(_bytes, stored)), sum(map(_bytes, in_float))
    if not quantized or of_floats < _DOMINANT * total:
        return []
    named = "; ".join(f"{d.site} ({_bytes(d):,.0f} bytes: {d.reason})" for d in in_float[:_NAMED])
    more = f"; and {len(in_float) - _NAMED} more" if len(in_float) > _NAMED else ""
    share = f"{of_floats / total:.0%} of the stored bytes are in float"
    return [f"{share}, so that fewer bits elsewhere save little: {named}{more}"]


def _elements(decision: Decision) -> int:
    """Return the number of values of a stored tensor, 0 where its shape is not known."""
    count = 1
    for length in decision.shape or (0,):
        count *= length if isinstance(length, int) else 0
    return count


def _bytes(decision: Decision) -> float:
    spec = decision.spec
    bits = tensor_dtype_named(decision.tensor_type if spec is None else spec.dtype.container).bits
    return _elements(decision) * bits / 8
