"""What is no number is never an agreement: NaN in what the integers are measured against."""

import numpy as np
import pytest
from onnx import helper
from qdq_models import make_model, weights

import qsdk
from qsdk import IntegerError

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def exported(path, weight, last):
    nodes = [helper.make_node("MatMul", ["x", "w"], ["m"], "mm"), helper.make_node(last, ["m"], ["y"], "last")]
    model = make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 4]}, {"w": weight})
    sim = qsdk.quantize(model, None, qsdk.w8a8().skip("last"))
    qsdk.calibrate(sim, [X], progress=False)
    qsdk.export(sim, path)
    return path


def test_nan_in_the_measurement_is_refused(tmp_path):
    path = exported(tmp_path / "m.onnx", weights(w=(6, 4))["w"], "Sqrt")
    with pytest.raises(IntegerError, match=r"gives NaN in the output 'y' on the inputs of the measurement"):
        qsdk.to_integer(path, tmp_path / "i.onnx", allow_float=["Sqrt"], data=[X])
    assert not (tmp_path / "i.onnx").exists()


def test_equal_infinities_are_no_distance_apart(tmp_path):
    path = exported(tmp_path / "m.onnx", np.full((6, 4), 1e4, np.float32), "Exp")
    report = qsdk.to_integer(path, tmp_path / "i.onnx", allow_float=["Exp"], data=[X])
    assert report.summary["max_lsb"] == 0
