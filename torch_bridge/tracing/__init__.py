"""From a module to a marked ONNX model, and what the trace is held against."""
