"""What has no integer form is refused by the name of its node, with the reason and with something the user can do."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_forms import OUT, cast_and_back, of_weight, stamped, started
from integer_models import Net
from onnx import TensorProto, helper

import qsdk
from onnx_backend.integer import convert as converter

F32 = np.float32
PAIR = "put a QuantizeLinear/DequantizeLinear pair"


def behind(op, *inputs, made=(2, 4, 8), **attrs):
    """One op between two pairs."""
    net, x = started((2, 4, 8))
    given = [net.const(value) for value in inputs]
    net.output(net.qdq(net.op(op, x, *given, **attrs), *OUT), list(made))
    return stamped(net)


def float_scales():
    net = Net()
    s, z = net.const(np.float16(0.03)), net.const(np.uint8(100))
    q = net.op("QuantizeLinear", net.input([2, 8], dtype=TensorProto.FLOAT16), s, z)
    net.output(net.op("DequantizeLinear", q, s, z), [2, 8], dtype=TensorProto.FLOAT16)
    return net.model()


def scales_of_data():
    net = Net()
    net.output(net.op("DequantizeLinear", *net.op("DynamicQuantizeLinear", net.input([2, 8]), outputs=3)), [2, 8])
    return net.model()


def minifloat():
    net = Net()
    s, z = net.const(F32(0.03)), net.name("zero")
    net.initializers.append(helper.make_tensor(z, TensorProto.FLOAT8E4M3FN, [], [0.0]))
    net.output(net.op("DequantizeLinear", net.op("QuantizeLinear", net.input([2, 8]), s, z), s, z), [2, 8])
    return net.model()


def codes_computed_on():
    net = Net()
    q = net.op("QuantizeLinear", net.input([2, 8]), net.const(F32(0.03)), net.const(np.uint8(100)))
    net.output(net.op("Cast", q, to=TensorProto.INT32), [2, 8], dtype=TensorProto.INT32)
    return net.model()


def several_scales():
    net = Net()
    scale = net.const(np.array([0.1, 0.2], F32))
    q = net.op("QuantizeLinear", net.input([3, 2]), scale, axis=1)
    net.output(net.op("DequantizeLinear", q, scale, axis=1), [3, 2])
    return net.model()


def accumulators_given():
    net = Net()
    x = net.op("DequantizeLinear", net.input([2, 8], dtype=TensorProto.INT32), net.const(F32(0.1)))
    net.output(net.qdq(net.op("Relu", x), *OUT), [2, 8])
    return stamped(net)


def of_a_runtime():
    net, x = started()
    net.output(net.qdq(net.op("QuickGelu", x, domain="com.microsoft"), *OUT), [2, 8])
    return stamped(net, imports=[helper.make_opsetid("com.microsoft", 1)])


def listed():
    net, x = started()
    parts = net.op("SequenceConstruct", x, x)
    net.output(net.qdq(net.op("SequenceAt", parts, net.const(np.int64(0))), *OUT), [2, 8])
    return stamped(net)


def mask_is_read():
    net, x = started()
    dropped, mask = net.op("Dropout", x, outputs=2)
    net.output(net.qdq(dropped, *OUT), [2, 8])
    net.output(net.op("Not", mask), [2, 8], "mask", TensorProto.BOOL)
    return stamped(net)


def dynamic_mean():
    net, x = started(("n", "m", 8))
    net.output(net.qdq(net.op("ReduceSum", x, net.const(np.array([1]))), *OUT), ["n", 1, 8])
    return net.model()


#: What is refused -> a model, what names the node, the reason, the remedy.
REFUSED = {
    "an op without a form": (
        lambda: behind("Hardmax"), "Hardmax 'node_hardmax", "Hardmax has no integer form", "replace it by operators",
    ),
    "an op of a runtime": (
        of_a_runtime, "QuickGelu 'node_quickgelu", "of domain 'com.microsoft'", "export the model without fusing",
    ),
    "a list of tensors": (
        listed, "SequenceConstruct 'node_seq", "list of tensors", "export the model with separate tensors",
    ),
    "scales of data": (
        scales_of_data, "DynamicQuantizeLinear 'node_dynamic", "depend on the data", "quantize the float model",
    ),
    "a float weight": (
        lambda: of_weight(lambda net: net.const(np.ones((8, 4), F32))), "MatMul 'node_matmul", "its weight is float",
        "store it as an integer initializer behind a DequantizeLinear",
    ),
    "scales per input channel": (
        lambda: of_weight(lambda net: net.weight((8, 4), 0)[0]), "MatMul 'node_matmul", "per index of axis 0",
        "per tensor, per output channel or per block",
    ),
    "several scales": (
        several_scales, "QuantizeLinear 'node_quantizelinear", "more than one scale", "quantize activations per tensor",
    ),
    "a minifloat": (
        minifloat, "QuantizeLinear 'node_quantizelinear", "FLOAT8E4M3FN have no integer", "use an integer dtype",
    ),
    "a cast to float16": (
        lambda: cast_and_back(TensorProto.FLOAT16), "Cast 'node_cast", "its tensor in float16", "remove the casts",
    ),
    "codes computed on": (
        codes_computed_on, "Cast 'node_cast", "on quantized codes directly", "put a DequantizeLinear in front of it",
    ),
    "accumulators as an input": (
        accumulators_given, "DequantizeLinear 'node_dequantizelinear", "neither quantized nor a stored integer",
        "quantize its input",
    ),
    "a mask that is read": (
        mask_is_read, "Dropout 'node_dropout", "the mask, is read", "export the model in evaluation mode",
    ),
    "a sum over a dynamic axis": (
        dynamic_mean, "ReduceSum 'node_reducesum", "not static", "shapes={input name: sizes}",
    ),
    "the root of a negative": (
        lambda: behind("Sqrt"), "Sqrt 'node_sqrt", "not a number", "clip its input to where it is defined",
    ),
    "a Resize without a form": (
        lambda: behind("Resize", np.zeros(0, F32), F32([1, 1, 2]), made=(2, 4, 16), mode="cubic"),
        "Resize 'node_resize", "cubic",
        'use mode="linear" or "nearest"',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_node_the_reason_and_the_remedy(name, tmp_path):
    make, node, reason, remedy = REFUSED[name]
    with pytest.raises(qsdk.IntegerError) as caught:
        qsdk.to_integer(make(), tmp_path / "integer.onnx")
    (row,) = [line for line in str(caught.value).splitlines() if node in line]
    assert row.index(node) < row.index(reason) < row.index(remedy), row
    assert list(tmp_path.iterdir()) == []


def test_what_is_behind_a_refused_node_is_not_refused_too():
    net, x = started((2, 3, 3))
    refused = net.op("Det", x)
    total = net.op("Add", refused, net.op("ReduceSum", x, net.const(np.array([1, 2])), keepdims=0))
    net.output(net.qdq(total, *OUT), [2])
    with pytest.raises(qsdk.IntegerError) as error:
        converter.convert(stamped(net))
    assert "Det 'node_det" in str(error.value)
    assert "Add 'node_add" not in str(error.value)


def test_the_places_of_a_pools_largest_values_have_no_integer_form():
    net, x = started((1, 2, 4, 4))
    pooled, places = net.op("MaxPool", x, outputs=2, kernel_shape=[2, 2])
    net.output(places, [1, 2, 3, 3], name="places", dtype=TensorProto.INT64)
    net.output(net.qdq(pooled, *OUT), [1, 2, 3, 3])
    with pytest.raises(qsdk.IntegerError, match="its second output, the indices, is read"):
        converter.convert(stamped(net))


def test_float16_scales_make_a_model_of_integers_too(tmp_path):
    summary = qsdk.to_integer(float_scales(), tmp_path / "integer.onnx").summary
    assert (summary["float_tensors"], summary["operations_max_lsb"] <= 1) == (0, True)


def test_what_is_still_float_gets_a_remedy_of_its_own(tmp_path):
    net, x = started()
    net.output(net.op("MatMul", x, net.weight((8, 4))[0]), [2, 4])
    with pytest.raises(qsdk.IntegerError) as caught:
        qsdk.to_integer(net.model(), tmp_path / "integer.onnx")
    assert f"graph output 'y': it leaves the model unquantized; quantize it: {PAIR[4:]} before it" in str(caught.value)
    assert "sim = qsdk.quantize(model, None, qsdk.w8a8())" in str(caught.value)
    with pytest.raises(qsdk.IntegerError) as caught:
        qsdk.to_integer(behind("Hardmax"), tmp_path / "integer.onnx")
    assert "qsdk.quantize" not in str(caught.value)


class Turned(torch.nn.Module):
    """Angles far beyond a turn, which qsdk leaves float."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)
        self.rates = torch.nn.Buffer(torch.logspace(0, -4, 8))

    def forward(self, x):
        return self.head(torch.sin(x * self.rates))


def test_advice_for_a_file_of_qsdk_can_be_followed(tmp_path):
    x = 5e4 * torch.rand(16, 8)
    sim = qsdk.quantize(Turned(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    with pytest.raises(qsdk.IntegerError) as caught:
        qsdk.to_integer(tmp_path / "q.onnx", tmp_path / "i.onnx", progress=False)
    assert "qsdk.quantize(" not in str(caught.value)
    assert "print(sim.coverage()) gives" in str(caught.value)
    named = ast.literal_eval(str(caught.value).rpartition("allow_float=")[2])
    assert len(named) == 2
    report = qsdk.to_integer(tmp_path / "q.onnx", tmp_path / "i.onnx", allow_float=named, data=[x], progress=False)
    assert report.summary["float_nodes"] == 2
    assert report.summary["operations_max_lsb"] <= 1
    with pytest.raises(qsdk.IntegerError, match=r'float with target="standard": allow_float='):
        qsdk.to_integer(tmp_path / "q.onnx", tmp_path / "i.onnx", target="portable", progress=False)


class Inner(torch.nn.Module):
    def forward(self, x):
        return torch.linalg.det(x)


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x) * 2.0


def test_a_node_that_an_exporter_has_named_is_shown_with_its_site(tmp_path):
    x = torch.randn(4, 3, 3)
    sim = qsdk.quantize(Wrapped(), x)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "q.onnx")
    with pytest.raises(qsdk.IntegerError, match=r"in front of the site inner/\S+:output\)"):
        qsdk.to_integer(tmp_path / "q.onnx", tmp_path / "i.onnx", progress=False)


# --- all of them ----------------------------------------------------------------------------------------------------

JARGON = ("lowering", "subgraph", "Lookup", "Refused", "Value", "codes of", "fixed point of", "accumulator,")


def stated_texts():
    """Every refusal in the source with its texts: reasons and remedies, names of constants replaced."""
    for path in sorted(Path(converter.__file__).parent.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refused":
                values = [constants.get(getattr(value, "id", ""), value) for value in node.args]
                yield f"{path.name}:{node.lineno}", [ast.unparse(value) for value in values]


@pytest.mark.slow
def test_every_refusal_states_a_reason_and_a_remedy():
    rows = list(stated_texts())
    assert len(rows) > 120
    for where, texts in rows:
        if texts[0].startswith("*"):
            continue  # a row of a table of reasons and remedies
        reason, remedy = texts
        assert reason.strip("f'\""), where
        assert len(remedy.strip("f'\"")) >= 8 or not remedy.startswith(("'", '"', "f")), f"{where}: {remedy}"
        for text in texts:
            assert not any(word in text for word in JARGON), f"{where}: {text}"
            assert not text.rstrip("'\"").endswith("."), f"{where}: {text}"
        assert "in this version" not in remedy, where
