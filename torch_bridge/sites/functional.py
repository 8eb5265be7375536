"""Which torch functions have a site, the name of an op in its site, and calls that a sim makes in another form."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, dtype, nn

from torch_bridge.sites.calls import Frame
from torch_bridge.torch_values.pytree import Path, map_leaves

# Conversions compute values only where they turn integers into floats; on floats they are no op of the model.
_CONVERSIONS = frozenset({"to", "type", "type_as", "float", "half", "double", "bfloat16"})
# Functions that return their argument, a copy of it, or something that is not computed from its values.
_WITHOUT_SITE = frozenset(
    {"contiguous", "detach", "clone", "cpu", "cuda"}
    | {"requires_grad", "dropout", "alpha_dropout", "feature_dropout", "dropout2d", "identity", "item", "tolist"}
    | {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones"}
    | {"new_full", "new_empty", "new_tensor", "set_", "copy", "backward", "register_hook", "deepcopy", "numpy"}
    | {
        "lift_fresh",
        "lift_fresh_copy",
    }  # a trace calls them where a tensor is made of numbers (`torch.FloatTensor([1.0])`)
    | {"setitem", "size", "stride", "dim", "numel", "is_floating_point", "symbolic", "as_subclass", "fill", "zero"}
)
_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})


def op_name(func: Callable[..., Any]) -> str | None:
    """Return an op's name in a site (`add` for `+`, `+=`, `torch.add` and `add_`), or None if it has no site."""
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        described = getattr(getattr(func, "__self__", None), "__name__", "")
        return described if described in _PROPERTIES else None
    if name.startswith("__"):
        name = name.strip("_")
        bare = name[1:] if name[:1] in ("i", "r") else name
        # __iadd__ and __radd__ are add; __index__, __invert__, __round__ are themselves
        name = bare if f"__{bare}__" in _OPERATORS else name
    name = name.strip("_")
    if name.startswith("grouped_mm"):
        name = "grouped_mm"  # a trace calls transformers' own in the place of torch's
    return None if not name or name.partition(".")[0] in _WITHOUT_SITE else name  # `detach.default` of torch.ops


# What torch.compiler.assume_constant_result sets, without loading the compiler: dynamo cannot read a method's name.
op_name._dynamo_marked_constant = True  # type: ignore[attr-defined]

_OPERATORS = frozenset({f"__{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow", "floordiv", "mod")})


def computes_floats(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether a call computes with floating-point values, or converts integers to them."""
    if name in _CONVERSIONS:
        return bool(args) and isinstance(args[0], Tensor) and not args[0].is_floating_point()
    return reads_floats(args, kwargs)


def reads_floats(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether any argument is a floating-point tensor or a list of them.

    Without one, the result is a constant or an index.
    """
    values = (*args, *(kwargs or {}).values())
    return any(
        isinstance(item, Tensor) and item.is_floating_point()
        for value in values
        for item in (value if isinstance(value, tuple | list) else (value,))
    )


def repeats_requires_grad(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Return whether a call is `x.requires_grad = True` on a tensor that requires gradients already.

    torch refuses that on computed tensors; in a sim an input is computed too, since its scale is learned.
    """
    if getattr(func, "__name__", "") != "__set__":
        return False
    return getattr(func.__self__, "__name__", "") == "requires_grad" and args[0].requires_grad and bool(args[1])  # type: ignore[attr-defined]


def with_one_rounding(
    args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `F.linear` or a Linear, its input contiguous: so torch rounds the result once.

    For an input in float16 or bfloat16 of 3 dimensions or more that is not contiguous, torch multiplies first, rounds,
    and adds the bias with a second rounding. The exported op rounds once, whatever the layout.
    """
    given = dict(kwargs or {})
    if args:
        return (_contiguous(args[0]), *args[1:]), given
    return args, given | {name: _contiguous(x) for name, x in given.items() if name == "input"}


def _contiguous(x: Any) -> Any:
    return x.contiguous() if _is_narrow(x) and x.dim() > 2 else x


def _is_narrow(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in _NARROW


_NARROW = (torch.float16, torch.bfloat16)
#: ops that torch, on processors at least, rounds inside in half precision: they are several, or their kernels are; the
#: exported ones round once. `tests/torch_bridge/tracing/test_computed_dtypes.py` derives it again
ROUNDED_INSIDE = frozenset(
    {"cosine_similarity", "instance_norm", "log_softmax", "logsumexp", "normalize"}
    | {"pairwise_distance", "prod", "softsign", "tanhshrink", "grid_sample"}
    | {"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"}  # they add up overlaps in float16
)
_REVERSED_QUOTIENTS = ("__rtruediv__", "__rdiv__")  # of a number by a tensor: torch multiplies by the reciprocal


def reads_narrow(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether an argument is a float16 or bfloat16 tensor."""
    return any(_is_narrow(x) for x in args) or any(_is_narrow(x) for x in (kwargs or {}).values())


def run_as_exported(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run a function; of equal values topk and sort take the first before others, as ONNX says of TopK.

    In half precision, one that torch rounds inside computes in float32 and rounds its result once. So does the
    exported op, on every processor. What is asked for in another dtype stays as torch computes it.
    """
    if func in _ORDERING and kwargs.get("out") is None:
        return _ORDERING[func](*args, **kwargs)
    values = (*args, *kwargs.values())
    rounds = reads_narrow(args, kwargs) and _is_rounded_inside(func, args, kwargs)
    mixed = any(isinstance(x, torch.dtype) or (isinstance(x, Tensor) and x.dtype == torch.float32) for x in values)
    if not rounds or mixed or kwargs.get("out") is not None:
        return func(*args, **kwargs)
    dtype = next(x.dtype for x in values if _is_narrow(x))
    return func(*map(_wide, args), **{name: _wide(x) for name, x in kwargs.items()}).to(dtype)


def _topk(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not input.dim():
        return torch.topk(input, k)
    values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


def _sort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Any:
    return torch.sort(input, dim=dim, descending=descending, stable=True)


def _argsort(input: Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True) -> Tensor:
    return torch.argsort(input, dim=dim, descending=descending, stable=True)


_ORDERING: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.topk: _topk,
    Tensor.topk: _topk,
    torch.sort: _sort,
    Tensor.sort: _sort,
    torch.argsort: _argsort,
    Tensor.argsort: _argsort,
}


def _is_rounded_inside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = op_name(func)
    if name == "pow" and func.__name__ not in ("pow_", "__ipow__"):  # torch multiplies in these alone
        return any(type(x) in (int, float) and x in (3, -2) for x in (*args[1:], *kwargs.values()))
    if name in ("softmax", "softmin"):
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        return bool(args) and axis not in (-1, args[0].dim() - 1)
    return name in ROUNDED_INSIDE or getattr(func, "__name__", "") in _REVERSED_QUOTIENTS


def _wide(x: Any) -> Any:
    return x.float() if _is_narrow(x) else x


#: ops whose numbers the exported file holds in the dtype of the tensor
_WITH_SCALARS = frozenset({"add", "sub", "rsub", "mul", "div", "truediv", "lerp", "addcmul", "addcdiv", "baddbmm"})
_SCALARS = frozenset({"value", "weight", "alpha", "beta"})  # by keyword


def with_narrow_scalars(
    name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], Mapping[str, Any] | None]:
    """Return the arguments of arithmetic on float16 or bfloat16 tensors and numbers, the numbers in that dtype.

    Torch computes with a number in float32 and rounds the result; the exported op has a constant of the tensor's
    dtype. Where an op follows that magnifies the difference, as in `x * sigmoid(1.702 * x)`, it shows.
    """
    by_keyword = {key: x for key, x in (kwargs or {}).items() if key in _SCALARS and type(x) is float}
    if name not in _WITH_SCALARS or not (by_keyword or any(type(value) is float for value in args)):
        return args, kwargs
    dtype = next((x.dtype for x in args[:2] if isinstance(x, Tensor)), None)
    if dtype not in _NARROW:
        return args, kwargs
    if name in ("add", "sub"):
        by_keyword = {}  # the exporter multiplies by `alpha` in float32
    narrow = {key: _rounded(x, dtype) for key, x in by_keyword.items()}
    return tuple(_rounded(x, dtype) if type(x) is float else x for x in args), {**(kwargs or {}), **narrow}


def _rounded(number: float, dtype: torch.dtype) -> float:
    return torch.tensor(number, dtype=dtype).item()


def relu_ceiling(module: nn.Module) -> float | None:
    """Return the upper bound of a ReLU (infinite) or ReLU6 module; None for any other module."""
    if isinstance(module, nn.ReLU):
        return inf
    return module.max_val if isinstance(module, nn.ReLU6) and module.min_val == 0 else None


def relu_ceiling_of_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> float | None:
    """Return the upper bound of a call of `relu` or `relu6` with one floating-point tensor; None for any other call."""
    bound = inf if name == "relu" else 6.0 if name == "relu6" else None
    if bound is None or len(args) != 1 or (kwargs or {}).keys() - {"inplace"}:
        return None
    return bound if isinstance(args[0], Tensor) and args[0].is_floating_point() else None


StdAndMean = Callable[..., tuple[Tensor, Tensor]]


def decompose_std_mean(func: Callable[..., Any]) -> StdAndMean | None:
    """Return the function to run in the place of `torch.std_mean` or `torch.var_mean`; None in the place of others."""
    if func is torch.std_mean:
        return lambda *args, **kwargs: (torch.std(*args, **kwargs), _mean(*args, **kwargs))
    if func is torch.var_mean:
        return lambda *args, **kwargs: (torch.var(*args, **kwargs), _mean(*args, **kwargs))
    return None


def _mean(
    input: Tensor,
    dim: int | tuple[int, ...] | bool | None = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = 1,
) -> Tensor:
    """Return the mean, called as either overload of `torch.var_mean`; one takes `unbiased` in the place of `dim`."""
    axes = None if isinstance(dim, bool) else dim
    return torch.mean(input, axes, keepdim)


class NarrowCall:
    """One call of an op whose float32 tensors are cast to a narrow type in front of it, and its results cast back."""

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

    One whose type is None is run as it is. `frame` is the call of the module that is the op, whose parameters are read
    in the narrow type; None for a function.
    """
    if narrow_type is None:
        return op(*args, **kwargs)
    call = NarrowCall(narrow_type)
    if frame is not None:
        frame.narrowing = call
    try:
        return call.results(op(*call.arguments(args), **call.arguments(kwargs)))
    finally:
        if frame is not None:
            frame.narrowing = None


def run_batch_norm(module: nn.modules.batchnorm._BatchNorm, forward: Callable[..., Tensor], input: Tensor) -> Tensor:
    """Run a BatchNorm on a tensor that may be narrower than its parameters, which are no sites.

    With the running statistics, all parameters are of the tensor's type. With those of the batch they stay as they are:
    torch updates the running ones in place, and computes with both types.
    """
    mean, var = module.running_mean, module.running_var
    if module.training or mean is None or var is None or input.dtype == mean.dtype:
        return forward(input)
    gain, shift = (None if part is None else part.to(input.dtype) for part in (module.weight, module.bias))
    return F.batch_norm(input, mean.to(input.dtype), var.to(input.dtype), gain, shift, False, 0.0, module.eps)
