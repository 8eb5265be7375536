"""The calls of one block: what batches give it and what it gives, taken apart by samples and run again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bridge.torch_values.pytree import Path, leaves_of, mapped, tensors_of
from torch_bridge.walk.module_walk import Arguments, ModuleCall

HELD_BACK = 8  # one sample in so many judges the result and is not learned from


@dataclass(frozen=True)
class Piece:
    """Samples of one call.

    Attributes:
        call: which.
        rows: int64 indices into the first axis of what is split by samples; None for the whole call.
        size: how many samples.
        split: which arguments are split by samples.
    """

    call: ModuleCall
    rows: Tensor | None
    size: int
    split: frozenset[Path]

    def quantized(self, *, drop: float = 0.0, generator: torch.Generator | None = None) -> Arguments:
        """A copy of the arguments in the quantized model; the block may write over it.

        Args:
            drop: probability with which an element of a floating-point tensor is the float model's instead.
            generator: of these choices.

        Source of `drop`: Wei et al. 2022, QDrop, section 4, at the block's inputs.
        """
        in_float = dict(_leaves(self.call.float)) if drop else {}

        def mixed(path: Path, leaf: Any) -> Any:
            other = in_float.get(path)
            if not isinstance(other, Tensor) or not other.is_floating_point() or other.shape != leaf.shape:
                return self._of(path, leaf)
            found, instead = self._of(path, leaf), self._of(path, other)
            chosen = torch.rand(found.shape, generator=generator).to(found.device) < drop
            return torch.where(chosen, instead, found)

        return _mapped(self.call.quantized, mixed)

    def in_float(self) -> Arguments:
        """A copy of the arguments in the float model."""
        return _mapped(self.call.float, self._of)

    def outputs(self) -> list[Tensor]:
        """What the float model gives for these samples."""
        found = floats_of(self.call.result)
        return [y if self.rows is None else y.index_select(0, self.rows.to(y.device)) for y in found]

    def chunks(self, size: int, generator: torch.Generator) -> list["Piece"]:
        """The samples in random order, at most `size` in each piece."""
        if self.rows is None:
            return [self]
        shuffled = self.rows[torch.randperm(self.size, generator=generator)]
        parts = [shuffled[start : start + size] for start in range(0, self.size, size)]
        return [Piece(self.call, rows, len(rows), self.split) for rows in parts]

    def first(self, count: int) -> "Piece":
        """At most so many of the samples, where they can be told apart."""
        if self.rows is None or self.size <= count:
            return self
        return Piece(self.call, self.rows[:count], count, self.split)

    def _of(self, path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.rows is None or path not in self.split:
            return leaf.clone()
        return leaf.index_select(0, self.rows.to(leaf.device))


def floats_of(value: Any) -> list[Tensor]:
    """The floating-point tensors of a value, in order."""
    return [tensor for tensor in tensors_of(value) if tensor.is_floating_point()]


def by_samples(call: ModuleCall) -> frozenset[Path]:
    """The arguments whose first axis is as long as that of the outputs; empty where the outputs disagree."""
    samples = _samples(call)
    leaves = _leaves(call.quantized)
    return frozenset(path for path, x in leaves if isinstance(x, Tensor) and x.dim() and x.shape[0] == samples)


def whole(call: ModuleCall, split: frozenset[Path]) -> Piece:
    """All samples of a call, told apart where the arguments in `split` have as many rows as the outputs."""
    samples = _samples(call)
    if not split or samples is None or not split <= by_samples(call):
        return Piece(call, None, samples or 1, split)
    return Piece(call, torch.arange(samples), samples, split)


def _samples(call: ModuleCall) -> int | None:
    sizes = {int(y.shape[0]) if y.dim() else 0 for y in floats_of(call.result)}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 0 else None


def _leaves(arguments: Arguments) -> list[tuple[Path, Any]]:
    return leaves_of((arguments.args, arguments.kwargs))


def _mapped(arguments: Arguments, each: Callable[[Path, Any], Any]) -> Arguments:
    args, kwargs = mapped((arguments.args, arguments.kwargs), each)
    return Arguments(args, kwargs)


def held_back(pieces: Sequence[Piece], generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    """Part samples to learn from and samples to judge by: one in `HELD_BACK` of each, at least one.

    Returns:
        The two lists. They are the same where there is but one sample, or one call whose samples cannot be told apart.
    """
    learn: list[Piece] = []
    judge: list[Piece] = []
    owed = 0.0
    for piece in pieces:
        owed += piece.size / HELD_BACK
        if piece.rows is not None and piece.size > 1:
            count = min(max(int(owed), int(not judge)), piece.size - 1)
            rows = piece.rows[torch.randperm(piece.size, generator=generator)]
            learn.append(Piece(piece.call, rows[count:], piece.size - count, piece.split))
            judge += [Piece(piece.call, rows[:count], count, piece.split)] if count else []
            owed -= count
        elif owed >= piece.size:
            judge.append(piece)
            owed -= piece.size
        else:
            learn.append(piece)
    if not judge and len(learn) > 1:
        judge.append(learn.pop())
    return (learn, judge) if judge else (learn, learn)
