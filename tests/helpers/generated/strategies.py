"""Arrays, scales, zero points and encodings for the arithmetic tests, random but chosen to hurt; graphs built by hand.

`make_case` draws from a NumPy generator (many arrays for one session of a runtime); `cases` wraps it for hypothesis.
Nothing here calls `qsdk.core.numerics.affine`: a case spreads its scales over x by `np.repeat`, so that it can
judge `align`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from qsdk import DType, Encoding
from qsdk.core.graph.graph import Graph, Op, Tensor
from qsdk.core.numerics.dtypes import DTYPES

GRANULARITIES = ("tensor", "channel", "block")
FILLINGS = ("random", "ties", "extreme")
STANDARD_INTEGERS = tuple(DTYPES[n] for n in ("int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16"))
ODD_INTEGERS = tuple(d for d in DTYPES.values() if d.is_integer and d.narrows_container)
INTEGERS = (*STANDARD_INTEGERS, *ODD_INTEGERS)
FLOAT8 = tuple(d for d in DTYPES.values() if d.name.startswith("float8") and d.kind == "minifloat")
MINIFLOATS = (*FLOAT8, DTYPES["float4e2m1"])
#: Written by hand, so that a wrong entry in qsdk's own table is found.
ML_DTYPE = {
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float4e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = float(np.finfo(np.float32).max)
SMALLEST = 2.0**-149
EXTREMES = np.array(
    [
        *(np.inf, -np.inf, LARGEST, -LARGEST, 1e30, -1e30, 2.0**31, -(2.0**31), 3e9, -3e9, 2.0**24 + 2, 65504.0),
        *(SMALLEST, -SMALLEST, 2.0**-127, 1.1754944e-38, 1e-30, -1e-30, 0.0, -0.0, 0.5, -0.5, 1.5, 2.5),
    ],
    np.float32,
)


@dataclass(frozen=True, eq=False)
class Case:
    """An array and the encoding to judge on it."""

    x: np.ndarray
    encoding: Encoding

    def spread(self, parameter: np.ndarray) -> np.ndarray:
        """A scale or zero point repeated to one value per element of x."""
        axis, size = self.encoding.axis, self.encoding.block_size
        if axis is None:
            return np.full(self.x.shape, parameter[0])
        axis %= self.x.ndim
        if size is not None:
            repeated = np.repeat(parameter, size, axis)
            return repeated[tuple(slice(n) for n in self.x.shape)]
        repeated = np.repeat(parameter, self.x.size // len(parameter))
        moved = self.x.shape[axis], *self.x.shape[:axis], *self.x.shape[axis + 1 :]
        return np.moveaxis(repeated.reshape(moved), 0, axis)

    def __repr__(self) -> str:
        e = self.encoding
        return f"Case({e.dtype}, axis={e.axis}, block={e.block_size}, s={e.scale!r}, z={e.zero_point!r}, x={self.x!r})"


def make_case(
    rng: np.random.Generator,
    dtype: DType,
    granularity: str,
    filling: str,
    *,
    symmetric: bool | None = None,
    shape: Sequence[int] | None = None,
    wild_scales: bool = False,
) -> Case:
    """Draw one case; `symmetric` None leaves the zero point to chance, `wild_scales` goes to float32's ends."""
    if shape is None:
        shape = rng.integers(1, 8, rng.integers(1, 5)).tolist()
    axis = None if granularity == "tensor" else int(rng.integers(-len(shape), len(shape)))
    size = int(rng.integers(1, shape[axis] + 1)) if axis is not None and granularity == "block" else None
    wanted = _parameter_shape(shape, axis, size)
    scale = _scales(rng, wanted, wild_scales)
    zero_point = np.zeros(wanted, np.int32)
    if dtype.is_integer and not (rng.integers(2) if symmetric is None else symmetric):
        zero_point = rng.integers(dtype.lo, dtype.hi + 1, wanted).astype(np.int32)
    empty = Case(np.zeros(shape, np.float32), Encoding(dtype, scale, zero_point, axis, size))
    return Case(_fill(rng, empty, filling), empty.encoding)


def _parameter_shape(shape: Sequence[int], axis: int | None, size: int | None) -> tuple[int, ...]:
    if axis is None:
        return (1,)
    if size is None:
        return (shape[axis],)
    wanted = list(shape)
    wanted[axis] = -(-shape[axis] // size)
    return tuple(wanted)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], wild: bool) -> np.ndarray:
    exponents = rng.integers(-20, 7, shape)
    if wild:
        exponents = rng.choice([-149, -130, -126, -100, -20, 0, 20, 100, 127], shape)
    mantissas = np.where(rng.integers(2, size=shape) == 1, 1.0, rng.uniform(1.0, 2.0, shape))
    return np.maximum(np.ldexp(mantissas, exponents), SMALLEST).astype(np.float32)


def _fill(rng: np.random.Generator, case: Case, filling: str) -> np.ndarray:
    shape, dtype = case.x.shape, case.encoding.dtype
    scale = case.spread(case.encoding.scale).astype(np.float64)
    zero_point = case.spread(case.encoding.zero_point)
    if filling == "extreme":
        return rng.choice(EXTREMES, shape)
    if dtype.is_integer:
        steps = rng.uniform(dtype.lo - 3, dtype.hi + 4, shape) - zero_point
        if filling == "ties":
            steps = np.rint(2 * steps) / 2
    elif filling == "ties":
        grid = minifloat_values(dtype)
        steps = rng.choice(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2]), shape)
    else:
        steps = rng.choice([-1.0, 1.0], shape) * np.exp2(rng.uniform(-20, np.log2(dtype.hi) + 1, shape))
    with np.errstate(over="ignore"):
        return (steps * scale).astype(np.float32)


def minifloat_values(dtype: DType) -> np.ndarray:
    """Every finite value of a minifloat, ascending, in float64."""
    patterns = np.arange(1 << dtype.bits, dtype=np.uint8).view(ML_DTYPE[dtype.name]).astype(np.float64)
    return np.unique(patterns[np.isfinite(patterns)])


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: Sequence[DType] = INTEGERS,
    granularities: Sequence[str] = GRANULARITIES,
    fillings: Sequence[str] = FILLINGS,
    **options: Any,
) -> Case:
    """Cases of rank 1 to 4 with up to a few hundred elements."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4), label="shape")
    dtype = draw(st.sampled_from(dtypes), label="dtype")
    granularity = draw(st.sampled_from(granularities), label="granularity")
    filling = draw(st.sampled_from(fillings), label="filling")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    return make_case(rng, dtype, granularity, filling, shape=shape, **options)


def finite_ranges() -> st.SearchStrategy[tuple[float, float]]:
    """Pairs low <= high of float32, anywhere."""
    numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair)))


def same_bits(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether two float32 arrays hold the same bits; every NaN counts as the same."""
    left, right = np.asarray(left), np.asarray(right)
    assert left.dtype == right.dtype == np.float32
    assert left.shape == right.shape
    both_nan = np.isnan(left) & np.isnan(right)
    return bool(((left.view(np.uint32) == right.view(np.uint32)) | both_nan).all())


def nearest_float(exact: Fraction, digits: int, least_exponent: int, limit: int) -> float:
    """The float nearest to an exact rational, half to even, by integer arithmetic alone; too large is infinite.

    The floats have `digits` significant binary digits, are multiples of 2**least_exponent, and less than 2**limit.
    """
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    quantum = Fraction(2) ** max(exponent - digits + 1, least_exponent)
    rounded = round(exact / quantum) * quantum
    if abs(rounded) >= Fraction(2) ** limit:
        return float("inf") if exact > 0 else float("-inf")
    return float(rounded)


def to_float32(exact: Fraction) -> float:
    """The float32 nearest to an exact rational."""
    return nearest_float(exact, 24, -149, 128)


def exact_quantize(x: float, scale: float, zero_point: int, lo: int, hi: int) -> int:
    """QuantizeLinear in exact arithmetic, with the one float32 rounding that the quotient has."""
    if np.isinf(x):
        return hi if x > 0 else lo
    quotient = to_float32(Fraction(x) / Fraction(scale))
    if np.isinf(quotient):
        return hi if quotient > 0 else lo
    return min(max(round(Fraction(quotient)) + zero_point, lo), hi)


def exact_dequantize(q: int, scale: float, zero_point: int) -> float:
    """DequantizeLinear in exact arithmetic with one float32 rounding (differences below 2**24)."""
    return to_float32((q - zero_point) * Fraction(scale))


class GraphBuilder:
    """Builds a `Graph` tensor by tensor; every method gives the id of what it adds."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.inputs: list[int] = []

    def input(self, name: str = "x", shape: Sequence[int | str] = (1, 3, 8, 8), dtype: str = "float32") -> int:
        self.inputs.append(self._add(Tensor(name, dtype, tuple(shape), f"{name}:input")))
        return self.inputs[-1]

    def stored(self, site: str | None, shape: Sequence[int], *, value: Any = None, dtype: str = "float32") -> int:
        array = None if value is None else np.asarray(value, dtype)
        return self._add(Tensor(site or "constant", dtype, tuple(shape), site, True, array))

    def op(
        self,
        type: str,
        inputs: Sequence[int | None],
        site: str | None = None,
        shape: Sequence[int] = (1, 4, 8, 8),
        **attributes: Any,
    ) -> int:
        result = self._add(Tensor(f"t{len(self.tensors)}", "float32", tuple(shape), site))
        self.ops.append(Op(type, tuple(inputs), (result,), attributes, f"n{len(self.ops)}"))
        return result

    def conv(self, x: int, owner: str, *, outputs: int = 4, bias: bool = False, site: bool = True) -> int:
        operands = [x, self.stored(f"{owner}:weight", (outputs, 3, 3, 3))]
        if bias:
            operands.append(self.stored(f"{owner}:bias", (outputs,)))
        return self.op("Conv", operands, f"{owner}:output" if site else None, (1, outputs, 8, 8))

    def relu(self, x: int, owner: str) -> int:
        return self.op("Relu", [x], f"{owner}:output", self.tensors[x].shape or ())

    def graph(self, *outputs: int) -> Graph:
        return Graph(self.tensors, self.ops, self.inputs, outputs)

    def _add(self, tensor: Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1
