"""Requantization: never further off than it states."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_models import LEVELS, UINT8, run
from onnx import TensorProto, helper

from onnx_backend.integer.codegen.expand import expand
from onnx_backend.integer.ir.builder import Builder, requantize
from onnx_backend.integer.ir.values import ActivationEncoding, Linear, Term
from onnx_backend.integer.reference.run import run_reference


def recipe(terms, constant, channels, zero_point):
    """The requantization of int32 tensors (values, channels) whose results leave as codes."""
    names = [f"acc{i}" for i in range(len(terms))]
    builder = Builder([*names, "y"], "half_even")
    value = Linear(
        tuple(
            Term(name, np.asarray(scale, np.float64), np.asarray(zero), np.asarray(-bound), np.asarray(bound))
            for name, (scale, zero, bound) in zip(names, terms, strict=True)
        ),
        np.asarray(constant, np.float64),
    )
    codes = requantize(builder, value, ActivationEncoding(1.0, zero_point, UINT8), "codes")
    error = builder.nodes[-1].plan.error
    nodes = expand(builder, {codes})
    nodes[-1].output[0] = "y"
    shape = [None, channels]
    graph = helper.make_graph(
        nodes,
        "recipe",
        [helper.make_tensor_value_info(name, TensorProto.INT32, shape) for name in names],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, shape)],
        builder.initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), error


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_value_is_further_off_than_the_stated_error(data):
    channels = data.draw(st.integers(1, 3))
    count = data.draw(st.integers(1, 3))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    terms, feeds = [], {}
    for i in range(count):
        bound = int(2 ** data.draw(st.floats(3, 29.5)))
        scale = rng.uniform(0.2, 1.0, channels) * 300 / bound * rng.choice([1.0, -1.0], channels)
        zero = int(rng.integers(-bound // 9, bound // 9 + 1))
        terms.append((scale, zero, bound))
        values = rng.integers(-bound, bound + 1, (64, channels))
        values[:4] = [[-bound] * channels, [bound] * channels, [0] * channels, [zero] * channels]
        feeds[f"acc{i}"] = values.astype(np.int32)
    constant = data.draw(st.sampled_from([0.0, 11.25, -300.4]))
    model, error = recipe(terms, constant, channels, 100)
    real = constant + sum((feeds[f"acc{i}"] - zero) * scale for i, (scale, zero, _) in enumerate(terms))
    assert error <= 1e-3
    lo = np.clip(np.floor(real - error + 0.5 - 1e-9), -100, 155) + 100
    hi = np.clip(np.floor(real + error + 0.5 + 1e-9), -100, 155) + 100
    for found in (run(model, feeds)["y"], run(model, feeds, LEVELS[0])["y"], run_reference(model, feeds)["y"]):
        assert np.all((lo <= found) & (found <= hi))
