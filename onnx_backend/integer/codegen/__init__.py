"""From recorded operations to ONNX nodes, as each target has them. Import the files."""
