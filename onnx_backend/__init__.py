"""The ONNX door: marks to Q/DQ and back, simulation in ONNX Runtime, parity, validation, integer-only graphs."""
