"""Where validation runs, what it costs, and that it raises no false alarm."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import classifier, make_model, mlp, weights

import qsdk
from onnx_backend.runtimes.validate import validate
from onnx_backend.validation.rules import require_valid
from qsdk import FileFormatError, OnnxSim

node = helper.make_node
U8 = np.zeros((), np.uint8)
X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


def chain(length: int) -> onnx.ModelProto:
    """Pairs and Relus, one after the other, each with parameters of its own."""
    nodes, stored, read = [], {}, "x"
    for i in range(length):
        stored |= {f"s{i}": np.float32(0.1), f"z{i}": np.uint8(3)}
        nodes.append(node("QuantizeLinear", [read, f"s{i}", f"z{i}"], [f"q{i}"], f"quantize{i}"))
        nodes.append(node("DequantizeLinear", [f"q{i}", f"s{i}", f"z{i}"], [f"d{i}"], f"dequantize{i}"))
        nodes.append(node("Relu", [f"d{i}"], [f"r{i}"], f"relu{i}"))
        read = f"r{i}"
    return make_model(nodes, {"x": [2, 4]}, {read: [2, 4]}, stored)


def branches(length: int) -> onnx.ModelProto:
    """Ifs, one after the other, with a pair in each branch."""

    def branch(read: str, name: str) -> onnx.GraphProto:
        pair = [
            node("QuantizeLinear", [read, "s", "z"], [f"q{name}"]),
            node("DequantizeLinear", [f"q{name}", "s", "z"], [f"d{name}"]),
        ]
        return helper.make_graph(pair, name, [], [helper.make_tensor_value_info(f"d{name}", TensorProto.FLOAT, [2, 4])])

    nodes, read = [], "x"
    for i in range(length):
        chosen = {"then_branch": branch(read, f"a{i}"), "else_branch": branch(read, f"b{i}")}
        nodes.append(node("If", ["c"], [f"r{i}"], f"if{i}", **chosen))
        read = f"r{i}"
    return make_model(nodes, {"x": [2, 4]}, {read: [2, 4]}, {"s": np.float32(0.1), "z": U8, "c": np.array(True)})


@pytest.mark.slow
@pytest.mark.parametrize("make", [chain, branches])
def test_time_is_linear_in_the_nodes(make):
    def seconds(model: onnx.ModelProto) -> float:
        start = time.process_time()
        assert validate(model).rows == []
        return time.process_time() - start

    small, large = make(150), make(1200)
    validate(small)
    shortest = min(seconds(small) for _ in range(3))
    assert seconds(large) < 8 * 3 * shortest  # 64 times if it were quadratic


MEMORY = """
import sys
import numpy as np
from onnx import TensorProto, helper
from onnx_backend.runtimes.validate import validate

MIB, COUNT = 1 << 20, 8
nodes, model = [], helper.make_model(helper.make_graph([], "g", [], []), opset_imports=[helper.make_opsetid("", 21)])
model.ir_version = 10
for i in range(COUNT):
    nodes.append(helper.make_node("DequantizeLinear", [f"w{i}", "s"], [f"y{i}"], f"dq{i}"))
    if sys.argv[1] == "narrow":
        nodes[-1].metadata_props.add(key="qsdk.dtype", value="int6")
    model.graph.initializer.add(name=f"w{i}", data_type=TensorProto.INT8, dims=[16, MIB], raw_data=bytes(16 * MIB))
    model.graph.output.append(helper.make_tensor_value_info(f"y{i}", TensorProto.FLOAT, [16, MIB]))
model.graph.initializer.append(helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]))
model.graph.node.extend(nodes)


def resident(what):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(what)]
    return int(line.split()[1]) / 1024


open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
assert validate(model).rows == []
print((resident("VmHWM") - before) / (16 * COUNT))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is counted by Linux")
@pytest.mark.parametrize("kind", ["whole", "narrow"])
def test_at_most_one_large_weight_is_copied_at_a_time(kind: str):
    result = subprocess.run([sys.executable, "-c", MEMORY, kind], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 0.4  # of all eight; the allocator may hold one more


def conflicting() -> onnx.ModelProto:
    """Valid but for `output_dtype` against the zero point of the first node."""
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", output_dtype=TensorProto.INT8),
        node("DequantizeLinear", ["q", "s"], ["d"], "the_dq"),
        node("MatMul", ["d", "w"], ["y"], "mm"),
    ]
    return make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 3]}, {"s": np.float32(0.1), "z": U8, **weights(w=(6, 3))})


def calibrated() -> OnnxSim:
    sim = qsdk.quantize(mlp(), None, qsdk.w8a8())
    assert isinstance(sim, OnnxSim)
    qsdk.calibrate(sim, [X], progress=False)
    return sim


ENTRIES = {
    "quantize": lambda path, out: qsdk.quantize(path, None, None),
    "quantize a model": lambda path, out: qsdk.quantize(onnx.load(path), None, None),
    "quantize with a config": lambda path, out: qsdk.quantize(path, None, qsdk.w8a8()),
    "load_encodings": lambda path, out: qsdk.load_encodings(calibrated(), path),
    "check_parity": lambda path, out: qsdk.check_parity(calibrated(), path, [X], progress=False),
    "to_integer": lambda path, out: qsdk.to_integer(path, out),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_invalid_model_is_refused_wherever_one_is_loaded(entry: str, tmp_path: Path):
    onnx.save(conflicting(), tmp_path / "model.onnx")
    with pytest.raises(FileFormatError, match=r"node 'the_q': output_dtype INT8 contradicts the zero point"):
        ENTRIES[entry](str(tmp_path / "model.onnx"), tmp_path / "out.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"reduce_range": True, "per_channel": True}])
@pytest.mark.parametrize("kind", ["QUInt8", "QInt8"])
def test_what_the_quantizer_of_the_runtime_writes_has_no_errors(options, kind: str, tmp_path: Path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    onnx.save(classifier(), tmp_path / "float.onnx")

    class Reader(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [{"x": np.random.default_rng(i).normal(size=(2, 3, 8, 8)).astype(np.float32)} for i in range(2)]

        def get_next(self):
            return self.left.pop() if self.left else None

    quantization.quantize_static(
        tmp_path / "float.onnx",
        tmp_path / "q.onnx",
        Reader(),
        activation_type=quantization.QuantType[kind],
        weight_type=quantization.QuantType.QInt8,
        **options,
    )
    report = validate(onnx.load(tmp_path / "q.onnx"))
    assert report.summary["errors"] == 0, str(report)


def test_an_integer_model_has_no_findings(tmp_path: Path):
    qsdk.export(calibrated(), tmp_path / "model.onnx")
    for edges in ("float", "integer"):
        qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "int.onnx", edges=edges)
        assert qsdk.validate(tmp_path / "int.onnx").rows == []


def test_parameters_of_a_damaged_constant_are_a_finding_and_no_crash():
    damaged = numpy_helper.from_array(np.float32([0.1, 0.2]), "s")
    damaged.raw_data = damaged.raw_data[:5]
    nodes = [
        node("Constant", [], ["s"], "held", value=damaged),
        node("QuantizeLinear", ["x", "s"], ["q"], "the_q"),
        node("DequantizeLinear", ["q", "s"], ["y"], "the_dq"),
    ]
    found = validate(make_model(nodes, {"x": [2, 2]}, {"y": [2, 2]}, {})).rows
    assert [(row["node"], row["rule"]) for row in found] == [("s", "stored")]


def test_the_ops_of_the_runtime_are_held_to_the_same_rules():
    def contrib(scale: float, opset: int = 17) -> onnx.ModelProto:
        stored = {"s": np.float32(0.1), "t": np.float32(scale), "z": np.uint16(7)}
        nodes = [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", domain="com.microsoft"),
            node("DequantizeLinear", ["q", "t", "z"], ["y"], "the_dq", domain="com.microsoft"),
        ]
        imports = [helper.make_opsetid("com.microsoft", 1)]
        return make_model(nodes, {"x": [2, 2]}, {"y": [2, 2]}, stored, opset, imports=imports)

    assert validate(contrib(0.1)).rows == []  # 16 bits, which the standard has from opset 21 on
    assert [(row["node"], row["rule"]) for row in validate(contrib(0.2)).rows] == [("the_dq", "pair")]


def test_weights_without_a_kernel_open_but_a_model_beyond_the_runtime_does_not():
    narrow = helper.make_tensor("w", TensorProto.FLOAT4E2M1, [4, 4], list(np.tile([0.5, 1.0, -2.0, 6.0], 4)))
    nodes = [node("DequantizeLinear", ["w", "s"], ["d"], "the_dq"), node("MatMul", ["x", "d"], ["y"], "mm")]
    model = make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 4]}, {"s": np.float32(0.1)}, 23, 11)
    model.graph.initializer.append(narrow)
    assert [(row["node"], row["rule"]) for row in validate(model).rows] == [("the_dq", "kernel")]
    require_valid(model, "m.onnx")
    model.opset_import[0].version = 28
    with pytest.raises(FileFormatError, match=r"m\.onnx: opset 28 is beyond the runtime's 26; export at opset 21"):
        require_valid(model, "m.onnx")


def test_what_the_default_session_gets_wrong_is_a_warning():
    def relu(form: dict, *zero_point: str) -> onnx.ModelProto:
        nodes = [
            node("Relu", ["x"], ["r"], "relu"),
            node("QuantizeLinear", ["r", "s", *zero_point], ["q"], "the_q", **form),
            node("DequantizeLinear", ["q", "s", *zero_point], ["y"], "the_dq"),
        ]
        model = make_model(nodes, {"x": ["n", 8]}, {"y": ["n", 8]}, {"s": np.float32(0.2)})
        if zero_point:
            model.graph.initializer.append(helper.make_tensor("z", TensorProto.INT4, [], [0]))
        return model

    found = validate(relu({}, "z"))
    assert [(row["node"], row["rule"], row["severity"]) for row in found.rows] == [
        ("the_q", "default_session", "warning")
    ]
    assert validate(relu({"output_dtype": TensorProto.INT4})).rows == []
