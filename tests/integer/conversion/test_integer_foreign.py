"""Integer-only models of what other tools write, and of Q/DQ written in unusual ways: exact, measured, or refused."""

import numpy as np
import onnx
import pytest
from foreign_forms import FORMS, attention, stamped
from foreign_models import aimet, by_onnxruntime, pt2e
from foreign_nets import NETS, lstm
from integer_models import LEVELS, Net, run
from qdq_models import convnet, mlp
from tool_options import S8, S16, TOOL, U8, U16, of_tool

import qsdk
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.measure import random_inputs

OPTIONS = {
    "standard": {},
    "onnxruntime": {"target": "onnxruntime"},
}


def converted(model, folder, **options):
    """Convert with every option; the standard one computes in the runtime, at every level, what NumPy does."""
    for name, chosen in OPTIONS.items():
        out = folder / f"{name}.onnx"
        summary = qsdk.to_integer(model, out, **chosen, **options).summary
        assert summary["float_tensors"] == 0
        assert summary["quantize_nodes"] == 0
        assert summary["operations_max_lsb"] <= 1, name
        assert summary["operations_differing"] <= 0.01, name
    written = onnx.load(folder / "standard.onnx")
    feeds = random_inputs(written, written, np.random.default_rng(7))
    wanted = run_reference(written, feeds)
    for level in LEVELS:
        for output, found in run(written, feeds, level).items():
            np.testing.assert_array_equal(found, wanted[output], err_msg=f"{output} at {level}")
            assert np.unique(found).size > 1
    return written


# --- onnxruntime.quantization ---------------------------------------------------------------------------------------


KINDS = {
    "uint8": of_tool(U8, S8),
    "uint8 per channel": of_tool(U8, S8, True),
    "int8": of_tool(S8, S8),
    "int8 per channel": of_tool(S8, S8, True),
    "uint8 weights per channel": of_tool(U8, U8, True),
    "uint16": of_tool(U16, S8),
    "uint16 per channel": of_tool(U16, S8, True),
    "int16 per channel": of_tool(S16, S8, True),
    "16-bit weights": of_tool(S16, S16, True),
}


# one network has every kind, the two others one of 8 and one of 16 bits
ONE_OF_EACH = ("uint8 per channel", "16-bit weights")
EVERY_NET = [net for net in NETS if net is not lstm]
NETS_AND_KINDS = [
    pytest.param(
        net,
        kind,
        marks=() if net is EVERY_NET[0] or kind in ONE_OF_EACH else pytest.mark.slow,
        id=f"{net.__name__}-{kind}",
    )
    for net in EVERY_NET
    for kind in KINDS
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("net", "kind"), NETS_AND_KINDS)
def test_what_onnxruntime_quantizes(net, kind, tmp_path):
    converted(by_onnxruntime(net(21), NETS[net], tmp_path, **KINDS[kind]), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "opset"),
    [
        pytest.param(net, opset, marks=() if net is EVERY_NET[0] else pytest.mark.slow, id=f"{net.__name__}-{opset}")
        for net in EVERY_NET
        for opset in (18, 19, 23, 25)
    ],
)
def test_every_opset(net, opset, tmp_path):
    written = converted(by_onnxruntime(net(opset), NETS[net], tmp_path, **KINDS["uint8 per channel"]), tmp_path)
    assert written.opset_import[0].version == max(opset, 21)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uint8", "int8 per channel"])
def test_an_lstm_with_quantized_weights(kind, tmp_path):
    options = {"op_types_to_quantize": ["LSTM", "Squeeze", "Gemm"], **KINDS[kind]}
    converted(by_onnxruntime(lstm(21), NETS[lstm], tmp_path, **options), tmp_path)


@pytest.mark.slow
def test_an_lstm_that_the_tool_leaves_float_is_refused_and_the_remedy_helps(tmp_path):
    model = by_onnxruntime(lstm(21), NETS[lstm], tmp_path, **KINDS["uint8"])
    with pytest.raises(qsdk.IntegerError) as caught:
        qsdk.to_integer(model, tmp_path / "integer.onnx")
    assert "LSTM 'lstm': its input is a float tensor; put a QuantizeLinear" in str(caught.value)
    assert "qsdk.quantize(model, None, qsdk.w8a8())" in str(caught.value)
    converted(completed(model, np.random.default_rng(0).normal(size=NETS[lstm]), tmp_path), tmp_path)


def completed(model, x, folder):
    """What is float in a file, quantized as the message says."""
    sim = qsdk.quantize(model, None, qsdk.w8a8())
    qsdk.calibrate(sim, [{"x": x.astype(np.float32)}], progress=False)
    qsdk.export(sim, folder / "completed.onnx")
    return onnx.load(folder / "completed.onnx")


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", list(TOOL)[3:])  # the first ones are among KINDS
def test_the_options_of_onnxruntimes_tool(name, tmp_path):
    net, opset, options = TOOL[name]
    made = {"mlp": mlp, "convnet": convnet}[net](opset)
    converted(by_onnxruntime(made, {"mlp": (4, 6), "convnet": (2, 3, 8, 8)}[net], tmp_path, **options), tmp_path)


# --- other tools ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prequantized", [False, True])
def test_what_aimet_exports(prequantized, tmp_path):
    converted(aimet(prequantized), tmp_path)


@pytest.mark.spread(1)
@pytest.mark.parametrize("opset", [18, 21])
def test_what_pt2e_exports_is_refused_where_it_is_float_and_the_remedy_helps(opset, tmp_path):
    model = pt2e(opset)
    with pytest.raises(qsdk.IntegerError, match=r"graph output 'y': it leaves the model unquantized; quantize it"):
        qsdk.to_integer(model, tmp_path / "integer.onnx")
    converted(completed(model, np.random.default_rng(0).normal(size=(2, 3, 8, 8)), tmp_path), tmp_path)


def test_what_pt2e_leaves_float_may_stay_float(tmp_path):
    report = qsdk.to_integer(pt2e(), tmp_path / "integer.onnx", allow_float=["node_mean", "node_linear"])
    assert report.summary["float_nodes"] == 2
    assert report.summary["operations_max_lsb"] == 0


# --- forms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_unusual_forms(name, tmp_path):
    converted(FORMS[name](), tmp_path)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith(("RotaryEmbedding", "Attention"))])
def test_what_is_written_out_computes_what_the_runtimes_own_kernel_does(name, tmp_path):
    model = FORMS[name]()
    written = converted(model, tmp_path)
    feeds = random_inputs(written, written, np.random.default_rng(9))
    wanted, found = (run(made, feeds, "ORT_DISABLE_ALL")["y"] for made in (model, written))
    assert np.abs(found - wanted).max() <= 0.048  # a step of the output
    assert (found != wanted).mean() <= 0.02


def test_one_of_several_composed_nodes_cannot_stay(tmp_path):
    net = Net()
    x = net.qdq(net.input([1, 2, 4, 8]), 0.031, 119)
    first = net.op("Attention", x, x, x)
    hidden = net.qdq(first, 0.03, 120)
    net.output(net.qdq(net.op("Attention", hidden, hidden, hidden), 0.03, 120), [1, 2, 4, 8])
    said = r"1 node cannot.*\n  Attention 'node_attention_\d+': it was left in one piece.*; name all nodes"
    with pytest.raises(qsdk.IntegerError, match=said):
        qsdk.to_integer(stamped(net, 23), tmp_path / "integer.onnx", allow_float=[f"node_{first}"])


def test_what_allow_float_names_stays_composed(tmp_path):
    report = qsdk.to_integer(attention(), tmp_path / "integer.onnx", allow_float=["Attention"])
    assert report.summary["float_nodes"] == 1
    assert "Attention" in {node.op_type for node in onnx.load(tmp_path / "integer.onnx").graph.node}
