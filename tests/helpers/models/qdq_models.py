"""Small float models, their encodings and an independent simulation, shared by the tests of the ONNX side."""

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.external_data import array
from onnx_backend.qdq.marks import mark
from qsdk import Encoding, QuantConfig
from qsdk.core.numerics.spec import axis_of
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of

LEVELS = (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)


def make_model(nodes, inputs, outputs, stored, opset=21, ir=10, **more):
    """Build a model of float tensors; `inputs` and `outputs` are name -> shape."""
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in d.items()] for d in (inputs, outputs)]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    graph = helper.make_graph(nodes, "graph", *values, tensors)
    imports = [helper.make_opsetid("", opset), *more.pop("imports", [])]
    return helper.make_model(graph, opset_imports=imports, ir_version=ir, **more)


def weights(seed=0, **shapes):
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=shape) * 0.4).astype(np.float32) for name, shape in shapes.items()}


def mlp(opset=21):
    """MatMul + bias -> Relu -> MatMul + bias: arithmetic that NumPy repeats."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["x", "w1"], ["m1"], "mm1"),
        node("Add", ["m1", "b1"], ["a1"], "add1"),
        node("Relu", ["a1"], ["r"], "relu"),
        node("MatMul", ["r", "w2"], ["m2"], "mm2"),
        node("Add", ["m2", "b2"], ["y"], "add2"),
    ]
    return make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 3]}, weights(w1=(6, 8), b1=(8,), w2=(8, 3), b2=(3,)), opset)


def convnet(opset=21):
    """A residual net with every kind of neighbour that the runtime fuses."""
    node = helper.make_node
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1] * 4),
        node("Relu", ["c"], ["r"], "relu"),
        node("ConvTranspose", ["r", "w2", "b2"], ["ct"], "deconv", group=2, pads=[1] * 4),
        node("Add", ["ct", "r"], ["a"], "add"),
        node("Concat", ["a", "r"], ["cat"], "concat", axis=1),
        node("MaxPool", ["cat"], ["mp"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        node("Sigmoid", ["mp"], ["s"], "sigmoid"),
        node("Mul", ["mp", "s"], ["silu"], "mul"),
        node("GlobalAveragePool", ["silu"], ["g"], "gap"),
        node("Flatten", ["g"], ["f"], "flat"),
        node("Gemm", ["f", "wg", "bg"], ["y"], "gemm", transB=1),
        node("Softmax", ["y"], ["p"], "softmax"),
    ]
    stored = weights(w=(8, 3, 3, 3), b=(8,), w2=(8, 4, 3, 3), b2=(8,), wg=(5, 16), bg=(5,))
    return make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5], "p": ["n", 5]}, stored, opset)


def classifier():
    """Conv, Relu, pooling and a linear layer called head."""
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "stem", pads=[1] * 4),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["g"], "pool"),
        helper.make_node("Flatten", ["g"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "wh", "bh"], ["y"], "head"),
    ]
    stored = weights(w=(8, 3, 3, 3), b=(8,), wh=(8, 5), bh=(5,))
    return make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", 5]}, stored)


def encodings_of(graph, plan, stored, seed=0):
    """Encodings as a calibration would find them: weights from their values, activations at random."""
    rng = np.random.default_rng(seed)
    found = {}
    for site, decision in plan.decisions.items():
        if not decision.quantized or decision.tied_to or decision.kind == "bias":
            continue
        facts = graph.tensors[graph.sites[site]]
        if facts.constant:
            found[site] = encoding_from_range(range_of(stored[facts.name], decision.spec), decision.spec)
        else:
            low = 0.0 if decision.op_type in ("Relu", "Softmax") else -float(rng.uniform(0.5, 3))
            ends = np.float32([low]), np.float32([rng.uniform(0.5, 3)])
            found[site] = encoding_from_range(Range(*ends), decision.spec)
    for site, decision in plan.decisions.items():
        if decision.quantized and decision.tied_to:
            found[site] = found[decision.tied_to]
    for site, decision in plan.decisions.items():
        if decision.quantized and decision.kind == "bias":
            scale = np.multiply(*(found[other].scale for other in decision.bias_of))
            found[site] = Encoding(decision.spec.dtype, scale, np.zeros(1), axis_of(decision.spec.granularity))
    return found


def prepared(model, config: QuantConfig, seed=0):
    """A float model, marked, with its plan and encodings."""
    graph = read_graph(model)
    plan = make_plan(graph, config)
    stored = {tensor.name: array(tensor) for tensor in model.graph.initializer}
    return mark(model, graph), graph, plan, encodings_of(graph, plan, stored, seed)


def session(model, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(model, feeds, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
    return session(model, level).run(None, feeds)


def stored_of(model, graph, plan, encodings):
    """Site -> the simulation's value of every stored tensor."""
    values = {tensor.name: array(tensor) for tensor in model.graph.initializer}
    sites = [s for s, d in plan.decisions.items() if d.quantized and d.kind in ("weight", "bias")]
    return {site: encodings[site].fake_quantize(values[graph.tensors[graph.sites[site]].name]) for site in sites}


def simulated_mlp(encodings, stored, x):
    """The fake-quantized MLP in NumPy: site -> value, as a capture."""

    def at(site, value):
        return encodings[site].fake_quantize(value) if site in encodings else value

    found = {"x": x, "x:input": at("x:input", x)}
    hidden = found["x:input"] @ stored["mm1:weight"] + stored["add1:bias"]
    found["relu:output"] = at("relu:output", np.maximum(hidden, 0))
    found["add2:output"] = at("add2:output", found["relu:output"] @ stored["mm2:weight"] + stored["add2:bias"])
    return found


def optimized(model, folder, **entries: str) -> list[str]:
    """The types of the nodes that the runtime's default level makes of a model."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    for key, value in entries.items():
        options.add_session_config_entry(f"session.{key}", value)
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [found.op_type for found in onnx.load(options.optimized_model_filepath).graph.node]
