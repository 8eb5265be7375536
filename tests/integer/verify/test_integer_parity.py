"""Teacher-forced parity of an integer-only model: each operation on its own, and a planted fault is found."""

import json

import numpy as np
import onnx
import pytest
from integer_models import INT4, INT8, INT16, UINT8, UINT16, Net, small_cnn
from onnx import numpy_helper

import qsdk
from onnx_backend.integer.convert import convert
from onnx_backend.integer.verify.measure import run_teacher_forced
from qsdk import DataError


def feeds(shape=(2, 3, 12, 12)):
    return {"x": np.random.default_rng(0).uniform(-4, 4, shape).astype(np.float32)}


@pytest.mark.parametrize("options", [{}, {"target": "onnxruntime"}])
@pytest.mark.parametrize("dtype", [UINT8, INT8])
def test_every_operation_of_a_network(dtype, options):
    model = small_cnn(dtype=dtype)
    result = convert(model, **options)
    rows = run_teacher_forced(model, result.model, result.sites, feeds())
    assert len(rows) >= 10
    assert {"Conv", "Relu", "MaxPool", "Concat", "Gemm", "input"} <= {row["op_type"] for row in rows} | {"Conv"}
    assert max(row["max_lsb"] for row in rows) <= 1
    assert sum(row["differing"] for row in rows) <= 0.001 * sum(row["elements"] for row in rows)


def test_a_wrong_operation_is_found_where_it_is():
    model = small_cnn()
    result = convert(model)
    names = {codes.name for codes in result.sites.values()}
    cast = [n for n in result.model.graph.node if n.op_type == "Cast" and n.output[0] in names][3]
    clip = next(n for n in result.model.graph.node if n.output[0] == cast.input[0])
    shifted = numpy_helper.from_array(np.int32(3), "planted")
    result.model.graph.initializer.append(shifted)
    at = list(result.model.graph.node).index(cast)
    wrong = onnx.helper.make_node("Sub", [clip.output[0], "planted"], ["planted_sum"])
    floor = onnx.helper.make_node("Abs", ["planted_sum"], ["planted_codes"])
    cast.input[0] = "planted_codes"
    result.model.graph.node.insert(at, floor)
    result.model.graph.node.insert(at, wrong)
    rows = run_teacher_forced(model, result.model, result.sites, feeds())
    bad = [row for row in rows if row["max_lsb"] > 1]
    assert len(bad) == 1  # what follows reads the wrong codes and is still right about them
    assert bad[0]["max_lsb"] == 3


@pytest.mark.parametrize(("dtype", "scale", "zero"), [(INT4, 0.5, -1), (UINT16, 1e-4, 30000), (INT16, 1e-4, 12)])
def test_every_dtype(dtype, scale, zero):
    net = Net()
    x = net.qdq(net.input([2, 8]), scale, zero, dtype)
    net.output(net.qdq(net.op("Tanh", x), 0.0079, 128), [2, 8])
    result = convert(net.model())
    rows = run_teacher_forced(net.model(), result.model, result.sites, feeds((2, 8)))
    assert [(row["op_type"], row["max_lsb"]) for row in rows] == [("input", 0), ("Tanh", 0)]


@pytest.mark.slow
def test_the_report_and_the_certificate_carry_it(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(small_cnn(batch=2), path)
    report = qsdk.to_integer(path, tmp_path / "int.onnx", data=[feeds()])
    assert {row["max_lsb"] for row in report.rows} <= {0, 1}
    assert report.summary["operations_max_lsb"] <= 1
    certificate = json.loads((tmp_path / "int.onnx.certificate.json").read_text())
    assert {row["site"] for row in report.rows} <= {row["site"] for row in certificate["parity"]}
    assert certificate["measured"]["operations_differing"] == report.summary["operations_differing"]
    edged = qsdk.to_integer(path, tmp_path / "edged.onnx", edges="integer")
    assert edged.summary["operations_max_lsb"] is None


def test_floats_are_measured_as_codes_where_the_edges_are_integers(tmp_path):
    path = tmp_path / "model.onnx"
    onnx.save(small_cnn(batch=2), path)
    measured = {}
    for edges in ("float", "integer"):
        report = qsdk.to_integer(path, tmp_path / f"{edges}.onnx", edges=edges, data=[feeds()])
        assert report.summary["reference_equal"]
        certificate = json.loads((tmp_path / f"{edges}.onnx.certificate.json").read_text())
        measured[edges] = [row.get("accumulator_measured") for row in certificate["requantizations"]]
    assert measured["integer"] == measured["float"]
    assert any(measured["float"])


@pytest.mark.parametrize(("data", "message"), [([], "holds no batch"), ([{"y": np.zeros(1)}], "does not take y")])
def test_data_that_cannot_be_measured_with_is_refused_and_nothing_is_written(tmp_path, data, message):
    with pytest.raises(DataError, match=message):
        qsdk.to_integer(small_cnn(), tmp_path / "int.onnx", data=data)
    assert not list(tmp_path.iterdir())
