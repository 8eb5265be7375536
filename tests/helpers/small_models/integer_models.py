"""Small Q/DQ models, written as our exporter and as ONNX Runtime's quantizer write them, for the integer tests."""

from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, checker, helper, numpy_helper, shape_inference

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
UINT8, INT8, UINT4, INT4 = TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT4, TensorProto.INT4
UINT16, INT16 = TensorProto.UINT16, TensorProto.INT16
NUMPY = {UINT8: np.uint8, INT8: np.int8, UINT16: np.uint16, INT16: np.int16}
GRID = {UINT8: (0, 255), INT8: (-128, 127), UINT4: (0, 15), INT4: (-8, 7)}
GRID |= {UINT16: (0, 65535), INT16: (-32768, 32767)}


class Net:
    """Writes a Q/DQ model node by node; every method gives the name of the tensor it made."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def name(self, stem: str) -> str:
        return f"{stem}_{len(self.nodes) + len(self.initializers)}"

    def input(self, shape, name="x", dtype=TensorProto.FLOAT):
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, tensor, shape, name="y", dtype=TensorProto.FLOAT):
        self.nodes[-1].output[list(self.nodes[-1].output).index(tensor)] = name
        self.outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def const(self, array, stem="const", dtype=None):
        name = self.name(stem)
        array = np.asarray(array)
        if dtype in (UINT4, INT4):
            tensor = helper.make_tensor(name, dtype, array.shape, array.reshape(-1).tolist())
        else:
            tensor = numpy_helper.from_array(array, name)
        self.initializers.append(tensor)
        return name

    def op(self, op_type, *inputs, outputs=1, domain="", **attributes):
        name = self.name(op_type.lower())
        names = [name] if outputs == 1 else [f"{name}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=f"node_{name}", domain=domain, **attributes))
        return name if outputs == 1 else names

    def qdq(self, x, scale, zero=0, dtype=UINT8, form="zero_point"):
        """Quantize and dequantize an activation; `form` is `zero_point`, `output_dtype` (zero must be 0) or `both`."""
        inputs, attrs = [self.const(np.float32(scale), "scale")], {}
        if form in ("zero_point", "both"):
            array = np.asarray(zero, NUMPY.get(dtype, np.int8))
            inputs.append(self.const(array, "zero_point", dtype))
        if form in ("output_dtype", "both"):
            assert form == "both" or zero == 0
            attrs["output_dtype"] = dtype
        q = self.op("QuantizeLinear", x, *inputs, **attrs)
        return self.op("DequantizeLinear", q, *inputs)

    def weight(self, shape, channels=None, dtype=INT8, low=1e-3, high=1e-2):
        """Make integers behind a DequantizeLinear; `channels` is the axis with one scale each."""
        lo, hi = GRID[dtype]
        values = self.rng.integers(lo, hi + 1, shape)
        values = values if dtype in (UINT4, INT4) else values.astype(NUMPY[dtype])
        scale = self.rng.uniform(low, high, () if channels is None else shape[channels]).astype(np.float32)
        zero = np.full(scale.shape, (lo + hi + 1) // 2)
        zeros = [] if dtype in (INT8, INT4) else [self.const(zero.astype(np.uint8), "zero_point", dtype)]
        attrs = {} if channels is None else {"axis": channels}
        stored = self.const(values, "weight", dtype)
        name = self.op("DequantizeLinear", stored, self.const(scale, "scale"), *zeros, **attrs)
        return name, scale

    def bias(self, count, x_scale, w_scale):
        """Make an int32 bias in the accumulator's scale."""
        scale = (np.float32(x_scale) * np.broadcast_to(w_scale, (count,))).astype(np.float32)
        values = self.rng.integers(-3000, 3000, count).astype(np.int32)
        return self.op("DequantizeLinear", self.const(values, "bias"), self.const(scale, "scale"), axis=0)

    def model(self, opset=21) -> ModelProto:
        graph = helper.make_graph(self.nodes, "net", self.inputs, self.outputs, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
        checker.check_model(model, full_check=True)
        return model


#: Operators whose int64 kernels in ONNX Runtime are wrong on x86 for operands in [2**31, 2**32).
FAULTY = ("Sign", "Clip", "Max", "Min", "ReduceMax", "ReduceMin")


def require_no_faulty_kernel(model):
    """The conversion writes none of them; a node that it copies keeps its name, which `Net` begins with `node_`."""
    require_none_in(shape_inference.infer_shapes(model).graph)


def require_none_in(graph):
    kinds = {info.name: info.type.tensor_type.elem_type for info in (*graph.value_info, *graph.output)}
    for node in graph.node:
        if node.op_type in FAULTY and not node.name.startswith("node_"):
            assert kinds.get(node.output[0]) not in (TensorProto.INT64, TensorProto.UNDEFINED), node.name
        for attribute in node.attribute:
            if attribute.HasField("g"):
                require_none_in(attribute.g)


def run(model, feeds, level="ORT_ENABLE_ALL"):
    require_no_faulty_kernel(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def simulate(model, feeds):
    """Run a Q/DQ model in the configuration in which ONNX Runtime is bit-exact."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_double_qdq_remover", "1")
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))


def small_cnn(seed=0, batch="n", dtype=UINT8, activation="relu6"):
    """A CNN with strided, depthwise, pointwise and residual convolutions, both pools, Concat and Gemm."""
    net = Net(seed)
    # scales in no simple ratio: those would put every second sum on a near-tie that float32 decides by noise
    # (scale, zero point) of activations that can be negative, and of those behind a Relu
    signed, positive = ((0.0313, 117), (0.0207, 0)) if dtype == UINT8 else ((0.0313, -9), (0.0207, -128))
    x = net.qdq(net.input([batch, 3, 12, 12]), *signed, dtype)

    def conv(value, w_shape, x_scale, act, encoding, **attrs):
        w, scale = net.weight(w_shape, 0)
        value = net.op("Conv", value, w, net.bias(w_shape[0], x_scale, scale), **attrs)
        if act == "relu":
            value = net.op("Relu", value)
        elif act == "relu6":
            value = net.op("Clip", value, net.const(np.float32(0)), net.const(np.float32(6)))
        return net.qdq(value, *encoding, dtype)

    stem = conv(x, (8, 3, 3, 3), signed[0], "relu", positive, pads=[1] * 4)
    deep = conv(stem, (8, 1, 3, 3), positive[0], activation, positive, pads=[1] * 4, group=8)
    point = conv(deep, (8, 8, 1, 1), positive[0], None, signed)
    total = net.qdq(net.op("Relu", net.op("Add", point, stem)), *positive, dtype)
    pooled = net.qdq(net.op("MaxPool", total, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4), *positive, dtype)
    averaged = net.qdq(
        net.op("AveragePool", total, kernel_shape=[2, 2], strides=[2, 2]), positive[0] * 0.7183, positive[1], dtype
    )
    joined = net.qdq(net.op("Concat", pooled, averaged, axis=1), *positive, dtype)
    narrow = conv(joined, (8, 16, 3, 3), positive[0], "relu", positive, strides=[2, 2], pads=[0, 0, 1, 1])
    mean = net.qdq(net.op("GlobalAveragePool", narrow), positive[0] * 0.5, positive[1], dtype)
    flat = net.qdq(net.op("Flatten", mean), positive[0] * 0.5, positive[1], dtype)
    w, scale = net.weight((10, 8), 0)
    logits = net.op("Gemm", flat, w, net.bias(10, np.float32(positive[0] * 0.5), scale), transB=1)
    net.output(net.qdq(logits, *signed, dtype), [batch, 10])
    return net.model()
