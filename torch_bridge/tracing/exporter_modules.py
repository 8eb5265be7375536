"""The modules of torch's exporter that tracing reaches into, or None where another version of torch lacks them.

Tracing is only slower then: each user of these looks for the functions that it needs, and leaves torch's own way.
"""

from importlib import import_module
from typing import Any


def _module(name: str) -> Any:
    """Return a module of torch, or None where another version of torch lacks it."""
    try:
        return import_module(name)
    except ImportError:
        return None


registration = _module("torch.onnx._internal.exporter._registration")
exporter_passes = _module("torch.onnx._internal.exporter._fx_passes")
operator_tables = _module("torch.onnx._internal.exporter._decomp")
composites = _module("torch._export.utils")
programs = _module("torch.export.exported_program")
capture = _module("torch.export._trace")
type_promotion = _module("torch.onnx._internal.fx.passes.type_promotion")
kernels = _module("torch._ops")
