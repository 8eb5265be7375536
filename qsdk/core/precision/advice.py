"""Advice: the sites that one scale serves badly, and the cheapest remedy for each.

Signal-to-quantization-noise ratios (SQNR) are those of a site's own float values, in decibels, on a sample of one pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from qsdk.core.numerics.dtypes import uint16
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.precision.samples import FloatArray, SiteSample
from qsdk.core.ranges.ranges import Range, encoding_from_range
from qsdk.core.report import EXACT_DB, Report
from qsdk.core.site import owner_of

_ENOUGH = 20.0  # dB; sites below it are listed
_NARROW = 8.0  # a member of a tie this many times narrower than its class loses three bits
_OUTLIER = 16.0  # a channel this many times larger than the median one ...
_LEVELS = 8.0  # ... which is left fewer steps of the grid than this


@dataclass(frozen=True)
class PrecisionAdvice:
    """A site that is served badly: the problem, the first remedy to try, and the SQNR after it."""

    what: str
    remedy: str
    after: float


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
    rows, total = [], sum(noise.values()) or 1.0
    for site, sample in samples.items():
        decision = plan.decisions.get(site)
        if decision is None or site not in encodings or not sample.values.size or decision.passes_through:
            continue
        now = decibels(noise_to_signal(sample.values, encodings[site]))
        result = _advice_for(plan, decision, encodings[site], sample, now)
        if result is not None:
            row: dict[str, Any] = {"site": site, "dtype": encodings[site].dtype.name, "sqnr_db": now}
            row["share"] = noise.get(site, 0.0) / total
            rows.append(row | {"finding": result.what, "remedy": result.remedy, "sqnr_db_then": result.after})
    return Report(
        "Precision advice", sorted(rows, key=lambda row: (-row["share"], row["sqnr_db"])), {"sites": len(rows)}
    )


def _advice_for(
    plan: Plan, decision: Decision, encoding: Encoding, sample: SiteSample, now: float
) -> PrecisionAdvice | None:
    spec = decision.spec
    assert spec is not None
    outlier = _outlier_channel(sample, encoding)
    if outlier is not None:
        return _widen(decision, spec, encoding, sample, outlier)
    if now >= _ENOUGH:
        return None
    own = encoding_from_range(_range_of(sample), replace(spec, fixed_range=None))
    alone, what = decibels(noise_to_signal(sample.values, own)), "its values spread too widely for one scale"
    if _is_much_narrower(own, encoding):
        what = (
            f"its range {sample.low:.3g}..{sample.high:.3g} shares a scale with {float(encoding.low[0]):.3g}.."
            f"{float(encoding.high[0]):.3g} of {decision.encoding_site}"
        )
        joint = _joint_of(plan, decision)
        if alone >= _ENOUGH and joint is not None:
            return PrecisionAdvice(what, f"config.override({joint!r}, tie=False)", alone)
    return _widen(decision, spec, encoding, sample, what)


def _widen(decision: Decision, spec: Spec, encoding: Encoding, sample: SiteSample, what: str) -> PrecisionAdvice:
    owner = owner_of(decision.site)
    held = Range(encoding.low, encoding.high)
    if spec.dtype.bits < 16:
        wide = encoding_from_range(held, replace(spec, dtype=uint16, symmetric=False, fixed_range=None))
        after = decibels(noise_to_signal(sample.values, wide))
        if after >= _ENOUGH:
            return PrecisionAdvice(what, f'config.override({owner!r}, activation="uint16")', after)
    rounded = sample.values.astype(np.float16).astype(np.float64)
    error = float(np.square(rounded - sample.values).sum())
    power = float(np.square(sample.values.astype(np.float64)).sum())
    after = decibels(error / power) if np.isfinite(error) else 0.0
    return PrecisionAdvice(what, f'config.override({owner!r}, activation="float16")', after)


def _range_of(sample: SiteSample) -> Range:
    return Range(np.array([sample.low], np.float32), np.array([sample.high], np.float32))


def _is_much_narrower(own: Encoding, held: Encoding) -> bool:
    return bool((held.scale > _NARROW * own.scale).all())


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
