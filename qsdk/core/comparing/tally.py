"""Tallies: differences in steps of a grid or units in the last place of floats, and the noise of outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qsdk.core.arrays import Array
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding

_MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}  # bits
#: the float dtypes of sites that are casts
FLOATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: the note of a site that a run of the simulation does not reach, as where a branch depends on values
NOT_CAPTURED = "the simulation captured nothing here"
_DIGITS = 3  # of a difference in steps; less is float rounding of the values


@dataclass
class Tally:
    """The differences found at one site so far."""

    kind: str
    largest: float = 0.0
    total: float = 0.0
    differing: int = 0
    elements: int = 0
    note: str = ""
    sqnr_db: float | None = None  # of an output, from end to end
    remark: str = ""  # that is no fault

    def add(self, difference: Array) -> None:
        """Add the distances of some elements."""
        self.largest = max(self.largest, float(difference.max(initial=0)))
        self.total += float(difference.sum())
        self.differing += int(np.count_nonzero(difference))
        self.elements += difference.size

    def add_codes(self, got: Array, simulated: Array, encoding: Encoding, tensor_type: str) -> None:
        """Add the distances between codes and those of simulated values, in steps of the grid."""
        wanted = encoding.quantize(simulated)
        self.add(in_units(lsb(got.astype(wanted.dtype), wanted), simulated, encoding, tensor_type))

    def add_values(self, got: Array, simulated: Array, encoding: Encoding, tensor_type: str) -> None:
        """Add the distances between dequantized values in steps; a rounding that a runtime left out is part of one."""
        step = affine.align(encoding.scale, simulated.shape, encoding.axis, encoding.block_size)
        steps = np.abs(got.astype(np.float64) - simulated.astype(np.float64)) / step
        # either side rounds what it dequantizes to its float type
        whole, larger = np.rint(steps), np.fmax(np.abs(got), np.abs(simulated))
        rounded_in = tensor_type if tensor_type in FLOATS else "float32"
        with np.errstate(invalid="ignore"):
            steps = np.where(np.abs(steps - whole) * step <= last_place(larger, rounded_in), whole, steps)
        exact = np.round(np.where(np.isnan(steps), np.inf, steps), _DIGITS)
        self.add(in_units(exact, simulated, encoding, tensor_type))

    def fail(self, note: str) -> None:
        """Count the site as wrong whatever its numbers are; the first reason stays."""
        self.largest, self.note = float("inf"), self.note or note

    def row(self, site: str) -> dict[str, Any]:
        """Return the site's row of the report."""
        mean = self.total / self.elements if self.elements else float("inf" if self.note else 0)
        row = {"site": site, "kind": self.kind, "max_lsb": self.largest, "mean_lsb": mean, "elements": self.elements}
        row |= {} if self.sqnr_db is None else {"sqnr_db": self.sqnr_db}
        row |= {"remark": self.remark} if self.remark else {}
        return {**row, "note": self.note} if self.note else row


def lsb(left: Array, right: Array) -> Array:
    """Return the distance of two arrays of codes in steps of their grid."""
    ordered, other = _ordered(left), _ordered(right)
    if left.dtype.itemsize < 8:
        return np.asarray(np.abs(ordered - other))
    # float64 has as many values as int64: those of different signs are further apart than an int64 can say
    apart = np.abs(ordered.astype(np.float64)) + np.abs(other.astype(np.float64))
    with np.errstate(over="ignore"):
        return np.where((ordered < 0) == (other < 0), np.abs(ordered - other), apart)


def float_lsb(left: Array, right: Array) -> Array:
    """Return the distance of two arrays of computed floats in units of the last place.

    Below 1/1024 of the tensor's largest value, more than one is counted in units of that size: an op that cancels,
    such as GELU far below zero, is no more exact in float32 either.
    """
    largest = float(np.abs(right.astype(np.float32)).max(initial=0))
    steps = lsb(left, right)
    if not 0 < largest < np.inf:
        return steps
    unit = np.ldexp(1.0, int(np.floor(np.log2(largest))) - 10 - _MANTISSA[right.dtype.name])
    with np.errstate(invalid="ignore"):  # infinities, which only the representation distinguishes
        coarse = np.rint(np.abs(left.astype(np.float64) - right.astype(np.float64)) / unit)
    return np.where(np.isfinite(coarse), np.minimum(steps, np.maximum(coarse, 1)), steps)


def _ordered(codes: Array) -> npt.NDArray[np.int64]:
    """Return codes as integers whose difference counts representable values."""
    if np.issubdtype(codes.dtype, np.integer) or codes.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return codes.astype(np.int64)
    bits = codes.view(f"i{codes.dtype.itemsize}").astype(np.int64)
    magnitude = (1 << (8 * codes.dtype.itemsize - 1)) - 1
    return np.where(bits < 0, -(bits & magnitude), bits)


def in_units(steps: Array, values: Array, encoding: Encoding, tensor_type: str) -> Array:
    """Return distances of codes in steps, or in units in the last place of a narrow float type where those are wider.

    One rounding to bfloat16 that falls to the other side moves a value by a unit, which may be several steps.
    """
    if tensor_type not in FLOATS or not steps.any():
        return steps
    step = affine.align(encoding.scale, values.shape, encoding.axis, encoding.block_size)
    unit = last_place(np.abs(values) + steps * step, tensor_type)
    return np.asarray(steps / np.maximum(np.ceil(unit / step), 1))


def last_place(values: Array, float_type: str) -> Array:
    """Return the unit in the last place of values in a float type."""
    exponent = np.frexp(np.abs(values.astype(np.float64)))[1] - 1
    return np.asarray(np.ldexp(1.0, exponent - _MANTISSA[float_type]))


def decibels_of(signal: float, noise: float) -> float:
    """Return the ratio of two powers in dB; infinite where nothing differs."""
    if noise == 0:
        return float("inf")
    return float(10 * np.log10(signal / noise)) if signal else float("-inf")


class Noise:
    """The power of a signal and of the difference from it, and the largest single difference."""

    def __init__(self) -> None:
        self.signal = self.difference = self.largest = 0.0
        self.elements = 0
        self.invented = 0  # values that are not finite where the wanted ones are

    def add(self, got: Array, wanted: Array) -> None:
        """Add the values of a batch, of the model and of the simulation."""
        values, exact = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
        with np.errstate(invalid="ignore"):  # infinite in both
            off = np.abs(values - exact)
        self.signal += float((exact**2).sum())
        self.difference += float((off**2).sum())
        self.largest = max(self.largest, float(np.nan_to_num(off, nan=np.inf).max(initial=0)))
        self.elements += exact.size
        self.invented += int(np.sum(np.isfinite(exact) & ~np.isfinite(values)))

    def decibels(self) -> float:
        """Return the ratio of both powers in dB."""
        return decibels_of(self.signal, self.difference)


class OutputNoises:
    """The noise of each output of a model by itself: none hides behind a larger one, or behind integers."""

    def __init__(self) -> None:
        self.by_name: dict[str, Noise] = {}
        self._floats: set[str] = set()

    def add(self, got: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
        """Add the outputs of a batch, of the model and of the simulation."""
        for name, right in wanted.items():
            kind = np.asarray(right).dtype.kind
            self._floats.update({name} if kind in "fV" else ())
            if kind in "fViub":
                self.by_name.setdefault(name, Noise()).add(got[name], right)

    def ratios(self) -> dict[str, float]:
        """Return float output -> its ratio in dB; integers have no power."""
        return {name: noise.decibels() for name, noise in self.by_name.items() if name in self._floats}

    def worst(self) -> tuple[str, float] | None:
        """Return the output with the lowest ratio in dB, and that; None where no output is float."""
        return min(self.ratios().items(), key=lambda item: -np.inf if np.isnan(item[1]) else item[1], default=None)

    def decibels(self) -> float | None:
        """Return the ratio of the worst output in dB; None where no output is float."""
        worst = self.worst()
        return None if worst is None else worst[1]
