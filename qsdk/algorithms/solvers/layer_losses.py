"""The error of a layer's output as a function of the deviation of some columns of its weight, the others fixed."""

from typing import Protocol

import torch
from torch import Tensor

from qsdk.core.layers.layer_problem import LayerProblem

#: Columns of a weight matrix: a run of them, or the indices of any.
Columns = slice | Tensor


class Loss(Protocol):
    """A function of the deviation of some columns, without constant terms."""

    def __call__(self, deviation: Tensor) -> Tensor:
        """Return the error of each output, [..., groups, outputs], for a deviation [..., groups, outputs, columns]."""


class Quadratic:
    """The loss `d H d' + 2 d L'`, with H and L of the columns.

    Attributes:
        h: [groups, columns, columns].
        linear: [groups, outputs, columns].
    """

    def __init__(self, h: Tensor, linear: Tensor, weight_product: Tensor | None = None) -> None:
        """Store H and L, and the product of the columns' weight with H if it is known already."""
        self.h, self.linear, self._weight_product = h, linear, weight_product

    def __call__(self, deviation: Tensor) -> Tensor:
        """Return the error of each output."""
        product = deviation * self.h if deviation.shape[-1] == 1 else deviation @ self.h
        return self.of_product(deviation, product)

    def of_product(self, deviation: Tensor, product: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Return the same from a given `deviation H`, for all outputs or for the given indices."""
        linear = self.linear if outputs is None else self.linear[:, outputs]
        return torch.add(product, linear, alpha=2).mul_(deviation).sum(-1)

    def weight_product(self, weight: Tensor) -> Tensor:
        """Return `W H` for the columns' weight."""
        return weight @ self.h if self._weight_product is None else self._weight_product

    def separable(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss without products of different columns: `sum of diagonal * (W~ - target)^2`.

        Returns:
            The target, [groups, outputs, columns], and the diagonal, [groups, columns].
        """
        diagonal = self.h.diagonal(dim1=-2, dim2=-1)
        return weight - self.linear / diagonal.clamp(min=torch.finfo(torch.float32).tiny)[:, None], diagonal


class SquaredLosses:
    """The losses `||WX - W~X~||^2`, computed from second moments.

    Attributes:
        errors: of each output with the present deviation, [groups, outputs].
        deviation: of the whole weight, [groups, outputs, K].
        now: value of the last returned loss with it, [groups, outputs].
    """

    now: Tensor

    def __init__(self, problem: LayerProblem, deviation: Tensor) -> None:
        """Start from a deviation of the whole weight, which is changed later."""
        self.deviation = deviation
        self._problem, self._h, linear = problem, problem.g_quantized, problem.linear_term()
        product = deviation @ self._h
        self._drifts = problem.drift()
        self.errors: Tensor = torch.add(product, linear, alpha=2).mul_(deviation).sum(-1) + self._drifts
        self._slope = product.add_(linear)  # per column: the drift and the errors of all columns

    def of(self, columns: Columns) -> Quadratic:
        """Return the loss of the deviation of these columns, with that of all others fixed."""
        if self._are_all(columns):
            self._loss = Quadratic(self._h, self._problem.linear_term(), self._problem.weight_product)
            self.now = self.errors - self._drifts
        else:
            own, inner = self.deviation[..., columns], self._h[:, columns][:, :, columns]
            product = own @ inner
            self._loss = Quadratic(inner, self._slope[..., columns] - product)
            self.now = self._loss.of_product(own, product)
        return self._loss

    def fix_columns(self, columns: Columns, deviation: Tensor, losses: Tensor | None = None) -> None:
        """Fix the deviation of these columns."""
        result = self._loss(deviation) if losses is None else losses
        if self._are_all(columns):
            self.errors, self.deviation = result + self._drifts, deviation
            return
        self.errors += result - self.now
        moved = deviation - self.deviation[..., columns]
        self.deviation[..., columns] = deviation
        later = slice(columns.stop, None) if isinstance(columns, slice) else slice(None)
        self._slope[..., later].baddbmm_(moved, self._h[:, columns][..., later])

    def _are_all(self, columns: Columns) -> bool:
        return isinstance(columns, slice) and columns.stop - columns.start == self.deviation.shape[-1]


class Absolute:
    """The loss `sum |e + d X~'|` over rows of X~, with e the error of all other columns.

    Attributes:
        x: [groups, columns, rows].
        error: [groups, outputs, rows].
    """

    def __init__(self, x: Tensor, error: Tensor) -> None:
        self.x, self.error = x, error

    def __call__(self, deviation: Tensor) -> Tensor:
        """Return the error of each output."""
        return torch.matmul(deviation, self.x).add_(self.error).abs_().sum(-1)


class AbsoluteLosses:
    """The losses `sum |WX - W~X~|`, computed from samples of the inputs."""

    def __init__(self, problem: LayerProblem, deviation: Tensor) -> None:
        """Start from a deviation of the whole weight, with the samples of the problem."""
        assert problem.samples is not None
        x, x_quantized = (rows.mT for rows in problem.samples)
        self._x, self._deviation = x_quantized, deviation.clone()
        self._error = problem.weight @ (x_quantized - x) + deviation @ x_quantized

    def now(self) -> Tensor:
        """Return the error of each output with the present deviation, [groups, outputs]."""
        errors: Tensor = self._error.abs().sum(-1)
        return errors

    def of(self, columns: Columns) -> Absolute:
        """Return the loss of the deviation of these columns, with that of all others fixed."""
        x = self._x[:, columns]
        self._error -= self._deviation[..., columns] @ x
        self._deviation[..., columns] = 0
        return Absolute(x, self._error)

    def fix_columns(self, columns: Columns, deviation: Tensor, losses: Tensor | None = None) -> None:
        """Fix the deviation of these columns."""
        self._deviation[..., columns] = deviation
        self._error = self._error + deviation @ self._x[:, columns]
