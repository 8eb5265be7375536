"""Exact rotations of a residual stream: where a graph allows them, and the stored tensors that they change."""
