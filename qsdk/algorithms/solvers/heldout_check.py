"""The check for a rounded weight: its errors on all data and on held-back data, beside those of nearest rounding."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsdk.algorithms.solvers.on_torch import scales_of_weights
from qsdk.algorithms.solvers.rounding import WeightGrid, rounded_
from qsdk.core.layers.layer_problem import LayerProblem, Solution
from qsdk.core.numerics.encoding import Encoding

#: Weights of an embedding whose error is computed at once.
ROWS_OF_TABLE = 1 << 20


@dataclass(frozen=True)
class Errors:
    """The error of each row of a weight, [groups, rows].

    Attributes:
        all_data: over all data.
        held_back: over held-back data; empty where nothing was held back.
    """

    all_data: Tensor
    held_back: tuple[Tensor, ...]

    def worse(self, than: "Errors", unit: Tensor | None = None) -> Tensor:
        """Return where the error is higher than another, on all data or on held-back data, bool [groups, rows].

        Rows of one `unit`, int64 [groups, rows], are compared by their sum.
        """
        result = torch.zeros_like(self.all_data, dtype=torch.bool)
        for mine, other in zip((self.all_data, *self.held_back), (than.all_data, *than.held_back), strict=True):
            gain = other - mine
            if unit is not None:
                flat = unit.flatten()
                gain = torch.zeros(gain.numel(), device=gain.device).index_add_(0, flat, gain.flatten())[unit]
            result |= gain < 0
        return result

    def where(self, test: Tensor, other: "Errors") -> "Errors":
        """Return these errors where a test of rows holds, and others elsewhere."""
        held_back = (torch.where(test, *pair) for pair in zip(self.held_back, other.held_back, strict=True))
        return Errors(torch.where(test, self.all_data, other.all_data), tuple(held_back))


@dataclass(frozen=True)
class HeldoutCheck:
    """A problem with the statistics of all data, and the criteria for solutions.

    Attributes:
        data: the problem, on torch, held-back data included.
        judged: the same, without the mean error if the bias absorbs that.
        held_back: the problem with held-back data alone, likewise; None where nothing was held back.
        shifts: whether the bias absorbs the mean error.
    """

    data: LayerProblem
    judged: LayerProblem
    held_back: LayerProblem | None
    shifts: bool

    @classmethod
    def of(cls, problem: LayerProblem, *, shift_bias: bool) -> "HeldoutCheck":
        """Return the check for a problem on torch; the bias is only shifted where there is one."""
        data, held_back = with_held_back(problem), problem.held_back
        if not (shift_bias and problem.bias is not None and data.mean is not None):
            return cls(data, data, held_back, shifts=False)
        return cls(data, data.centered(), held_back and held_back.centered(), shifts=True)

    def errors(self, found: Tensor) -> Errors:
        """Return the errors of a solution W~, float32 [groups, rows, K]."""
        held_back = () if self.held_back is None else (self.held_back.errors(found),)
        return Errors(self.judged.errors(found), held_back)

    def solution(self, encoding: Encoding, rounded: Tensor, plain: Tensor, errors: tuple[Errors, Errors]) -> Solution:
        """Return a rounded weight, float32 [groups, rows, K], as a solution, with the errors of it and of `plain`."""
        shift = self.data.mean_error(rounded) if self.shifts else None
        before = self.data.errors(plain) if self.shifts else errors[1].all_data
        return Solution(
            encoding,
            rounded,
            self.data.relative(before),
            self.judged.relative(errors[0].all_data),
            bias_shift=shift,
        )


def with_held_back(problem: LayerProblem) -> LayerProblem:
    """Return the problem with the statistics of all data, the held-back data included."""
    other = problem.held_back
    if other is None or not other.rows:
        return problem
    count = problem.count + other.count

    def mean(one: Tensor | None, two: Tensor | None) -> Tensor | None:
        return None if one is None or two is None else (problem.count * one + other.count * two) / count

    return replace(
        problem,
        h=problem.g_quantized + other.g_quantized,
        x_quantized=None,
        drifted=None,
        roots=None,
        linear=problem.linear_term + other.linear_term,
        drifts=problem.drift + other.drift,
        rows=problem.rows + other.rows,
        count=count,
        mean=mean(problem.mean, other.mean),
        mean_quantized=mean(problem.mean_quantized, other.mean_quantized),
        held_back=None,
    )


def keep_nearest(problem: LayerProblem) -> Solution | None:
    """Return the solution for a problem that rounding cannot improve (a frozen encoding, an embedding); else None.

    In an embedding, each weight is an output of its own. Nothing can make up for its error, so nearest is best.
    """
    if problem.layout.kind == "embedding":
        error = _error_of_embedding(problem)
    elif problem.encoding.frozen:
        grid = WeightGrid.of(problem, problem.encoding)
        error = problem.relative_error((grid.nearest(problem.weight.mT) * grid.scale).mT)
    else:
        return None
    note = "its encoding is frozen" if problem.encoding.frozen else "each weight is read by itself: nearest is best"
    return Solution(problem.encoding, None, error, error, note=note)


def _error_of_embedding(problem: LayerProblem) -> float:
    """Return the relative error of the nearest codes, some rows of the table at a time: tables are large."""
    (scale, zero_point), dtype = scales_of_weights(problem, problem.encoding), problem.encoding.dtype
    weight, h, linear, drifts = problem.weight, problem.g_quantized, problem.linear_term, problem.drift
    error = energy = 0.0
    step = max(1, ROWS_OF_TABLE // weight[0].numel())
    for rows in (slice(start, start + step) for start in range(0, len(weight), step)):
        ends = dtype.lo - zero_point[rows], dtype.hi - zero_point[rows]
        nearest = rounded_(weight[rows] / scale[rows], dtype, *ends) * scale[rows]
        d, drift = nearest - weight[rows], float(drifts[rows].sum())
        error += float(((d * h[rows] + 2 * linear[rows]) * d).sum()) + drift
        energy += float(((weight[rows] * h[rows] - 2 * linear[rows]) * weight[rows]).sum()) + drift
    return max(error, 0.0) / energy if energy > 0 else 0.0
