"""The sums in front of the gates of a recurrent layer: their stated error is that of the worst, and is carried on."""

from types import SimpleNamespace

import numpy as np
import pytest
from exact_integer import surroundings
from onnx import TensorProto, helper

from onnx_backend.integer.ir.values import ActivationEncoding
from onnx_backend.integer.lowering.recurrent.cells import GruBefore, GruBehind
from onnx_backend.integer.lowering.recurrent.layer import (
    OFFSET,
    Direction,
    Inputs,
    Matrix,
    state_fraction,
    state_product,
    write_sums,
)
from onnx_backend.integer.reference.run import run_reference

DROP, HIDDEN = 8, 5


@pytest.mark.parametrize("scales", [(1.0, 0.5, 0.125), (2.0**-9, 2.0**-30, 2.0**-16)])
def test_the_worst_sum_of_a_step_is_near_its_bound(scales):
    """Columns of different scales are brought to one unit, of which a step cuts off nearly a whole one."""
    rng = np.random.default_rng(0)
    weight = Matrix(rng.integers(-128, 128, (HIDDEN, 3)), np.asarray(scales), 128, 8, "R")
    fraction = state_fraction(1.0)
    product = state_product(weight, fraction, 8.0 * max(scales) * 128)
    states = rng.integers(-(1 << fraction), (1 << fraction) + 1, (2000, 1, HIDDEN))
    ctx = surroundings(states=states.shape)
    found = write_sums(ctx, product, ctx.constant64(-product.centre), "states", DROP, weight.write(ctx))
    edge = helper.make_tensor_value_info("states", TensorProto.INT64, states.shape)
    result = helper.make_tensor_value_info(found, TensorProto.INT64, None)
    graph = helper.make_graph(ctx.nodes, "sums", [edge], [result], ctx.initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    sums = run_reference(model, {"states": (states + OFFSET) << DROP})[found]
    exact = (states * 2.0**-fraction) @ (weight.integers * weight.scale)
    worst, bound = np.abs(sums * product.unit - exact).max(), product.error(0.0, 1.0)
    assert worst <= bound
    assert worst > 0.75 * bound


@pytest.mark.parametrize("make", [GruBefore, GruBehind])
def test_an_error_of_the_candidates_sum_reaches_the_state(make):
    """With exact gates and a candidate as steep as Tanh at 0, the state is off by what its sum is off by."""
    rng = np.random.default_rng(1)
    ctx = surroundings(x=(2, 1, 4))
    matrices = [
        Matrix(rng.integers(-99, 99, (rows, 3 * HIDDEN)), np.asarray(0.01), 128, 8, "W") for rows in (4, HIDDEN)
    ]
    encoding = ActivationEncoding(0.03, 119, TensorProto.UINT8)
    inputs = Inputs([("x", encoding)], matrices[0], np.zeros(3 * HIDDEN))
    cell = make(ctx, Direction(inputs, matrices[1], HIDDEN, 1, 2, False, None, None, np.zeros(HIDDEN), 1.0))
    table = SimpleNamespace(error=lambda function, argument: argument if function == "Tanh" else 0.0)
    off = SimpleNamespace(error=lambda state, largest: 0.01, unit=2.0**-30)
    if make is GruBehind:
        cell.product, cell.gates, cell.curve = off, table, table
    else:
        cell.products, cell.tables = [off, off], [table, table]
    (after_one, _), (after_two, _) = (error for error, _ in zip(cell.errors(), range(2), strict=False))
    assert 0.01 <= after_one <= after_two < 0.0101
