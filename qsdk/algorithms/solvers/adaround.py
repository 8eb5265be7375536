"""AdaRound: round each weight down or up so that the layer's output error is smallest."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from qsdk.algorithms.solvers import relaxation, seq_mse
from qsdk.algorithms.solvers.gptq import exact_limit, units_of
from qsdk.algorithms.solvers.heldout_check import Errors, HeldoutCheck, keep_nearest
from qsdk.algorithms.solvers.on_torch import cells_of_weights, on_torch
from qsdk.algorithms.solvers.output_chunks import solve_in_chunks
from qsdk.algorithms.solvers.outputs import SampledOutputs
from qsdk.algorithms.solvers.rounding import (
    SIDE_BY_SIDE,
    ErrorFeedback,
    Objective,
    WeightGrid,
    coordinate_descent,
    order_by_diagonal,
)
from qsdk.core.errors import ConfigError
from qsdk.core.layers.layer_problem import LayerProblem, Solution
from qsdk.core.numerics.encoding import Encoding

Method = Literal["coordinate_descent", "relaxed"]
METHODS = ("coordinate_descent", "relaxed")
Scales = Literal["search", "fixed"]
SCALES = ("search", "fixed")
#: default of `iterations`: sweeps of coordinate descent, steps of Adam
ITERATIONS = {"coordinate_descent": 5, "relaxed": 500}
#: samples per step of `relaxed` with `activation`, and its default damping
BATCH, DAMPING = 1024, 0.03


def solve(
    problem: LayerProblem,
    *,
    method: Method = "coordinate_descent",
    iterations: int | None = None,
    starts: int = 4,
    damping: float | None = None,
    scales: Scales = "fixed",
    shift_bias: bool = True,
    activation: bool = False,
) -> Solution:
    """Round each weight to the grid point below or above it, for the smallest output error of the layer.

    `coordinate_descent`: error feedback column by column, then descent on the rounding choices until none improves,
    from several orders of the columns. `relaxed`: the paper's soft rounding by gradient descent, hardened at the end.
    An output for which nearest rounding is better, on all data or on held-back data, keeps it.

    Args:
        problem: with the encoding whose grid is used.
        method: `coordinate_descent` or `relaxed`.
        iterations: sweeps of coordinate descent, at most; later ones gain little. Of `relaxed`: steps of Adam. None
            for 5 and 500.
        starts: number of column orders that `coordinate_descent` starts from; the first is that of the diagonal.
        damping: share of the mean second moment that is added to the diagonal, so that weights stay in directions that
            the data does not cover; None for 0.03, and more where rows are few (`rounding.damping_for`).
        scales: `fixed` keeps the encoding; `search` also rounds to the grids that `seq_mse` finds for this problem, and
            an output takes those where its error is lower, on all data and on held-back data.
        shift_bias: whether the layer's bias, if there is one, absorbs the mean error.
        activation: with `relaxed`, measure the error behind the layer's activation function, on samples of its inputs.

    Returns:
        The rounded weight, every element exactly on the encoding's grid, the encoding, and relative errors.

    Source: the problem is that of Nagel et al. 2020, AdaRound, sections 3.1 to 3.4, with its asymmetric
    reconstruction and activation function (equation 25); the fast solution is Frantar et al. 2023, GPTQ, section 3, in
    the form of Babai's nearest plane (Chen et al. 2025), kept between floor and ceil, then coordinate descent.
    """
    _require_options(problem, method, iterations, starts, damping, activation)
    if scales not in SCALES:
        raise ConfigError(f"unknown scales {scales!r} of adaround; choose one of {', '.join(SCALES)}")
    count = ITERATIONS[method] if iterations is None else iterations
    if activation and problem.activation is not None:
        return _solve_behind_activation(on_torch(problem), count, damping, shift_bias=shift_bias)
    options: dict[str, Any] = {"method": method, "count": count, "starts": starts, "damping": damping}
    options["search"] = scales == "search"
    return solve_in_chunks(problem, partial(_solve, **options, shift_bias=shift_bias))


def _solve(
    problem: LayerProblem,
    *,
    method: Method,
    count: int,
    starts: int,
    damping: float | None,
    search: bool,
    shift_bias: bool,
) -> Solution:
    """Solve a problem on torch by its second moments; `count` are sweeps or steps, for the rest see `solve`."""
    if (left := keep_nearest(problem)) is not None:
        return left
    check = HeldoutCheck.of(problem, shift_bias=shift_bias)
    objective = Objective.of(check.judged, damping)

    def rounded_on(encoding: Encoding) -> tuple[Tensor, Errors, Tensor, Errors]:
        """Return the rounded weight with its errors, and likewise the one that is rounded to nearest."""
        grid, full, plain = _choices(replace(problem, encoding=encoding))
        if method == "coordinate_descent":
            codes = _descended(objective, grid, count, starts)
        else:
            codes = _relaxed(objective.weight, grid, full, _gradient(objective, grid), count)
        rounded = (codes * grid.scale).mT
        errors, errors_of_plain = check.errors(rounded), check.errors(plain)
        worse = errors.worse(errors_of_plain)
        rounded, errors = torch.where(worse[..., None], plain, rounded), errors_of_plain.where(worse, errors)
        return rounded, errors, plain, errors_of_plain

    encoding = problem.encoding
    rounded, errors, plain, errors_of_plain = rounded_on(encoding)
    # ranges that were searched before suited inputs that nearest rounding had made noisy: too narrow for these
    other = (
        seq_mse.solve(problem, shift_bias=shift_bias).encoding if search and problem.spec.scales_are_free else encoding
    )
    if other != encoding:
        on_other, errors_of_other, *_ = rounded_on(other)
        cells = cells_of_weights(problem, encoding)
        stays = errors_of_other.worse(errors, units_of(cells))
        encoding = seq_mse.merge_encodings(encoding, other, cells[stays])
        rounded, errors = torch.where(stays[..., None], rounded, on_other), errors.where(stays, errors_of_other)
    return check.solution(encoding, rounded, plain, (errors, errors_of_plain))


def _choices(problem: LayerProblem) -> tuple[WeightGrid, WeightGrid, Tensor]:
    """Return the grid points around each weight of a problem on torch, all points, and the nearest values."""
    full, weight = WeightGrid.of(problem, problem.encoding, exact_limit(problem)), problem.weight.mT
    return full.around(weight), full, (full.nearest(weight) * full.scale).mT


def _relaxed(
    weight: Tensor, grid: WeightGrid, full: WeightGrid, gradient: Callable[[Tensor, int], Tensor], steps: int
) -> Tensor:
    """Return codes that gradient descent has chosen, cut to the limit of their sums, which it does not know."""
    codes = relaxation.relax(weight, grid, gradient, steps)
    return codes if full.limit is None else full.nearest(codes * full.scale)


def _solve_behind_activation(
    problem: LayerProblem,
    steps: int,
    damping: float | None,
    *,
    shift_bias: bool,
) -> Solution:
    """Solve a problem on torch by relaxation of the error behind its activation function, on samples."""
    if (left := keep_nearest(problem)) is not None:
        return left
    grid, full, plain = _choices(problem)
    outputs, weight = SampledOutputs.of(problem), problem.weight.mT
    gradient = sampled_gradient(outputs, weight, plain, DAMPING if damping is None else damping)
    rounded = (_relaxed(weight, grid, full, gradient, steps) * grid.scale).mT
    return _keep_if_better(outputs, problem, rounded, plain, shifts=shift_bias and problem.bias is not None)


def _require_options(
    problem: LayerProblem, method: str, iterations: int | None, starts: int, damping: float | None, activation: bool
) -> None:
    site = problem.site
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r} of adaround; choose one of {', '.join(METHODS)}")
    if activation and method == "coordinate_descent":
        raise ConfigError(
            "second moments, on which method='coordinate_descent' works, end in front of activation functions; "
            "choose method='relaxed' with activation=True"
        )
    if damping is not None and damping <= 0:
        raise ConfigError(f"{site}: a damping of {damping} is not positive")
    if starts < 1 or (iterations is not None and iterations < 0):
        raise ConfigError(f"{site}: {starts} starts and {iterations} iterations; give at least 1 and 0")


def _descended(objective: Objective, grid: WeightGrid, sweeps: int, starts: int) -> Tensor:
    """Return the best codes from several orders of the columns, as many side by side as is efficient."""
    weights, columns = objective.weight.numel(), objective.weight.shape[1]
    orders = _orders(objective.h, starts if columns > 1 else 1)
    best, lowest = None, None
    for some in torch.split(orders, max(SIDE_BY_SIDE // weights, 1)):
        several = objective.repeated(len(some))
        grids = WeightGrid.concatenate([grid] * len(some))
        codes, _ = ErrorFeedback.of(several, some.flatten(0, 1)).round(grids)
        result = coordinate_descent(several, grids, codes, sweeps)
        errors = several(result * grids.scale)
        for found, error in zip(result.chunk(len(some)), errors.chunk(len(some)), strict=True):
            if best is None or lowest is None:
                best, lowest = found, error
            else:
                best = torch.where((error < lowest)[:, None], found, best)
                lowest = torch.minimum(error, lowest)
    assert best is not None
    return best


def _keep_if_better(
    outputs: SampledOutputs, problem: LayerProblem, rounded: Tensor, plain: Tensor, *, shifts: bool
) -> Solution:
    """Return the rounding that is better behind the activation function where there is one, else the nearest one."""

    def judged(weight: Tensor) -> tuple[Tensor, Tensor]:
        given = outputs.given(weight)
        shift = outputs.shift(given) if shifts else torch.zeros_like(outputs.bias)
        return outputs.errors(given + shift[:, None]), shift

    before = outputs.errors(outputs.given(plain))
    (errors, shift), (plain_errors, plain_shift) = judged(rounded), judged(plain)
    falls = outputs.falls(plain_errors, errors)
    rounded = torch.where(falls[..., None], rounded, plain)
    shift = torch.where(falls, shift, plain_shift)
    after = outputs.relative(torch.where(falls[:, None], errors, plain_errors))
    result = shift if shifts else None
    return Solution(problem.encoding, rounded, outputs.relative(before), after, bias_shift=result)


def sampled_gradient(
    outputs: SampledOutputs, exact: Tensor, plain: Tensor, damping: float
) -> Callable[[Tensor, int], Tensor]:
    """Return the gradient of the error behind the activation function on some samples, in units of `_gradient`."""
    learning = outputs.learning.nonzero()[:, 0]
    generator = torch.Generator().manual_seed(0)
    per_row = outputs.errors(outputs.given(plain))[:, learning].sum((0, 2)).mean()
    unit = float(per_row) / plain.numel() or 1.0
    ridge = damping * float(outputs.x_quantized.square().mean())

    def gradient(weight: Tensor, step: int) -> Tensor:
        chosen = torch.randperm(len(learning), generator=generator, device=generator.device)[:BATCH]
        rows = learning[chosen.to(learning.device)]
        x = outputs.x_quantized[:, rows]
        given = x @ weight + outputs.bias[:, None]
        missed = outputs.function(given) - outputs.function(outputs.exact[:, rows])
        slope = x.mT @ (missed * outputs.function.derivative(given)) / len(rows)
        result: Tensor = (slope + ridge * (weight - exact)) * (2 / unit)
        return result

    return gradient


def _gradient(objective: Objective, grid: WeightGrid) -> Callable[[Tensor, int], Tensor]:
    """Return the gradient of the error, in units of the mean cost of rounding one weight to nearest."""
    nearest = grid.nearest(objective.weight) * grid.scale - objective.weight
    unit = float((nearest * (objective.h @ nearest)).mean()) or 1.0  # 1 for weights that are already on the grid
    return lambda weight, step: torch.baddbmm(objective.linear, objective.h, weight - objective.weight) * (2 / unit)


def _orders(h: Tensor, count: int) -> Tensor:
    """Return the order of the diagonal, and others near it, int64 [count, groups, K]."""
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(count - 1, *diagonal.shape, generator=generator, device=generator.device).to(diagonal)
    others = (diagonal.log() + noise / 2).argsort(dim=-1, descending=True, stable=True)
    return torch.cat([order_by_diagonal(h)[None], others])
