"""Provenance: the versions, the config and the network that a file was made with."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from qsdk.core.config.config import QuantConfig
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.graph_json import graph_to_text

GRAPH = "graph"
#: property of a model: name -> sizes of its inputs in the example that it was quantized with, as JSON
EXAMPLE = "qsdk.example"
_PACKAGES = ("qsdk", "torch", "onnx", "onnxruntime", "numpy")


def provenance_of(config: QuantConfig | None, graph: Graph) -> dict[str, Any]:
    """Return `tool`, `versions`, `config`, `network` and `graph` as values for JSON.

    The config is None for a sim opened from a Q/DQ file; its custom patterns are listed by name.
    """
    patterns = [] if config is None else [pattern.name for pattern in config.patterns]
    named = {"patterns": patterns} if patterns else {}
    return {
        "tool": "qsdk",
        "versions": {**{name: installed(name) for name in _PACKAGES}, "python": platform.python_version()},
        "config": None if config is None else replace(config, patterns=()).to_dict(),
        **named,
        "network": network_hash(graph),
        GRAPH: graph_to_text(graph),
    }


def example_text(sizes: Mapping[str, Sequence[int]]) -> str:
    """Return the sizes of inputs as text for the model property `EXAMPLE`."""
    return json.dumps({name: [int(size) for size in given] for name, given in sizes.items()})


def example_sizes(text: str) -> dict[str, list[int]]:
    """Return the sizes that `example_text` wrote; {} where they are damaged, since nothing depends on them."""
    try:
        result = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    entries = result.items() if isinstance(result, dict) else ()
    return {
        name: given
        for name, given in entries
        if isinstance(given, list) and all(type(size) is int and size > 0 for size in given)
    }


@cache
def installed(package: str) -> str | None:
    """Return the version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def network_hash(graph: Graph) -> str:
    """Return `sha256:...` of a network's ops, connections, attributes and fixed sizes, without names and weights."""
    result = hashlib.sha256()
    numbers: dict[int | None, int] = {None: -1}  # by first use: files differ in the order of their tensors

    def seen(tensors: Sequence[int | None]) -> list[int]:
        for index in tensors:
            if index is not None and index not in numbers:
                numbers[index] = len(numbers) - 1
                tensor = graph.tensors[index]
                sizes = [n if isinstance(n, int) else None for n in tensor.shape or ()]
                value = None if tensor.is_float or tensor.value is None else np.asarray(tensor.value).tolist()
                result.update(repr((tensor.dtype, tensor.shape is None, sizes, tensor.constant, value)).encode())
        return [numbers[index] for index in tensors]

    result.update(repr(seen(graph.inputs)).encode())
    for op in graph.ops:
        attributes = sorted((name, _plain(value)) for name, value in op.attributes.items())
        result.update(repr((op.domain, op.type, seen(op.inputs), seen(op.outputs), attributes)).encode())
    result.update(repr(seen(graph.outputs)).encode())
    return f"sha256:{result.hexdigest()}"


def _plain(value: Any) -> str:
    return repr(np.asarray(value).tolist() if hasattr(value, "tolist") else value)
