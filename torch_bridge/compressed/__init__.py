"""Folders in the format compressed-tensors, which vLLM and transformers read: integers, scales and a config."""
