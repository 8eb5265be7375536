"""Moments of the float and quantized inputs of layers that read one input, streamed batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qsdk.algorithms import ranks

#: Bits between the bound of a sum and the unit that its terms are rounded to: 52, and 3 of headroom.
_BITS, _HEADROOM = 52, 3
#: Elements that are added at a time.
_PART = 1 << 18
#: Moves terms that lie half-way between two multiples of the unit off that place.
_NO_TIES = 1 + 2.0**-52


def exponents(values: Tensor) -> Tensor:
    """Return for each value the smallest e with |value| < 2^e, int64; 0 for 0."""
    return torch.frexp(values.double())[1].long()


class ExactSum:
    """A sum of float tensors in which every term is rounded once, to a multiple of a unit that is known beforehand.

    Sums of multiples of one unit are exact in float64 as long as they stay below 2^53 units: then any order, and any
    distribution over ranks, gives the same bits. The unit of each element is 2^-49 of its bound.

    Source: the accumulators of Demmel and Nguyen 2015, Parallel Reproducible Summation, with one bin, since the bound
    is known before the first term.
    """

    def __init__(self, bounds: Sequence[Tensor]) -> None:
        """Start at zero.

        Args:
            bounds: int64 tensors that broadcast to the shape of the sum; the sum of the absolute values of all terms
                is at most 2 to the power of their sum. A bound that is given in several tensors takes little memory.
        """
        largest = max(range(len(bounds)), key=lambda at: bounds[at].numel())
        others = _power_of_two(torch.tensor(_HEADROOM, device=bounds[0].device)) * 1.5
        for at, bound in enumerate(bounds):
            if at != largest:
                others = others * _power_of_two(bound)
        # the offset of each element is their product, exact since all but one are powers of two
        self._offset = _power_of_two(bounds[largest]), others
        self._total = self._offset[0] * self._offset[1]

    def add(self, term: Tensor) -> None:
        """Add a float32 tensor.

        The total sits on an offset so large that its last bit is the unit: the addition itself rounds the term.
        Rounding half-way cases to even would look at the other terms, so there are none: a term that is so small is
        made larger by 2^-52 of itself.
        """
        # in parts, since torch makes a float64 copy of the term
        axis = max(term.dim() - 2, 0)
        rows = max(_PART * term.shape[axis] // max(term.numel(), 1), 1)
        for total, part in zip(torch.split(self._total, rows, axis), torch.split(term, rows, axis), strict=True):
            total.add_(part, alpha=_NO_TIES)

    def value(self) -> Tensor:
        """Return the sum, float64; sums of such values over ranks are exact as well."""
        return torch.addcmul(self._total, *self._offset, value=-1)


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2 to the power of int64 tensors, float64: the bits themselves, since `pow` may be off by one."""
    return ((exponent + 1023) << _BITS).contiguous().view(torch.float64)


#: Rows per matrix product: enough to run at full speed.
FOLD = 256
#: Batches whose rows are not multiplied together, so that as many ranks multiply the same rows together as one does.
LANES = 8
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


@dataclass(frozen=True)
class Bounds:
    """What is known of all rows, those of other ranks included, before the first is added.

    Attributes:
        x_quantized: largest |X~| of each input, float32 [groups, K].
        difference: largest |X - X~|, likewise.
        count: upper bound of the number of rows that the rows represent.
    """

    x_quantized: Tensor
    difference: Tensor
    count: float

    @classmethod
    def of(cls, x: Tensor, x_quantized: Tensor, count: float) -> "Bounds":
        """Return the bounds of rows [groups, rows, K] of X and X~."""
        largest = [values.abs().amax(1) for values in (x_quantized, x - x_quantized)]
        return cls(largest[0], largest[1], count)


@dataclass(frozen=True)
class _Rows:
    """Some rows of X~ and X - X~, the number that each represents, and their place among all calls."""

    place: tuple[int, int]
    x: Tensor
    difference: Tensor
    weight: float


class Moments:
    """Streaming sums over rows of X and X~; `finish` adds up those of all ranks, with the bits that one rank finds.

    With D = X - X~ they are X~X~', and either D X~' and DD', or the products of W with these, computed from the outputs
    WD, which is cheaper where there are no more outputs than inputs. Summing D, not X, keeps small differences of the
    inputs, which would be lost in the difference of large sums.

    Rows are multiplied in lots of whole calls, the same lots on any number of ranks that divides `LANES`, and the
    products are added up exactly (`ExactSum`).
    """

    def __init__(self, weight: Tensor, bounds: Bounds, *, second: bool = True, few: int | None = None) -> None:
        """Start at zero.

        Args:
            weight: of all layers that read the input, float32 [groups, outputs, K].
            bounds: of all rows.
            second: whether to gather second moments, or means only.
            few: fewer rows than this, over all ranks, are kept instead of sums; None for K.
        """
        self._weight, self._second = weight, second
        groups, outputs, k = weight.shape
        self._by_outputs = outputs <= k
        self._few, self._elements = k if few is None else few, groups * k
        self._lanes: list[list[_Rows]] = [[] for _ in range(LANES)]
        self._lots: list[list[_Rows]] = []
        self._kept = 0  # rows in lanes and lots
        self._count = exponents(weight.new_tensor(max(bounds.count, 1.0))) + 1  # float32 products round
        self._x, self._difference = (exponents(v.to(weight.device)) for v in (bounds.x_quantized, bounds.difference))
        self._largest_difference = bounds.difference.to(weight)
        self._means = ExactSum([self._count, torch.stack([self._x, self._difference])])
        self._counts = torch.zeros(2, dtype=torch.float64, device=weight.device)
        self._gram: list[ExactSum] = []
        self._others: list[ExactSum] = []  # by outputs: linear term and drifts, else D'X~ and the blocks of D'D

    def add(self, x: Tensor, x_quantized: Tensor, weight: float = 1.0, place: tuple[int, int] = (0, 0)) -> bool:
        """Add rows [groups, rows, K] of X and X~ that represent `weight` rows each; return whether all are finite.

        Args:
            x: of the float model.
            x_quantized: of the quantized one.
            weight: number of rows that each represents.
            place: of their batch among those of all ranks, and of the call in it.
        """
        difference = x - x_quantized
        sums = torch.stack([rows.sum(1, dtype=torch.float32) for rows in (x_quantized, difference)])
        if not sums.isfinite().all():
            return False
        self._means.add(sums * weight)
        # in steps of 2^-20, which add up exactly
        self._counts += self._counts.new_tensor([x.shape[1], round(weight * x.shape[1] * 2**20) / 2**20])
        if self._second and x.shape[1]:
            lane = self._lanes[place[0] % LANES]
            lane.append(_Rows(place, x_quantized, difference, weight))
            self._kept += x.shape[1]
            waiting = sum(rows.x.shape[1] for rows in lane)
            if waiting >= FOLD or waiting * self._elements > CHUNK // LANES:
                self._lots.append(lane.copy())
                lane.clear()
            if self._gram or self._many(self._kept):
                self._multiply_lots()
        return True

    def _many(self, rows: int) -> bool:
        return rows >= self._few or rows * self._elements > CHUNK

    def finish(self, owners: Sequence[tuple[slice, int]] = ((slice(None), 0),)) -> Sums:
        """Return the sums over all rows of all ranks; those of second order only to the ranks that own outputs."""
        means = self._means.value()
        ranks.all_reduce_sum([means, self._counts])
        rows, count = int(self._counts[0]), float(self._counts[1])
        mean_quantized = means[0] / max(count, 1)
        mean = mean_quantized + means[1] / max(count, 1)
        facts = (mean.float(), mean_quantized.float(), rows, count)
        if not self._second:
            return Sums(None, None, None, *facts)
        if not self._many(rows):
            return self._of_few_rows(sorted({owner for _, owner in owners}), *facts)
        self._lots += [lane for lane in self._lanes if lane]
        self._multiply_lots()
        return self._of_products(owners, *facts)

    def _of_products(
        self, owners: Sequence[tuple[slice, int]], mean: Tensor, mean_quantized: Tensor, rows: int, count: float
    ) -> Sums:
        every, means = sorted({owner for _, owner in owners}), (mean, mean_quantized, rows, count)
        mine = ranks.rank() in every
        h = self._filled(self._gram, every)
        if self._by_outputs:
            linear, drifts = (part.value() for part in self._others)
            for part, owner in owners:
                ranks.reduce_sum(linear[:, part], [owner])
            ranks.reduce_sum(drifts, every)
            return Sums(h, linear.float(), drifts.float(), *means) if mine else Sums(None, None, None, *means)
        crossed = self._others[0].value()
        ranks.reduce_sum(crossed, every)
        squared = self._filled(self._others[1:], every)
        if h is None or squared is None:
            return Sums(None, None, None, *means)
        # in place: the weights of a head are as many as those of a dozen other layers
        drifts = (self._weight @ squared).mul_(self._weight).sum(-1)
        return Sums(h, (self._weight @ crossed.float()).neg_(), drifts, *means)

    def _filled(self, blocks: Sequence[ExactSum], owners: Sequence[int]) -> Tensor | None:
        """Return a symmetric matrix from its blocks on and below the diagonal, added up over all ranks, to owners."""
        groups, _, k = self._weight.shape
        result = self._weight.new_empty(groups, k, k) if ranks.rank() in owners else None
        for part, block in zip(_strips(k), blocks, strict=True):
            values = block.value()
            ranks.reduce_sum(values, owners)
            if result is not None:
                result[:, part, : part.stop] = values.float()
                result[:, : part.start, part] = result[:, part, : part.start].mT
        return result

    def _of_few_rows(
        self, owners: Sequence[int], mean: Tensor, mean_quantized: Tensor, rows: int, count: float
    ) -> Sums:
        zeros, (groups, _, k) = self._weight.new_zeros, self._weight.shape
        own = [part for lot in (*self._lots, *self._lanes) for part in lot]
        found = ranks.gather_to(owners, own)
        if found is None:
            return Sums(None, None, None, mean, mean_quantized, rows, count)
        # stable: of one place, in the order in which they were added
        parts = sorted((part for some in found for part in some), key=lambda part: part.place)
        pairs = [(zeros(groups, 0, k),) * 2, *((part.x.to(zeros(0)), part.difference.to(zeros(0))) for part in parts)]
        weights = [1.0, *(part.weight for part in parts)]
        x, difference = _scaled(pairs, weights)
        ones = [zeros(1, part.shape[1], 1) + 1 for part, _ in pairs]
        roots = None if rows == count else _scaled([(one, one) for one in ones], weights)[0].flatten()
        drifted = (difference @ self._weight.mT).neg_()
        return Sums(None, None, None, mean, mean_quantized, rows, count, x, drifted, roots)

    def _start(self) -> None:
        k = self._weight.shape[-1]
        column = self._x[:, None, :]

        def blocks(of: Tensor) -> list[ExactSum]:
            return [ExactSum([of[:, part, None], of[:, None, : part.stop], self._count]) for part in _strips(k)]

        self._gram = blocks(self._x)
        if self._by_outputs:
            out = exponents(_largest_outputs(self._weight, self._largest_difference.double())) + 1
            self._others = [ExactSum([out[..., None], column, self._count]), ExactSum([2 * out, self._count])]
        else:
            self._others = [ExactSum([self._difference[..., None], column, self._count]), *blocks(self._difference)]

    def _multiply_lots(self) -> None:
        """Multiply the lots into the sums, so that memory does not grow with the data."""
        if not self._gram:
            self._start()
        differ = bool(self._largest_difference.any())
        for lot in self._lots:
            self._kept -= sum(rows.x.shape[1] for rows in lot)
            weight = lot[0].weight if len({rows.weight for rows in lot}) == 1 else 1.0
            pairs = [(rows.x, rows.difference) for rows in lot]
            x, difference = _scaled(pairs, [rows.weight / weight for rows in lot])
            _add_gram(self._gram, x, weight)
            if not differ:
                continue
            if self._by_outputs:
                out = difference @ self._weight.mT
                self._others[0].add(_product(out.mT, x, -weight))
                self._others[1].add(out.square_().sum(1).mul_(weight))
            else:
                self._others[0].add(_product(difference.mT, x, weight))
                _add_gram(self._others[1:], difference, weight)
        self._lots = []


def _largest_outputs(weight: Tensor, largest: Tensor) -> Tensor:
    """Return the largest products [groups, outputs] of a weight with inputs up to `largest` [groups, K], in float64."""
    some = max(1, CHUNK // max(largest.numel(), 1))  # outputs at a time: float64 takes twice the memory
    return torch.cat([(part.abs().double() @ largest[..., None])[..., 0] for part in torch.split(weight, some, 1)], 1)


def _scaled(parts: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return the rows concatenated, times the roots of their weights, so that products of them are weighted."""
    if len(parts) == 1 and weights[0] == 1:
        return parts[0]
    scaled = [
        [x if weight == 1 else x * weight**0.5 for x in part] for part, weight in zip(parts, weights, strict=True)
    ]
    x, difference = (torch.cat(each, 1) for each in zip(*scaled, strict=True))
    return x, difference


def _product(left: Tensor, right: Tensor, weight: float) -> Tensor:
    """Return a product of matrices times a number."""
    result = left @ right
    return result if weight == 1 else result.mul_(weight)


def _add_gram(blocks: Sequence[ExactSum], rows: Tensor, weight: float) -> None:
    """Add the Gram matrix of rows [groups, rows, K], of wide ones only the blocks on and below the diagonal."""
    for part, block in zip(_strips(rows.shape[-1]), blocks, strict=True):
        block.add(_product(rows[..., part].mT, rows[..., : part.stop], weight))


def _strips(k: int) -> list[slice]:
    """Return the rows of the blocks of a matrix; each reaches from the first column to the diagonal."""
    step = k if k < WIDE else -(-k // BLOCKS)
    return [slice(start, min(start + step, k)) for start in range(0, k, step)]
