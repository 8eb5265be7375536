"""Where bits buy nothing: widths that a file rounds up, and floats that outweigh everything else in it."""

from collections import Counter
from collections.abc import Sequence

from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.planning.plan import Decision, Plan

_DOMINANT = 0.5  # of the stored bytes
_NAMED = 3  # tensors in a sentence


def where_bits_buy_nothing(plan: Plan) -> list[str]:
    """Return a sentence for each width of weights that takes no byte less than a wider one, and for dominant floats.

    Bytes are those of stored tensors, without scales.

    Example:
        >>> from qsdk.core.numerics.dtypes import dtype_named
        >>> from qsdk.core.numerics.spec import Spec
        >>> weight = Decision("a:weight", "Conv", "weight", Spec(dtype_named("int3")), "", shape=(8,))
        >>> where_bits_buy_nothing(Plan({"a:weight": weight}))
        ['int3 is stored in int4 (1 weight): weight="int4" takes no byte more']
    """
    stored = [d for d in plan.decisions.values() if d.kind in ("weight", "bias") and _elements(d)]
    return [*_odd_widths(stored), *_dominant_floats(stored)]


def _odd_widths(stored: Sequence[Decision]) -> list[str]:
    dtypes = [d.spec.dtype for d in stored if d.spec is not None and d.quantized and d.kind == "weight"]
    odd = Counter((x.name, x.container) for x in dtypes if x.bits < dtype_named(x.container).bits)
    return [
        f'{name} is stored in {container} ({count} weight{"s" * (count > 1)}): weight="{container}" takes no byte more'
        for (name, container), count in odd.items()
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
    bits = dtype_named(decision.tensor_type if spec is None else spec.dtype.container).bits
    return _elements(decision) * bits / 8
