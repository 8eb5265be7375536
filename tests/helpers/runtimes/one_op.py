"""Models of one op, run by ONNX Runtime and by the evaluator in torch."""

import numpy as np
import onnxruntime as ort
from onnx import helper, numpy_helper

from onnx_backend.opening.read_graph import read_graph
from qsdk.algorithms.graph_in_torch.run_graph import run_graph


def one_op(op, inputs, attributes=None, outputs=1, opset=21, domain=""):
    """Return a model of one op and its feeds: int64 arrays are stored, the others fed, and None is absent."""
    names = ["" if value is None else f"x{place}" for place, value in enumerate(inputs)]
    given = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True) if name}
    stored = {name: value for name, value in given.items() if value.dtype == np.int64}
    fed = {name: value for name, value in given.items() if name not in stored}
    results = [f"y{place}" for place in range(outputs)] if isinstance(outputs, int) else list(outputs)
    node = helper.make_node(op, names, results, "the_op", domain=domain, **(attributes or {}))
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in fed.items()
    ]
    named = [helper.make_empty_tensor_value_info(name) for name in results if name]
    tensors = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph([node], "one_op", values, named, tensors)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10), fed


def by_runtime(model, feeds):
    """Return the outputs of ONNX Runtime, which computes every op as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return session.run(None, feeds)


def by_torch(model, feeds, at_site=lambda site, value: value):
    """Return the outputs of the evaluator as arrays."""
    return [value.detach().numpy() for value in run_graph(read_graph(model), {}, feeds, at_site)]
