"""How much a block's outputs matter for the model's, to weigh errors by: the diagonal of Fisher information."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward, feed
from torch_bridge.torch_values.pytree import floats_of, map_leaves
from torch_bridge.training.training import eval_mode

#: share of the mean importance that every output has at least, so that none is given up for those of a few samples
FLOOR = 0.1


def output_importance(
    sim: QuantSim, batches: Iterable[Any], paths: Sequence[str], forward: Forward | None, generator: torch.Generator
) -> Mapping[str, Sequence[Tensor]]:
    """Return, for the outputs of each module, their importance without the axis of samples, 1 on average.

    It is the mean square of the gradient of the float model's outputs, combined with random signs, over all samples;
    along axes that differ between batches (the length of a text) it is averaged. One forward and one backward pass in
    float.

    Source: Li et al. 2021, BRECQ, section 3.3; there the square of each sample's own gradient of the loss.
    """
    sums: dict[str, list[Tensor]] = {}
    with sim.alone(), eval_mode(sim.model), sim.float_phase() as model, torch.enable_grad():
        for number, batch in enumerate(batches):
            with _recorded(model, paths) as seen:
                outputs = floats_of(feed(model, batch, sim.example, forward, f"batch {number}"))
            where = [(path, at) for path, ys in seen.items() for at in range(len(ys))]
            signs = [torch.randint(0, 2, y.shape, generator=generator).to(y) * 2 - 1 for y in outputs]
            reached = [pair for pair in zip(outputs, signs, strict=True) if pair[0].requires_grad]
            gradients = torch.autograd.grad(
                [y for y, _ in reached],
                [seen[path][at] for path, at in where],
                [sign for _, sign in reached],
                allow_unused=True,
            )
            for (path, at), gradient in zip(where, gradients, strict=True):
                y = seen[path][at]
                square = torch.zeros_like(y) if gradient is None else gradient.detach().float().square()
                known = sums.setdefault(path, [])
                here = square.mean(0) if square.dim() > 1 else square.mean()
                if at < len(known):
                    known[at] = _sum_of_common_axes(known[at], here)
                else:
                    known.append(here)
    return {path: _relative(found) for path, found in sums.items()}


@contextmanager
def _recorded(model: nn.Module, paths: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Yield what is filled with the outputs of each module's first call, each a tensor that has a gradient."""
    seen: dict[str, list[Tensor]] = {}

    def after(path: str, module: nn.Module, args: Any, result: Any) -> Any:
        """Note what a module's first call returns, as tensors of which gradients are known."""
        if path in seen:
            return result
        seen[path] = []

        def copied(_: Any, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                return leaf
            y = leaf if leaf.requires_grad else leaf.detach().requires_grad_()
            seen[path].append(y)
            return y.clone()  # an op behind it may write over it

        return map_leaves(result, copied)

    with ExitStack() as hooks:
        for path in paths:
            hooks.callback(model.get_submodule(path).register_forward_hook(partial(after, path)).remove)
        yield seen


def _sum_of_common_axes(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two tensors, averaged along the axes in which their sizes differ."""
    for axis in range(one.dim()):
        if one.shape[axis] != other.shape[axis]:
            one, other = (x.mean(axis, keepdim=True) for x in (one, other))
    return one + other


def _relative(sums: Sequence[Tensor]) -> list[Tensor]:
    """Return importances that are 1 on average over all outputs; ones where no gradient reaches them."""
    mean = float(sum(x.sum() for x in sums)) / max(sum(x.numel() for x in sums), 1)
    if not mean > 0:
        return [torch.ones_like(x) for x in sums]
    return [FLOOR + (1 - FLOOR) * x / mean for x in sums]
