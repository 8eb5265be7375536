"""Open axes of a model's inputs: taken from a batch of data where the conversion needs their sizes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnx import ModelProto

from onnx_backend.feeding import as_feeds
from onnx_backend.model import input_names
from onnx_backend.session import simulation_session

_FIRST, _TRIAL = 2, (16, 32)  # sizes of a first axis and of others with which a refusal is tried again


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


def sizes_of(model: ModelProto, batch: Any) -> list[dict[str, list[int | None]]]:
    """Give the sizes that a batch has where the model's inputs are open: with the first axes left open, and all.

    Raises:
        DataError: the model does not take it.
    """
    feeds = as_feeds(batch, simulation_session(model).get_inputs(), "batch 0 of data=")
    given: dict[str, list[int | None]] = {
        name: [int(size) for size in feeds[name].shape] for name in open_inputs(model) if name in feeds
    }
    first = {name: [open_inputs(model)[name][0], *sizes[1:]] for name, sizes in given.items()}
    return [first, given] if first != given else [given]


def trial_sizes(model: ModelProto) -> Iterator[dict[str, list[int]]]:
    """Give sizes that a model may take: open axes of the same name are equal."""
    for size in _TRIAL:
        yield {
            name: [known or (_FIRST if axis == 0 else size) for axis, known in enumerate(sizes)]
            for name, sizes in open_inputs(model).items()
        }


def in_words(sizes: Mapping[str, Sequence[int | None]]) -> tuple[str, str]:
    """Give sizes as `shapes=` and as `--shape` take them, `?` for an open one."""
    texts = {name: ["?" if size is None else str(size) for size in given] for name, given in sizes.items()}
    call = ", ".join(f'"{name}": ({", ".join(given)})' for name, given in texts.items())
    return f"shapes={{{call}}}", " ".join(f"--shape {name}={','.join(given)}" for name, given in texts.items())
