"""Layer problems made at random, with correlated inputs, for the tests of layer solvers."""

from dataclasses import replace
from typing import Any

import torch

from qsdk import Encoding
from qsdk.core.layers.layer_problem import LayerProblem, WeightLayout
from qsdk.core.numerics.spec import Granularity, PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.ranges.ranges import encoding_from_range, range_of

LAYERS: list[tuple[WeightLayout, Granularity]] = [
    (WeightLayout("linear", (4, 12)), PerChannel(0)),
    (WeightLayout("linear", (12, 4), 1, 1, 0), PerBlock(0, 5)),
    (WeightLayout("conv", (6, 2, 3), 2), PerTensor()),
    (WeightLayout("conv", (4, 1, 3, 3), 4), PerChannel(0)),
    (WeightLayout("conv", (4, 2, 2, 2, 2)), PerChannel(0)),
    (WeightLayout("conv_transpose", (4, 3, 2, 2), 2, 1, 0), PerChannel(1)),
    (WeightLayout("conv_transpose", (6, 2, 3), 2, 1, 0), PerBlock(0, 2)),
]


def problem_from_moments(
    site: str,
    spec: Spec,
    encoding: Encoding,
    layout: WeightLayout,
    weight: Any,
    g: Any,
    c: Any,
    g_quantized: Any,
    rows: int,
    **others: Any,
) -> LayerProblem:
    """Make a layer problem of the three second moments XX', XX~' and X~X~', [groups, K, K] each."""
    difference = g - c - c.swapaxes(-1, -2) + g_quantized
    linear, drifts = weight @ (g_quantized - c), (weight @ difference * weight).sum(-1)
    more: dict[str, Any] = {"count": float(rows), **others}
    return LayerProblem(site, spec, encoding, layout, weight, g_quantized, linear, drifts, rows, **more)


def problem_of(
    layout: WeightLayout,
    spec: Spec,
    *,
    seed: int = 0,
    noise: float = 0.05,
    rows: int = 2000,
    weights: int = 0,
    held_back: int = 0,
) -> LayerProblem:
    """Make a problem with a bias: `seed` draws the data, `weights` the layer and how its inputs are correlated."""
    groups, _, k = layout.matrix_shape
    fixed, fresh = torch.Generator().manual_seed(weights), torch.Generator().manual_seed(seed + 1000)
    weight = torch.randn(layout.shape, generator=fixed)
    mixes = [torch.randn(k, k, generator=fixed) * torch.logspace(0, -1.5, k) for _ in range(groups)]
    encoding = encoding_from_range(range_of(weight.numpy(), spec), spec)

    def told_by(count: int) -> LayerProblem:
        drawn = []
        for mix in mixes:
            x = (torch.randn(count, k, generator=fresh) @ mix.T).relu()
            drawn.append((x, x + noise * x.std() * torch.randn(x.shape, generator=fresh)))
        x, noisy = (torch.stack(each) for each in zip(*drawn, strict=True))
        means: dict[str, Any] = {
            "mean": x.mean(1),
            "mean_quantized": noisy.mean(1),
            "bias": weight.new_zeros(layout.matrix_shape[:2]),
        }
        moments = x.mT @ x, x.mT @ noisy, noisy.mT @ noisy
        matrix = layout.to_matrix(weight)
        return problem_from_moments("fc:weight", spec, encoding, layout, matrix, *moments, count, **means)

    problem = told_by(rows)
    return replace(problem, held_back=told_by(held_back)) if held_back else problem


def scales_of(problem: LayerProblem, encoding: Encoding) -> torch.Tensor:
    """The scale of each weight, [groups, rows, K]."""
    return torch.from_numpy(encoding.scale.reshape(-1)[problem.layout.cells(encoding)])
