"""Islands in ONNX files: ops in float16 or bfloat16 inside a float32 model."""
