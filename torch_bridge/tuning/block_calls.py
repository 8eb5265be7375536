"""The calls of one block: its arguments and results on all batches, split by samples and run again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_bridge.torch_values.pytree import Path, floats_of, leaves_of, map_leaves
from torch_bridge.walk.module_walk import Arguments, ModuleCall

HELD_BACK = 8  # one sample in so many is used to judge the result, not to learn from


@dataclass(frozen=True)
class Piece:
    """Samples of one call.

    Attributes:
        call: the call.
        rows: int64 indices into the first axis of what is split by samples; None for the whole call.
        size: number of samples.
        split: the arguments that are split by samples.
    """

    call: ModuleCall
    rows: Tensor | None
    size: int
    split: frozenset[Path]

    def quantized_arguments(self, *, drop: float = 0.0, generator: torch.Generator | None = None) -> Arguments:
        """Return a copy of the arguments in the quantized model; the block may write over it.

        Args:
            drop: probability with which an element of a floating-point tensor is the float model's instead.
            generator: of these choices.

        Source of `drop`: Wei et al. 2022, QDrop, section 4, at the block's inputs.
        """
        in_float = dict(_leaves(self.call.float)) if drop else {}

        def mixed(path: Path, leaf: Any) -> Any:
            other = in_float.get(path)
            if not isinstance(other, Tensor) or not other.is_floating_point() or other.shape != leaf.shape:
                return self._select(path, leaf)
            quantized, float_value = self._select(path, leaf), self._select(path, other)
            drawn_on = generator.device if generator is not None else quantized.device
            drawn = torch.rand(quantized.shape, generator=generator, device=drawn_on)
            chosen = drawn.to(quantized.device) < drop
            return torch.where(chosen, float_value, quantized)

        return _map_arguments(self.call.quantized, mixed)

    def float_arguments(self) -> Arguments:
        """Return a copy of the arguments in the float model."""
        return _map_arguments(self.call.float, self._select)

    def outputs(self) -> list[Tensor]:
        """Return the float model's outputs for these samples."""
        tensors = floats_of(self.call.result)
        return [y if self.rows is None else y.index_select(0, self.rows.to(y.device)) for y in tensors]

    def chunks(self, size: int, generator: torch.Generator) -> list["Piece"]:
        """Return the samples in random order, at most `size` in each piece."""
        if self.rows is None:
            return [self]
        shuffled = self.rows[torch.randperm(self.size, generator=generator, device=generator.device)]
        parts = [shuffled[start : start + size] for start in range(0, self.size, size)]
        return [Piece(self.call, rows, len(rows), self.split) for rows in parts]

    def first(self, count: int) -> "Piece":
        """Return at most `count` of the samples, where they can be split."""
        if self.rows is None or self.size <= count:
            return self
        return Piece(self.call, self.rows[:count], count, self.split)

    def _select(self, path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.rows is None or path not in self.split:
            return leaf.clone()
        return leaf.index_select(0, self.rows.to(leaf.device))


def arguments_with_samples(call: ModuleCall) -> frozenset[Path]:
    """Return the arguments whose first axis is as long as that of the outputs; empty where the outputs disagree."""
    samples = _samples(call)
    leaves = _leaves(call.quantized)
    return frozenset(path for path, x in leaves if isinstance(x, Tensor) and x.dim() and x.shape[0] == samples)


def all_samples(call: ModuleCall, split: frozenset[Path]) -> Piece:
    """Return all samples of a call, split where the arguments in `split` have as many rows as the outputs."""
    samples = _samples(call)
    if not split or samples is None or not split <= arguments_with_samples(call):
        return Piece(call, None, samples or 1, split)
    rows = torch.arange(samples, device=floats_of(call.result)[0].device)
    return Piece(call, rows, samples, split)


def _samples(call: ModuleCall) -> int | None:
    sizes = {int(y.shape[0]) if y.dim() else 0 for y in floats_of(call.result)}
    return sizes.pop() if len(sizes) == 1 and min(sizes) > 0 else None


def _leaves(arguments: Arguments) -> list[tuple[Path, Any]]:
    return leaves_of((arguments.args, arguments.kwargs))


def _map_arguments(arguments: Arguments, each: Callable[[Path, Any], Any]) -> Arguments:
    args, kwargs = map_leaves((arguments.args, arguments.kwargs), each)
    return Arguments(args, kwargs)


def split_held_back(pieces: Sequence[Piece], generator: torch.Generator) -> tuple[list[Piece], list[Piece]]:
    """Split samples into those to learn from and those to judge by: one in `HELD_BACK` of each, at least one.

    Returns:
        The two lists. They are the same where there is only one sample, or one call whose samples cannot be split.
    """
    learn: list[Piece] = []
    judge: list[Piece] = []
    owed = 0.0
    for piece in pieces:
        owed += piece.size / HELD_BACK
        if piece.rows is not None and piece.size > 1:
            count = min(max(int(owed), int(not judge)), piece.size - 1)
            rows = piece.rows[torch.randperm(piece.size, generator=generator, device=generator.device)]
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
