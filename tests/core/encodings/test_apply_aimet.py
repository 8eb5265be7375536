"""`apply_encodings` with files that AIMET 2.42 wrote: the Q/DQ model computes what AIMET's own simulation computed.

The files, and the outputs below, are of one run of AIMET on the network `tiny()` with the batch `X`.
"""

import json

import numpy as np
import onnx
import pytest
from aimet_documents import FILES, named, tiny
from foreign_models import integers

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk import FileFormatError, quantize

X = np.reshape(
    np.float32([-1.55, 0.86, 0.12, -0.64, 2.0, 0.76, -1.2, 0.07, 0.58, -0.19, 0.68, -0.07, 0.67, 1.44, -0.68, 0.2]),
    (4, 2, 2, 1),
)
SIMULATED = {
    "plain": [
        [2.0199530124664307, 0.0194226261228323, 3.9816384315490723],
        [-0.9517086744308472, 0.13595838844776154, 1.7286137342453003],
        [-0.3107620179653168, 0.11653575301170349, 2.0976436138153076],
        [-0.7963276505470276, 0.27191677689552307, 1.7480363845825195],
    ],
    "blocks": [
        [2.1421289443969727, -0.10298696160316467, 4.078283786773682],
        [-1.1534539461135864, -0.08238957077264786, 1.6477913856506348],
        [-0.32955828309059143, 0.12358435988426208, 2.080336570739746],
        [-0.8856878876686096, 0.16477914154529572, 1.7095836400985718],
    ],
    "two_level": [
        [2.080336570739746, -0.020597392693161964, 3.995894193649292],
        [-1.1534539461135864, -0.06179217994213104, 1.6271940469741821],
        [-0.32955828309059143, 0.12358435988426208, 2.059739351272583],
        [-0.906285285949707, 0.22657132148742676, 1.6477913856506348],
    ],
}
NODES = {"mm1:weight": "m1", "mm2:weight": "m2", "conv:weight": "conv.weight"}


def applied(path, folder):
    report = qsdk.apply_encodings(tiny(), path, folder / "out.onnx")
    return report, onnx.load(folder / "out.onnx")


@named
def test_a_file_of_aimet_gives_a_model_that_computes_as_its_simulation(path, tmp_path):
    report, model = applied(path, tmp_path)
    (found,) = simulation_session(model).run(None, {"x": X})
    lsb = quantize(tmp_path / "out.onnx", None, None).encodings["mm2:output"].scale[0]
    np.testing.assert_allclose(found, SIMULATED[path.stem.partition(".")[0]], rtol=0, atol=1e-5 * lsb)
    assert report.summary["unmatched"] == 0


@named
def test_the_scales_and_zero_points_are_those_of_the_file_digit_for_digit(path, tmp_path):
    data = json.loads(path.read_text())
    report, model = applied(path, tmp_path)
    encodings = quantize(tmp_path / "out.onnx", None, None).encodings
    names = {row["name"]: row["site"] for row in report.rows if row["state"] == "applied"}
    listed = data.get("encodings", data.get("activation_encodings"))
    said = {entry["name"]: entry for entry in listed} if isinstance(listed, list) else listed
    x = said["x"][0] if isinstance(said["x"], list) else said["x"]
    scale = x.get("y_scale", x.get("scale"))
    zero_point = x["y_zero_point"] if "y_zero_point" in x else -np.ravel(x["offset"])[0]
    found = encodings["x:input"]
    assert (found.dtype.name, found.scale[0], found.zero_point[0]) == (
        "uint8",
        np.float32(np.ravel(scale)[0]),
        zero_point,
    )
    bits = 8 if path.stem.startswith("plain") else 4
    stored = integers(model)
    floats = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in tiny().graph.initializer}
    for site, name in NODES.items():
        assert encodings[site].dtype.name == f"int{bits}"
        np.testing.assert_array_equal(stored[site][0][1], encodings[site].quantize(floats[name]))
    assert set(names.values()) >= {*NODES, "x:input", "relu:output", "mm2:output"}


def test_a_float16_entry_becomes_a_pair_of_casts(tmp_path):
    path = next(path for path in FILES if path.stem == "plain.1.0.0")
    report, model = applied(path, tmp_path)
    (row,) = [row for row in report.rows if row["site"] == "mm1:output"]
    assert (row["state"], row["dtype"]) == ("applied", "float16")
    assert [node.op_type for node in model.graph.node].count("Cast") == 2


@named
def test_a_file_of_aimet_for_another_network_is_refused_by_name(path, tmp_path):
    model = tiny()
    for node in model.graph.node:
        names = ["w" if name == "m1" else name for name in node.input]
        del node.input[:]
        node.input.extend(names)
    next(tensor for tensor in model.graph.initializer if tensor.name == "m1").name = "w"
    with pytest.raises(FileFormatError, match=r"(?s)1 no tensor of that name: m1 \(.*strict=False"):
        qsdk.apply_encodings(model, path, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()
    report = qsdk.apply_encodings(model, path, tmp_path / "out.onnx", strict=False)
    assert {row["name"]: row["state"] for row in report.rows}["m1"] == "unmatched"
    assert "mm1:weight" not in integers(onnx.load(tmp_path / "out.onnx"))
