"""The error of a layer's output as a function of the deviation of some columns of its weight, the others given."""

from typing import Protocol

import torch
from torch import Tensor

from qsdk.core.layer_problem import LayerProblem


class Loss(Protocol):
    """A function of the deviation of some columns; constants that no choice changes are left out."""

    def __call__(self, deviation: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Give the error of each output, [..., groups, outputs], for a deviation [..., groups, outputs, columns].

        With indices of `outputs` the deviation is of these alone.
        """


class ColumnLosses(Protocol):
    """Losses of one block of columns after the other."""

    def of(self, columns: Tensor) -> Loss:
        """The loss of these columns' deviation, given those of all others; their own so far is forgotten."""

    def settle(self, columns: Tensor, deviation: Tensor) -> None:
        """Take these columns' deviation as given from now on."""


class Quadratic:
    """`d H d' + 2 d L'`, H and L those of the columns.

    Attributes:
        h: [groups, columns, columns].
        linear: [groups, outputs, columns].
    """

    def __init__(self, h: Tensor, linear: Tensor) -> None:
        self.h, self.linear = h, linear

    def __call__(self, deviation: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Give the error of each output."""
        linear = self.linear if outputs is None else self.linear[:, outputs]
        return torch.matmul(deviation, self.h).add_(linear, alpha=2).mul_(deviation).sum(-1)

    def separable(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What is left without the products of different columns: `sum of diagonal * (W~ - target)^2`, and a constant.

        Returns:
            The target, [groups, outputs, columns], and the diagonal, [groups, columns].
        """
        diagonal = self.h.diagonal(dim1=-2, dim2=-1)
        return weight - self.linear / diagonal.clamp(min=torch.finfo(torch.float32).tiny)[:, None], diagonal


class SquaredLosses:
    """`||WX - W~X~||^2`, on second moments."""

    def __init__(self, problem: LayerProblem, deviation: Tensor) -> None:
        """Start from a deviation of the whole weight."""
        self._h, self._linear, self._deviation = problem.g_quantized, problem.linear_term(), deviation.clone()

    def of(self, columns: Tensor) -> Quadratic:
        """The loss of these columns' deviation, given those of all others."""
        if len(columns) == self._deviation.shape[-1]:
            return Quadratic(self._h, self._linear)
        self._deviation[..., columns] = 0
        # what the columns' own error meets: the input's drift and the errors of all other columns
        linear = self._linear[..., columns] + self._deviation @ self._h[:, :, columns]
        return Quadratic(self._h[:, columns][:, :, columns], linear)

    def settle(self, columns: Tensor, deviation: Tensor) -> None:
        """Take these columns' deviation as given from now on."""
        self._deviation[..., columns] = deviation


class Absolute:
    """`sum |e + d X~'|` over rows of X~, e the error of all other columns.

    Attributes:
        x: [groups, columns, rows].
        error: [groups, outputs, rows].
    """

    def __init__(self, x: Tensor, error: Tensor) -> None:
        self.x, self.error = x, error

    def __call__(self, deviation: Tensor, outputs: Tensor | None = None) -> Tensor:
        """Give the error of each output."""
        error = self.error if outputs is None else self.error[:, outputs]
        return torch.matmul(deviation, self.x).add_(error).abs_().sum(-1)


class AbsoluteLosses:
    """`sum |WX - W~X~|`, on samples of the inputs."""

    def __init__(self, problem: LayerProblem, deviation: Tensor) -> None:
        """Start from a deviation of the whole weight, with the samples of the problem."""
        assert problem.samples is not None
        x, x_quantized = (rows.mT for rows in problem.samples)
        self._x, self._deviation = x_quantized, deviation.clone()
        self._error = problem.weight @ (x_quantized - x) + deviation @ x_quantized

    def now(self) -> Tensor:
        """The error of each output with the deviation as it is, [groups, outputs]."""
        errors: Tensor = self._error.abs().sum(-1)
        return errors

    def of(self, columns: Tensor) -> Absolute:
        """The loss of these columns' deviation, given those of all others."""
        x = self._x[:, columns]
        self._error -= self._deviation[..., columns] @ x
        self._deviation[..., columns] = 0
        return Absolute(x, self._error)

    def settle(self, columns: Tensor, deviation: Tensor) -> None:
        """Take these columns' deviation as given from now on."""
        self._deviation[..., columns] = deviation
        self._error = self._error + deviation @ self._x[:, columns]
