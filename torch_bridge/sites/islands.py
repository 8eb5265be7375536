"""Islands: calls of ops that compute in float16 or bfloat16 inside a float32 model, as a rule of the config asks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, dtype, nn

from torch_bridge.sites.call_scopes import Frame
from torch_bridge.torch_values.pytree import Path, map_leaves


class NarrowCall:
    """One call of an op whose float32 tensors are cast to a narrow type in front of it, and its results cast back.

    Attributes:
        narrow_type: the type that the op computes in.
    """

    def __init__(self, narrow_type: dtype) -> None:
        self.narrow_type = narrow_type
        self._wide_type: dtype | None = None
        self._given: list[tuple[Tensor, Tensor]] = []  # a cast argument, and the argument

    def narrow(self, x: Tensor) -> Tensor:
        """Return a float32 tensor in the narrow type; a single number without axes stays, as torch takes it.

        In one piece of memory, because a Linear adds its bias to a rounded product where its input is a view.
        """
        if x.dtype.itemsize <= self.narrow_type.itemsize or not x.is_floating_point() or not x.dim():
            return x
        self._wide_type = x.dtype
        cast = x.to(self.narrow_type, memory_format=torch.contiguous_format)
        self._given.append((cast, x))
        return cast

    def arguments(self, given: Any) -> Any:
        """Return the arguments of the call with their tensors in the narrow type."""
        return map_leaves(given, self._narrow_leaf)

    def results(self, made: Any) -> Any:
        """Return what the op returned in the wide type; what it wrote over its argument is written over that."""
        return made if self._wide_type is None else map_leaves(made, self._wide_leaf, caches=False)

    def _narrow_leaf(self, path: Path, leaf: Any) -> Any:
        return self.narrow(leaf) if isinstance(leaf, Tensor) else leaf

    def _wide_leaf(self, path: Path, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dtype != self.narrow_type:
            return leaf
        for cast, x in self._given:
            if leaf is cast:
                return x.copy_(leaf)
        return leaf.to(self._wide_type)


def run_narrow(
    narrow_type: dtype | None, frame: Frame | None, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run an op in a narrow float type.

    Args:
        narrow_type: None for an op that is no island, which is run as it is.
        frame: the call of the module that is the op, whose parameters are read in the narrow type; None for a function.
        op: the module's forward, or the function.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.
    """
    if narrow_type is None:
        return op(*args, **kwargs)
    call = NarrowCall(narrow_type)
    if frame is not None:
        frame.island = call
    try:
        return call.results(op(*call.arguments(args), **call.arguments(kwargs)))
    finally:
        if frame is not None:
            frame.island = None


def run_batch_norm(module: nn.modules.batchnorm._BatchNorm, forward: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Run a BatchNorm on a tensor that may be narrower than its parameters, which are no sites.

    With the running statistics, all parameters are of the tensor's type. With those of the batch they stay as they are:
    torch updates the running ones in place, and computes with both types.

    Args:
        module: the BatchNorm.
        forward: its own.
        input: its argument, under torch's name.
    """
    mean, var = module.running_mean, module.running_var
    if module.training or mean is None or var is None or input.dtype == mean.dtype:
        return forward(input)
    gain, shift = (None if part is None else part.to(input.dtype) for part in (module.weight, module.bias))
    return F.batch_norm(input, mean.to(input.dtype), var.to(input.dtype), gain, shift, False, 0.0, module.eps)
