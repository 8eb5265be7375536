"""Orthogonal matrices that spread outliers over all channels."""
