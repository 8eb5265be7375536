"""The float and the quantized model side by side, layer by layer."""
