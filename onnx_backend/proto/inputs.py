"""The inputs of an ONNX model, and the sizes that its open axes had in the example it was quantized with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper, shape_inference

from onnx_backend.proto.graph_queries import declared_sizes, input_names, unique
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import copied, is_mark, metadata
from qsdk.core.encodings.provenance import EXAMPLE, example_sizes, example_text
from qsdk.core.errors import ConfigError, ModelError
from qsdk.core.graph.graph import PAST, STEP, TOTAL

#: Operators that ONNX defines by others, and whose shapes it then does not infer.
_LIKE_THEIR_INPUT = (
    "GroupNormalization",
    "MeanVarianceNormalization",
    "RMSNormalization",
    "SimplifiedLayerNormalization",
)


def sizes_by_input(model: ModelProto, shapes: Mapping[str, int | Sequence[int]]) -> dict[str, Sequence[int | None]]:
    """Return the sizes of inputs that follow from sizes of inputs and of axes: input name -> sizes, None where open.

    Of the numbers of tokens that a decoder with a cache has (past, new, and all of them), two give the third. `shapes`
    has all sizes of an input by its name, or the size of an open axis by its name.
    """
    axes = {name: size for name, size in shapes.items() if isinstance(size, int)}
    if PAST in axes and STEP in axes:
        axes.setdefault(TOTAL, axes[PAST] + axes[STEP])
    found: dict[str, Sequence[int | None]] = {name: tuple(s) for name, s in shapes.items() if not isinstance(s, int)}
    given: dict[str, int] = {}
    known: set[str] = set()
    for info in (info for info in model.graph.input if info.name in set(input_names(model.graph))):
        named = [dim.dim_param for dim in info.type.tensor_type.shape.dim]
        known.update(filter(None, named))
        if info.name not in found and not axes.keys().isdisjoint(named):
            pairs = zip(named, declared_sizes(info.type), strict=True)
            found[info.name] = [axes.get(name, size) for name, size in pairs]
        given.update(
            (name, size) for name, size in zip(named, found.get(info.name, ()), strict=False) if size is not None
        )
    unknown = sorted(name for name in shapes if name in axes and name not in known)
    if unknown:
        raise ConfigError(f"shapes names the axes {', '.join(unknown)}; open are {', '.join(sorted(known)) or 'none'}")
    past, step, total = (given.get(name) for name in (PAST, STEP, TOTAL))
    if past is not None and step is not None and total not in (None, past + step):
        raise ConfigError(
            f"{past} tokens of the past ({PAST}) and {step} new ones ({STEP}) are not {total} ({TOTAL}); leave the "
            "last one out, or make it their sum"
        )
    return found


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int | None]], *, least: int = 1) -> ModelProto:
    """Return a copy whose inputs have these sizes; axes that share the name of a dynamic one change with it.

    `shapes` has all sizes of an input, None for one that stays open; `least` is the smallest size.
    """
    fixed = copied(model)
    infos = {info.name: info for info in fixed.graph.input if info.name in set(input_names(model.graph))}
    unknown = sorted(set(shapes) - set(infos))
    if unknown:
        raise ConfigError(f"shapes= names {', '.join(unknown)}; the model's inputs are {', '.join(infos)}")
    named: dict[str, set[int]] = {}
    for name, sizes in shapes.items():
        dims = infos[name].type.tensor_type.shape.dim
        if len(sizes) != len(dims) or any(size is not None and size < least for size in sizes):
            wanted = f"the input has {len(dims)} axes, of sizes above {least - 1}"
            raise ConfigError(f"shapes[{name!r}] = {list(sizes)}: {wanted}")
        for dim, size in zip(dims, sizes, strict=True):
            if size is None:
                continue
            if dim.HasField("dim_value") and dim.dim_value > 0 and dim.dim_value != size:  # some exporters write -1
                raise ConfigError(f"shapes[{name!r}] = {list(sizes)} contradicts the model's size {dim.dim_value}")
            if dim.dim_param:
                named.setdefault(dim.dim_param, set()).add(int(size))
            dim.dim_value = int(size)
    for info in (*fixed.graph.value_info, *fixed.graph.output):
        for dim in info.type.tensor_type.shape.dim if info.type.tensor_type.HasField("shape") else ():
            if dim.dim_param:
                known = named.get(dim.dim_param, set())
                dim.ClearField("dim_param")  # one without a size is inferred again, as is one of several
                if len(known) == 1:
                    dim.dim_value = next(iter(known))
            elif dim.dim_value < 0:  # some exporters write -1 for an open axis
                dim.ClearField("dim_value")
    return fixed


def with_sizes_of(model: ModelProto, values: Mapping[str, npt.NDArray[Any]]) -> ModelProto:
    """Return a copy whose inputs have the sizes of these values, whatever was declared, and inferred shapes."""
    fixed = copied(model)
    for info in fixed.graph.input:
        if info.name in values:
            shape = info.type.tensor_type.shape
            del shape.dim[:]
            shape.SetInParent()  # a scalar has a shape without axes
            for size in np.shape(values[info.name]):
                shape.dim.add().dim_value = size
    for info in fixed.graph.output:
        info.type.tensor_type.ClearField("shape")
    del fixed.graph.value_info[:]
    return with_inferred_shapes(fixed)


def with_inferred_shapes(model: ModelProto) -> ModelProto:
    """Return a model with the shapes that ONNX can infer."""
    inferable = _inferable(model)
    found = shape_inference.infer_shapes(inferable, data_prop=True)
    for node, own in zip(found.graph.node, model.graph.node, strict=True) if inferable is not model else ():
        node.CopyFrom(own)
    return found


def static_sizes(model: ModelProto) -> dict[str, tuple[int | None, ...]]:
    """Return the dimensions of every tensor whose shape is known, None for a dynamic one."""
    found: dict[str, tuple[int | None, ...]] = {}
    for info in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        if info.type.tensor_type.HasField("shape"):
            found[info.name] = tuple(declared_sizes(info.type))
    found.update((tensor.name, tuple(tensor.dims)) for tensor in model.graph.initializer)
    return found


def _inferable(model: ModelProto) -> ModelProto:
    """Return a model of the same shapes, each operator without inference replaced by its first input."""
    if not any(_is_like_its_input(node) for node in model.graph.node):
        return model
    result = copied(model)
    for node in result.graph.node:
        if _is_like_its_input(node):
            node.op_type, node.domain = "Identity", ""
            del node.input[1:], node.attribute[:]
    return result


def _is_like_its_input(node: NodeProto) -> bool:
    return is_mark(node) or (node.op_type in _LIKE_THEIR_INPUT and node.domain in ("", "ai.onnx"))


@dataclass(frozen=True)
class ModelInput:
    """An input that a caller feeds.

    Attributes:
        name: in the model.
        dtype: of its array.
        shape: a number, the name of an open dimension, or "" for an open one without a name; None if undeclared.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...] | None


def inputs_of(model: ModelProto) -> list[ModelInput]:
    """Return the inputs that a caller feeds, in graph order."""
    fed, found = set(input_names(model.graph)), []
    for value in model.graph.input:
        if value.name not in fed:
            continue
        tensor = value.type.tensor_type
        try:
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
        except KeyError:
            raise ModelError(f"the input {value.name!r} is no numeric tensor; feed the model from Python") from None
        dims = tensor.shape.dim
        sizes = tuple(int(d.dim_value) if d.HasField("dim_value") else str(d.dim_param) for d in dims)
        found.append(ModelInput(value.name, dtype, sizes if tensor.HasField("shape") else None))
    return found


def open_inputs(model: ModelProto) -> dict[str, list[int | None]]:
    """Return the sizes of the inputs that have an open axis, with None for each open axis."""
    names, found = set(input_names(model.graph)), {}
    for info in model.graph.input:
        if info.name in names and info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim  # some exporters write -1 for a dynamic one
            sizes = [int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else None for d in dims]
            if None in sizes:
                found[info.name] = sizes
    return found


def note_example(model: ModelProto, example: Mapping[str, npt.ArrayLike] | None) -> None:
    """Note the sizes of an example in a model with open axes, in place: `to_integer` may need them."""
    if example is not None and open_inputs(model):
        tell_axes_apart(model, example)
        set_properties(model, {EXAMPLE: example_text({name: np.shape(value) for name, value in example.items()})})


def tell_axes_apart(model: ModelProto, batch: Mapping[str, npt.ArrayLike]) -> None:
    """Rename, in place, the open axes of inputs that have one name and that a batch has in different sizes.

    ONNX Runtime lets tensors share memory if their sizes have the same name, and does not run a file that uses one name
    for different sizes. Other tensors have no name there afterwards.
    """
    axes = [
        (value.name, dim, size)
        for value in model.graph.input
        if value.name in batch
        for dim, size in zip(value.type.tensor_type.shape.dim, np.shape(batch[value.name]), strict=False)
        if dim.dim_param
    ]
    sizes: dict[str, set[int]] = {}
    for _, dim, size in axes:
        sizes.setdefault(dim.dim_param, set()).add(size)
    several = {name for name, found in sizes.items() if len(found) > 1}
    if not several:
        return
    for value in (*model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in several:
                dim.ClearField("dim_param")
    taken = set(sizes)
    for name, dim, _ in axes:
        if dim.dim_param in several:
            dim.dim_param = unique(f"{dim.dim_param}_{name}", taken)


def noted_example(model: ModelProto) -> dict[str, list[int]]:
    """Return the sizes of the example for inputs with an open axis; nothing if the file notes none that fit."""
    text = metadata(model).get(EXAMPLE, "")
    found, wanted = example_sizes(text), open_inputs(model)
    for name, known in wanted.items():
        given = found.get(name, [])
        if len(given) != len(known) or any(own not in (None, size) for own, size in zip(known, given, strict=True)):
            return {}  # a tool has changed the inputs since
    return {name: found[name] for name in wanted}
