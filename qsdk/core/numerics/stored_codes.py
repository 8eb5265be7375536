"""Whether a weight's own float dtype keeps the codes that a solver chooses for it."""

from qsdk.core.numerics.spec import Spec

_DIGITS = {"float16": 11, "bfloat16": 8}  # significant binary digits; all codes fit those of float32 and float64


def reason_codes_get_lost(spec: Spec, dtype: str) -> str:
    """Return why codes of a spec do not survive that their values are stored in a float dtype; "" where they do.

    With d binary digits, a value `(q - zero_point) * scale` is stored with an error below
    `abs(q - zero_point) * scale / 2**d`. Rounding it again yields q as long as that is at most half a step.
    """
    digits = _DIGITS.get(dtype)
    if digits is None or not spec.dtype.is_integer:
        return ""
    lo, hi = int(spec.dtype.lo), int(spec.dtype.hi)
    levels = max(-lo, hi) if spec.symmetric else hi - lo
    if levels <= 2 ** (digits - 1):
        return ""
    grid = f"{'symmetric' if spec.symmetric else 'asymmetric'} {spec.dtype.name}"
    return f"{dtype} has {digits} binary digits, too few for the codes of {grid}; convert the model to float32"
