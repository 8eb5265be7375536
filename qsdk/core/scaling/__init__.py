"""Equivalent scalings: stored tensors are divided and multiplied by factors per channel; the float output stays."""
