"""A layer of an ONNX file has one name in coverage, in sensitivity and in the profile."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import qsdk

SPELLINGS = {
    "of the node": ("/0/conv1/Conv", "/1/conv2/Conv"),
    "of the node, as torch.export has it": ("node_conv2d", "node_conv2d_1"),
    "of no node": ("", ""),
    "twice": ("conv", "conv"),
}


def two_convolutions(names: tuple[str, str]) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    stored = [
        numpy_helper.from_array(rng.normal(size=size).astype(np.float32), name)
        for name, size in (("w1", (8, 3, 3, 3)), ("w2", (4, 8, 3, 3)))
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["y1"], name=names[0]),
        helper.make_node("Relu", ["y1"], ["r"], name="relu"),
        helper.make_node("Conv", ["r", "w2"], ["y2"], name=names[1]),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y2")]
    values[0] = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])
    graph = helper.make_graph(nodes, "two", values[:1], values[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("names", SPELLINGS.values(), ids=SPELLINGS.keys())
def test_every_report_names_a_layer_alike(names: tuple[str, str]):
    x = np.random.default_rng(1).normal(size=(4, 3, 8, 8)).astype(np.float32)
    sim = qsdk.quantize(two_convolutions(names), None)
    qsdk.calibrate(sim, [x], progress=False)
    covered = [row["site"].rpartition(":")[0] for row in sim.coverage().rows if row["kind"] == "weight"]
    assert len(set(covered)) == 2
    ranked = {row["layer"] for row in qsdk.sensitivity(sim, [x], progress=False).rows if row["kind"] == "weights"}
    assert ranked == set(covered)
    timed = [
        row for row in qsdk.analysis.profile(sim, threads=1, repeats=1, progress=False).rows if "Conv" in row["op_type"]
    ]
    assert sorted(row["layer"] for row in timed) == sorted(covered)
    if all(names):
        assert all(
            name in row["nodes"]
            for name, row in zip(sorted(names), sorted(timed, key=lambda r: r["layer"]), strict=True)
        )
