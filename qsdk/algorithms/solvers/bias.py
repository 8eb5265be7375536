"""Bias correction: the shift of a layer's bias that restores the mean of its output in the float model."""

from torch import Tensor

from qsdk.algorithms.solvers.on_torch import on_torch
from qsdk.algorithms.solvers.outputs import SampledOutputs
from qsdk.algorithms.solvers.seq_mse import fake_quantize
from qsdk.core.layers.layer_problem import LayerProblem, Solution

NO_BIAS = "it has no bias that could take the shift"


def solve(problem: LayerProblem) -> Solution:
    """Shift the bias, per output channel, so that the mean of the layer's output is that of the float model.

    With an activation function right behind the layer, the mean is the one behind that function. The reason: ranges
    that are too narrow shrink a layer's outputs, and restoring a negative mean in front of a ReLU would leave fewer of
    them above 0 than before, which harms the layers behind. A shift is kept only if it lowers the squared error on
    held-back samples.

    Args:
        problem: with means and samples; its encoding and weight stay.

    Returns:
        The shift, and relative errors of the output, behind the activation function, on the samples without and with
        it.

    Source: Nagel et al. 2019, Data-Free Quantization, section 4.2.2 (empirical bias correction), with X~ as it is after
    the corrections of the layers before, and there without the activation function.
    """
    problem = on_torch(problem)
    quantized = fake_quantize(problem, problem.encoding)
    if problem.layout.kind == "embedding":
        error = problem.relative_error(quantized)
        return Solution(problem.encoding, None, error, error, note=NO_BIAS)
    outputs = SampledOutputs.of(problem)
    given = outputs.given(quantized)
    before = outputs.errors(given)
    if problem.bias is None:
        error = outputs.relative(before)
        return Solution(problem.encoding, None, error, error, note=NO_BIAS)
    # without a function the mean over all data is known
    shift: Tensor | None = problem.mean_error(quantized) if problem.activation is None else None
    result, errors = outputs.corrected(given, shift)
    return Solution(problem.encoding, None, outputs.relative(before), outputs.relative(errors), bias_shift=result)
