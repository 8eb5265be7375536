"""Copies of the sim of an ONNX model: independent, and whole when the original is gone."""

import copy
import gc
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import convnet

import qsdk
from onnx_backend.proto.weightless import LARGE

RNG = np.random.default_rng(5)
IMAGES = [RNG.normal(size=(4, 3, 8, 8)).astype(np.float32) for _ in range(2)]


def wide():
    """One MatMul whose weight counts as large, and is kept in a file by a saved sim."""
    inner = LARGE // 64 + 1
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n", k]) for n, k in (("x", inner), ("y", 64))]
    weight = numpy_helper.from_array(RNG.normal(size=(inner, 64)).astype(np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "dot")], "g", values[:1], values[1:], [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def calibrated(model, data):
    sim = qsdk.quantize(model, None, qsdk.w8a8())
    qsdk.calibrate(sim, data, progress=False)
    return sim


@pytest.mark.slow
@pytest.mark.parametrize("ran", [False, True])
def test_a_copy_computes_the_same_and_changes_alone(ran, tmp_path):
    sim = calibrated(convnet(), IMAGES)
    wanted = sim.run(IMAGES[0])[0]
    if not ran:
        sim = qsdk.load(saved(sim, tmp_path))
    other = copy.deepcopy(sim)
    np.testing.assert_array_equal(other.run(IMAGES[0])[0], wanted)
    assert other.encodings == sim.encodings
    qsdk.equalize(other, IMAGES, progress=False)
    qsdk.adaround(other, IMAGES, iterations=10, progress=False)
    other.set_precision("*", weight="int4")
    qsdk.calibrate(other, IMAGES, progress=False)
    np.testing.assert_array_equal(sim.run(IMAGES[0])[0], wanted)
    assert not np.array_equal(other.run(IMAGES[0])[0], wanted)
    qsdk.calibrate(sim, IMAGES, progress=False)  # its weights too are those of before
    np.testing.assert_array_equal(sim.run(IMAGES[0])[0], wanted)


def saved(sim, folder):
    qsdk.save(sim, folder / "sim.qsdk")
    return folder / "sim.qsdk"


def test_a_copy_of_an_opened_file_runs_the_file_itself(tmp_path):
    sim = calibrated(convnet(), IMAGES)
    qsdk.export(sim, tmp_path / "model.onnx")
    opened = qsdk.quantize(tmp_path / "model.onnx", None)
    other = copy.deepcopy(opened)
    assert other.opened.SerializeToString() == opened.opened.SerializeToString()
    np.testing.assert_array_equal(other.run(IMAGES[0])[0], opened.run(IMAGES[0])[0])


def test_a_copy_takes_a_snapshot_back():
    sim = calibrated(convnet(), IMAGES)
    other = copy.deepcopy(sim)
    before = other.snapshot(weights=True)
    qsdk.equalize(other, IMAGES, progress=False)
    other.restore(before)
    np.testing.assert_array_equal(other.run(IMAGES[0])[0], sim.run(IMAGES[0])[0])
    with pytest.raises(qsdk.ModelError, match="another sim"):
        sim.restore(before)


@pytest.mark.spread(1)
@pytest.mark.parametrize("loaded", [False, True])
def test_large_weights_in_files_live_as_long_as_a_copy_needs_them(loaded, tmp_path):
    model = wide()
    x = RNG.normal(size=(2, LARGE // 64 + 1)).astype(np.float32)
    sim = calibrated(model, [x])
    sim.in_memory = 0
    if loaded:
        sim = qsdk.load(saved(sim, tmp_path))
    (wanted,) = sim.run(x)
    other = copy.deepcopy(sim)
    files = [Path(file) for file in other.files_read()]
    assert files
    del sim
    gc.collect()
    np.testing.assert_array_equal(other.run(x)[0], wanted)
    qsdk.calibrate(other, [x], progress=False)
    np.testing.assert_array_equal(other.run(x)[0], wanted)
    del other
    gc.collect()
    assert not any(file.exists() for file in files)
