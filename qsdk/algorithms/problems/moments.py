"""Moments of the float and quantized inputs of layers that read one input, streamed batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsdk.algorithms import ranks

#: Rows per matrix product: enough to run at full speed.
FOLD = 256
#: Upper bound of pending elements: 64 MiB of float32.
CHUNK = 1 << 24
#: Matrices of at least so many columns are summed as lower triangles of blocks: 9/16 of the work.
WIDE, BLOCKS = 256, 8


@dataclass(frozen=True)
class Sums:
    """The sums over a set of rows, for layers whose weights W are stacked.

    Attributes:
        h: X~X~', float32 [groups, K, K]; None where `x_quantized` replaces it.
        linear: `W (X~ - X) X~'`, float32 [groups, outputs, K]; None where `drifted` replaces it.
        drifts: `||W (X - X~)||^2`, float32 [groups, outputs]; None likewise.
        mean: of X, float32 [groups, K].
        mean_quantized: of X~, likewise.
        rows: number of rows.
        count: number of rows that they represent.
        x_quantized: the rows of X~, float32 [groups, rows, K], where they are few; multiplied by `roots`.
        drifted: W (X~ - X) for these rows, float32 [groups, rows, outputs], multiplied likewise.
        roots: the root of the number of rows that each represents, float32 [rows]; None for ones.
    """

    h: Tensor | None
    linear: Tensor | None
    drifts: Tensor | None
    mean: Tensor
    mean_quantized: Tensor
    rows: int
    count: float
    x_quantized: Tensor | None = None
    drifted: Tensor | None = None
    roots: Tensor | None = None


class Moments:
    """Streaming sums over rows of X and X~; `finish` adds up those of all ranks.

    With D = X - X~ they are X~X~', and either D X~' and DD', or the products of W with these, computed from the outputs
    WD, which is cheaper where there are no more outputs than inputs. Summing D, not X, keeps small differences of the
    inputs, which would be lost in the difference of large sums.
    """

    def __init__(self, weight: Tensor, *, second: bool = True, few: int | None = None) -> None:
        """Start at zero.

        Args:
            weight: of all layers that read the input, float32 [groups, outputs, K].
            second: whether to gather second moments, or means only.
            few: fewer rows than this are kept instead of sums; None for K.
        """
        self._weight, self._second = weight, second
        groups, outputs, k = weight.shape
        self._by_outputs = outputs <= k
        self._few = k if few is None else few
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._weights: list[float] = []  # of the pending rows
        self._waiting = 0
        self._folded: list[Tensor] = []
        self._sums = torch.zeros(2, groups, k, dtype=torch.float64, device=weight.device)  # of X~ and D
        self._counts = torch.zeros(2, dtype=torch.float64, device=weight.device)

    def add(self, x: Tensor, x_quantized: Tensor, weight: float = 1.0) -> bool:
        """Add rows [groups, rows, K] of X and X~ that represent `weight` rows each; return whether all are finite."""
        difference = x - x_quantized
        sums = torch.stack([rows.sum(1, dtype=torch.float32) for rows in (x_quantized, difference)])
        if not sums.isfinite().all():
            return False
        self._sums.add_(sums, alpha=weight)
        self._counts += self._counts.new_tensor([x.shape[1], weight * x.shape[1]])
        if self._second and x.shape[1]:
            self._pending.append((x_quantized, difference))
            self._weights.append(weight)
            self._waiting += x.shape[1]
            groups, _, k = self._weight.shape
            enough = FOLD if self._folded else max(FOLD, self._few)
            if self._waiting >= enough or self._waiting * groups * k > CHUNK:
                self._fold()
        return True

    def finish(self) -> Sums:
        """Return the sums over all rows of all ranks."""
        ranks.all_reduce_sum([self._sums, self._counts])
        rows, count = int(self._counts[0]), float(self._counts[1])
        mean_quantized = self._sums[0] / max(count, 1)
        mean = mean_quantized + self._sums[1] / max(count, 1)
        means = (mean.float(), mean_quantized.float(), rows, count)
        if not self._second:
            return Sums(None, None, None, *means)
        if not self._folded and rows < self._few and ranks.world_size() == 1:
            return self._of_few_rows(*means)
        self._fold()
        ranks.all_reduce_sum(self._folded)
        h = _fill_upper(self._folded[0])
        if self._by_outputs:
            linear, drifts = self._folded[1], self._folded[2].float()
        else:
            linear = -(self._weight @ self._folded[1])
            drifts = ((self._weight @ _fill_upper(self._folded[2])) * self._weight).sum(-1)
        return Sums(h, linear, drifts, *means)

    def _of_few_rows(self, mean: Tensor, mean_quantized: Tensor, rows: int, count: float) -> Sums:
        zeros, (groups, _, k) = self._weight.new_zeros, self._weight.shape
        parts, weights = [(zeros(groups, 0, k),) * 2, *self._pending], [1.0, *self._weights]
        x, difference = _scaled(parts, weights)
        ones = [zeros(1, part.shape[1], 1) + 1 for part, _ in parts]
        roots = None if rows == count else _scaled([(one, one) for one in ones], weights)[0].flatten()
        drifted = difference @ -self._weight.mT
        return Sums(None, None, None, mean, mean_quantized, rows, count, x, drifted, roots)

    def _fold(self) -> None:
        """Multiply the pending rows into the sums, so that memory does not grow with the data."""
        groups, outputs, k = self._weight.shape
        if not self._folded:
            zeros = self._weight.new_zeros
            square = (groups, k, k)
            shapes = [square, (groups, outputs, k), (groups, outputs)] if self._by_outputs else [square] * 3
            self._folded = [zeros(shape) for shape in shapes]
            if self._by_outputs:
                self._folded[2] = self._folded[2].double()
        if not self._pending:
            return
        weight = self._weights[0] if len(set(self._weights)) == 1 else 1.0
        x, difference = _scaled(self._pending, [each / weight for each in self._weights])
        self._pending, self._weights, self._waiting = [], [], 0
        _add_gram(self._folded[0], x, weight)
        if not difference.any():
            return
        if self._by_outputs:
            out = difference @ self._weight.mT
            self._folded[1].baddbmm_(out.mT, x, alpha=-weight)
            self._folded[2] += out.square_().sum(1).mul_(weight)
        else:
            self._folded[1].baddbmm_(difference.mT, x, alpha=weight)
            _add_gram(self._folded[2], difference, weight)


def _scaled(parts: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the rows concatenated, times the roots of their weights, so that products of them are weighted."""
    if len(parts) == 1 and weights[0] == 1:
        return parts[0]
    scaled = [
        [x if weight == 1 else x * weight**0.5 for x in part] for part, weight in zip(parts, weights, strict=True)
    ]
    x, difference = (torch.cat(each, 1) for each in zip(*scaled, strict=True))
    return x, difference


def _add_gram(total: Tensor, rows: Tensor, weight: float) -> None:
    """Add the Gram matrix of rows to [groups, K, K]; of wide ones only the blocks on and below the diagonal."""
    step = _block(total)
    for start in range(0, total.shape[-1], step):
        stop = start + step
        total[:, start:stop, :stop].baddbmm_(rows[..., start:stop].mT, rows[..., :stop], alpha=weight)


def _fill_upper(total: Tensor) -> Tensor:
    """Fill in the blocks above the diagonal that `_add_gram` left out, and return the matrix."""
    step = _block(total)
    for start in range(step, total.shape[-1], step):
        stop = start + step
        total[:, :start, start:stop] = total[:, start:stop, :start].mT
    return total


def _block(total: Tensor) -> int:
    k = total.shape[-1]
    return k if k < WIDE else -(-k // BLOCKS)
