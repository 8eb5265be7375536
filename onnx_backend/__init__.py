"""The ONNX door: marks to Q/DQ and back, simulation in ONNX Runtime, parity, validation, integer-only graphs.

The package is also an ONNX backend, `onnx_backend.prepare(model).run(inputs)`, which is loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx_backend.backend import QsdkBackend, is_compatible, prepare, run_model, run_node, supports_device

__all__ = ["QsdkBackend", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("onnx_backend.backend"), name)
    raise AttributeError(f"module 'onnx_backend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
