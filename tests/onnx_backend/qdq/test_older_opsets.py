"""Files of opsets below 21: 8-bit pairs with zero points, the same codes, and errors that name what cannot be said."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsdk
from onnx_backend.qdq.older_opsets import at_older_opset


class Block(nn.Module):
    """Attention, LayerNorm and GELU, none of which opset 13 has as such."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )


def upsampled() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=2), nn.SiLU(), nn.PReLU())


NETWORKS = {"images": (images, (2, 3, 16, 16)), "upsampled": (upsampled, (2, 3, 9, 9)), "block": (Block, (2, 8, 16))}


def sim_of(name: str, config: qsdk.QuantConfig | None = None):
    made, shape = NETWORKS[name]
    torch.manual_seed(0)
    x = torch.randn(shape)
    sim = qsdk.quantize(made().eval(), x, config, dynamic_shapes={})
    qsdk.calibrate(sim, [x], progress=False)
    return sim, x


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("opset", [13, 14, 15, 17, 20])
def test_the_file_computes_the_simulated_codes_at_each_opset_that_has_its_operators(tmp_path, name, opset):
    sim, x = sim_of(name)
    path = tmp_path / "m.onnx"
    qsdk.export(sim, path, opset=opset)
    model = onnx.load(path)
    assert [entry.version for entry in model.opset_import] == [opset]
    pairs = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert all(len(node.input) == 3 for node in pairs)
    assert {attribute.name for node in pairs for attribute in node.attribute} <= {"axis"}
    assert qsdk.validate(path).summary == {"errors": 0, "warnings": 0}
    assert qsdk.check_parity(sim, path, [x], progress=False).summary["passed"]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    (got,) = ort.InferenceSession(path, options).run(None, {model.graph.input[0].name: x.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(got, sim(x).numpy(), atol=float(sim.encodings[output_of(sim)].scale[0]) * 1.01)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [13, 14])
def test_a_block_of_open_sizes_computes_the_same_at_other_sizes(tmp_path, opset):
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16)
    sizes = {0: torch.export.Dim("n"), 1: torch.export.Dim("t")}
    sim = qsdk.quantize(Block().eval(), x, dynamic_shapes={"x": sizes})
    qsdk.calibrate(sim, [x], progress=False)
    found = {}
    for version in (opset, 21):
        qsdk.export(sim, tmp_path / "m.onnx", opset=version)
        assert qsdk.check_parity(sim, tmp_path / "m.onnx", [torch.randn(3, 5, 16)], progress=False).summary["passed"]
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        (found[version],) = ort.InferenceSession(tmp_path / "m.onnx", options).run(None, {"x": x[:1, :3].numpy()})
    step = float(sim.encodings[output_of(sim)].scale[0])
    assert np.abs(found[opset] - found[21]).max() <= 1.01 * step


def reshaped(*parts, shape="parts", allowzero=1):
    """A file of opset 21 whose Reshape takes a shape that is made of parts; a part is a number or an axis of x."""
    nodes, stored = [helper.make_node("Shape", ["x"], ["sizes"])], []
    for i, part in enumerate(parts):
        stored.append(numpy_helper.from_array(np.array([int(part)]), f"n{i}"))
        if isinstance(part, str):
            nodes.append(helper.make_node("Gather", ["sizes", f"n{i}"], [f"p{i}"]))
        else:
            nodes.append(helper.make_node("Identity", [f"n{i}"], [f"p{i}"]))
    nodes.append(helper.make_node("Concat", [f"p{i}" for i in range(len(parts))], ["parts"], axis=0))
    nodes.append(helper.make_node("Reshape", ["x", shape], ["y"], "reshaped", allowzero=allowzero))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    inputs += [helper.make_tensor_value_info("given", TensorProto.INT64, [2])] if shape == "given" else []
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * len(parts))]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("parts", [(2, "0", -1), ("1", "0"), (-1, 2)])
def test_a_shape_that_is_computed_says_no_zero(parts):
    written = at_older_opset(reshaped(*parts), 13)
    assert [node.attribute[:] for node in written.graph.node if node.op_type == "Reshape"] == [[]]
    x = np.arange(24, dtype=np.float32).reshape(6, 4)
    runs = [ort.InferenceSession(m.SerializeToString()).run(None, {"x": x})[0] for m in (reshaped(*parts), written)]
    np.testing.assert_array_equal(*runs)


@pytest.mark.parametrize("options", [{"parts": ("0", 0)}, {"parts": ("0", 4), "shape": "given"}])
def test_a_shape_that_may_say_zero_is_an_error_with_the_node_and_the_lowest_opset(options):
    model = reshaped(*options.pop("parts"), **options)
    with pytest.raises(qsdk.ExportError, match=r"no attribute allowzero there, and 'reshaped' uses it; .*opset is 14"):
        at_older_opset(model, 13)


def output_of(sim) -> str:
    return next(row["site"] for row in sim.coverage().rows if row["kind"] == "output")


def test_a_file_of_an_older_opset_opens_with_its_encodings(tmp_path):
    sim, x = sim_of("images")
    qsdk.export(sim, tmp_path / "m.onnx", opset=13)
    again = qsdk.quantize(tmp_path / "m.onnx", None)
    assert set(again.encodings) == set(sim.encodings)
    for site, encoding in sim.encodings.items():
        np.testing.assert_array_equal(again.encodings[site].scale.ravel(), encoding.scale.ravel())
    with torch.no_grad():
        np.testing.assert_array_equal(again.run(x.numpy())[0], sim(x).numpy())


@pytest.mark.parametrize(
    ("config", "opset", "named", "least"),
    [
        (qsdk.weight_only("int4"), 17, r"5:weight.*\(int4\)", 21),
        (qsdk.w8a16(), 20, r"uint16", 21),
        (qsdk.w8a8(block_size=4), 20, r"5:weight \(int8 in blocks\)", 21),
        (qsdk.weight_only("float8e4m3fn"), 18, r"float8e4m3fn", 19),
    ],
)
def test_what_an_opset_cannot_say_is_an_error_with_the_lowest_that_can(tmp_path, config, opset, named, least):
    sim, _ = sim_of("images", config)
    with pytest.raises(
        qsdk.ExportError, match=rf"opset {opset} cannot say .*{named}.*the lowest opset that can is {least}"
    ):
        qsdk.export(sim, tmp_path / "m.onnx", opset=opset)
    qsdk.export(sim, tmp_path / "m.onnx", opset=least)
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == least


@pytest.mark.slow
def test_float8_weights_stand_in_a_file_of_opset_19(tmp_path):
    sim, x = sim_of("images", qsdk.weight_only("float8e4m3fn"))
    qsdk.export(sim, tmp_path / "m.onnx", opset=19)
    report = qsdk.check_parity(sim, tmp_path / "m.onnx", [x], progress=False)
    assert report.summary["passed"]
    assert report.summary["weights_max_lsb"] == 0
