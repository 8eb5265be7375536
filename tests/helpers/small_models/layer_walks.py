"""Small walks that need no model, and solvers that write down what they are given."""

from collections.abc import Callable
from typing import Any

import torch
from fake_walk import FakeWalk

from qsdk import int4
from qsdk.algorithms.solvers import seq_mse
from qsdk.core.layers.layer_problem import Layer, LayerProblem, Solution, WeightLayout
from qsdk.core.numerics.spec import PerChannel, Spec

WIDTH = 6


def plain_layer(name: str, bias: str = "") -> Layer:
    """A layer of six outputs and inputs, int4 per channel."""
    return Layer(f"{name}:weight", Spec(int4, PerChannel(0)), WeightLayout("linear", (WIDTH, WIDTH)), None, bias)


def plain_walk(seed: int = 0, batches: int = 8, **others: Any) -> FakeWalk:
    """Three stages; the second has two layers that read one input. The last batch is a ragged one."""
    generator = torch.Generator().manual_seed(seed)
    stages = [
        [plain_layer("one", "one:bias")],
        [plain_layer("left"), plain_layer("right")],
        [plain_layer("head")],
    ]
    weights = {
        each.site: torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(place))
        for place, each in enumerate(each for stage in stages for each in stage)
    }
    sizes = [16] * (batches - 1) + [5]
    data = [torch.randn(size, WIDTH, generator=generator) for size in sizes]
    return FakeWalk(stages, weights, data, **others)


def recorded(into: dict[str, Any]) -> Callable[[LayerProblem], Solution]:
    """SeqMSE that notes sums of what each problem holds."""

    def solver(problem: LayerProblem) -> Solution:
        held_back = problem.held_back
        assert held_back is not None
        assert problem.samples is not None
        into[problem.site] = [
            *(float(values.double().sum()) for values in (problem.g_quantized, problem.linear_term, problem.drift)),
            *(float(values.double().sum()) for values in (problem.mean, held_back.g_quantized, held_back.mean)),
            problem.rows,
            held_back.rows,
            problem.samples[0].shape[1],
        ]
        return seq_mse.solve(problem)

    return solver
