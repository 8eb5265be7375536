"""Q/DQ models as other tools write them: made by onnxruntime.quantization, and built after what was seen elsewhere."""

import logging
import warnings

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from qdq_models import make_model

from onnx_backend.qdq.narrow_regions import as_simulated

node = helper.make_node


class _Reader:
    def __init__(self, source, shape):
        dtype = helper.tensor_dtype_to_np_dtype(source.type.tensor_type.elem_type)
        rng = np.random.default_rng(5)
        self.batches = iter([{source.name: rng.normal(size=shape).astype(dtype)} for _ in range(3)])

    def get_next(self):
        return next(self.batches, None)


def by_onnxruntime(model, shape, folder, **options):
    """Quantize a model with onnxruntime's own tool, in its QDQ format unless the options say otherwise."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnxruntime.quantization import QuantFormat, quantize_static

        logging.disable(logging.WARNING)
        try:
            onnx.save(model, folder / "float.onnx")
            reader = _Reader(model.graph.input[0], shape)
            options = {"quant_format": QuantFormat.QDQ, **options}
            quantize_static(folder / "float.onnx", folder / "quantized.onnx", reader, **options)
        finally:
            logging.disable(logging.NOTSET)
    return onnx.load(folder / "quantized.onnx")


def plain_pair(name, source, output, parameters, **options):
    """A QuantizeLinear and a DequantizeLinear."""
    return [
        node("QuantizeLinear", [source, *parameters], [f"{output}_codes"], f"{name}_q", **options),
        node("DequantizeLinear", [f"{output}_codes", *parameters], [output], f"{name}_dq", **options),
    ]


def pt2e(opset=21):
    """What torch's exporter writes for a model of pt2e, without its optimizer.

    Scales and zero points are computed, axis=1 is written everywhere, a fake-quantized weight keeps its float values
    and has its codes clipped, and a stored one is int8.
    """
    nodes = [
        *plain_pair("x", "x", "xd", ["s", "z"], axis=1),
        node("Cast", ["ws"], ["ws32"], "cast_scale", to=TensorProto.FLOAT),
        node("Cast", ["wz"], ["wz8"], "cast_zero_point", to=TensorProto.INT8),
        node("DequantizeLinear", ["wq", "ws32", "wz8"], ["wd"], "node_dequantize_per_channel", axis=0),
        node("Conv", ["xd", "wd", "b"], ["c"], "node_conv2d"),
        node("Relu", ["c"], ["r"], "node_relu"),
        *plain_pair("r", "r", "rd", ["rs", "rz"], axis=1),
        node("ReduceMean", ["rd", "axes"], ["mean"], "node_mean", keepdims=0),
        node("Expand", ["one_scale", "five"], ["full"], "expand_scale"),
        node("CastLike", ["full", "fw"], ["fs"], "like_scale"),
        node("Expand", ["zero", "five"], ["zeros"], "expand_zero"),
        node("Cast", ["zeros"], ["fz"], "cast_zeros", to=TensorProto.INT8),
        node("QuantizeLinear", ["fw", "fs", "fz"], ["fq"], "node_quantize_per_channel", axis=0),
        node("Clip", ["fq", "low", "high"], ["fc"], "node_clip"),
        node("DequantizeLinear", ["fc", "fs", "fz"], ["fd"], "node_dequantize_per_channel_1", axis=0),
        node("Gemm", ["mean", "fd"], ["y"], "node_linear", transB=1),
    ]
    rng = np.random.default_rng(2)
    stored = {
        "s": np.float32(0.02),
        "z": np.int8(-3),
        "rs": np.float32(0.03),
        "rz": np.uint8(0),
        "wq": rng.integers(-127, 128, (8, 3, 3, 3)).astype(np.int8),
        "ws": rng.uniform(0.004, 0.01, 8).astype(np.float32),
        "wz": np.zeros(8, np.int64),
        "b": rng.normal(size=8).astype(np.float32),
        "axes": np.array([2, 3]),
        "one_scale": np.float32(0.05),
        "five": np.array([5]),
        "zero": np.array(0),
        "fw": (rng.normal(size=(5, 8)) * 0.3).astype(np.float32),
        "low": np.int8(-8),
        "high": np.int8(7),
    }
    return make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, stored, opset, 10 if opset > 20 else 8)


def aimet(prequantized=False):
    """What AIMET writes: outputs keep their names, weights are quantized while the model runs, biases are int32."""
    rng = np.random.default_rng(3)
    w = (rng.normal(size=(6, 8)) * 0.4).astype(np.float32)
    w_scale = np.abs(w).max(0) / np.float32(127)
    w_codes = np.rint(w / w_scale).astype(np.int8)
    x_scale = np.float32(0.03)
    b_scale = x_scale * w_scale
    b_codes = np.rint(rng.normal(size=8).astype(np.float32) / b_scale).astype(np.int32)
    weight = node("DequantizeLinear", ["w_q", "w_scale", "w_zero_point"], ["w_qdq"], "w_dq", axis=1)
    quantize = node("QuantizeLinear", ["w", "w_scale", "w_zero_point"], ["w_q"], "w_q", axis=1)
    nodes = [
        *([] if prequantized else [quantize]),
        weight,
        node("DequantizeLinear", ["b_q", "b_scale", "b_zero_point"], ["b_qdq"], "b_dq", axis=0),
        *plain_pair("x", "x", "x_qdq", ["x_scale", "x_zero_point"]),
        node("Gemm", ["x_qdq", "w_qdq", "b_qdq"], ["y_updated"], "gemm"),
        *plain_pair("y", "y_updated", "y", ["y_scale", "y_zero_point"]),
    ]
    stored = {
        "w_q" if prequantized else "w": w_codes if prequantized else w,
        "w_scale": w_scale,
        "w_zero_point": np.zeros(8, np.int8),
        "b_q": b_codes,
        "b_scale": b_scale,
        "b_zero_point": np.zeros(8, np.int32),
        "x_scale": x_scale,
        "x_zero_point": np.uint8(120),
        "y_scale": np.float32(0.05),
        "y_zero_point": np.uint8(128),
    }
    return make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 8]}, stored)


def integers(model):
    """What every DequantizeLinear reads that is stored, by the site it says: the integers of a Q/DQ model."""
    model = as_simulated(model)  # a table that is looked up on codes is dequantized behind the look-up
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {}
    for item in model.graph.node:
        if item.op_type == "DequantizeLinear":
            site = {entry.key: entry.value for entry in item.metadata_props}["qsdk.site"]
            found[site] = [(str(stored[n].dtype), stored[n].tolist()) for n in item.input if n in stored]
    return found
