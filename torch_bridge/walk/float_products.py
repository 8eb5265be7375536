"""Products of half-precision tensors on a processor that has no instructions for them, in float32.

Torch adds up such products in float32 too and rounds each sum once, but one number at a time: a forward of a bfloat16
model takes minutes per layer there. Here both operands are widened, which is exact, and the result is rounded once.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_PRODUCTS = frozenset(
    {functional.linear, torch.addmm, torch.baddbmm, torch.bmm, torch.matmul, torch.mm}
    | {Tensor.__matmul__, Tensor.bmm, Tensor.matmul, Tensor.mm}
)


class FloatProducts(TorchFunctionMode):
    """A mode in which products of tensors of one of these dtypes on the CPU are made in float32."""

    def __init__(self, dtypes: Iterable[torch.dtype]) -> None:
        super().__init__()
        self._dtypes = frozenset(dtypes)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Widen the operands of a product and round its result; call anything else as it is."""
        given = kwargs or {}
        tensors = [x for x in (*args, *given.values()) if isinstance(x, Tensor)] if func in _PRODUCTS else []
        found = {x.dtype for x in tensors if x.device.type == "cpu"}
        if len(found) != 1 or not found <= self._dtypes or "out" in given:
            return func(*args, **given)
        wide = func(*map(_widened, args), **{name: _widened(x) for name, x in given.items()})
        return wide.to(found.pop())


def float_products(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a `FloatProducts` for the half-precision dtypes of a model that this processor has no kernels for."""
    present = {parameter.dtype for parameter in model.parameters() if parameter.device.type == "cpu"}
    slow = {dtype for dtype in present if not has_kernels(dtype)}
    return FloatProducts(slow) if slow else nullcontext()


def has_kernels(dtype: torch.dtype) -> bool:
    """Return whether torch has fast products of a dtype on this processor; True where it has no oneDNN to ask."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
