"""The simulation session computes what an unoptimized session computes, whatever stands beside Q and DQ."""

import itertools

import numpy as np
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.runtime.session import simulation_session, with_float_weights
from qsdk import FileFormatError

node = helper.make_node
RNG = np.random.default_rng(17)
SHAPE = [2, 4, 6, 6]
X = (RNG.normal(size=SHAPE) * 2).astype(np.float32)
DTYPES = {"UINT8": 9, "INT8": -3, "UINT16": 900, "INT16": -77, "UINT4": 4, "INT4": -1, "FLOAT8E4M3FN": 0}
SCALES = {"UINT8": 0.03, "INT8": 0.03, "UINT16": 2e-4, "INT16": 2e-4, "UINT4": 0.4, "INT4": 0.4, "FLOAT8E4M3FN": 0.01}
INTS = {"axes": [1], "shape": [2, 4, 36], "starts": [1], "ends": [5], "at": [2], "split": [1, 3]} | {
    "pads": [0, 0, 1, 1, 0, 0, 1, 1],
    "last": [-1],
    "indices": [2, 0],
    "repeats": [1, 1, 2, 1],
    "expanded": [2, 4, 6, 6],
}
FLOATS = {"lo": np.float32(-0.5), "hi": np.float32(1.5), "six": np.float32(6), "zero": np.float32(0)}
FLOATS["half"] = np.float32(0.5)
FLOATS |= {"row": RNG.normal(size=(1, 4, 1, 1)).astype(np.float32), "sizes": np.float32([1, 1, 2, 2])}
CASES = {
    **{name: [node(name, ["d"], ["t"])] for name in ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "Gelu")},
    **{name: [node(name, ["d"], ["t"])] for name in ("Identity", "Abs", "Neg", "Exp", "Erf", "Elu", "HardSigmoid")},
    **{name: [node(name, ["d"], ["t"])] for name in ("GlobalAveragePool", "GlobalMaxPool", "Flatten", "Softplus")},
    **{name: [node(name, ["d", "d"], ["t"])] for name in ("Add", "Mul", "Sub", "Max", "Min", "Sum", "Mean")},
    **{name: [node(name, ["d", "last"], ["t"], keepdims=1)] for name in ("ReduceMean", "ReduceMax", "ReduceSum")},
    **{f"{name} row": [node(name, ["d", "row"], ["t"])] for name in ("Add", "Mul", "PRelu")},
    "Softmax": [node("Softmax", ["d"], ["t"], axis=-1)],
    "Clip": [node("Clip", ["d", "lo", "hi"], ["t"])],
    "Relu6": [node("Clip", ["d", "zero", "six"], ["t"])],
    "MaxPool": [node("MaxPool", ["d"], ["t"], kernel_shape=[2, 2], strides=[2, 2])],
    "AveragePool": [node("AveragePool", ["d"], ["t"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])],
    "Reshape": [node("Reshape", ["d", "shape"], ["t"])],
    "Transpose": [node("Transpose", ["d"], ["t"], perm=[0, 2, 3, 1])],
    "Slice": [node("Slice", ["d", "starts", "ends", "at"], ["t"])],
    "Squeeze back": [node("Unsqueeze", ["d", "axes"], ["u"]), node("Squeeze", ["u", "axes"], ["t"])],
    "Concat": [node("Concat", ["d", "d"], ["t"], axis=1)],
    "Split": [node("Split", ["d", "split"], ["t", "t2"], axis=1)],
    "Pad": [node("Pad", ["d", "pads"], ["t"])],
    "Gather": [node("Gather", ["d", "indices"], ["t"], axis=1)],
    "Expand": [node("Expand", ["d", "expanded"], ["t"])],
    "Tile": [node("Tile", ["d", "repeats"], ["t"])],
    "DepthToSpace": [node("DepthToSpace", ["d"], ["t"], blocksize=2)],
    "Resize": [node("Resize", ["d", "", "sizes"], ["t"], mode="nearest")],
    "Resize linear": [node("Resize", ["d", "", "sizes"], ["t"], mode="linear")],
    "Reshape Relu": [node("Reshape", ["d", "shape"], ["r"]), node("Relu", ["r"], ["t"])],
    "MaxPool Tanh": [node("MaxPool", ["d"], ["r"], kernel_shape=[2, 2]), node("Tanh", ["r"], ["t"])],
    "Gelu tanh": [node("Gelu", ["d"], ["t"], approximate="tanh")],
    "SiLU": [node("Sigmoid", ["d"], ["gate"]), node("Mul", ["d", "gate"], ["t"])],
    "Where": [node("Greater", ["d", "half"], ["m"]), node("Where", ["m", "d", "half"], ["t"])],
    "float16": [node("Cast", ["d"], ["h"], to=TensorProto.FLOAT16), node("Cast", ["h"], ["t"], to=TensorProto.FLOAT)],
    "no op": [],
}  # fmt: skip


def probe(case: str, dtype: str, form: str, same: bool) -> ModelProto:
    """One op between two Q/DQ pairs; `form` says what a QuantizeLinear carries."""
    nodes = CASES[case]
    code = getattr(TensorProto, dtype)
    scales = {"s": np.float32(SCALES[dtype]), "s2": np.float32(SCALES[dtype] * (1 if same else 0.7))}
    stored = [numpy_helper.from_array(np.asarray(value), name) for name, value in {**FLOATS, **scales}.items()]
    stored += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in INTS.items()]
    stored += [helper.make_tensor(name, code, [], [DTYPES[dtype]]) for name in ("z", "z2")]
    first, second = (["s", "z"], ["s2", "z2"]) if form == "zero_point" else (["s"], ["s2"])
    written = {"output_dtype": code} if form == "output_dtype" else {}
    graph = [
        node("QuantizeLinear", ["x", *first], ["q"], **written),
        node("DequantizeLinear", ["q", *first], ["d"]),
        *nodes,
        node("QuantizeLinear", ["t" if nodes else "d", *second], ["q2"], **written),
        node("DequantizeLinear", ["q2", *second], ["y"]),
    ]
    return assembled(graph, stored, SHAPE)


def assembled(nodes, stored, shape) -> ModelProto:
    read = {name for item in nodes for name in item.input}
    graph = helper.make_graph(
        nodes,
        "probe",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [tensor for tensor in stored if tensor.name in read],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def plain_session(model: ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_op_between_two_pairs_is_exact_to_the_bit(dtype: str):
    compared = 0
    for case, form, same in itertools.product(CASES, ("zero_point", "output_dtype"), (True, False)):
        model = probe(case, dtype, form, same)
        wanted = plain_session(model).run(None, {"x": X})[0]
        got = simulation_session(model).run(None, {"x": X})[0]
        # a kernel of its own for the same float op may round the other way, and then the code is the next one
        apart = np.abs(got - wanted) > 1e-6 * np.abs(wanted)
        assert apart.mean() <= (0.002 if case in ("Softmax", "Gelu tanh", "SiLU", "Resize linear") else 0), case
        compared += 1
    assert compared == 4 * len(CASES)


def layer(op: str, *, weight_dtype: int | None, bias: bool = True, **attributes) -> ModelProto:
    """A layer between Q/DQ pairs, with weights behind DequantizeLinear or, for None, as float."""
    shape = {"Conv": (8, 4, 3, 3), "ConvTranspose": (4, 8, 3, 3), "MatMul": (6, 5), "Gemm": (6, 5)}[op]
    weight = (RNG.normal(size=shape) * 0.3).astype(np.float32)
    axis = {"Conv": 0}.get(op, 1)
    channels = shape[axis]
    stored = [numpy_helper.from_array(np.float32(0.05), "s"), helper.make_tensor("z", TensorProto.UINT8, [], [100])]
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["d"])]
    if weight_dtype is None:
        stored.append(numpy_helper.from_array(weight, "w"))
    else:
        scale = (np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis)) / 127).astype(np.float32)
        spread = scale.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
        codes = np.rint(weight / spread).clip(-8 if weight_dtype == TensorProto.INT4 else -128, 7).astype(np.int32)
        stored.append(helper.make_tensor("wq", weight_dtype, shape, codes.ravel().tolist()))
        stored.append(numpy_helper.from_array(scale, "ws"))
        nodes.append(node("DequantizeLinear", ["wq", "ws"], ["w"], axis=axis))
    operands = ["d", "w"]
    if bias and op != "MatMul":
        stored.append(numpy_helper.from_array(RNG.normal(size=channels).astype(np.float32) * 0.01001, "b"))
        operands.append("b")
    nodes.append(node(op, operands, ["t"], **attributes))
    nodes += [node("Relu", ["t"], ["r"]), node("QuantizeLinear", ["r", "s", "z"], ["q2"])]
    nodes.append(node("DequantizeLinear", ["q2", "s", "z"], ["y"]))
    return assembled(nodes, stored, SHAPE if op != "Gemm" else [24, 6])


@pytest.mark.parametrize("weight_dtype", [None, TensorProto.INT8, TensorProto.INT4])
@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "MatMul", "Gemm"])
def test_a_layer_differs_by_no_more_than_the_rounding_of_its_accumulator(op: str, weight_dtype: int | None):
    x = X.reshape(-1, 6)[:24] if op == "Gemm" else X
    model = layer(op, weight_dtype=weight_dtype)
    wanted, got = (open_(model).run(None, {"x": x})[0] for open_ in (plain_session, simulation_session))
    steps = np.abs(got - wanted) / 0.05
    assert steps.max() < 1.01
    assert (steps > 0.5).mean() < 0.005


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose", "Gemm"])
def test_a_float_weight_beside_quantized_activations_stays_float(op: str):
    """The runtime's own levels quantize it to int8, and a float bias to int32."""
    model = layer(op, weight_dtype=None)
    x = X.reshape(-1, 6)[:24] if op == "Gemm" else X
    del model.graph.node[-3:]
    model.graph.output[0].name = "t"
    wanted, got = (open_(model).run(None, {"x": x})[0] for open_ in (plain_session, simulation_session))
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("codes", "scale", "zero_point", "attributes"),
    [
        (np.int8([[1, -2], [3, -128]]), np.float32(0.1), None, {}),
        (np.uint8([[1, 2], [3, 255]]), np.float32([0.1, 0.3]), np.uint8([3, 200]), {"axis": 1}),
        (np.uint8([[1, 2], [3, 255]]), np.float32([0.1, 0.3]), np.uint8([3, 200]), {"axis": -2}),
        (np.int16([[1, -2, 9], [3, -4, 5]]), np.float32([[0.1, 3], [1e-5, 7]]), None, {"axis": 1, "block_size": 2}),
        (np.int32([2**30 + 1, -5]), np.float32([1e-6, 3e-7]), None, {"axis": 0}),
        (np.int8([7]), np.float32([0.3]), np.int8([2]), {"axis": 0}),
        (np.int8(7), np.float32(0.3), np.int8(2), {}),
    ],
)  # fmt: skip
def test_stored_tensors_are_dequantized_as_the_runtime_does(codes, scale, zero_point, attributes):
    stored = {"q": codes, "s": scale} | ({} if zero_point is None else {"z": zero_point})
    nodes = [node("DequantizeLinear", list(stored), ["w"], **attributes), node("Identity", ["w"], ["y"])]
    model = assembled(nodes, [numpy_helper.from_array(np.asarray(v), k) for k, v in stored.items()], [1])
    wanted = plain_session(model).run(["y"], {"x": np.zeros(1, np.float32)})[0]
    folded = with_float_weights(model)
    assert [item.op_type for item in folded.graph.node] == ["Identity"]
    np.testing.assert_array_equal(numpy_helper.to_array(folded.graph.initializer[0]), wanted)
    assert len(folded.graph.initializer) == 1


def test_what_is_no_float32_weight_stays_behind_its_node():
    half = assembled(
        [node("DequantizeLinear", ["q", "s"], ["w"]), node("Cast", ["w"], ["y"], to=TensorProto.FLOAT)],
        [numpy_helper.from_array(np.int8([1, 2]), "q"), numpy_helper.from_array(np.float16(0.5), "s")],
        [1],
    )
    leaving = assembled(
        [node("DequantizeLinear", ["q", "s"], ["y"])],
        [numpy_helper.from_array(np.int8([1, 2]), "q"), numpy_helper.from_array(np.float32(0.5), "s")],
        [1],
    )
    for model in (half, leaving):
        assert with_float_weights(model).graph.node[0].op_type == "DequantizeLinear"
        assert simulation_session(model).run(None, {"x": np.zeros(1, np.float32)})[0].tolist() == [0.5, 1.0]


def test_a_model_the_runtime_cannot_load_is_refused_with_the_remedy():
    broken = assembled([node("NoSuchOp", ["x"], ["y"])], [], [1])
    with pytest.raises(FileFormatError, match=r"the runtime cannot load the model: .*run qsdk\.validate on it"):
        simulation_session(broken)
