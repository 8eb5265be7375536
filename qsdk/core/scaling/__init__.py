"""Equivalent scalings: factors per channel that stored tensors give and take back, so that the float output stays."""
