"""The sentence at the top of a page: precision, size, noise, and which layers cause it."""

from collections import Counter
from collections.abc import Sequence

from qsdk.core.numerics.dtypes import tensor_dtype_named
from qsdk.verbs.analysis.page.facts import LayerFacts, SiteFacts

MOST = 0.8  # of the noise
_NEARLY_ALL = 0.9  # of the elements, or of the sites


def sentence(layers: Sequence[LayerFacts], times_smaller: float, sqnr_db: float | None, noise: str) -> str:
    """Return the sentence.

    Args:
        layers: of the model.
        times_smaller: the file is than with its weights in float32.
        sqnr_db: of the outputs; None without data.
        noise: what it counts, in words.
    """
    label = precision_label(layers)
    if label == FLOAT:
        return "Nothing is quantized."
    parts = [label, f"a file {times_smaller:.1f} times smaller than in float32"]
    if sqnr_db is not None:
        parts.append(f"outputs {sqnr_db:.1f} dB above {noise} (SQNR)")
    text = ", ".join(parts)
    text = text[0].upper() + text[1:]
    worst = worst_layers(layers)
    if not worst:
        return f"{text}."
    few = f"one layer of {len(layers)} causes" if len(worst) == 1 else f"{len(worst)} of {len(layers)} layers cause"
    return f"{text}; {few} {MOST:.0%} of the noise.".replace("%", " %")


FLOAT = "float"


def precision_label(layers: Sequence[LayerFacts]) -> str:
    """Return the precision in the field's short form, such as `W4A8`; with `mostly` where it is mixed."""
    sites = [site for layer in layers for site in layer.sites]
    weights, activations = _bits([s for s in sites if s.kind == "weight"]), _bits([s for s in sites if not s.stored])
    if not weights and not activations:
        return FLOAT
    label = _letter("W", weights, "float weights, ") + _letter("A", activations, ", float activations")
    counts = [Counter(weights), Counter(activations)]
    mixed = any(max(count.values()) < _NEARLY_ALL * count.total() for count in counts if count)
    return f"mostly {label}" if mixed else label


def _letter(letter: str, bits: Counter[int], without: str) -> str:
    return f"{letter}{bits.most_common(1)[0][0]}" if bits else without


def _bits(sites: Sequence[SiteFacts]) -> Counter[int]:
    """Return the bits of quantized sites, and what they count for: elements of weights, or one each."""
    found: Counter[int] = Counter()
    for site in sites:
        dtype = tensor_dtype_named(site.dtype)
        if dtype.is_quantized:
            found[dtype.bits] += max(site.elements, 1)
    return found


def worst_layers(layers: Sequence[LayerFacts]) -> list[LayerFacts]:
    """Return the fewest layers that cause most of the noise, worst first; none without data."""
    ranked = sorted(layers, key=lambda layer: -(layer.share or 0.0))
    found: list[LayerFacts] = []
    reached = 0.0
    for layer in ranked:
        if not layer.share:
            break
        found.append(layer)
        reached += layer.share
        if reached >= MOST:
            break
    return found
