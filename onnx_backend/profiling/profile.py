"""What a profile says: rows by layer, cures, and random values to profile with."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from onnx import ModelProto

from onnx_backend.profiling.kernels import Profile, layers_of, nodes_of, number_in
from onnx_backend.profiling.speed import slow_in
from onnx_backend.proto.inputs import inputs_of, noted_example
from onnx_backend.proto.nodes import node_label
from onnx_backend.runtime.feeds import random_array
from qsdk.core.arrays import Array
from qsdk.core.errors import ConfigError

_PAIR = ("QuantizeLinear", "DequantizeLinear")


def rows_of(model: ModelProto, found: Profile) -> Iterator[dict[str, Any]]:
    """Yield a row per kernel of a profiled model, in the order in which they run: see `qsdk.analysis.profile`."""
    nodes = nodes_of(model, found.kernels)
    total = sum(kernel.ms for kernel in found.kernels) or 1.0
    for kernel, own, layer in zip(found.kernels, nodes, layers_of(model, found.kernels, nodes), strict=True):
        computing = [node for node in own if node.op_type not in _PAIR]
        precision = "conversion" if own and not computing else kernel.precision
        yield {
            "layer": layer,
            "op_type": kernel.op_type,
            "ms": kernel.ms,
            "share": kernel.ms / total,
            "precision": precision,
            "nodes": ", ".join(map(node_label, computing or own)),
        }


def cures_of(model: ModelProto, found: Profile) -> list[dict[str, Any]]:
    """Return what a profiled model computes in floats for nothing, the most time first: `ms`, `finding`, `cure`."""

    def label(name: str) -> str:
        number = number_in(name)
        return name if number is None else node_label(model.graph.node[number])

    times = {kernel.name: kernel.ms for kernel in found.kernels}
    causes = [] if found.graph is None else slow_in(found.graph, label)
    rows = [
        {"ms": sum(times.get(name, 0.0) for name in one.kernels), "finding": str(one), "cure": one.cure}
        for one in causes
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def random_feeds_for(model: ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, Array]:
    """Return random values of the declared sizes: an open batch is 1, other open sizes are those of the example.

    A size that is open, neither given nor noted in the file, is a ConfigError.
    """
    inputs, noted, rng, found = inputs_of(model), noted_example(model), np.random.default_rng(0), {}
    unknown = sorted(set(shapes) - {item.name for item in inputs})
    if unknown:
        names = ", ".join(item.name for item in inputs)
        raise ConfigError(f"shapes names {unknown[0]!r}; the inputs are {names}")
    for item in inputs:
        sizes = item.shape
        if item.name in shapes:
            sizes = tuple(shapes[item.name])
        elif sizes is not None:
            example: Sequence[Any] = noted.get(item.name, sizes)
            sizes = tuple(
                size if isinstance(size, int) else 1 if axis == 0 else example[axis] for axis, size in enumerate(sizes)
            )
        if sizes is None or any(not isinstance(size, int) for size in sizes):
            shown = "undeclared" if sizes is None else str([size or "?" for size in sizes])
            raise ConfigError(
                f"the size of the input {item.name!r} is {shown}; give data, or its sizes: "
                f"shapes={{{item.name!r}: (1, 3, 224, 224)}} (its own)"
            )
        # sessions take float32 where a model takes bfloat16
        dtype = np.dtype(np.float32) if item.dtype == ml_dtypes.bfloat16 else item.dtype
        found[item.name] = random_array(rng, dtype, tuple(map(int, sizes)))
    return found
