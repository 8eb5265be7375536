"""What qsdk notes in a model, and the form of each note: it is checked once, when a model is opened.

Whoever reads a note later relies on its form.
"""

import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeGuard, get_args

from onnx import ModelProto, NodeProto

from onnx_backend.proto.nodes import metadata, node_label
from onnx_backend.proto.subgraphs import all_nodes
from qsdk.core.errors import FileFormatError
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import Kind

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_KINDS = frozenset({"", *get_args(Kind)})


def require_own_metadata(model: ModelProto, where: str) -> None:
    """Refuse a model whose notes are not in the form in which qsdk writes them.

    Args:
        model: is not changed.
        where: its name, for messages.

    Raises:
        FileFormatError: names the node, the note and what it holds.
    """
    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in all_nodes(nodes):
            if any(entry.key.startswith("qsdk.") for entry in node.metadata_props):
                facts = metadata(node)
                _require(facts, _wrong_in(node, facts, ranks), f"{where}: the node {node_label(node)!r}")
    known = metadata(model)
    _require(known, (key for key, value in known.items() if not _is_sound_property(key, value)), where)


def _require(facts: Mapping[str, str], wrong: Iterable[str], owner: str) -> None:
    key = next(iter(wrong), None)
    if key is not None:
        found = f"has {key} = {facts[key][:60]!r}" if key in facts else f"lacks {key}"
        raise FileFormatError(f"{owner} {found}, which qsdk does not write so; the file is damaged, export it again")


def _wrong_in(node: NodeProto, facts: Mapping[str, str], ranks: Mapping[str, int]) -> Iterable[str]:
    """Yield the notes of a node that are damaged, or that another one needs."""
    for key, is_sound in _NODE_NOTES.items():
        if key in facts and not is_sound(facts[key]):
            yield key
    if node.op_type == "Cast" and "qsdk.site" in facts:  # of a site in a narrow float type
        yield from (key for key in ("qsdk.dtype", "qsdk.kind") if key not in facts)
        if facts["qsdk.dtype"] not in _FLOATS:
            yield "qsdk.dtype"
    if "qsdk.perm" in facts:
        if "qsdk.site" not in facts:
            yield "qsdk.site"
        axes = [int(axis) for axis in facts["qsdk.perm"].split(",")]
        rank = ranks.get(node.input[0], len(axes)) if node.input else 0
        if sorted(axes) != list(range(rank)):
            yield "qsdk.perm"
    if "qsdk.island" in facts:
        if "qsdk.computes_in" not in facts:
            yield "qsdk.computes_in"
        ports = json.loads(facts["qsdk.island"])
        if any(int(at) >= len(node.input) for at in ports["inputs"]) or any(
            int(at) >= len(node.output) for at in ports["outputs"]
        ):
            yield "qsdk.island"


def _is_axes(text: str) -> bool:
    return re.fullmatch(r"\d{1,4}(,\d{1,4})*", text, re.ASCII) is not None


def _is_island(text: str) -> bool:
    """Return whether a text says by position the site and kind of inputs, and of outputs a tensor's name besides."""
    found = _parsed(text)
    if not isinstance(found, dict) or found.keys() != {"inputs", "outputs"}:
        return False
    return all(
        isinstance(ports, dict)
        and all(
            re.fullmatch(r"\d{1,4}", at, re.ASCII) and _is_texts(facts) and len(facts) == count and facts[1] in _KINDS
            for at, facts in ports.items()
        )
        for ports, count in ((found["inputs"], 2), (found["outputs"], 3))
    )


def _is_nodes(text: str) -> bool:
    """Return whether a text says the nodes that a node stands for."""
    found = _parsed(text)
    try:
        return bool(found) and _is_texts(found) and all(NodeProto.FromString(b64decode(one)).output for one in found)
    except Exception:  # of base64 or protobuf, whose type has no stubs
        return False


def _is_texts(found: object) -> TypeGuard[list[str]]:
    return isinstance(found, list) and all(isinstance(item, str) for item in found)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_dtypes_by_name(text: str) -> bool:
    return all(pair.partition("=")[2] in _FLOATS for pair in text.split(","))


def _is_dtype(text: str) -> bool:
    return text.removesuffix("_strict") in DTYPES


def _is_sound_property(key: str, value: str) -> bool:
    if key == "qsdk.constant_sites":
        return _is_texts(_parsed(value))
    if key == "qsdk.encodings.file":
        return value == Path(value).name and value not in ("", "..") and "\0" not in value
    edge = re.fullmatch(r"qsdk\.(?:input|output)\..*\.(dtype|scale|zero_point)", key, re.DOTALL)
    if edge is None:
        return True
    if edge[1] == "dtype":
        return _is_dtype(value)
    if edge[1] == "zero_point":
        return re.fullmatch(r"-?\d{1,9}", value, re.ASCII) is not None
    try:
        return 0 < float(value) < math.inf
    except ValueError:
        return False


#: form of each note of a node
_NODE_NOTES: Mapping[str, Callable[[str], bool]] = {
    "qsdk.site": bool,
    "qsdk.dtype": _is_dtype,
    "qsdk.kind": _KINDS.__contains__,
    "qsdk.perm": _is_axes,
    "qsdk.island": _is_island,
    "qsdk.stands_for": _is_nodes,
    "qsdk.computes_in": _FLOATS.__contains__,
    "qsdk.enters": _FLOATS.__contains__,
    "qsdk.kernel_attributes": _is_dtypes_by_name,
}
