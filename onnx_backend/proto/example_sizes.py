"""Open axes of a model's inputs, and the sizes that they had in the example it was quantized with."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from onnx import ModelProto

from onnx_backend.proto.model import input_names, set_properties
from qsdk.core.encodings.provenance import EXAMPLE, example_sizes, example_text


def open_inputs(model: ModelProto) -> dict[str, list[int | None]]:
    """Give the sizes of the inputs that have an open axis, None for one that is open."""
    names, found = set(input_names(model.graph)), {}
    for info in model.graph.input:
        if info.name in names and info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim  # some exporters write -1 for a dynamic one
            sizes = [int(d.dim_value) if d.HasField("dim_value") and d.dim_value > 0 else None for d in dims]
            if None in sizes:
                found[info.name] = sizes
    return found


def note_example(model: ModelProto, example: Mapping[str, npt.ArrayLike] | None) -> None:
    """Write the sizes of an example into a model that leaves some open, in place: `to_integer` may need them."""
    if example is not None and open_inputs(model):
        set_properties(model, {EXAMPLE: example_text({name: np.shape(value) for name, value in example.items()})})


def noted_example(model: ModelProto) -> dict[str, list[int]]:
    """Give the sizes of the example for the inputs that leave some open; none where the file says none that fit."""
    said = {entry.key: entry.value for entry in model.metadata_props}.get(EXAMPLE, "")
    found, wanted = example_sizes(said), open_inputs(model)
    for name, known in wanted.items():
        given = found.get(name, [])
        if len(given) != len(known) or any(own not in (None, size) for own, size in zip(known, given, strict=True)):
            return {}  # a tool has changed the inputs since
    return {name: found[name] for name in wanted}
