"""`seq_mse` lets biases take up the mean error behind activation functions, not the one in front of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from islands import DOORS
from qdq_models import make_model
from random_problems import problem_of
from torch import Tensor, nn
from torch_models import seeded

import qsdk
from qsdk.algorithms.solvers import bias, seq_mse
from qsdk.core.layers.layer_problem import Activation, WeightLayout
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import PerTensor, Spec

WIDTH = 16
INT2 = qsdk.w8a16().override("*", weight="int2", per_channel=False)


def network() -> nn.Sequential:
    """A layer with outputs that are mostly below 0, and a ReLU6 that cuts them off."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU6())
    with torch.no_grad():
        model[0].weight.mul_(4.0)
        model[0].bias.sub_(2.0)
    return model


def as_onnx(model: nn.Sequential):
    from onnx import helper

    stored = {"w": model[0].weight.detach().numpy(), "b": model[0].bias.detach().numpy()}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"], "linear", transB=1),
        helper.make_node("Clip", ["h", "low", "high"], ["y"], "clip"),
    ]
    ends = {"low": np.float32(0), "high": np.float32(6)}
    return make_model(nodes, {"x": ["n", WIDTH]}, {"y": ["n", WIDTH]}, stored | ends)


@pytest.mark.spread(1)
@pytest.mark.parametrize("door", DOORS)
def test_means_behind_a_relu6_are_those_of_the_float_model(door):
    """In front of it they are too, where a network has no such function."""
    model, x = network(), seeded(4096, WIDTH, seed=1)
    data: list[Tensor | np.ndarray] = list(x.split(1024)) if door == "torch" else np.split(x.numpy(), 4)
    sim = qsdk.quantize(model if door == "torch" else as_onnx(model), data[0] if door == "torch" else None, INT2)
    qsdk.calibrate(sim, data, progress=False)
    with torch.no_grad():
        exact = model(x).mean(0)

    def mean_errors() -> Tensor:
        found = sim.run(x) if door == "torch" else torch.from_numpy(sim.run(x.numpy())[0])
        return (found.mean(0) - exact).abs()

    qsdk.seq_mse(sim, data, shift_bias=False, progress=False)
    before = mean_errors()
    report = qsdk.seq_mse(sim, data, progress=False)
    assert float(mean_errors().mean()) < 0.6 * float(before.mean())
    assert report.rows[0]["error_after"] < report.rows[0]["error_before"]


def test_the_shift_is_that_of_correct_bias():
    layout, spec = WeightLayout("linear", (4, 12)), Spec(dtype_named("int3"), PerTensor())
    problem, x = problem_of(layout, spec), 3 * seeded(1, 800, 12, seed=1) - 1
    problem = replace(problem, activation=Activation(low=0.0), samples=(x, x), bias=problem.bias - 4)
    found = seq_mse.solve(problem)
    assert found.bias_shift.any()
    wanted = bias.solve(replace(problem, encoding=found.encoding))
    torch.testing.assert_close(found.bias_shift, wanted.bias_shift)
    assert found.error_after == wanted.error_after
    assert seq_mse.solve(problem, shift_bias=False).bias_shift is None
