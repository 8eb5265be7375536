"""The neutral graph evaluated in PyTorch, so that an ONNX model has gradients."""
