"""Layer problems and their grids as torch tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsdk.core.layers.layer_problem import LayerProblem
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding

#: Elements of a tensor below which a kernel is not worth being shared.
SMALL = 1 << 18


@contextmanager
def one_thread_for(values: Tensor) -> Iterator[None]:
    """Run torch's kernels on one thread inside the block if a tensor on a processor is small.

    A kernel on a small tensor takes less time than to wake up other threads, which sleep between kernels where paused
    forward passes have threads of their own.
    """
    before = torch.get_num_threads()
    if before == 1 or values.device.type != "cpu" or values.numel() > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


_ARRAYS = ("h", "linear", "drifts", "x_quantized", "drifted", "roots", "mean", "mean_quantized", "bias")


def on_torch(problem: LayerProblem) -> LayerProblem:
    """Return the problem with float32 torch tensors on the weight's device, sharing memory if possible."""
    weight = _tensor(problem.weight).float()

    def moved(values: Any) -> Any:
        return None if values is None else _tensor(values).to(weight)

    arrays = {name: moved(getattr(problem, name)) for name in _ARRAYS}
    samples = problem.samples and (moved(problem.samples[0]), moved(problem.samples[1]))
    held_back = problem.held_back and on_torch(problem.held_back)
    return replace(problem, weight=weight, samples=samples, held_back=held_back, **arrays)


def scales_of_weights(problem: LayerProblem, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point of each weight, float32 [groups, out_per_group, K]. They are read-only views."""
    layout, device = problem.layout, problem.weight.device

    def each(values: Any) -> Tensor:
        aligned = affine.align(torch.from_numpy(values).to(device), layout.shape, encoding.axis, encoding.block_size)
        matrix: Tensor = layout.to_matrix(aligned.expand(layout.shape))
        return matrix.float()

    return each(encoding.scale), each(encoding.zero_point)


def cells_of_weights(problem: LayerProblem, encoding: Encoding) -> Tensor:
    """Return the scale of each weight, int64 [groups, out_per_group, K]: indices into the flattened scale."""
    return _tensor(problem.layout.cells(encoding)).to(problem.weight.device)


def _tensor(values: Any) -> Tensor:
    """Return a tensor where it is, or an array as one on the host; `torch.as_tensor` asks for the default device."""
    if isinstance(values, Tensor):
        return values.detach()
    array = np.asarray(values)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
