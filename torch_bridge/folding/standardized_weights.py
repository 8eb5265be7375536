"""Layers that compute the weight of their op in a forward of their own (weight standardisation, a mask, a gain)."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_bridge.torch_values.pytree import tensors_of

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_OPS = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def plain_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the layer class of torch.nn from which a layer with a forward of its own is derived, else None."""
    bases = type(module).__mro__
    defining = next(base for base in bases if "forward" in vars(base))
    if not isinstance(module, _LAYERS) or defining.__module__.startswith("torch.nn.modules") or module._modules:
        return None
    return next(base for base in bases if base.__module__.startswith("torch.nn.modules") and "forward" in vars(base))


class ComputedWeight(nn.Module):
    """The module that computes the weight a layer passes to its op, from the layer's tensors alone."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        super().__init__()
        layer = copy.deepcopy(layer)
        self._parameters, self._buffers = layer._parameters, layer._buffers
        self.inside = (layer, torch.zeros_like(x[:1]))  # a tuple: no submodule, so the tensors keep their names

    def forward(self) -> Tensor:
        """Run the layer on zeros, and return the weight that its op gets."""
        call = _linear_call(*self.inside)
        assert call is not None
        return call[0]


class _LinearCallRecorder(TorchFunctionMode):
    """The function mode that records calls of linear ops, and which tensors derive from the input."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.derived = [x]
        self.calls: list[tuple[Any, Any]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tensors_of((args, dict(kwargs or {})))
        result = func(*args, **(kwargs or {}))
        if any(one is other for one in given for other in self.derived):
            self.derived += tensors_of(result)
        if func in _OPS:
            named = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **(kwargs or {})}
            self.calls.append((named["weight"], named.get("bias")))
        return result


def _linear_call(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Return weight and bias of the one linear op of a layer, and its result.

    The result is None if the weight reads the input, or if there is not exactly one linear op.
    """
    with torch.no_grad(), _LinearCallRecorder(x) as recorder:
        result = layer.forward(x)
    if len(recorder.calls) != 1 or not isinstance(result, Tensor):
        return None
    weight, bias = recorder.calls[0]
    if any(weight is tensor for tensor in recorder.derived):
        return None
    return weight, bias, result


def computed_weights(model: nn.Module, run: Callable[[], Any]) -> Iterator[tuple[str, nn.Module, ComputedWeight]]:
    """Yield the layers that differ from layers of torch.nn only by a weight computed from their own tensors.

    Args:
        model: in eval mode, not wrapped.
        run: runs the model; called only where a layer has a forward of its own.

    Yields:
        Path, layer, and the module that computes its weight. On the example, a plain layer with this weight computes
        the same as the layer.
    """
    layers = {path: module for path, module in model.named_modules() if plain_class(module) is not None}
    if not layers:
        return
    seen: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 1 and isinstance(args[0], Tensor):
            seen.setdefault(module, args[0].detach().clone())

    handles = [module.register_forward_pre_hook(note) for module in layers.values()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    for path, module in layers.items():
        if module in seen and _only_computes_weight(module, seen[module]):
            yield path, module, ComputedWeight(module, seen[module])


@torch.no_grad()
def _only_computes_weight(layer: nn.Module, x: Tensor) -> bool:
    call = _linear_call(layer, x)
    stored = layer._parameters.get("weight")
    if call is None or stored is None or call[0] is stored or call[0].shape != stored.shape:
        return False
    weight, bias, expected = call
    if bias is not layer._parameters.get("bias"):
        return False
    plain = copy.copy(layer)
    plain.__dict__["_parameters"] = {**layer._parameters, "weight": nn.Parameter(weight, requires_grad=False)}
    cls = plain_class(layer)
    assert cls is not None
    plain.__class__ = cls
    result = plain.forward(x)
    return result.shape == expected.shape and bool((result - expected).abs().max() <= 1e-5 * expected.abs().max())
