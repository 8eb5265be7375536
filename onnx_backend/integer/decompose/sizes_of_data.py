"""Sizes for the open axes of a model's inputs, from data or from its example, where the conversion needs them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnx import ModelProto

from onnx_backend.proto.inputs import noted_example, open_inputs
from onnx_backend.runtime.feeds import as_feeds
from onnx_backend.runtime.session import simulation_session

_FIRST, _TRIAL = 2, (16, 32)  # sizes of a first axis and of others with which a refusal is tried again


def sizes_of(model: ModelProto, batch: Any) -> list[dict[str, list[int | None]]]:
    """Return the sizes of a batch for inputs with open axes: with the first axes left open, and all fixed."""
    feeds = as_feeds(batch, simulation_session(model).get_inputs(), "batch 0 of data=")
    return _in_turn(open_inputs(model), {name: value.shape for name, value in feeds.items()})


def sizes_of_example(model: ModelProto) -> list[dict[str, list[int | None]]]:
    """Return the sizes of the example that a model was quantized with, as `sizes_of`; none if the file has none."""
    found = noted_example(model)
    return _in_turn(open_inputs(model), found) if found else []


def _in_turn(
    wanted: Mapping[str, Sequence[int | None]], found: Mapping[str, Sequence[int]]
) -> list[dict[str, list[int | None]]]:
    given: dict[str, list[int | None]] = {name: [int(n) for n in found[name]] for name in wanted if name in found}
    first = {name: [wanted[name][0], *sizes[1:]] for name, sizes in given.items()}
    return [first, given] if first != given else [given]


def trial_sizes(model: ModelProto) -> Iterator[dict[str, list[int]]]:
    """Yield sizes that a model may accept: open axes of the same name are equal."""
    for size in _TRIAL:
        yield {
            name: [known or (_FIRST if axis == 0 else size) for axis, known in enumerate(sizes)]
            for name, sizes in open_inputs(model).items()
        }


def in_words(sizes: Mapping[str, Sequence[int | None]]) -> tuple[str, str]:
    """Return sizes in the form of `shapes=` and of `--shape`, `?` for an open one."""
    texts = {name: ["?" if size is None else str(size) for size in given] for name, given in sizes.items()}
    call = ", ".join(f'"{name}": ({", ".join(given)})' for name, given in texts.items())
    return f"shapes={{{call}}}", " ".join(f"--shape {name}={','.join(given)}" for name, given in texts.items())
