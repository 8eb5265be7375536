"""An integer model on every runtime that is installed: its outputs by runtime."""

from typing import Any

import onnxruntime as ort
import pytest
from integer_models import LEVELS
from onnx.reference import ReferenceEvaluator

from onnx_backend.integer.reference.run import run_reference
from onnx_backend.runtimes.openvino import OpenVinoRunner


def openvino(model: Any, feeds: Any) -> list[Any]:
    """The outputs of OpenVINO's CPU plugin; skips where it is not installed."""
    pytest.importorskip("openvino", reason="the extra qsdk[openvino] is not installed")
    return OpenVinoRunner(model, fixed_sizes=False).run(feeds)


def onnxruntime(model: Any, feeds: Any, level: str = "ORT_ENABLE_ALL") -> list[Any]:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def every_runtime(model: Any, feeds: Any) -> dict[str, list[Any]]:
    """The outputs of a model on ONNX Runtime at every level, OpenVINO, onnx's evaluator and the NumPy reference."""
    found = {level: onnxruntime(model, feeds, level) for level in LEVELS}
    found["openvino"] = openvino(model, feeds)
    found["evaluator"] = ReferenceEvaluator(model).run(None, dict(feeds))
    reference = run_reference(model, feeds)
    found["numpy"] = [reference[info.name] for info in model.graph.output]
    return found
