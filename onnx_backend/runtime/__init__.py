"""Sessions of ONNX Runtime: their options, inputs and feeds."""
