"""Bias correction: what a layer's bias takes up so that the mean of its output is that of the float model."""

import torch
from torch import Tensor

from qsdk.algorithms.on_torch import on_torch
from qsdk.algorithms.seq_mse import fake_quantize
from qsdk.core.layer_problem import LayerProblem, Solution

#: rows of its inputs on which a layer's error is told
SAMPLES = 2048


def solve(problem: LayerProblem) -> Solution:
    """Shift the bias by `E[WX] - E[W~X~]`, per output channel.

    Args:
        problem: with means and samples; its encoding and weight stay.

    Returns:
        The shift, and relative output errors on the samples without and with it.

    Source: Nagel et al. 2019, Data-Free Quantization, section 4.2.2 (empirical bias correction), with X~ as it is after
    the corrections of the layers before.
    """
    problem = on_torch(problem)
    quantized = fake_quantize(problem, problem.encoding)
    if not problem.has_bias:
        error = _relative_error(problem, quantized, 0.0)
        return Solution(problem.encoding, None, error, error, note="it has no bias that could take the shift")
    shift: Tensor = problem.mean_error(quantized)
    before, after = (_relative_error(problem, quantized, moved) for moved in (0.0, shift))
    return Solution(problem.encoding, None, before, after, bias_shift=shift)


def _relative_error(problem: LayerProblem, quantized: Tensor, shift: Tensor | float) -> float:
    """`||WX - W~X~ - shift||^2 / ||WX||^2` over the samples."""
    assert problem.samples is not None
    x, x_quantized = problem.samples
    wanted = x @ problem.weight.mT
    difference = wanted - x_quantized @ quantized.mT
    moved = shift[:, None] if isinstance(shift, torch.Tensor) else shift
    energy = float(wanted.square().sum())
    return float((difference - moved).square().sum()) / energy if energy > 0 else 0.0
