"""What other tools say of invalid Q/DQ models, asked again on the installed versions; ours finds each one by name."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.runtimes.validate import validate

T = TensorProto
IR = {13: 7, 19: 9, 21: 10, 22: 10, 23: 11, 24: 12, 25: 13, 26: 13, 27: 13, 28: 14}
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
S, U8, I8 = np.float32(0.1), np.zeros((), np.uint8), np.zeros((), np.int8)
BLOCKS = {"axis": 1, "block_size": 2}
VECTOR, HALF = {"s": np.ones(1, np.float32)}, {"s": np.float16(0.1)}
node = helper.make_node


class Said(NamedTuple):
    """What each tool makes of a model: `ok`, `fails`, or for the runtime where it fails."""

    check_model: str
    full_check: str
    infer_shapes: str
    strict: str
    reference: str
    runtime: str


def built(nodes, stored: Mapping[str, Any], opset=21, y=T.FLOAT, x=T.FLOAT, **more: Any) -> ModelProto:
    """A model x [2, 4] -> y [2, 4] with these stored tensors."""
    values = [helper.make_tensor_value_info(name, code, [2, 4]) for name, code in (("x", x), ("y", y))]
    tensors = [v if isinstance(v, T) else numpy_helper.from_array(np.asarray(v), n) for n, v in stored.items()]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:], tensors)
    imports = [helper.make_opsetid("", opset), *more.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=more.pop("ir", IR[opset]), **more)


def pair(stored=None, q=None, dq=None, zero_point=True, **more) -> ModelProto:
    """x -> `the_q` -> `the_dq` -> y; `q` and `dq` are attributes, `dz` the zero point of the second if given."""
    stored = {"s": S, **({"z": U8} if zero_point else {}), **(stored or {})}
    read = ["s", *(["z"] if "z" in stored else [])]
    second = ["s", *(["dz"] if "dz" in stored else read[1:])]
    nodes = [
        node("QuantizeLinear", ["x", *read], ["q"], "the_q", **(q or {})),
        node("DequantizeLinear", ["q", *second], ["y"], "the_dq", **(dq or {})),
    ]
    return built(nodes, stored, **more)


def alone(output: int, opset=21, zero_point=True, given=False, **attributes) -> ModelProto:
    """x -> `the_q` -> y; `given`: the zero point is an input of the model."""
    read = ["x", "s", *(["z"] if zero_point else [])]
    stored = {"s": S} | ({"z": U8} if zero_point and not given else {})
    model = built([node("QuantizeLinear", read, ["y"], "the_q", **attributes)], stored, opset, y=output)
    if given:
        model.graph.input.append(helper.make_tensor_value_info("z", T.UINT8, []))
    return model


def in_a_branch() -> ModelProto:
    def branch(name):
        inner = [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", output_dtype=T.INT8),
            node("DequantizeLinear", ["q", "s"], ["o"], "the_dq"),
        ]
        return helper.make_graph(inner, name, [], [helper.make_tensor_value_info("o", T.FLOAT, [2, 4])])

    chosen = node("If", ["c"], ["y"], "if", then_branch=branch("yes"), else_branch=branch("no"))
    return built([chosen], {"s": S, "z": U8, "c": np.array(True)})


def in_a_function() -> ModelProto:
    body = [
        node("QuantizeLinear", ["a", "s", "z"], ["q"], "the_q", output_dtype=T.INT8),
        node("DequantizeLinear", ["q", "s"], ["b"], "the_dq"),
    ]
    body = [
        node("Constant", [], ["s"], value_float=0.1),
        node("Constant", [], ["z"], value=numpy_helper.from_array(U8)),
        *body,
    ]
    function = helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("", 21)])
    call = [node("F", ["x"], ["y"], "call", domain="local")]
    return built(call, {}, imports=[helper.make_opsetid("local", 1)], functions=[function])


def scales(*shape: int) -> dict[str, Any]:
    return {"s": np.ones(shape, np.float32)}


def vector() -> ModelProto:
    """One scale for a vector of 8, and yet a block size."""
    whole = {"axis": 0, "block_size": 8}
    model = pair(VECTOR, whole, whole, zero_point=False)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.ClearField("dim")
        value.type.tensor_type.shape.dim.add().dim_value = 8
    return model


def weight(stored: Mapping[str, Any], code_node: onnx.NodeProto, **more: Any) -> ModelProto:
    """x + the four values that `code_node` dequantizes."""
    return built([code_node, node("Add", ["x", "d"], ["y"], "add")], {"s": S, **stored}, **more)


def bias() -> ModelProto:
    dequantize = node("DequantizeLinear", ["b", "s", "z"], ["d"], "the_dq")
    return weight({"b": np.ones(4, np.int32), "z": np.int32(1)}, dequantize)


def another(**stored: Any) -> ModelProto:
    """A pair whose second node has a scale of its own, `ds`."""
    model = pair(stored)
    model.graph.node[1].input[1] = "ds"
    return model


def overflowing() -> ModelProto:
    spelt = helper.make_tensor("z", T.INT8, [4], [1, 2, 3, 4])
    spelt.int32_data[0] = 300
    return weight({"z": spelt}, node("DequantizeLinear", ["z", "s"], ["d"], "the_dq"))


def truncated() -> ModelProto:
    damaged = numpy_helper.from_array(np.ones(4, np.int8), "z")
    damaged.raw_data = damaged.raw_data[:3]
    return weight({"z": damaged}, node("DequantizeLinear", ["z", "s"], ["d"], "the_dq"))


def off_grid() -> ModelProto:
    dequantize = node("DequantizeLinear", ["w", "s"], ["d"], "the_dq")
    entry = dequantize.metadata_props.add()
    entry.key, entry.value = "qsdk.dtype", "int6"
    return weight({"w": np.array([31, -32, 32, 0], np.int8)}, dequantize)


def nan_weights() -> ModelProto:
    model = weight({"w": np.float32([1, np.nan, 0, 2])}, node("QuantizeLinear", ["w", "s"], ["q"], "the_q"))
    model.graph.node.insert(1, node("DequantizeLinear", ["q", "s"], ["d"], "the_dq"))
    return model


def unread() -> ModelProto:
    model = pair()
    model.graph.node[1].output[0] = "lost"
    model.graph.node.append(node("Relu", ["x"], ["y"], "relu"))
    return model


def q(rule: str, severity: str = "error") -> tuple[str, str, str]:
    return "the_q", rule, severity


def dq(rule: str, severity: str = "error") -> tuple[str, str, str]:
    return "the_dq", rule, severity


def quiet(code: int, opset: int = 21, **more: Any) -> ModelProto:
    """A pair that says its type by `output_dtype` alone."""
    return pair(q={"output_dtype": code, **more}, zero_point=False, opset=opset)


def tensor(name: str, code: int, values: list[float]) -> TensorProto:
    return helper.make_tensor(name, code, [len(values)] if len(values) > 1 else [], values)


E8M0 = {"s": tensor("s", T.FLOAT8E8M0, [1.0])}
MODELS: dict[str, tuple[ModelProto, tuple[str, str, str]]] = {
    **{
        f"conflict at opset {opset}": (alone(T.INT8, opset, output_dtype=T.INT8), q("output_dtype"))
        for opset in range(21, 27)
    },
    "conflict, zero point is an input": (alone(T.INT8, given=True, output_dtype=T.INT8), q("output_dtype")),
    "conflict in a branch": (in_a_branch(), ("if/then_branch/the_q", "output_dtype", "error")),
    "conflict in a function": (in_a_function(), ("F/the_q", "output_dtype", "error")),
    "conflict, then DequantizeLinear": (pair(q={"output_dtype": T.INT8}), q("output_dtype")),
    "uint8 by default, declared int8": (alone(T.INT8, zero_point=False), q("dtype")),
    "uint8 by default, read as int8": (pair({"dz": I8}, zero_point=False), dq("dtype")),
    "output_dtype INT32": (quiet(T.INT32), q("dtype")),
    "output_dtype FLOAT": (quiet(T.FLOAT), q("dtype")),
    "output_dtype FLOAT4E2M1 at 21": (quiet(T.FLOAT4E2M1), q("dtype")),
    "output_dtype INT2 at 21": (quiet(T.INT2), q("dtype")),
    "output_dtype 999": (quiet(999), q("dtype")),
    "output_dtype at 19": (quiet(T.UINT8, 19), q("opset")),
    "scales with one zero point": (pair(scales(4)), q("shape")),
    "3 scales for 4 channels": (pair(scales(3), zero_point=False), q("shape")),
    "blocks of another shape": (pair(scales(2, 3), BLOCKS, BLOCKS, zero_point=False), q("shape")),
    "matrix of scales, no blocks": (pair(scales(2, 4), zero_point=False), q("shape")),
    "DequantizeLinear to INT8": (pair(dq={"output_dtype": T.INT8}, opset=23), dq("output_dtype")),
    # beyond the research's table
    "blocks with one scale": (pair(q=BLOCKS, dq=BLOCKS), q("shape")),
    "block_size -2": (pair(scales(2, 2), {"block_size": -2}, {"block_size": -2}, False), q("shape")),
    "no scales": (pair(scales(0), zero_point=False), q("shape")),
    "axis 2 of 2": (pair(scales(4), {"axis": 2}, {"axis": 2}, False), q("shape")),
    "block_size for a whole vector": (vector(), q("kernel", "warning")),
    "scale and zero point of shapes () and (1,)": (pair(VECTOR), q("shape", "warning")),
    "scale 0": (pair({"s": np.float32(0)}), q("scale")),
    "scale -1": (pair({"s": np.float32(-1)}), q("scale")),
    "scale NaN": (pair({"s": np.float32(np.nan)}), q("scale")),
    "scale inf": (pair({"s": np.float32(np.inf)}), q("scale")),
    "scale INT64": (pair({"s": np.array(1)}), q("scale")),
    "scale FLOAT16 at 13": (pair(HALF, opset=13), q("scale")),
    "scale FLOAT16 for FLOAT at 21": (pair(HALF, y=T.FLOAT16), q("scale")),
    "scale FLOAT16 for FLOAT at 23": (pair(HALF, opset=23, y=T.FLOAT16), q("kernel", "warning")),
    "scale FLOAT8E8M0 at 23": (pair(E8M0, dq={"output_dtype": 1}, opset=23), q("scale")),
    "scale FLOAT8E8M0 at 24": (pair(E8M0, dq={"output_dtype": 1}, opset=24), q("kernel", "warning")),
    "scale FLOAT8E8M0 given on": (pair(E8M0, opset=24, y=T.FLOAT8E8M0), dq("output_dtype")),
    "x INT32": (pair(x=T.INT32, opset=23), q("kernel", "warning")),
    "x BFLOAT16": (pair({"s": tensor("s", T.BFLOAT16, [0.1])}, x=T.BFLOAT16, y=T.BFLOAT16), q("kernel", "warning")),
    "x DOUBLE": (pair(x=T.DOUBLE), q("dtype")),
    "FLOAT4E2M1 at 23": (quiet(T.FLOAT4E2M1, 23), q("kernel", "warning")),
    "FLOAT6E2M3 at 25": (quiet(27, 25), q("dtype")),
    "FLOAT6E2M3 at 28": (quiet(27, 28), q("kernel", "warning")),
    "DequantizeLinear with output_dtype at 21": (pair(dq={"output_dtype": 1}), dq("opset")),
    "precision at 21": (pair(q={"precision": 1}), q("opset")),
    "precision INT8": (pair(q={"precision": T.INT8}, opset=23), q("dtype")),
    "precision FLOAT16": (pair(q={"precision": T.FLOAT16}, opset=23), q("dtype", "warning")),
    "saturate=0 for integers": (pair(q={"saturate": 0}), q("dtype", "warning")),
    "saturate at 13": (pair(q={"saturate": 1}, opset=13), q("opset")),
    "zero point INT32": (pair({"z": np.int32(0)}), q("dtype")),
    "zero point 2 for float8": (pair({"z": tensor("z", T.FLOAT8E4M3FN, [2.0])}), q("zero_point")),
    "bias with a zero point": (bias(), ("the_dq", "zero_point", "warning")),
    "another scale behind": (another(ds=np.float32(0.2)), dq("pair")),
    "another zero point behind": (pair({"dz": np.uint8(3)}), dq("pair")),
    "int8 that holds 300": (overflowing(), ("z", "stored", "error")),
    "int8 with a byte missing": (truncated(), ("z", "stored", "error")),
    "codes off their grid": (off_grid(), ("the_dq", "grid", "error")),
    "NaN among the weights": (nan_weights(), ("the_q", "grid", "error")),
    "a result that nobody reads": (unread(), ("the_dq", "unused", "warning")),
    "IR 14": (pair(ir=14), ("", "runtime", "warning")),
    "opset 27": (pair(opset=27), ("", "runtime", "warning")),
}


NOTHING = Said("ok", "ok", "ok", "ok", "ok", "ok")
RUNS_NOT = Said("ok", "ok", "ok", "ok", "ok", "run fails")
RUNS_NOWHERE = Said("ok", "ok", "ok", "ok", "fails", "run fails")
NO_KERNEL = Said("ok", "ok", "ok", "ok", "ok", "load fails")
CONFLICT = Said("ok", "fails", "ok", "fails", "fails", "load fails")
DECLARED = Said("ok", "fails", "ok", "fails", "ok", "load fails")
TYPE = Said("ok", "fails", "ok", "ok", "ok", "load fails")
TYPE_NOWHERE = Said("ok", "fails", "ok", "ok", "fails", "load fails")
LATE = Said("fails", "fails", "ok", "ok", "fails", "load fails")
#: what onnxruntime 1.32 says instead
NEWER = {"scale FLOAT16 for FLOAT at 23": "ok", "precision INT8": "load fails", "IR 14": "ok", "opset 27": "ok"}
#: verdicts -> models; those of onnx 1.23 and onnxruntime 1.31
VERDICTS: Mapping[Said, tuple[str, ...]] = {
    CONFLICT: (*(name for name in MODELS if name.startswith("conflict")), "output_dtype 999"),
    DECLARED: ("uint8 by default, declared int8", "DequantizeLinear to INT8", "scale INT64"),
    TYPE: (
        *("output_dtype FLOAT4E2M1 at 21", "output_dtype INT2 at 21", "scale FLOAT16 for FLOAT at 21", "x DOUBLE"),
        *("scale FLOAT8E8M0 at 23", "scale FLOAT8E8M0 given on", "FLOAT6E2M3 at 25"),
    ),
    TYPE_NOWHERE: (
        *("uint8 by default, read as int8", "output_dtype INT32", "output_dtype FLOAT", "scale FLOAT16 at 13"),
        "zero point INT32",
    ),
    LATE: (
        *("output_dtype at 19", "DequantizeLinear with output_dtype at 21", "precision at 21", "saturate at 13"),
        "int8 with a byte missing",
    ),
    RUNS_NOT: (
        *("scales with one zero point", "blocks of another shape", "blocks with one scale"),
        *("block_size for a whole vector", "scale FLOAT16 for FLOAT at 23"),
    ),
    RUNS_NOWHERE: (
        *("3 scales for 4 channels", "matrix of scales, no blocks", "no scales", "axis 2 of 2"),
        "zero point 2 for float8",
    ),
    NO_KERNEL: (
        *("scale FLOAT8E8M0 at 24", "x INT32", "x BFLOAT16", "FLOAT4E2M1 at 23", "FLOAT6E2M3 at 28"),
        *("IR 14", "opset 27"),
    ),
    NO_KERNEL._replace(reference="fails"): ("block_size -2",),
    NOTHING: (
        *("scale and zero point of shapes () and (1,)", "scale 0", "scale -1", "scale NaN", "scale inf"),
        *("precision INT8", "precision FLOAT16", "saturate=0 for integers", "bias with a zero point"),
        *("another scale behind", "another zero point behind", "int8 that holds 300", "codes off their grid"),
        *("NaN among the weights", "a result that nobody reads"),
    ),
}
SAID = {name: said for said, names in VERDICTS.items() for name in names}
if tuple(int(part) for part in ort.__version__.split(".")[:2]) >= (1, 32):
    SAID |= {name: SAID[name]._replace(runtime=runtime) for name, runtime in NEWER.items()}


def verdict(ask: Callable[[], Any]) -> str:
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ask()
    except Exception:  # each tool has its own
        return "fails"
    return "ok"


def asked(model: ModelProto) -> Said:
    code = model.graph.input[0].type.tensor_type.elem_type
    x = X.reshape(-1) if len(model.graph.input[0].type.tensor_type.shape.dim) == 1 else X
    feeds: dict[str, Any] = {"x": x.astype(helper.tensor_dtype_to_np_dtype(code))}
    if len(model.graph.input) > 1:
        feeds["z"] = U8
    return Said(
        verdict(lambda: onnx.checker.check_model(model)),
        verdict(lambda: onnx.checker.check_model(model, full_check=True)),
        verdict(lambda: onnx.shape_inference.infer_shapes(model)),
        verdict(lambda: onnx.shape_inference.infer_shapes(model, strict_mode=True)),
        verdict(lambda: ReferenceEvaluator(model).run(None, feeds)),
        runtime(model, feeds),
    )


def runtime(model: ModelProto, feeds: Mapping[str, Any]) -> str:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return "load fails"
    return "ok" if verdict(lambda: session.run(None, feeds)) == "ok" else "run fails"


@pytest.mark.parametrize("name", MODELS)
def test_ours_finds_every_row_and_others_say_what_the_table_says(name: str):
    model, found = MODELS[name]
    assert asked(model) == SAID[name]
    report = validate(model)
    assert found in [(row["node"], row["rule"], row["severity"]) for row in report.rows], str(report)
    assert bool(report.summary["errors"]) == (found[2] == "error")
    assert all(row["problem"] and row["remedy"] for row in report.rows)
