"""A NumPy reference of integer-only models, independent of ONNX Runtime. Import the files."""
