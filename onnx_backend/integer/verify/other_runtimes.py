"""Run a portable integer model on every runtime that is installed, and require the same integers of all."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from onnx_backend.integer.reference.run import run_reference
from onnx_backend.proto.nodes import attributes
from onnx_backend.runtimes.openvino import OpenVinoRunner
from qsdk.core.errors import IntegerError

Array = npt.NDArray[Any]
_LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
#: Elements of all tensors up to which onnx's evaluator runs too: it takes microseconds for each.
_EVALUATED = 1 << 22
_CODES: Mapping[Any, int] = MappingProxyType(
    {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.uint16): TensorProto.UINT16}
)


def compare_runtimes(model: ModelProto, standard: ModelProto, inputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Return the runtimes, with their versions, that give the integers of the NumPy reference, and what stopped others.

    Behind float edges the codes of the inputs are given: rounding a float to its code is each runtime's own.

    Args:
        model: of the portable target.
        standard: the same network, of the standard target.
        inputs: of both.

    Raises:
        IntegerError: a runtime gives other integers, or the standard target has others.
    """
    tensors = run_reference(model, inputs, every_tensor=True)
    names = [info.name for info in model.graph.output]
    for name, values in zip(names, _session(standard).run(names, dict(inputs)), strict=True):
        if not np.array_equal(values, tensors[name]):
            raise IntegerError(
                f"the portable and the standard form disagree on the output {name!r}; this is a defect of qsdk, and "
                "the model was not written"
            )
    model, feeds = _behind_its_inputs(model, tensors)
    pooled = any(node.op_type == "MaxPool" and "auto_pad" in attributes(node) for node in model.graph.node)
    # onnx's evaluator gives such a pool another shape than the standard says
    small = not pooled and sum(tensor.size for tensor in tensors.values()) <= _EVALUATED
    rows: list[dict[str, Any]] = []
    for runtime, version, note, run in _runtimes(model, small):
        try:
            found = run(feeds)
        except Exception as error:  # the runtimes' own exception types
            rows.append({"runtime": runtime, "version": version, "equal": None, "reason": f"does not run it: {error}"})
            continue
        for name, values in zip(names, found, strict=True):
            if not np.array_equal(values, tensors[name]):
                raise IntegerError(
                    f"{runtime} {version}{note} and the integer reference disagree on the output {name!r}; this is a "
                    "defect of qsdk or of that runtime, and the model was not written"
                )
        if not rows or rows[-1]["runtime"] != runtime:
            rows.append({"runtime": runtime, "version": version, "equal": True})
    return rows


def _behind_its_inputs(model: ModelProto, tensors: Mapping[str, Array]) -> tuple[ModelProto, dict[str, Array]]:
    """Return a model whose inputs are the results of the QuantizeLinear nodes of its float inputs, and their values."""
    cut = ModelProto()
    cut.CopyFrom(model)
    floats = {info.name for info in cut.graph.input}
    edges = [node for node in cut.graph.node if node.op_type == "QuantizeLinear" and node.input[0] in floats]
    for node in edges:
        cut.graph.node.remove(node)
        name = node.output[0]
        kind, shape = _CODES[tensors[name].dtype], [None] * tensors[name].ndim
        cut.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    read = {name for node in cut.graph.node for name in node.input}
    kept = [info for info in cut.graph.input if info.name in read]
    del cut.graph.input[:]
    cut.graph.input.extend(kept)
    return cut, {info.name: tensors[info.name] for info in kept}


def _session(model: ModelProto, level: str = "ORT_DISABLE_ALL") -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run_session(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> Sequence[Array]:
    return list(session.run(None, dict(feeds)))


def _runtimes(
    model: ModelProto, small: bool
) -> Iterator[tuple[str, str, str, Callable[[Mapping[str, Array]], Sequence[Array]]]]:
    for level in _LEVELS:
        yield "onnxruntime", ort.__version__, f" at {level}", partial(_run_session, _session(model, level))
    if small:
        evaluator = ReferenceEvaluator(model)
        yield "onnx.reference", onnx.__version__, "", lambda feeds: list(evaluator.run(None, dict(feeds)))
    if importlib.util.find_spec("openvino") is not None:
        # sizes stay open, as in the file that is written
        runner = OpenVinoRunner(model, fixed_sizes=False)
        yield "openvino", runner.version, "", runner.run
