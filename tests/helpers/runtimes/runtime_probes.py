"""One op between two Q/DQ pairs, in every dtype and form: what the runtime's default level makes of it."""

from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from half_files import in_type
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.readers import Form
from onnx_backend.workarounds.onnxruntime_barriers import insert_barriers
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import storage_type

node = helper.make_node
LEVELS = ort.GraphOptimizationLevel
IMAGE = (2, 4, 6, 6)
SCALES = {8: 0.03, 16: 2e-4, 4: 0.4, 2: 1.0}
ZERO_POINTS = {"uint8": 9, "int8": -3, "uint16": 900, "int16": -77, "uint4": 4, "int4": -1, "uint2": 1, "int2": -1}
WEIGHTS = ("int8", "uint8", "int4", "int16", "float8e4m3fn", "float32", "float16")
WEIGHTS += ("int8 blocks", "uint8 blocks", "int4 blocks")
FLOATS = {"low": -0.5, "high": 1.5, "zero": 0.0, "six": 6.0, "half": 0.5, "sizes": [1.0, 1, 2, 2]}
INTS = {"axes": [1], "shape": [2, 4, 36], "starts": [1], "ends": [5], "at": [2], "split": [1, 3], "last": [-1]} | {
    "pads": [0, 0, 1, 1, 0, 0, 1, 1],
    "indices": [2, 0],
    "repeats": [1, 1, 2, 1],
    "expanded": [2, 4, 6, 6],
}


def one(op: str, *more: str, **attributes) -> list[NodeProto]:
    return [node(op, ["d", *more], ["t"], **attributes)]


def moved(op: str, following: str, *more: str, **attributes) -> list[NodeProto]:
    return [node(op, ["d", *more], ["r"], **attributes), node(following, ["r"], ["t"])]


#: what stands for a reader of a DequantizeLinear in the table -> nodes from "d" to "t"
OPS = {
    **{name: one(name) for name in ("Relu", "Sigmoid", "Tanh", "LeakyRelu", "HardSwish", "Gelu", "Identity", "Abs")},
    **{name: one(name) for name in ("Neg", "Exp", "Erf", "Elu", "HardSigmoid", "Softplus", "Flatten", "Softmax")},
    **{name: one(name) for name in ("GlobalAveragePool", "GlobalMaxPool")},
    **{name: one(name, "d") for name in ("Add", "Mul", "Sub", "Max", "Min", "Mean")},
    **{name: one(name, "last", keepdims=1) for name in ("ReduceMean", "ReduceMax", "ReduceSum")},
    "Clip": one("Clip", "low", "high"),
    "Clip at 0": one("Clip", "zero", "six"),
    "MaxPool": one("MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
    "AveragePool": one("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "Reshape": one("Reshape", "shape"),
    "Transpose": one("Transpose", perm=[0, 2, 3, 1]),
    "Slice": one("Slice", "starts", "ends", "at"),
    "Unsqueeze": one("Unsqueeze", "axes"),
    "Squeeze": one("Squeeze"),
    "Concat": one("Concat", "e", axis=1),
    "Split": [node("Split", ["d", "split"], ["t", "t2"], axis=1)],
    "Pad": one("Pad", "pads"),
    "Gather": one("Gather", "indices", axis=1),
    "Expand": one("Expand", "expanded"),
    "Tile": one("Tile", "repeats"),
    "DepthToSpace": one("DepthToSpace", blocksize=2),
    "Resize": one("Resize", "", "sizes", mode="nearest"),
    "Resize linear": one("Resize", "", "sizes", mode="linear"),
    "Where": [node("Greater", ["d", "half"], ["m"]), node("Where", ["m", "d", "half"], ["t"])],
    "Cast": [node("Cast", ["d"], ["h"], to=TensorProto.FLOAT16), node("Cast", ["h"], ["t"], to=TensorProto.FLOAT)],
    "MatMul": one("MatMul", "d"),
    "QuantizeLinear": [],
    **{f"{name}>": moved(name, "Relu") for name in ("Flatten", "Identity")},
    "MaxPool>": moved("MaxPool", "Tanh", kernel_shape=[2, 2]),
    "Reshape>": moved("Reshape", "Relu", "shape"),
    "Transpose>": moved("Transpose", "Tanh", perm=[0, 2, 3, 1]),
    "Slice>": moved("Slice", "Relu", "starts", "ends", "at"),
    "Squeeze>": moved("Squeeze", "Relu"),
    "Unsqueeze>": moved("Unsqueeze", "Relu", "axes"),
    "Gather>": moved("Gather", "Relu", "indices", axis=1),
    "Pad>": moved("Pad", "Relu", "pads"),
}
LAYERS = {"Conv": ((8, 4, 3, 3), 0, 1), "ConvTranspose": ((4, 8, 3, 3), 1, 0), "MatMul": ((6, 16), 1, 0)} | {
    "Gemm": ((6, 16), 1, 0)
}
LABELS = (*OPS, *(f"{layer}/{weight}" for layer in LAYERS for weight in WEIGHTS))


@dataclass(frozen=True)
class Probe:
    """A reader of an activation of one dtype, whose Q/DQ pairs say it in one form."""

    label: str
    dtype: str
    form: Form
    same: bool = True  # the two pairs have the same scale
    tensor_type: str = "float32"  # of the activations, the weights and the scales

    def model(self, *, separated: bool) -> ModelProto:
        """The model, as it would be exported or (not `separated`) without what keeps ops apart."""
        code = int(helper.np_dtype_to_tensor_dtype(storage_type(dtype_named(self.dtype))))
        two_bits = dtype_named(self.dtype).bits == 2
        stored = [numpy_helper.from_array(np.float32(value), name) for name, value in FLOATS.items()]
        stored += [numpy_helper.from_array(np.int64(value), name) for name, value in INTS.items()]
        stored += [numpy_helper.from_array(np.float32(s), n) for n, s in (("s", self.scale), ("s2", self.last_scale))]
        zero_point = ZERO_POINTS.get(self.dtype, 0)
        stored.append(helper.make_tensor("z", code, [], [zero_point]))
        nodes, shape, more = self._inside()
        options = {} if self.form == "zero_point" else {"output_dtype": code}
        given = [] if self.form == "output_dtype" else ["z"]
        second = []  # another tensor, "e", with a pair of its own
        if any("e" in item.input for item in nodes):
            second = [node("Abs", ["x"], ["a"]), node("QuantizeLinear", ["a", "s", *given], ["r"], **options)]
            second.append(node("DequantizeLinear", ["r", "s", *given], ["e"]))
        nodes = [
            node("QuantizeLinear", ["x", "s", *given], ["q"], **options),
            node("DequantizeLinear", ["q", "s", *given], ["d"]),
            *second,
            *nodes,
            node("QuantizeLinear", ["t" if nodes else "d", "s2", *given], ["q2"], **options),
            node("DequantizeLinear", ["q2", "s2", *given], ["y"]),
        ]
        read = {name for item in nodes for name in item.input}
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", shape), ("y", None))]
        graph = helper.make_graph(
            nodes, "probe", values[:1], values[1:], [t for t in (*stored, *more) if t.name in read]
        )
        opset, ir = (25, 13) if two_bits else (21, 10)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
        model = in_type(model, self.tensor_type)
        if separated:
            insert_barriers(model)
        return model

    @property
    def scale(self) -> float:
        return SCALES[dtype_named(self.dtype).bits] if dtype_named(self.dtype).is_integer else 0.01

    @property
    def last_scale(self) -> float:
        return self.scale * (1 if self.same else 0.7)

    def _inside(self) -> tuple[list[NodeProto], tuple[int, ...], list[TensorProto]]:
        if self.label in OPS:
            return OPS[self.label], ((7, 7) if self.label == "MatMul" else IMAGE), []
        op, weight = self.label.split("/")
        shape, channel, along = LAYERS[op]
        stored, nodes = weight_of(shape, weight, channel, along)
        options = {"pads": [1, 1, 1, 1]} if op.startswith("Conv") else {}
        return [*nodes, node(op, ["d", "w"], ["t"], **options)], (IMAGE if options else (7, 6)), stored

    def verdict(self, *, separated: bool = False) -> str:
        """Whether the default level is `right` (to one LSB), `wrong`, or `fails`; "none" where no level runs it."""
        model = self.model(separated=separated)
        shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
        x = (np.random.default_rng(3).normal(size=shape) * 2).astype(self.tensor_type)
        try:
            wanted = opened(model, LEVELS.ORT_DISABLE_ALL).run(None, {"x": x})[0]
        except Exception:
            return "none"
        try:
            got = opened(model, LEVELS.ORT_ENABLE_ALL).run(None, {"x": x})[0]
        except Exception:
            return "fails"
        step = 1.01 * self.last_scale
        if not dtype_named(self.dtype).is_integer:
            step = np.maximum(0.26 * np.abs(wanted), step / 64)  # one ulp of float8e5m2
        if self.tensor_type == "float16":
            got, wanted = got.astype(np.float32), wanted.astype(np.float32)
            step = step + 2.0**-10 * np.abs(wanted)
        return "right" if (np.abs(got - wanted) <= step).all() else "wrong"


def weight_of(shape, weight: str, channel: int, along: int) -> tuple[list[TensorProto], list[NodeProto]]:
    """A stored weight "w", per channel or in blocks of two, behind DequantizeLinear unless it is float."""
    values = (np.random.default_rng(0).normal(size=shape) * 0.3).astype(np.float32)
    if weight == "float32":
        return [numpy_helper.from_array(values, "w")], []
    if weight == "float16":
        half = numpy_helper.from_array(values.astype(np.float16), "w16")
        return [half], [node("Cast", ["w16"], ["w"], to=TensorProto.FLOAT)]
    dtype = dtype_named(weight.split()[0])
    scale_shape = [1] * len(shape)
    scale_shape[channel] = shape[channel]
    options = {"axis": channel}
    if weight.endswith("blocks"):
        scale_shape = list(shape)
        scale_shape[along] //= 2
        options = {"axis": along, "block_size": 2}
    top = np.abs(values).max() / dtype.hi
    scale = np.full(scale_shape, top, np.float32) * np.linspace(1.0, 1.5, int(np.prod(scale_shape))).reshape(
        scale_shape
    )
    scale = scale.astype(np.float32)
    full = np.repeat(scale, 2, along) if "block_size" in options else scale
    codes = values / full
    if dtype.is_integer:
        codes = np.clip(np.rint(codes), dtype.lo, dtype.hi)
    stored = [numpy_helper.from_array(codes.astype(storage_type(dtype)), "wq")]
    stored.append(numpy_helper.from_array(scale if "block_size" in options else scale.reshape(-1), "ws"))
    return stored, [node("DequantizeLinear", ["wq", "ws"], ["w"], **options)]


def opened(model: ModelProto, level) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
