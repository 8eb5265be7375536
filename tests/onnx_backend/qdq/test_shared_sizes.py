"""Inputs that give different sizes one name run in the simulation as they do in the runtime."""

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from qsdk import calibrate, quantize, w8a8


def two_states() -> ModelProto:
    """Two inputs `[n, c, w]`, of which a layer reads one and a mean over w the other."""
    nodes = [
        helper.make_node("MatMul", ["a", "W"], ["u"]),
        helper.make_node("Relu", ["b"], ["v"]),
        helper.make_node("ReduceMean", ["v"], ["m"], axes=[2], keepdims=0),
        helper.make_node("Add", ["u", "m"], ["y"]),
    ]
    weight = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32) / 4
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "c", "w"]) for name in "ab"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "states", inputs, outputs, [numpy_helper.from_array(weight, "W")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_one_name_for_two_sizes_hinders_neither_calibration_nor_simulation():
    generator = np.random.default_rng(1)
    batches = [
        {name: generator.normal(size=(1, 16, width)).astype(np.float32) for name, width in (("a", 16), ("b", 4))}
        for _ in range(3)
    ]
    sim = quantize(two_states(), None, w8a8())
    calibrate(sim, batches, method="percentile", progress=False)
    calibrate(sim, batches, progress=False)
    for batch in batches:
        weight = numpy_helper.to_array(two_states().graph.initializer[0])
        wanted = batch["a"] @ weight + np.maximum(batch["b"], 0).mean(2)
        assert np.abs(sim.run(batch)[0] - wanted).max() < 0.05 * np.abs(wanted).max()
