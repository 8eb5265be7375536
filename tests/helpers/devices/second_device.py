"""A second device without hardware: tensors that say they are on `FAR`, and hold their values on the CPU.

As on a GPU, an op of tensors on two devices is an error (0-dim tensors of the CPU aside), and NumPy cannot read `FAR`.
"""

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

#: `meta` is the one type of device whose tensors need neither a kernel nor a driver
FAR = torch.device("meta")
#: reads of its values for which the host waits, while `noting_waits` is entered
_waits: list[str] | None = None
_WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, torch.ops.aten.equal.default)
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
#: their indices may be on the CPU
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default)


class FarTensor(Tensor):
    """A tensor on `FAR`."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "FarTensor":
        made = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=FAR
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    is_meta = False

    @property
    def data(self) -> Tensor:
        return FarTensor(self.values.detach())

    @data.setter
    def data(self, other: "FarTensor") -> None:
        torch._C.TensorBase.data.__set__(self, other)
        self.values = other.values

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the values: as if they were read with `map_location="cpu"`."""
        return self.values.__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        _note("tolist")
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor on another device has no NumPy array; copy it with Tensor.cpu() first")

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()


class _Ops(TorchDispatchMode):
    """Makes tensors of the second device in `x.to(FAR)`, `torch.zeros(..., device=FAR)` and the like."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Values(TorchFunctionMode):
    """Makes tensors of the second device from Python's values, which reach no dispatcher on a device without values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.new_tensor and isinstance(args[0], FarTensor):
            func, args, given = torch.tensor, args[1:], {"dtype": args[0].dtype, "device": FAR, **given}
        if func is torch.unravel_index and isinstance(args[0], FarTensor):  # makes its divisors from Python's values
            return tuple(part.to(FAR) for part in func(args[0].cpu(), *args[1:], **given))
        on_far = func in (torch.tensor, torch.as_tensor) and torch.device(given.get("device") or "cpu").type == FAR.type
        return func(*args, **{**given, "device": "cpu"}).to(FAR) if on_far else func(*args, **given)


@contextmanager
def second_device() -> Iterator[None]:
    """Have a second device, in this thread and in those that it starts."""
    run = threading.Thread.run  # a mode holds for one thread

    def run_with_device(self: threading.Thread) -> None:
        with _Ops(), _Values():
            run(self)

    threading.Thread.run = run_with_device
    try:
        with _Ops(), _Values():
            yield
    finally:
        threading.Thread.run = run


@contextmanager
def noting_waits() -> Iterator[list[str]]:
    """Yield a list of the reads for which a host would wait for its GPU: each by its op and the line that asked."""
    global _waits
    _waits = []
    try:
        yield _waits
    finally:
        _waits = None


def _note(what: str) -> None:
    if _waits is not None:
        frames = [frame for frame in traceback.extract_stack() if "torch_bridge" in frame.filename]
        _waits.append(f"{what} at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else what)


def _waits_for(func: Any, args: Any, kwargs: Any, on_far: bool) -> bool:
    """Return whether the host waits in an op: it crosses devices, or gives the host values or sizes by them."""
    if func in _COPIES:
        is_copy = func is torch.ops.aten.copy_.default
        target_is_far = isinstance(args[0], FarTensor) if is_copy else on_far
        crosses = isinstance(args[1 if is_copy else 0], FarTensor) != target_is_far
        return crosses and not kwargs.get("non_blocking", False)
    indices = [x for x in args[1] if x is not None] if func in _INDEXING else []
    return func in _WAITING or any(x.dtype == torch.bool or not isinstance(x, FarTensor) for x in indices)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    far = {id(x.values): x for x in tensors if isinstance(x, FarTensor)}
    host = [x for x in tensors if not isinstance(x, FarTensor) and x.ndim]
    if far and host and func not in (*_COPIES, *_INDEXING):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got one on {host[0].device}")
    device, on_far = kwargs.get("device"), bool(far)
    if device is not None:
        kwargs, on_far = {**kwargs, "device": torch.device("cpu")}, torch.device(device).type == FAR.type
    if (far or on_far) and _waits_for(func, args, kwargs, on_far):
        _note(str(func))
    plain_args, plain = tree_map(lambda x: x.values if isinstance(x, FarTensor) else x, (args, kwargs))
    result = func(*plain_args, **plain)
    if func is torch.ops.aten.copy_.default:
        return args[0]

    def as_far(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return far[id(x)] if id(x) in far else FarTensor(x)

    return tree_map(as_far, result) if on_far else result
