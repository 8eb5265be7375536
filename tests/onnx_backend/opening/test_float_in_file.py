"""Coverage of an opened Q/DQ file lists what the file leaves float, and why."""

import numpy as np
from foreign_models import aimet, by_onnxruntime, pt2e
from qdq_models import convnet, mlp

from onnx_backend.opening.encodings_of_file import FLOAT_IN_FILE
from qsdk import calibrate, export, load, quantize, save, w8a8


def floats(sim):
    """Site -> kind and reason of the rows that are float; the summary counts them."""
    report = sim.coverage()
    found = {row["site"]: (row["kind"], row["reason"]) for row in report.rows if row["state"] == "float"}
    assert report.summary["float"] == len(found)
    assert all(reason for _, reason in found.values())
    assert len({row["site"] for row in report.rows}) == len(report.rows)
    return found


def test_what_a_tool_left_float_is_listed_as_the_choice_of_the_file(tmp_path):
    model = by_onnxruntime(mlp(), (4, 6), tmp_path, op_types_to_quantize=["MatMul"])
    assert floats(quantize(model, None, None)) == {
        "(add1:bias)": ("bias", FLOAT_IN_FILE),
        "(add2:bias)": ("bias", FLOAT_IN_FILE),
        "(add1:output)": ("activation", "inside MatMul+Add+Relu"),
        "(add2:output)": ("output", FLOAT_IN_FILE),
    }
    assert floats(quantize(aimet(), None, None)) == {}
    assert floats(quantize(pt2e(), None, None)) == {
        "(node_conv2d:bias)": ("bias", FLOAT_IN_FILE),
        "(node_conv2d:output)": ("activation", "inside Conv+Relu"),
        "(node_mean:output)": ("activation", FLOAT_IN_FILE),
        "(node_linear:output)": ("output", FLOAT_IN_FILE),
    }


def test_an_exported_file_lists_the_reasons_of_the_plan_it_came_from(tmp_path):
    """A float site of the first plan is float in the file, for the planner's reason where that is not a rule's."""
    config = w8a8().skip("*", dtype="float32", op_type="Add")
    sim = quantize(convnet(), None, config)
    calibrate(sim, [np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)], progress=False)
    export(sim, tmp_path / "q.onnx")
    opened = quantize(tmp_path / "q.onnx", None, None)
    found = floats(opened)
    wanted = {row["site"]: row for row in sim.coverage().rows if row["state"] == "float"}
    assert set(found) == {site if site.startswith("(") else f"({site})" for site in wanted}
    for site, (kind, reason) in found.items():
        before = wanted.get(site) or wanted[site[1:-1]]
        assert kind == before["kind"]
        assert reason == (FLOAT_IN_FILE if "[" in before["reason"] else before["reason"])
    assert FLOAT_IN_FILE in {reason for _, reason in found.values()}
    save(opened, tmp_path / "sim.qsdk")
    assert load(tmp_path / "sim.qsdk").coverage().rows == opened.coverage().rows


def test_a_weight_that_is_stored_transposed_is_no_float_tensor(tmp_path):
    """Export stores a Linear's weight as [in, out]; what is read back through a Transpose is the quantized weight."""
    sim = quantize(pt2e(), None, w8a8())
    calibrate(sim, [np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32)], progress=False)
    export(sim, tmp_path / "q.onnx")
    opened = quantize(tmp_path / "q.onnx", None, None)
    assert any(op.type == "Transpose" for op in opened.graph.ops)
    assert not any("view of" in reason for _, reason in floats(opened).values())
