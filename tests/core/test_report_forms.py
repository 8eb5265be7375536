"""Reports and sims show themselves on one screen, and in full when asked; what export says about sizes."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from qdq_models import convnet, make_model

import qsdk
from qsdk import Report

ROWS = [{"site": f"layer{n}:weight", "bits": n, "reason": "why " * 60} for n in range(70)]
LONG = {
    "ranking": ROWS,
    "raised": [f"site{n}" for n in range(50)],
    "note": "x" * 1000,
    "verdict": True,
}
X = np.random.default_rng(0).normal(size=(16, 3, 8, 8)).astype(np.float32)


def test_a_long_report_fits_a_screen_and_says_how_to_see_all():
    report = Report("Long", ROWS, LONG)
    lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 410
    shown = sum(line.startswith("layer") for line in lines)
    assert lines[-1] == f"... {70 - shown} more rows: print(report.full())"
    assert shown >= 20
    assert "  ... 65 more" in lines
    assert "raised: site0, site1, site2, site3, site4 and 45 more" in lines
    assert lines.index("verdict: True") < lines.index(next(line for line in lines if line.startswith("layer")))


def test_the_full_form_leaves_nothing_out():
    text = Report("Long", ROWS, LONG).full()
    assert all(f"layer{n}:weight" in text for n in range(70))
    assert "x" * 1000 in text
    assert "site49" in text
    assert text.count("why " * 59) == 140  # in the rows and in the ranking
    few = Report("Few", ROWS[:3], {"total": 3})
    assert str(Report("Few", [{"a": 1}], {"total": 3})) == Report("Few", [{"a": 1}], {"total": 3}).full()
    assert few.full().splitlines()[-1] == "total: 3"


def test_a_report_of_many_facts_fits_too():
    report = Report("Facts", ROWS, {f"fact{n}": n for n in range(60)})
    lines = str(report).splitlines()
    assert len(lines) <= 40
    assert "... 44 more facts: report.summary" in lines


def test_small_tables_stand_under_their_name():
    rows = [{"op_type": "Conv", "sites": 3}, {"op_type": "Gemm", "sites": 1}]
    heading, *lines = str(Report("Small", [], {"by_type": rows})).splitlines()[1:]
    assert heading == "by_type:"
    assert lines == ["  op_type  sites", "  -------  -----", "  Conv         3", "  Gemm         1"]


def test_a_notebook_shows_as_many_rows():
    html = Report("Long <1>", ROWS, LONG)._repr_html_()
    assert "<b>Long &lt;1&gt;</b>" in html
    assert html.count("<tr>") < 45
    assert "more rows: print(report.full())" in html
    assert "x" * 500 not in html


def test_rows_go_to_pandas_where_it_is(monkeypatch: pytest.MonkeyPatch):
    pandas = pytest.importorskip("pandas")
    frame = Report("Long", [{"a": np.float32(1.5), "b": "x"}, {"a": None, "b": "y"}]).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["b"]) == ["x", "y"]
    assert frame["a"][0] == 1.5
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(qsdk.ConfigError, match=r"to_pandas\(\) needs pandas.*pip install pandas"):
        Report("Long").to_pandas()


def test_sims_and_their_reports_begin_with_the_op_types(tmp_path: Path):
    onnx.save(convnet(), tmp_path / "float.onnx")
    sim = qsdk.quantize(str(tmp_path / "float.onnx"), None, qsdk.w8a8().skip("gemm"))
    assert repr(sim).startswith("OnnxSim(")
    assert "; 0 of " in repr(sim)
    calibrated = qsdk.calibrate(sim, [X], progress=False)
    assert "; 0 of " not in repr(sim)
    assert "<td>Conv</td>" in sim._repr_html_()
    coverage = sim.coverage()
    of_type = {row["op_type"]: row for row in coverage.summary["by_type"]}
    assert sum(row["sites"] for row in of_type.values()) == len(coverage.rows)
    assert sum(row["float"] for row in of_type.values()) == coverage.summary["float"] > 0
    assert of_type["Conv"]["dtypes"] == "1 int8, 1 int32, 1 float32"  # Relu quantizes its output
    reasons = coverage.summary["float_because"]
    assert sum(row["sites"] for row in reasons) == coverage.summary["float"]
    assert {row["reason"] for row in reasons} == {row["reason"] for row in coverage.rows if row["state"] == "float"}
    assert sum(row["sites"] for row in calibrated.summary["by_type"]) == calibrated.summary["sites"]
    exported = qsdk.export(sim, tmp_path / "m.onnx")
    assert sum(row["sites"] for row in exported.summary["by_type"]) == len(exported.rows)
    module = qsdk.quantize(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    assert "<td>Gemm</td>" in module._repr_html_()


def linear(size: int) -> onnx.ModelProto:
    stored = {"w": np.random.default_rng(0).normal(size=(size, size)).astype(np.float32)}
    return make_model(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "head")], {"x": [1, size]}, {"y": [1, size]}, stored
    )


def exported(model: onnx.ModelProto, config: qsdk.QuantConfig, folder: Path) -> dict:
    onnx.save(model, folder / "float.onnx")
    sim = qsdk.quantize(str(folder / "float.onnx"), None, config)
    shape = [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    qsdk.calibrate(sim, [np.random.default_rng(0).normal(size=shape).astype(np.float32)], progress=False)
    return qsdk.export(sim, folder / "m.onnx").summary


def test_export_says_how_large_the_file_is_and_would_be(tmp_path: Path):
    found = exported(linear(256), qsdk.w8a8(), tmp_path)
    assert found["bytes"] == (tmp_path / "m.onnx").stat().st_size
    assert abs(found["as_float32_bytes"] - (tmp_path / "float.onnx").stat().st_size) < 4000  # the nodes and metadata
    assert found["ratio"] == found["bytes"] / found["as_float32_bytes"]
    assert 0.25 < found["ratio"] < 0.3
    assert "size_remarks" not in found


def test_export_says_where_bits_buy_nothing(tmp_path: Path):
    narrow = exported(linear(256), qsdk.w4a8().override("head", weight="int3"), tmp_path)
    assert narrow["size_remarks"] == [
        "int3 (weights: 1) is stored in int4: no byte less than int4, which is more exact"
    ]
    assert narrow["bytes"] >= exported(linear(256), qsdk.w4a8(), tmp_path)["bytes"] - 100
    (left,) = exported(linear(256), qsdk.w8a8().skip("head"), tmp_path)["size_remarks"]
    assert left.startswith("float tensors: 262,144 of ")
    (nodes,) = exported(linear(4), qsdk.w4a8(), tmp_path)["size_remarks"]
    assert nodes.startswith("the nodes and their names: ")
