"""The forms in which functions are traced, where torch's exporter fails on them or translates them wrongly.

It fails on a BatchNorm whose statistics are sites. For `squeeze` it removes axes that are not one long. For `mean` with
`dim=None` it writes an op without its input. Of a softmax or mean with `dtype=` it casts the result, which was
computed in the dtype of the input, where torch casts the input. A dropout that drops nothing returns its very argument;
traced as an op, what is written into its result would be missing from the argument; so would what is written into an
einsum that only moves the axes of its operand, which torch returns as a view. Of an embedding of bags it writes a Loop.
An einsum of several dtypes it writes as it is, which ONNX does not know. Of values whose mean is scattered to one place
it writes the last one. A sort it writes as a TopK, which is stable, unless it is asked for a stable one.
"""

from collections.abc import Callable, Mapping
from functools import reduce
from string import ascii_letters
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.core.errors import ExportError

OPSET = 21


def _batch_norm(
    input: Tensor,  # torch's name, since it may come by keyword
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Return `F.batch_norm` of x [N, C, ...] as one ONNX op, or as ops on the batch itself if it uses batch statistics.

    The exporter uses the running statistics even where `training` is true, so they are not passed to it then.
    """
    if training or running_mean is None or running_var is None:
        return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)
    gain = running_var.new_ones(running_var.shape) if weight is None else weight
    shift = running_mean.new_zeros(running_mean.shape) if bias is None else bias
    read = (input, gain, shift, running_mean, running_var)
    return torch.onnx.ops.symbolic(
        "BatchNormalization", read, {"epsilon": eps}, dtype=input.dtype, shape=input.shape, version=OPSET
    )


def _native_batch_norm(
    input: Tensor,  # torch's name
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Return `torch.batch_norm`, which takes the same arguments in another order."""
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _squeeze(input: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return x without those of the named axes that are one long."""
    named = dim if isinstance(dim, tuple | list) else (dim,)
    axes = [axis for axis in named if input.dim() and _is_one_long(input, axis)]
    return torch.squeeze(input, axes) if axes else input


def _is_one_long(x: Tensor, axis: int) -> bool:
    length = x.shape[axis]
    if isinstance(length, torch.SymInt):
        raise ExportError(
            f"squeeze({axis}) takes axis {axis} away where it is one long alone, and that axis is dynamic; "
            f"use select({axis}, 0) where it always goes, or no squeeze where it never does"
        )
    return length == 1


def _mean(input: Tensor, dim: None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the mean over all axes, with the axes named."""
    return torch.mean(input, tuple(range(input.dim())), keepdim, dtype=dtype)


def _embedding_bag(
    input: Tensor,  # torch's names, since they may come by keyword
    weight: Tensor,
    offsets: None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Return `F.embedding_bag` of indices [bags, length] as a look-up and a sum, mean or maximum of each bag."""
    rows = F.embedding(input, weight)
    rows = rows if per_sample_weights is None else rows * per_sample_weights[..., None]
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.amax(1)
    kept = (input != padding_idx % len(weight))[..., None]
    if mode == "max":
        return torch.where(kept.any(1), rows.masked_fill(~kept, -torch.inf).amax(1), 0.0)
    total = torch.where(kept, rows, 0.0).sum(1)
    return total if mode == "sum" else total / kept.to(total.dtype).sum(1).clamp(min=1.0)


def _is_of_bags(input: Tensor, *args: Any, max_norm: float | None = None, **_: Any) -> bool:
    """Return whether the indices of `F.embedding_bag` are [bags, length], and no row of the table is rescaled."""
    return input.dim() == 2 and max_norm is None and (len(args) < 3 or args[2] is None)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.bilinear` as a batch of matrix products with the stored weight [out, in1, in2], and a sum."""
    rows = torch.matmul(weight, input2[..., None, :, None])[..., 0]
    result = (rows * input1[..., None, :]).sum(-1)
    return result if bias is None else result + bias


def _scatter_mean(
    input: Tensor,  # torch's names
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Return `scatter_reduce` by a mean as sums over how many values go to each place."""
    count = torch.zeros_like(input).scatter_add(dim, index, torch.ones_like(src))
    own = input if include_self else torch.where(count > 0, 0, input)
    divisor = count + 1 if include_self else count.clamp(min=1)
    rounding = None if input.is_floating_point() else "floor"
    return torch.div(own.scatter_add(dim, index, src), divisor, rounding_mode=rounding)


def _grouped_mm(input: Tensor, weight: Tensor, offs: Tensor, **_: Any) -> Tensor:
    """Return the products of rows [S, K], sorted by group, with the matrix of their group among [E, K, N].

    Group i ends before row `offs[i]`. The exporter has no form of it: here each row takes the matrix of its group.
    """
    at = torch.arange(input.shape[0], device=offs.device, dtype=offs.dtype)
    groups = (offs[None] <= at[:, None]).sum(-1)
    return torch.matmul(input[:, None], torch.index_select(weight, 0, groups)).squeeze(1)


def _counts_of(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # torch's names
    """Return `histc` of whole numbers with one bin for each: how often each of them occurs."""
    return (input[:, None] == torch.arange(bins, device=input.device, dtype=input.dtype) + min).sum(0).to(input.dtype)


def _counts_whole_numbers(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> bool:
    return input.dim() == 1 and max - min == bins - 1


def _given(input: Tensor, *_: Any, **__: Any) -> Tensor:
    return input


def _drops(input: Tensor, p: float = 0.5, training: bool = True, *_: Any, train: bool = True, **__: Any) -> bool:
    """Return whether a call of `F.dropout`, or of `torch.dropout` with its own name for `training`, drops anything."""
    return training and train and p > 0.0


def _einsum_of_views(*args: Any) -> Tensor:
    """Return an einsum of one operand, none of whose values it adds up, as diagonals and a permutation of its axes."""
    equation, (x,) = _equation_and_operands(args)
    read, arrow, kept = equation.replace(" ", "").partition("->")
    if not arrow:
        kept = "..." * ("..." in read) + "".join(sorted(set(read) - {"."}))
    before, _, behind = read.partition("...")
    open_axes = [chr(axis) for axis in range(x.dim() - len(before) - len(behind))]  # names that no equation has
    axes = [*before, *open_axes, *behind]
    for label in sorted({label for label in axes if axes.count(label) > 1}):
        while axes.count(label) > 1:
            first, second = [at for at, other in enumerate(axes) if other == label][:2]
            x = x.diagonal(0, first, second)
            axes = [other for at, other in enumerate(axes) if at not in (first, second)] + [label]
    first_kept, _, last_kept = kept.partition("...")
    return x.permute([axes.index(label) for label in (*first_kept, *open_axes, *last_kept)])


def _einsum_of_one_type(*args: Any) -> Tensor:
    """Return an einsum of operands of several dtypes, as of positions and frequencies, in the one that torch gives."""
    equation, operands = _equation_and_operands(args)
    dtype = reduce(torch.promote_types, (operand.dtype for operand in operands))
    return torch.einsum(equation, *(operand.to(dtype) for operand in operands))


def _has_types(args: tuple[Any, ...]) -> bool:
    """Return whether the operands of an einsum have more than one dtype."""
    return len({operand.dtype for operand in _equation_and_operands(args)[1]}) > 1


def _moves_axes(args: tuple[Any, ...]) -> bool:
    """Return whether an einsum has one operand and adds up none of its values: torch returns a view of it."""
    equation, operands = _equation_and_operands(args)
    read, arrow, kept = equation.replace(" ", "").partition("->")
    summed = set(read) - set(kept) if arrow else {label for label in read if label != "." and read.count(label) > 1}
    return len(operands) == 1 and not summed


def _equation_and_operands(args: tuple[Any, ...]) -> tuple[str, list[Tensor]]:
    """Return both from the arguments of `torch.einsum`, which may be operands followed by lists of numbers of axes."""
    if isinstance(args[0], str):
        operands = args[1] if isinstance(args[1], list | tuple) else args[1:]
        return args[0], list(operands)
    labels = ["".join("..." if axis is ... else ascii_letters[axis] for axis in axes) for axes in args[1::2]]
    kept = [] if len(args) % 2 == 0 else ["".join("..." if a is ... else ascii_letters[a] for a in args[-1])]
    return "->".join([",".join(labels), *kept]), list(args[: len(labels) * 2 : 2])


def _computed_in(func: Callable[..., Any], at: int | None) -> Callable[..., Any]:
    """Return a function of x and others whose dtype, by keyword or at a position, x is cast to first."""

    def cast_first(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = kwargs.pop("dtype", None)
        if at is not None and len(args) >= at:
            args, dtype = (*args[: at - 1], None), args[at - 1]
        return func(input if dtype is None else input.to(dtype), *args, **kwargs)

    return cast_first


def _in_place(func: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of x and others that writes its result into x."""

    def write(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(func(input, *args, **kwargs))

    return write


def export_form(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function to trace in the place of a torch function: mostly the function itself."""
    if func is F.batch_norm:
        return _batch_norm
    if func is torch.batch_norm:
        return _native_batch_norm
    if func is torch.einsum and _moves_axes(args):
        return _einsum_of_views
    if func is torch.einsum and _has_types(args):
        return _einsum_of_one_type
    if func is F.embedding_bag and _is_of_bags(*args, **kwargs):
        return _embedding_bag
    if func is F.bilinear:
        return _bilinear
    if is_grouped_product(func):
        return _grouped_mm
    if func is torch.histc and _counts_whole_numbers(*args, **kwargs):
        return _counts_of
    if func in _SCATTERS and (args[4] if len(args) > 4 else kwargs.get("reduce")) == "mean":
        return _scatter_mean if func is not Tensor.scatter_reduce_ else _in_place(_scatter_mean)
    if func in _SORTS and "stable" in kwargs:
        return lambda *given, stable, **named: func(*given, **named)
    if func in _DROPOUTS and not _drops(*args, **kwargs):
        return _given
    if func in _AVERAGES and (args[6] if len(args) > 6 else kwargs.get("divisor_override")) is not None:
        raise ExportError(
            "torch's exporter drops divisor_override= of an average pooling, so a file would hold other values; leave "
            "it out, and multiply the result by the size of the window over the divisor"
        )
    if func in _CAST_FIRST and (func not in _MEANS or kwargs.get("dtype") is not None):
        form = _mean if func in _MEANS and _names_no_axis(args, kwargs) else func
        return _computed_in(form, _CAST_FIRST[func])
    if len(args) > 1 or "dim" in kwargs:
        dim = args[1] if len(args) > 1 else kwargs["dim"]
        if func in _SQUEEZES:
            return _squeeze
        if func in _MEANS and dim is None:
            return _mean
    return func


def is_grouped_product(func: Callable[..., Any]) -> bool:
    """Return whether a function multiplies sorted rows with the matrix of their group, torch's or transformers' own."""
    return getattr(func, "__name__", "").strip("_").partition(".")[0] in _GROUPED


def _names_no_axis(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return (args[1] if len(args) > 1 else kwargs.get("dim")) is None


_GROUPED = frozenset({"grouped_mm", "grouped_mm_fallback"})
_SQUEEZES = (torch.squeeze, Tensor.squeeze, Tensor.squeeze_)
_SORTS = (torch.sort, Tensor.sort, torch.argsort, Tensor.argsort)
_MEANS = (torch.mean, Tensor.mean)
_SCATTERS = (torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_)
_AVERAGES = (F.avg_pool2d, F.avg_pool3d)
_DROPOUTS = (F.dropout, torch.dropout)
#: functions whose exported op ignores `dtype=` -> the position of that argument behind x; None where it is by keyword
_CAST_FIRST: Mapping[Callable[..., Any], int | None] = {
    F.softmax: 3,
    F.softmin: 3,
    F.log_softmax: 3,
    torch.softmax: 2,
    torch.log_softmax: 2,
    Tensor.softmax: 2,
    Tensor.log_softmax: 2,
    torch.mean: None,
    Tensor.mean: None,
}
