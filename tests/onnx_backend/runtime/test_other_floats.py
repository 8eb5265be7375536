"""Sessions of models in bfloat16 and float64, and arrays of any float dtype for any float input."""

import re

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import files_read
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.compare_runs import compare_runs, float_session
from onnx_backend.runtime.feeds import DeclaredInput, as_feeds, random_feeds
from onnx_backend.runtime.session import simulation_session
from onnx_backend.runtime.session_input import session_of
from qsdk import DataError

node, value = helper.make_node, helper.make_tensor_value_info
CODES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
}
ARRAYS = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64}
RNG = np.random.default_rng(5)
WEIGHT = RNG.normal(size=(96, 64)) / 8
X = RNG.normal(size=(4, 96)).astype(np.float32)


def layer(dtype: str) -> ModelProto:
    """A linear layer whose inner result leaves the model too, and an input that passes through."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Gelu", ["h"], ["y"]), node("Identity", ["other"], ["same"])]
    inputs = [value("x", CODES[dtype], ["n", 96]), value("other", CODES[dtype], [3])]
    outputs = [value(name, CODES[dtype], None) for name in ("h", "y", "same", "w", "other")]
    stored = [numpy_helper.from_array(WEIGHT.astype(ARRAYS[dtype]), "w")]
    graph = helper.make_graph(nodes, "layer", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def rounded(values, dtype: str) -> np.ndarray:
    """Values rounded to a dtype; those of bfloat16 as float32."""
    found = np.asarray(values).astype(ARRAYS[dtype])
    return found.astype(np.float32) if dtype == "bfloat16" else found


OTHER = np.float32([0.1, 1e-3, 7.123456])


@pytest.mark.parametrize("open_session", [float_session, simulation_session])
@pytest.mark.parametrize("dtype", CODES)
def test_a_model_of_any_float_dtype_runs(dtype: str, open_session):
    model = layer(dtype)
    before = model.SerializeToString(deterministic=True)
    session = open_session(model)
    assert model.SerializeToString(deterministic=True) == before
    feeds = as_feeds((X, OTHER), session.get_inputs(), "the batch")
    outputs = dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))
    exact = rounded(X, dtype).astype(np.float64) @ rounded(WEIGHT, dtype).astype(np.float64)
    step = {"float32": 1e-6, "float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-13}[dtype]
    np.testing.assert_allclose(outputs["h"], exact, rtol=step, atol=step)
    np.testing.assert_array_equal(outputs["h"], rounded(outputs["h"], dtype))
    np.testing.assert_array_equal(outputs["y"], rounded(outputs["y"], dtype))
    np.testing.assert_array_equal(outputs["same"], rounded(OTHER, dtype))
    np.testing.assert_array_equal(outputs["w"], rounded(WEIGHT, dtype))
    names = {"bfloat16": "float", "float32": "float", "float64": "double"}
    assert {given.type for given in session.get_inputs()} == {f"tensor({names.get(dtype, dtype)})"}


@pytest.mark.parametrize("open_session", [simulation_session, ort.InferenceSession])
def test_only_a_simulation_rounds_every_result_in_float16(open_session):
    """`x * c + y * s`, as in a rotary embedding: where the sum cancels, the roundings of both products remain."""
    x, y, c, s = RNG.normal(size=(4, 64, 64)).astype(np.float16)
    nodes = [node("Mul", ["x", "c"], ["a"]), node("Mul", ["y", "s"], ["b"]), node("Add", ["a", "b"], ["z"])]
    inputs = [value(name, TensorProto.FLOAT16, [64, 64]) for name in "xycs"]
    graph = helper.make_graph(nodes, "g", inputs, [value("z", TensorProto.FLOAT16, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    simulates = open_session is simulation_session
    session = open_session(model) if simulates else open_session(model.SerializeToString())
    (got,) = session.run(None, {"x": x, "y": y, "c": c, "s": s})
    assert np.array_equal(got, x * c + y * s) == simulates


def test_a_bfloat16_model_that_is_too_large_for_one_message_runs_from_a_file():
    model = layer("bfloat16")
    small = session_of(model, ort.SessionOptions()).run(None, {"x": X, "other": OTHER})
    spooled = session_of(model, ort.SessionOptions(), most=100).run(None, {"x": X, "other": OTHER})
    for left, right in zip(small, spooled, strict=True):
        np.testing.assert_array_equal(left, right)


def test_weights_in_a_file_stay_there(tmp_path):
    onnx.save(layer("bfloat16"), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=100)
    model = load(tmp_path / "m.onnx", inline=100)
    assert files_read(model)
    got = session_of(model, ort.SessionOptions()).run(None, {"x": X, "other": OTHER})
    for left, right in zip(
        got, session_of(layer("bfloat16"), ort.SessionOptions()).run(None, {"x": X, "other": OTHER}), strict=True
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("dtype", CODES)
def test_two_forms_of_a_model_are_compared_in_any_dtype(dtype: str):
    model = layer(dtype)
    assert compare_runs(model, model, None, "nothing") == "equal outputs on random inputs"
    wanted = np.float32 if dtype == "bfloat16" else ARRAYS[dtype]
    assert {array.dtype for array in next(random_feeds(model)).values()} == {np.dtype(wanted)}


@pytest.mark.parametrize("given", [*ARRAYS, "torch"])
@pytest.mark.parametrize("dtype", CODES)
def test_an_input_takes_arrays_of_every_float_dtype(dtype: str, given: str):
    declared = DeclaredInput(value("x", CODES[dtype], [4, 96]))
    batch = torch.from_numpy(X).bfloat16() if given == "torch" else X.astype(ARRAYS[given])
    seen = batch.float().numpy() if given == "torch" else batch
    found = as_feeds(batch, [declared], "batch 0")["x"]
    wanted = rounded(seen.astype(np.float64), dtype)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


def test_values_too_large_for_a_narrow_input_become_infinite_as_a_cast_makes_them():
    declared = DeclaredInput(value("x", TensorProto.FLOAT16, [2]))
    np.testing.assert_array_equal(as_feeds(np.float32([1e6, -1e6]), [declared], "batch 0")["x"], [np.inf, -np.inf])


@pytest.mark.parametrize("dtype", CODES)
def test_integers_for_a_float_input_are_refused_with_the_conversion(dtype: str):
    session = float_session(layer(dtype))
    taken = "float32" if dtype == "bfloat16" else dtype
    message = f"batch 3: the input 'x' takes {taken} [n, 96], got int64 [4, 96]; convert it with .astype('{taken}')"
    with pytest.raises(DataError, match=re.escape(message)):
        as_feeds((X.astype(np.int64), OTHER), session.get_inputs(), "batch 3")
