"""What a walk through an ONNX sim must give, found the slow way: whole runs with every wanted tensor as an output."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.lower import lower
from onnx_backend.proto.lazy_tensors import with_large
from onnx_backend.proto.model_io import load
from onnx_backend.runtime.session import simulation_session
from onnx_backend.walk.layer_walk import OnnxStep
from qsdk import OnnxSim
from qsdk.algorithms.problems.calls import gather_patches
from qsdk.core.layers.layer_problem import Layer
from qsdk.core.planning.plan import Plan


def model_of(
    nodes: Sequence[Any], inputs: dict[str, list[Any]], outputs: Sequence[str], **stored: np.ndarray
) -> ModelProto:
    """A float model of float inputs, at opset 21."""
    given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    kept = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    graph = helper.make_graph(list(nodes), "g", given, made, kept)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def exposed(model: ModelProto, names: Iterable[str], x: Any) -> dict[str, np.ndarray]:
    """The values of tensors in a whole run of a model, by name."""
    model, feeds = load(model), dict(x)
    known = {value.name for value in model.graph.output} | feeds.keys()
    model.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    session = simulation_session(model)
    made = [value.name for value in session.get_outputs()]
    return {**dict(zip(made, session.run(None, feeds), strict=True)), **feeds}


def float_model(sim: OnnxSim) -> ModelProto:
    """The float model of a sim."""
    lowered = lower(sim.traced().model, Plan({}, ()), {})
    return with_large(lowered.model, lowered.large)


def names_in(step: OnnxStep) -> tuple[list[str], list[str]]:
    """What the tensors that a step's layers multiply are called in the float model and in the quantized one."""
    first, second = ([call.value(stream) for call in step.place.calls] for stream in step.run.streams)
    return first, second


def product(layer: Layer, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """What the weight makes of an input by its matrix and patches, [groups, rows, outputs]."""
    matrix = torch.from_numpy(np.ascontiguousarray(layer.layout.to_matrix(weight)))
    rows = torch.from_numpy(np.array(x))
    groups, _, k = layer.layout.matrix_shape
    if layer.layout.kind == "embedding":
        return matrix[rows.reshape(-1).long() % groups].numpy()[None, ..., 0]
    if layer.geometry is None:
        return (rows.reshape(-1, groups, k).movedim(1, 0) @ matrix.mT).numpy()
    count = rows.shape[0] * int(np.prod(layer.geometry.output_size(tuple(rows.shape[2:]))))
    return (gather_patches(rows, torch.arange(count), layer.geometry) @ matrix.mT).numpy()
