"""Write recorded operations as ONNX nodes, for each target in its own way. Import the files."""
