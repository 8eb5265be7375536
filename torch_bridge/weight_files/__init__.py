"""Weights that stay in the files they came from, so that a model may be larger than memory."""
