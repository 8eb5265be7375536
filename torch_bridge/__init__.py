"""The PyTorch door: wrappers, quantizers, tracing, calibration and training of an nn.Module."""
