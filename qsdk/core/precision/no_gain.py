"""Where bits buy nothing: widths that a file rounds up, and floats that outweigh everything else in it."""

from collections import Counter
from collections.abc import Mapping, Sequence

from qsdk.core.numerics.dtypes import DTYPES, tensor_dtype_named
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.site import port_of

_DOMINANT = 0.5  # of the stored bytes
_NAMED = 3  # tensors in a sentence
_EXACT_BITS = 7  # of weights in kernels that add pairs of products in 16 bits


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
