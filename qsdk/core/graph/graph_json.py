"""A graph as plain values for JSON: the facts by which its sites are found in another file of the same network.

It holds no weights, and no names but those of sites.
"""

import base64
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import FileFormatError
from qsdk.core.graph.graph import Graph, Op, Tensor

_LARGEST = 2**28  # characters
_FEW = 16  # elements of a constant that selects the part for a Slice or a Gather


def graph_to_plain(graph: Graph) -> dict[str, Any]:
    """Return a graph as values for JSON, in which a tensor is identified by its place in the list.

    Returns:
        `tensors` (dtype, whether stored, site, shape, value), `ops` (type, inputs, outputs, attributes, domain),
        `inputs` and `outputs`; empty fields at the end of a list are absent. An op's inputs count back from its first
        output, and its outputs on from the last one of the op before, so that equal blocks of a network look the same.
    """
    # shapes show the layout of a weight; those of activations would only make the text longer
    stored = [graph.constant_root(index) is not None for index in range(len(graph.tensors))]
    tensors = [
        [t.dtype, int(t.constant), t.site, list(t.shape) if weight and t.shape else None, _small(t)]
        for t, weight in zip(graph.tensors, stored, strict=True)
    ]
    befores = [0, *(op.outputs[-1] for op in graph.ops)]
    ops = [
        [op.type, _back(op), [t - before for t in op.outputs], _plain(op.attributes), op.domain]
        for op, before in zip(graph.ops, befores, strict=False)
    ]
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "tensors": [_trimmed(fields) for fields in tensors],
        "ops": [_trimmed(fields) for fields in ops],
    }


def graph_from_plain(data: Any, where: str) -> Graph:
    """Return the graph that `graph_to_plain` wrote."""
    try:
        tensors = [_tensor(index, *fields) for index, fields in enumerate(data["tensors"])]
        ops: list[Op] = []
        for fields in data["ops"]:
            ops.append(_op(ops[-1].outputs[-1] if ops else 0, *fields))
        graph = Graph(tensors, ops, list(data["inputs"]), list(data["outputs"]))
        problem = _problem(graph)
    except (AttributeError, KeyError, IndexError, OverflowError, TypeError, ValueError) as error:
        problem = repr(error)
    if problem:
        raise FileFormatError(f"the graph in the provenance of {where} is damaged ({problem}); write the file again")
    return graph


def graph_to_text(graph: Graph) -> str:
    """Return the JSON of `graph_to_plain`, compressed (zlib) and in base 85: a tenth of its length."""
    text = json.dumps(graph_to_plain(graph), separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode()


def graph_from_text(text: Any, where: str) -> Graph:
    """Return the graph that `graph_to_text` wrote."""
    try:
        data = json.loads(zlib.decompressobj().decompress(base64.b85decode(text), _LARGEST))
    except (RecursionError, TypeError, ValueError, zlib.error) as error:
        data = repr(error)
    return graph_from_plain(data, where)


def _back(op: Op) -> list[int | None]:
    return [None if tensor is None else op.outputs[0] - tensor for tensor in op.inputs]


def _small(tensor: Tensor) -> Any:
    """Return the value of a constant that is an index, a size or one number."""
    value = tensor.value
    if value is None or value.dtype.kind not in "iubf" or value.size > (1 if value.dtype.kind == "f" else _FEW):
        return None
    return value.tolist() if np.isfinite(value).all() else None


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sorted(attributes.items()) if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _trimmed(fields: list[Any]) -> list[Any]:
    """Return the fields up to the last one that is not empty."""
    kept = [index for index, value in enumerate(fields) if value not in (None, "", {})]
    return fields[: kept[-1] + 1]


def _tensor(
    index: int, dtype: str, stored: int, site: str | None = None, shape: Any = None, value: Any = None
) -> Tensor:
    known: npt.NDArray[Any] | None = None if value is None else np.array(value, dtype)
    return Tensor(site or f"#{index}", dtype, None if shape is None else tuple(shape), site, bool(stored), known)


def _op(before: int, kind: str, inputs: Any, outputs: Any, attributes: Any = None, domain: str = "") -> Op:
    made = tuple(before + step for step in outputs)
    read = tuple(None if back is None else made[0] - back for back in inputs)
    return Op(kind, read, made, dict(attributes or {}), "", domain)


def _problem(graph: Graph) -> str:
    """Return why a graph is inconsistent, or ""."""
    known = {index for index, tensor in enumerate(graph.tensors) if tensor.constant} | set(graph.inputs)
    for op in graph.ops:
        if any(tensor is not None and tensor not in known for tensor in op.inputs):
            return f"{op.type} reads what nothing before it makes"
        known.update(op.outputs)
    sites = [tensor.site for tensor in graph.tensors if tensor.site is not None]
    if not known.union(graph.outputs) <= set(range(len(graph.tensors))) or len(set(sites)) < len(sites):
        return "it names a tensor that is not there, or a site twice"
    wrong = [tensor for tensor in graph.tensors if not isinstance(tensor.dtype, str) or not _is_shape(tensor.shape)]
    return f"{wrong[0].name} has no shape or dtype" if wrong else ""


def _is_shape(shape: Any) -> bool:
    return shape is None or all(size is None or isinstance(size, int | str) for size in shape)
