"""The choice of weights that take fewer bits, so that a model fits into a number of bytes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LowerableWeight:
    """A weight that may take fewer bits.

    Attributes:
        site: its name.
        saves: bytes that this saves in a file.
        noise: at the model's outputs with fewer bits.
    """

    site: str
    saves: int
    noise: float


def choose_lowered(weights: Sequence[LowerableWeight], bytes_to_save: int) -> list[str] | None:
    """Return the sites to lower; None if all together save too little.

    Those that cost least noise per byte come first, or those that cost least noise: whichever ends with less. What then
    turns out not to be needed is taken back, the noisiest first.

    Examples:
        >>> weights = [LowerableWeight("a", 10, 1.0), LowerableWeight("b", 100, 2.0), LowerableWeight("c", 100, 9.0)]
        >>> choose_lowered(weights, 105), choose_lowered(weights, 90), choose_lowered(weights, 300)
        (['a', 'b'], ['b'], None)
    """
    useful = [weight for weight in weights if weight.saves > 0]
    if sum(weight.saves for weight in useful) < bytes_to_save:
        return None
    per_byte = sorted(useful, key=lambda weight: weight.noise / weight.saves)
    alone = sorted(useful, key=lambda weight: weight.noise)
    choices = [_enough(ranked, bytes_to_save) for ranked in (per_byte, alone)]
    best = min(choices, key=lambda chosen: sum(weight.noise for weight in chosen))
    return [weight.site for weight in weights if weight in best]


def _enough(ranked: Sequence[LowerableWeight], bytes_to_save: int) -> list[LowerableWeight]:
    """Return the first weights that save enough, without those that are not needed."""
    chosen: list[LowerableWeight] = []
    saved = 0
    for weight in ranked:
        if saved >= bytes_to_save:
            break
        chosen.append(weight)
        saved += weight.saves
    for weight in sorted(chosen, key=lambda weight: -weight.noise):
        if saved - weight.saves >= bytes_to_save:
            chosen.remove(weight)
            saved -= weight.saves
    return chosen
