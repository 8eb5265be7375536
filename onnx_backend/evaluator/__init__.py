"""The ONNX backend: `prepare` and `run_model` on NumPy arrays, node by node."""
