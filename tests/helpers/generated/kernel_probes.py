"""One op at a time in bfloat16, float64 or float16: whether the installed runtime runs it as in float32."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper, numpy_helper

node = helper.make_node
_IR = {21: 10, 13: 8, 17: 8, 18: 8, 20: 9, 23: 11, 25: 13}
OPSETS = tuple(_IR)
CODES = {"bfloat16": TensorProto.BFLOAT16, "float64": TensorProto.DOUBLE, "float32": TensorProto.FLOAT}
CODES |= {"float16": TensorProto.FLOAT16}
OF_DTYPE = "a tensor of the dtype"  # as an attribute
_CLOSE = {"bfloat16": 0.05, "float64": 1e-4, "float16": 1e-3}  # of the largest value


@dataclass(frozen=True)
class Probe:
    """One node: shapes of its inputs of the dtype probed, or integers, or the name of another dtype's values."""

    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    unread: tuple[str, ...] = ()  # more outputs, of other dtypes
    out: str = ""  # the dtype of its outputs, where it is another one


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


_V, _M, _IMAGE = (6,), (4, 6), (2, 4, 6, 6)
_WORDS = "Abs Acos Asin Atan Ceil Cos Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Log Mish Neg"
_WORDS += " Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh ThresholdedRelu"
_PAIRED = "Add Div Max Mean Min Mod Mul PRelu Pow Sub Sum"
_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare"
_CHANNELS = (4,)
PROBES: dict[str, Probe] = {
    **{op: Probe((_M,)) for op in _WORDS.split()},
    **{op: Probe((_M, _M), {"fmod": 1} if op == "Mod" else {}) for op in _PAIRED.split()},
    **{op: Probe((_M,), {"keepdims": 1}) for op in _REDUCTIONS.split()},
    **{op: Probe((_M, _M), out="bool") for op in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")},
    **{op: Probe((_M,), out="bool") for op in ("IsInf", "IsNaN")},
    **{op: Probe((_M,), {"axis": 1}) for op in ("Softmax", "LogSoftmax", "Hardmax", "LpNormalization", "Flatten")},
    **{op: Probe((_M,), {"axis": 1}, out="int64") for op in ("ArgMax", "ArgMin")},
    "Attention": Probe(((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4))),
    "AveragePool": Probe((_IMAGE,), {"kernel_shape": [2, 2]}),
    "BatchNormalization": Probe((_IMAGE, _CHANNELS, _CHANNELS, _CHANNELS, _CHANNELS)),
    "Cast": Probe((_M,), {"to": TensorProto.FLOAT}, out="float32"),
    "CastLike": Probe((_M, np.ones(1, np.float32)), out="float32"),
    "Clip": Probe((_M, (), ())),
    "Compress": Probe((_M, np.array([True, False, True, True])), {"axis": 0}),
    "Concat": Probe((_M, _M), {"axis": 1}),
    "ConstantOfShape": Probe((ints(2, 3),), {"value": OF_DTYPE}),
    "Conv": Probe((_IMAGE, (3, 4, 3, 3), (3,))),
    "ConvTranspose": Probe((_IMAGE, (4, 3, 3, 3), (3,))),
    "CumSum": Probe((_M, ints(1).reshape(()))),
    "DepthToSpace": Probe((_IMAGE,), {"blocksize": 2}),
    "DequantizeLinear": Probe((np.arange(6, dtype=np.uint8), ())),
    "Dropout": Probe((_M,)),
    "Einsum": Probe((_M, _M), {"equation": "ij,kj->ik"}),
    "Expand": Probe((_M, ints(3, 4, 6))),
    "Gather": Probe((_M, ints(2, 0)), {"axis": 0}),
    "GatherElements": Probe((_M, ints(0, 1, 2, 3).reshape(4, 1)), {"axis": 1}),
    "GatherND": Probe((_M, ints(0, 1, 2, 3).reshape(2, 2))),
    "Gemm": Probe((_M, (6, 3), (3,))),
    "GlobalAveragePool": Probe((_IMAGE,)),
    "GlobalMaxPool": Probe((_IMAGE,)),
    "GridSample": Probe((_IMAGE, (2, 3, 3, 2))),
    "GroupNormalization": Probe((_IMAGE, _CHANNELS, _CHANNELS), {"num_groups": 2}),
    "GRU": Probe(((5, 2, 3), (1, 12, 3), (1, 12, 4)), {"hidden_size": 4}),
    "InstanceNormalization": Probe((_IMAGE, _CHANNELS, _CHANNELS)),
    "LRN": Probe((_IMAGE,), {"size": 3}),
    "LSTM": Probe(((5, 2, 3), (1, 16, 3), (1, 16, 4)), {"hidden_size": 4}),
    "LayerNormalization": Probe((_M, _V, _V)),
    "MatMul": Probe((_M, (6, 3))),
    "MaxPool": Probe((_IMAGE,), {"kernel_shape": [2, 2]}),
    "NonZero": Probe((_M,), out="int64"),
    "OneHot": Probe((ints(0, 2), ints(4).reshape(()), (2,))),
    "Pad": Probe((_M, ints(0, 1, 0, 1), ())),
    "QuantizeLinear": Probe((_M, (), np.array(3, np.uint8)), out="uint8"),
    "RMSNormalization": Probe((_M, _V)),
    "RNN": Probe(((5, 2, 3), (1, 4, 3), (1, 4, 4)), {"hidden_size": 4}),
    "Range": Probe(((), (), ())),
    "Reshape": Probe((_M, ints(6, 4))),
    "Resize": Probe((_IMAGE, None, np.array([1, 1, 2, 2], np.float32))),
    "ReverseSequence": Probe((_M, ints(1, 2, 3, 4)), {"batch_axis": 0, "time_axis": 1}),
    "RotaryEmbedding": Probe(((1, 2, 3, 4), (3, 2), (3, 2), ints(0, 1, 2).reshape(1, 3))),
    "ScatterElements": Probe((_M, ints(0, 1, 2).reshape(1, 3), (1, 3))),
    "ScatterND": Probe((_M, ints(0, 2).reshape(2, 1), (2, 6))),
    "Shape": Probe((_M,), out="int64"),
    "Shrink": Probe((_M,)),
    "Size": Probe((_M,), out="int64"),
    "Slice": Probe((_M, ints(1), ints(3), ints(0))),
    "SpaceToDepth": Probe((_IMAGE,), {"blocksize": 2}),
    "Split": Probe((_M, ints(1, 3)), {"axis": 0}, outputs=2),
    "Squeeze": Probe(((1, 4, 6), ints(0))),
    "Tile": Probe((_M, ints(1, 2))),
    "TopK": Probe((_M, ints(2)), {"axis": 1}, unread=("places",)),
    "Transpose": Probe((_M,)),
    "Trilu": Probe((_M,)),
    "Unsqueeze": Probe((_M, ints(0))),
    "Where": Probe((np.array([True, False, True, False, True, True]), _M, _M)),
}


def allowed(op: str, dtype: str, opset: int) -> bool:
    """Return True if the op exists at the opset, and its schema lets every input that a probe casts have the dtype."""
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return False
    if schema.deprecated:
        return False
    used = [schema.inputs[min(at, len(schema.inputs) - 1)] for at, x in enumerate(PROBES[op].inputs) if _is_cast(x)]
    return all(f"tensor({'double' if dtype == 'float64' else dtype})" in value.types for value in used)


def has_kernel(op: str, dtype: str) -> bool:
    """Return True if the runtime runs the op in the dtype, right, at every opset whose schema allows it."""
    opsets = [opset for opset in OPSETS if allowed(op, dtype, opset)]
    return bool(opsets) and all(runs(op, dtype, opset) == "" for opset in opsets)


def runs(op: str, dtype: str, opset: int, *, exact: bool = False) -> str:
    """Return "" if the op loads at every level and gives the values of float32, within the dtype's rounding.

    The values that it reads are multiples of 1/4 below 2, which every dtype here holds; `exact` allows no rounding.
    """
    probe = PROBES[op]
    rng = np.random.default_rng(0)
    values = [(rng.integers(1, 8, x) / 4).astype(np.float32) if _is_cast(x) else x for x in probe.inputs]
    if op == "Clip":
        values[1:] = [np.float32(0.5), np.float32(1.5)]
    if op == "Range":
        values = [np.float32(value) for value in (0, 4, 1)]
    wanted = _run(op, "float32", opset, values, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    for level in (ort.GraphOptimizationLevel.ORT_DISABLE_ALL, ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
        try:
            got = _run(op, dtype, opset, values, level)
        except Exception as error:  # the runtime's own exception types are private
            return str(error).split("\n")[0]
        for left, right in zip(got, wanted, strict=True):
            room = 0.0 if exact else _CLOSE[dtype] * float(np.abs(right).max(initial=0))
            if not np.allclose(left, right, rtol=0, atol=room, equal_nan=True):
                return "other values"
    return ""


def _is_cast(value: Any) -> bool:
    return isinstance(value, tuple)


def _run(op: str, dtype: str, opset: int, values: list[Any], level: ort.GraphOptimizationLevel) -> list[np.ndarray]:
    model = probe_model(op, dtype, opset, values)
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {f"x{at}": np.asarray(x) for at, x in enumerate(values) if _is_cast(PROBES[op].inputs[at])}
    return list(session.run(None, feeds))


def probe_model(op: str, dtype: str, opset: int, values: list[Any]) -> ModelProto:
    """Return a model with one op in a dtype between Casts of its float32 inputs and outputs."""
    probe, nodes, inputs, stored, names = PROBES[op], [], [], [], []
    for at, (given, value) in enumerate(zip(probe.inputs, values, strict=True)):
        if given is None:
            names.append("")
        elif _is_cast(given):
            inputs.append(helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT, given))
            nodes.append(node("Cast", [f"x{at}"], [f"t{at}"], to=CODES[dtype]))
            names.append(f"t{at}")
        else:
            stored.append(numpy_helper.from_array(value, f"c{at}"))
            names.append(f"c{at}")
    made = [f"y{at}" for at in range(probe.outputs)]
    value = (
        {"value": helper.make_tensor("value", CODES[dtype], [1], [2.5])}
        if OF_DTYPE in probe.attributes.values()
        else {}
    )
    nodes.append(node(op, names, [*made, *probe.unread], **{**probe.attributes, **value}))
    outputs = []
    for name in made:
        if not probe.out:
            nodes.append(node("Cast", [name], [f"{name}f"], to=TensorProto.FLOAT))
        outputs.append(helper.make_empty_tensor_value_info(name if probe.out else f"{name}f"))
    graph = helper.make_graph(nodes, "probe", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR[opset])
