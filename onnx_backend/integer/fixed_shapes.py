"""Giving the dynamic axes of a model's inputs fixed sizes, which unrolled and normalising operations need."""

from collections.abc import Mapping, Sequence

from onnx import ModelProto

from onnx_backend.model import input_names
from qsdk.core.errors import ConfigError


def with_shapes(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """Give a copy whose inputs have these sizes; shapes of inner tensors and outputs are left to be inferred again.

    Args:
        model: any.
        shapes: input name -> all of its sizes.

    Raises:
        ConfigError: an unknown input, another rank, a size below 1, or one that contradicts a fixed one.
    """
    fixed = ModelProto()
    fixed.CopyFrom(model)
    infos = {info.name: info for info in fixed.graph.input if info.name in set(input_names(model.graph))}
    unknown = sorted(set(shapes) - set(infos))
    if unknown:
        raise ConfigError(f"shapes= names {', '.join(unknown)}; the model's inputs are {', '.join(infos)}")
    for name, sizes in shapes.items():
        dims = infos[name].type.tensor_type.shape.dim
        if len(sizes) != len(dims) or any(size < 1 for size in sizes):
            raise ConfigError(f"shapes[{name!r}] = {list(sizes)}: the input has {len(dims)} axes, of sizes above 0")
        for dim, size in zip(dims, sizes, strict=True):
            if dim.HasField("dim_value") and dim.dim_value > 0 and dim.dim_value != size:  # some exporters write -1
                raise ConfigError(f"shapes[{name!r}] = {list(sizes)} contradicts the model's size {dim.dim_value}")
            dim.dim_value = int(size)
    del fixed.graph.value_info[:]
    for info in fixed.graph.output:
        kind = info.type.tensor_type
        if kind.HasField("shape"):
            for dim in kind.shape.dim:
                if dim.dim_param:
                    dim.ClearField("dim_param")
    return fixed
