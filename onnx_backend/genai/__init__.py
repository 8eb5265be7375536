"""Folders for onnxruntime-genai: an exported decoder in that runtime's fused forms, its config, and their check."""
