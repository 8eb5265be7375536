"""Layer problems and their grids as torch tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from qsdk.core.encoding import Encoding
from qsdk.core.layer_problem import LayerProblem


def on_torch(problem: LayerProblem) -> LayerProblem:
    """Give the problem with float32 torch tensors on the weight's device, sharing memory where that can be."""
    weight = torch.as_tensor(problem.weight).detach().float()
    g, c, g_quantized = (
        torch.as_tensor(moment).detach().to(weight) for moment in (problem.g, problem.c, problem.g_quantized)
    )
    return replace(problem, weight=weight, g=g, c=c, g_quantized=g_quantized)


def scales_of_weights(problem: LayerProblem, encoding: Encoding) -> tuple[Tensor, Tensor]:
    """The scale and the zero point of each weight, float32 [groups, out_per_group, K]."""
    cells = cells_of_weights(problem, encoding)
    scale, zero_point = (torch.as_tensor(v.reshape(-1)).to(cells.device) for v in (encoding.scale, encoding.zero_point))
    return scale[cells], zero_point[cells].float()


def cells_of_weights(problem: LayerProblem, encoding: Encoding) -> Tensor:
    """Which scale each weight uses: int64 [groups, out_per_group, K], an index into the flattened scale."""
    return torch.as_tensor(problem.layout.cells(encoding)).to(problem.weight.device)
