"""The ONNX Runtime session in which a Q/DQ model is simulated exactly."""

import onnxruntime as ort
from onnx import ModelProto

from onnx_backend.model import serialized
from qsdk.core.errors import FileFormatError


def simulation_session(model: bytes | ModelProto) -> ort.InferenceSession:
    """Open a session that runs QuantizeLinear and DequantizeLinear as they are written.

    Basic optimization without the remover of double Q/DQ pairs is bit-exact on 1084 of 1086 probe graphs; the
    runtime's default level fuses and rounds differently, or fails to load.

    Raises:
        FileFormatError: the runtime cannot load the model.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_double_qdq_remover", "1")
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    options.log_severity_level = 4
    data = serialized(model) if isinstance(model, ModelProto) else model
    try:
        return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's own exception types are private
        raise FileFormatError(f"the runtime cannot load the model: {error}; run qsdk.validate on it") from error
