"""Dynamic axes: which axes of the inputs may have another length than the example's, and their names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qsdk.core.errors import ConfigError
from qsdk.core.graph.graph import PAST, STEP, TOTAL
from torch_bridge.torch_values.pytree import CacheKey, Path

#: axis -> its name, for one tensor
Axes = Mapping[int, str]
BATCH = "batch"


def batch_axes(leaves: Sequence[tuple[Path, Any]]) -> dict[Path, Axes]:
    """Return the axes that are dynamic by default: the first of every tensor as long as the first tensor.

    Beside a cache of keys and values, the numbers of tokens are dynamic too: of the cache, of the step, and of both.
    """
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim}
    length = next((len(tensor) for tensor in tensors.values()), None)
    axes: dict[Path, dict[int, str]] = {path: {0: BATCH} for path, tensor in tensors.items() if len(tensor) == length}
    past = next((tensor.shape[-2] for path, tensor in tensors.items() if _is_in_cache(path)), None)
    step = next((tensor.shape[1] for path, tensor in tensors.items() if _is_row_of_tokens(path, tensor)), None)
    if past is not None and step is not None:
        names = {step: STEP, past + step: TOTAL}
        for path, tensor in tensors.items():
            if _is_in_cache(path):
                axes.setdefault(path, {})[tensor.ndim - 2] = PAST
            elif _is_row_of_tokens(path, tensor) and tensor.shape[1] in names:
                axes.setdefault(path, {})[1] = names[tensor.shape[1]]
    return dict(axes)


def _is_in_cache(path: Path) -> bool:
    return any(isinstance(key, CacheKey) for key in path)


def _is_row_of_tokens(path: Path, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and not _is_in_cache(path)


def named_axes(leaves: Sequence[tuple[Path, Any]], wanted: Any) -> dict[Path, Axes]:
    """Return the axes that `dynamic_shapes` names, in the form that `torch.onnx.export` takes.

    `wanted` is a mapping by argument name, or a sequence in the order of the arguments. The entry of a container has
    its form; that of a tensor is `{axis: name}`, or a name or None for every axis. What is left out is static.
    """
    return {path: axes for path, axes in _entries((), wanted, leaves) if axes}


def _entries(path: Path, wanted: Any, leaves: Sequence[tuple[Path, Any]]) -> Iterator[tuple[Path, Axes]]:
    if wanted is None:
        return
    tensor = next((leaf for at, leaf in leaves if at == path and isinstance(leaf, Tensor)), None)
    if tensor is not None:
        yield path, _axes_of(tensor, wanted, path)
        return
    children = list(dict.fromkeys(at[len(path)] for at, _ in leaves if at[: len(path)] == path and at != path))
    where = f"dynamic_shapes of {'.'.join(path)}" if path else "dynamic_shapes"
    if isinstance(wanted, Mapping):
        items = {str(key): item for key, item in wanted.items()}
    elif isinstance(wanted, tuple | list):
        if len(wanted) > len(children):
            raise ConfigError(f"{where} has {len(wanted)} entries, and the example has {', '.join(children) or 'none'}")
        items = dict(zip(children, wanted, strict=False))
    else:
        raise ConfigError(f"{where} is {wanted!r}; give a mapping by name, or a tuple in order")
    unknown = [key for key, item in items.items() if key not in children and item is not None]
    if unknown:
        has = f"has {', '.join(children)}" if children else "holds no tensor there"
        raise ConfigError(f"{where} names {', '.join(unknown)}, and the example {has}; name what the example gives")
    for key, item in items.items():
        yield from _entries((*path, key), item, leaves)


def _axes_of(tensor: Tensor, wanted: Any, path: Path) -> Axes:
    where = f"dynamic_shapes of {'.'.join(path)} (shape {tuple(tensor.shape)})"
    pairs = (
        wanted.items()
        if isinstance(wanted, Mapping)
        else enumerate(wanted)
        if isinstance(wanted, tuple | list)
        else None
    )
    if pairs is None:
        raise ConfigError(f"{where} is {wanted!r}; give {{axis: name}}, such as {{0: 'batch'}}")
    result: dict[int, str] = {}
    for axis, name in pairs:
        if not isinstance(axis, int) or not -tensor.ndim <= axis < tensor.ndim:
            raise ConfigError(f"{where} names the axis {axis!r}; it has the axes 0 to {tensor.ndim - 1}")
        if isinstance(name, torch.export.Dim):
            name = name.__name__
        if name is not None:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"{where} calls axis {axis} {name!r}; give it a name, such as 'batch', or None")
            result[axis % tensor.ndim] = name
    return result


def plain_shapes(wanted: Any) -> Any:
    """Return `dynamic_shapes` with names in the place of torch's `Dim`, so that a saved sim can hold it."""
    if isinstance(wanted, Mapping):
        return {key: plain_shapes(item) for key, item in wanted.items()}
    if isinstance(wanted, tuple | list):
        return [plain_shapes(item) for item in wanted]
    return wanted.__name__ if isinstance(wanted, torch.export.Dim) else wanted
