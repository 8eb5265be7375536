import itertools
import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from qdq_models import convnet, make_model, mlp, prepared

from onnx_backend.lower import insert
from onnx_backend.runtimes.validate import validate
from onnx_backend.validation.rules import require_valid
from qsdk import FileFormatError, quantize, w4a8, w4a16, w8a8, w8a16

node = helper.make_node
U8, I8 = np.zeros((), np.uint8), np.zeros((), np.int8)


def pair(stored=None, quantize=None, dequantize=None, names=("s", "z"), shape=(2, 4), opset=21, **more):
    """Q -> DQ with the given stored tensors and attributes."""
    held = {"s": np.float32(0.1), "z": U8} | (stored or {})
    dq = list(names) if "ds" not in held else ["ds", *names[1:]]
    dq = dq if "dz" not in held else [dq[0], "dz"]
    nodes = [
        node("QuantizeLinear", ["x", *names], ["q"], "the_q", **(quantize or {})),
        node("DequantizeLinear", ["q", *dq], ["y"], "the_dq", **(dequantize or {})),
    ]
    return make_model(nodes, {"x": shape}, {"y": shape}, held, opset, **more)


def rules(model):
    return [(row["node"], row["rule"], row["severity"]) for row in validate(model).rows]


CONFLICT = {"quantize": {"output_dtype": TensorProto.INT8}}
BLOCKS = {"axis": 1, "block_size": 2}
CASES = {
    "conflict": (pair(**CONFLICT), ("the_q", "output_dtype")),
    "pair of types": (pair({"dz": I8}), ("the_dq", "dtype")),
    "no quantized type": (pair(quantize={"output_dtype": TensorProto.FLOAT}, names=("s",)), ("the_q", "dtype")),
    "unknown type": (pair(quantize={"output_dtype": 999}, names=("s",)), ("the_q", "dtype")),
    "int2 at 21": (pair(quantize={"output_dtype": TensorProto.INT2}, names=("s",)), ("the_q", "dtype")),
    "int4 zero point at 19": (
        pair({"z": numpy_helper.to_array(helper.make_tensor("z", TensorProto.INT4, [], [0]))}, opset=19),
        ("the_q", "dtype"),
    ),
    "attribute at 19": (pair(quantize={"output_dtype": TensorProto.UINT8}, opset=19), ("the_q", "opset")),
    "zero points and scales": (
        pair({"s": np.ones(4, np.float32)}, {"axis": 1}, {"axis": 1}),
        ("the_q", "shape"),
    ),
    "channels": (
        pair({"s": np.ones(3, np.float32), "z": np.zeros(3, np.uint8)}, {"axis": 1}, {"axis": 1}),
        ("the_q", "shape"),
    ),
    "blocks": (
        pair({"s": np.ones((2, 3), np.float32), "z": np.zeros((2, 3), np.uint8)}, BLOCKS, BLOCKS),
        ("the_q", "shape"),
    ),
    "blocks of another rank": (
        pair({"s": np.ones(2, np.float32), "z": np.zeros(2, np.uint8)}, BLOCKS, BLOCKS),
        ("the_q", "shape"),
    ),
    "two dimensions without blocks": (
        pair({"s": np.ones((2, 4), np.float32), "z": np.zeros((2, 4), np.uint8)}),
        ("the_q", "shape"),
    ),
    "axis": (
        pair({"s": np.ones(4, np.float32), "z": np.zeros(4, np.uint8)}, {"axis": 2}, {"axis": 2}),
        ("the_q", "shape"),
    ),
    "zero scale": (pair({"s": np.float32(0)}), ("the_q", "scale")),
    "negative scale": (pair({"s": np.float32(-1)}), ("the_q", "scale")),
    "infinite scale": (pair({"s": np.float32(np.inf)}), ("the_q", "scale")),
    "nan scale": (pair({"s": np.float32(np.nan)}), ("the_q", "scale")),
    "another scale": (pair({"ds": np.float32(0.2)}), ("the_dq", "pair")),
    "another zero point": (pair({"dz": np.array(3, np.uint8)}), ("the_dq", "pair")),
    "another axis": (
        pair({"s": np.ones(4, np.float32), "z": np.zeros(4, np.uint8)}, {"axis": 1}, {"axis": 0}, shape=(4, 4)),
        ("the_dq", "pair"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_defect_is_found_at_its_node(name):
    model, (where, rule) = CASES[name]
    found = rules(model)
    assert (where, rule, "error") in found, found
    report = validate(model)
    assert report.summary["errors"] >= 1
    assert all(row["remedy"] and row["problem"] for row in report.rows)
    with pytest.raises(FileFormatError, match=r"some\.onnx, node 'the_"):
        require_valid(model, "some.onnx")


def test_a_conflict_of_output_dtype_and_zero_point_names_the_node():
    model = pair(**CONFLICT)
    onnx.checker.check_model(model)  # the usual check misses it
    with pytest.raises(FileFormatError, match=r"node 'the_q': output_dtype INT8 contradicts the zero point.*UINT8"):
        quantize(model)
    with pytest.raises(FileFormatError, match="node 'the_q': output_dtype INT8"):
        require_valid(model, "model.onnx")


def test_a_conflict_is_found_also_where_the_zero_point_is_not_stored():
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", output_dtype=TensorProto.INT8)]
    model = make_model(nodes, {"x": [2]}, {"q": [2]}, {"s": np.float32(1)})
    model.graph.input.append(helper.make_tensor_value_info("z", TensorProto.UINT8, []))
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT8
    assert ("the_q", "output_dtype", "error") in rules(model)
    model.graph.node[0].name = ""
    assert ("q", "output_dtype", "error") in rules(model)


def test_a_conflict_inside_a_branch_or_a_function_is_found():
    inner = [node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", output_dtype=TensorProto.INT8)]
    inner.append(node("DequantizeLinear", ["q", "s"], ["o"], "the_dq"))
    branch = helper.make_graph(inner, "b", [], [helper.make_tensor_value_info("o", TensorProto.FLOAT, [2])])
    stored = {"s": np.float32(1), "z": U8, "c": np.array(True)}
    choose = [node("If", ["c"], ["y"], "choose", then_branch=branch, else_branch=branch)]
    found = rules(make_model(choose, {"x": [2]}, {"y": [2]}, stored))
    assert ("choose/then_branch/the_q", "output_dtype", "error") in found
    assert ("choose/else_branch/the_q", "output_dtype", "error") in found

    body = [
        node("Constant", [], ["s"], value_float=1.0),
        node("Constant", [], ["z"], value=numpy_helper.from_array(U8)),
        *inner,
    ]
    function = helper.make_function("local", "F", ["x"], ["o"], body, [helper.make_opsetid("", 21)])
    call = [node("F", ["x"], ["y"], "call", domain="local")]
    imports = [helper.make_opsetid("local", 1)]
    model = make_model(call, {"x": [2]}, {"y": [2]}, {}, imports=imports, functions=[function])
    assert ("F/the_q", "output_dtype", "error") in rules(model)


@pytest.mark.parametrize(("opset", "ir", "problem"), [(27, 13, "opset 27"), (21, 14, "IR version 14")])
def test_what_the_runtime_cannot_load_is_a_warning_but_stops_a_simulation(opset, ir, problem):
    model = pair()
    model.opset_import[0].version, model.ir_version = opset, ir
    assert ("", "runtime", "warning") in rules(model)
    assert validate(model).summary["errors"] == 0
    with pytest.raises(FileFormatError, match=f"m.onnx: {problem} is beyond the runtime"):
        require_valid(model, "m.onnx")


def test_a_type_without_a_kernel_is_a_warning():
    model = pair(quantize={"output_dtype": TensorProto.FLOAT4E2M1}, names=("s",), opset=23, ir=11)
    assert ("the_q", "kernel", "warning") in rules(model)
    assert validate(model).summary["errors"] == 0


def test_a_bias_with_a_zero_point_is_a_warning():
    nodes = [node("DequantizeLinear", ["b", "s", "z"], ["d"], "bias"), node("Add", ["x", "d"], ["y"])]
    stored = {"b": np.ones(4, np.int32), "s": np.float32(1), "z": np.array(1, np.int32)}
    assert rules(make_model(nodes, {"x": [4]}, {"y": [4]}, stored)) == [("bias", "zero_point", "warning")]


def test_what_onnx_itself_refuses_is_reported_too():
    model = mlp()
    model.graph.node[0].attribute.append(helper.make_attribute("nonsense", 1))
    assert rules(model) == [("", "checker", "error")]


def test_a_stored_weight_is_checked_like_an_activation():
    nodes = [node("DequantizeLinear", ["w", "s"], ["d"], "weight", axis=1), node("MatMul", ["x", "d"], ["y"])]
    stored = {"w": np.ones((4, 3), np.int8), "s": np.ones(4, np.float32)}
    model = make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, stored)
    assert ("weight", "shape", "error") in rules(model)
    stored |= {"s": np.ones(3, np.float32), "z": np.zeros(3, np.uint8)}
    nodes[0].input.append("z")
    assert ("weight", "dtype", "error") in rules(make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 3]}, stored))


@pytest.mark.parametrize("dialect", ["onnxruntime", "onnx"])
@pytest.mark.parametrize(
    "config",
    [
        w8a8(),
        w4a8(),
        w4a16(block_size=2),
        w8a16(),
        w8a8().override("*", activation="int8_strict", weight="int3"),
        w8a8().override("*", activation="float8e4m3fn", weight="float8e4m3fn"),
        w8a8().override("*", weight="int2"),
        w8a8().skip("gemm", dtype="float16"),
    ],
)
def test_what_we_export_has_no_findings(config, dialect):
    marked, _, plan, encodings = prepared(convnet(), config)
    model, _ = insert(marked, plan, encodings, dialect=dialect)
    expected = set() if dialect == "onnxruntime" else {("default_session", "warning")}
    assert {(row["rule"], row["severity"]) for row in validate(model).rows} <= expected


@pytest.mark.slow
def test_block_sizes_are_those_of_the_interval_that_the_specification_gives():
    legal = {}
    for length, count, block in itertools.product(range(1, 13), range(1, 13), range(1, 15)):
        scales = {"s": np.ones((2, count), np.float32)}
        where = {"axis": 1, "block_size": block}
        found = validate(pair(scales, where, where, names=("s",), shape=(2, length))).rows
        legal.setdefault((length, count), set()).update({block} if found == [] else ())
        wrong = [row for row in found if row["rule"] == "shape"]
        assert len(wrong) == len(found)
    for (length, count), blocks in legal.items():
        smallest = math.ceil(length / count)
        largest = math.ceil(length / (count - 1)) - 1 if count > 1 else 14
        assert blocks == set(range(smallest, largest + 1)), (length, count)


def test_the_message_names_the_legal_block_sizes():
    def problem(length, count, block):
        where = {"axis": 1, "block_size": block}
        scales = {"s": np.ones((2, count), np.float32)}
        return validate(pair(scales, where, where, names=("s",), shape=(2, length))).rows[0]["problem"]

    assert problem(100, 4, 32 - 8).endswith("it would be (2, 5), or block_size 25 to 33")
    assert problem(4, 4, 2).endswith("it would be (2, 2), or block_size 1")
    assert problem(4, 3, 2).endswith("and no block size cuts 4 into 3")


def test_float_models_have_no_findings():
    assert validate(convnet()).rows == []
    assert validate(convnet(13)).rows == []


def test_agreeing_forms_have_no_findings():
    assert rules(pair(quantize={"output_dtype": TensorProto.UINT8})) == []
    assert rules(pair({"z": I8}, quantize={"output_dtype": TensorProto.INT8})) == []
    assert rules(pair(quantize={"output_dtype": TensorProto.INT16}, names=("s",))) == []
    uneven = {"s": np.ones((2, 2), np.float32), "z": np.zeros((2, 2), np.uint8)}
    assert rules(pair(uneven, {"axis": 1, "block_size": 3}, {"axis": 1, "block_size": 3})) == []
    even = {"s": np.ones(4, np.float32), "z": np.zeros(4, np.uint8)}
    assert rules(pair(even, {"axis": 1}, {"axis": -1})) == []
