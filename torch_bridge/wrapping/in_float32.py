"""Run a model of bfloat16 or float16 values in float32, one module's values at a time."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.wrapping.wrapped_state import state_of

_NARROW = (torch.bfloat16, torch.float16)
#: module -> what its stores hold outside a call
Held = dict[nn.Module, list[tuple[dict[str, Any], str, Tensor]]]


@contextmanager
def computing_in_float32(model: nn.Module) -> Iterator[None]:
    """Run a wrapped model of narrow values in float32 inside the block: quantizers give that, and modules read it.

    Values that no quantizer reads are there in float32 while the forward of their module runs, so that a model whose
    weights lie in files needs the memory of one layer. What a module reads of another one stays narrow.
    """
    held: Held = {}
    quantizers = [quantizer for module in model.modules() for quantizer in state_of(module).quantizers]
    modules = [module for module in model.modules() if _narrow(module)]

    def widen(module: nn.Module, _: Any) -> None:
        held[module] = _narrow(module)
        for store, name, value in held[module]:
            wide = value.detach().float()
            store[name] = nn.Parameter(wide, requires_grad=False) if isinstance(value, nn.Parameter) else wide

    def restore(module: nn.Module, *_: Any) -> None:
        for store, name, value in held.pop(module, []):
            store[name] = value

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(widen).remove)
            hooks.callback(module.register_forward_hook(restore, always_call=True).remove)
        for quantizer in quantizers:
            quantizer.gives_float32 = True
            hooks.callback(setattr, quantizer, "gives_float32", False)
        yield


def _narrow(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Return the narrow values of a module that no quantizer reads, with the store and the name of each."""
    quantized = {q.site.rpartition(":")[2] for q in state_of(module).quantizers if q.spec.dtype.is_quantized}
    stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    every = [(store, name, value) for store in stores for name, value in store.items() if name not in quantized]
    return [(store, name, value) for store, name, value in every if value is not None and value.dtype in _NARROW]
