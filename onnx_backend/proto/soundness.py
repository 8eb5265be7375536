"""Checks before any tool opens a model: its functions are finite and fit their calls, no op lacks a needed input.

onnx's checker lets all of this pass; onnx's inliner and ONNX Runtime hang on it or end the process. What qsdk notes in
its own files is checked here too, once: whoever reads a note later relies on its form.
"""

import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard, get_args

import onnx
from onnx import FunctionProto, ModelProto, NodeProto, OperatorSetIdProto
from onnx.defs import OpSchema

from onnx_backend.proto.nodes import metadata, node_label
from onnx_backend.proto.subgraphs import all_nodes
from qsdk.core.errors import FileFormatError
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import Kind

_NODES = 2**20  # the largest models that were met have some 10,000
_BYTES = 2**31 - 1  # of one protobuf message, the output of onnx's inliner
_DEPTH = 100  # calls within calls, as in ONNX Runtime; onnx's own tools recurse
_SHOWN = 10**15
_AGAIN = "export the model again"
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_KINDS = frozenset({"", *get_args(Kind)})
#: domain, name and overload, by which a call names a function
Key = tuple[str, str, str]


def require_sound(model: ModelProto, where: str) -> None:
    """Refuse a model that the tools behind this package hang on or crash on; `where` is its name in messages.

    That is one with a function that calls itself or whose calls multiply or do not fit, a node that omits an input that
    its op needs, or damaged notes of qsdk.
    """
    functions = {_key(function): function for function in model.functions}
    if len(functions) < len(model.functions):
        keys = [_key(function) for function in model.functions]
        raise FileFormatError(f"{where} holds two functions {_name(max(keys, key=keys.count))}; {_AGAIN}")
    nodes = all_nodes(model.graph.node)
    inside = {key: all_nodes(function.node) for key, function in functions.items()}
    for node in (*nodes, *(node for body in inside.values() for node in body)):
        _require_fit(node, functions.get(_called(node)), where)
    for key, function in functions.items():
        computed = {name for node in function.node for name in node.output} | {*function.input}
        for name in function.output:
            if name not in computed:
                raise FileFormatError(f"{where}: the function {_name(key)} does not make {name!r}; {_AGAIN}")
    order = _require_end(nodes, inside, functions, where)
    needed: dict[Key, frozenset[str]] = {}  # the inputs that a function cannot do without
    for key in order:
        names = _require_given(inside[key], functions[key].opset_import, needed, functions, where)
        needed[key] = names.intersection(functions[key].input)
    _require_given(nodes, model.opset_import, needed, functions, where)
    _require_own_metadata(model, [*nodes, *(node for body in inside.values() for node in body)], where)


def _require_fit(node: NodeProto, function: FunctionProto | None, where: str) -> None:
    if function is None:
        return
    for what, given, known in (("inputs", node.input, function.input), ("outputs", node.output, function.output)):
        if len(given) > len(known):
            raise FileFormatError(
                f"{where}: the node {node_label(node)!r} calls {_name(_key(function))} with {len(given)} {what}, it "
                f"has {len(known)}; {_AGAIN}"
            )


def _require_end(
    nodes: Sequence[NodeProto],
    inside: Mapping[Key, Sequence[NodeProto]],
    functions: Mapping[Key, FunctionProto],
    where: str,
) -> list[Key]:
    """Return the functions, each behind those that it calls; refuse calls without an end, too deep or too many."""
    calls = {key: [called for node in body if (called := _called(node)) in inside] for key, body in inside.items()}
    try:
        order = [*TopologicalSorter(calls).static_order()]
    except CycleError as error:
        circle = error.args[1][:0:-1]  # in the order of the calls
        first = min(range(len(circle)), key=lambda at: [*calls].index(circle[at]))
        way = " -> ".join(_name(key) for key in (*circle[first:], *circle[: first + 1]))
        raise FileFormatError(f"{where}: a function calls itself ({way}), which has no end; export it again") from error
    depth: dict[Key, int] = {}
    count: dict[Key, int] = {}
    size: dict[Key, int] = {}
    for key in order:
        depth[key] = 1 + max((depth[name] for name in calls[key]), default=0)
        count[key] = len(inside[key]) + sum(count[name] for name in calls[key])
        size[key] = functions[key].ByteSize() + sum(size[name] for name in calls[key])
    deep = next((key for key in calls if depth[key] > _DEPTH), None)
    if deep is not None:
        raise FileFormatError(
            f"{where}: functions call functions more than {_DEPTH} deep, from {_name(deep)} on; export the model again "
            "without them"
        )
    used = [called for node in nodes if (called := _called(node)) in inside]
    total, total_bytes = sum(count[name] for name in used), sum(size[name] for name in used)
    if total > _NODES or total_bytes > _BYTES:
        worst = max(used, key=size.__getitem__)
        raise FileFormatError(
            f"{where}: the calls of its functions stand for {_shown(total)} nodes of {_shown(total_bytes)} bytes, "
            f"most of them in {_name(worst)}; up to {_NODES:,} nodes and 2 GiB can be opened. Export the model again, "
            "without functions that call each other over and over"
        )
    return order


def _require_given(
    nodes: Iterable[NodeProto],
    opsets: Iterable[OperatorSetIdProto],
    needed: Mapping[Key, frozenset[str]],
    functions: Mapping[Key, FunctionProto],
    where: str,
) -> frozenset[str]:
    """Return the tensors that nodes cannot do without; refuse a node that omits one, on which ONNX Runtime can crash.

    Only optional inputs may be "" by the standard; `needed` has those of the functions that the nodes call.
    """
    versions = {"" if entry.domain == "ai.onnx" else entry.domain: int(entry.version) for entry in opsets}
    names: set[str] = set()
    for node in nodes:
        function = functions.get(_called(node))
        if function is not None:
            given = dict(zip(function.input, node.input, strict=False))
            read = {name: given.get(name, "") for name in needed[_key(function)]}
        elif functions or "" in node.input:
            read = _read_by_schema(node, versions)
        else:
            continue
        for position, tensor in read.items():
            if not tensor:
                raise FileFormatError(
                    f"{where}: the node {node_label(node)!r} ({node.op_type}) omits its input "
                    f"{position!r}, which {node.op_type} needs; {_AGAIN}"
                )
        names.update(read.values())
    return frozenset(names)


def _read_by_schema(node: NodeProto, versions: Mapping[str, int]) -> dict[str, str]:
    """Return the tensor at each input that an op's schema does not call optional; none where the op is unknown."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if not onnx.defs.has(node.op_type, domain) or domain not in versions:
        return {}
    try:
        parameters = onnx.defs.get_schema(node.op_type, versions[domain], domain).inputs
    except onnx.defs.SchemaError:  # the op came with a later opset
        return {}
    read = {}
    for index, tensor in enumerate(node.input):
        parameter = parameters[min(index, len(parameters) - 1)] if parameters else None
        if parameter is not None and parameter.option != OpSchema.FormalParameterOption.Optional:
            variadic = parameter.option == OpSchema.FormalParameterOption.Variadic
            read[f"{parameter.name}[{index - len(parameters) + 1}]" if variadic else parameter.name] = tensor
    return read


def _key(function: FunctionProto) -> Key:
    return function.domain, function.name, function.overload


def _called(node: NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


def _name(key: Key) -> str:
    return "::".join(part for part in key[:2] if part)


def _shown(count: int) -> str:
    return f"{count:,}" if count < _SHOWN else f"more than {_SHOWN:,}"


# --- what qsdk notes in a model -----------------------------------------------------------------------------------


def _require_own_metadata(model: ModelProto, nodes: Iterable[NodeProto], where: str) -> None:
    """Refuse a model whose notes are not in the form in which qsdk writes them."""
    ranks = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    for node in nodes:
        if any(entry.key.startswith("qsdk.") for entry in node.metadata_props):
            facts = metadata(node)
            _require(facts, _wrong_in(node, facts, ranks), f"{where}: the node {node_label(node)!r}")
    known = metadata(model)
    _require(known, (key for key, value in known.items() if not _is_sound_property(key, value)), where)


def _require(facts: Mapping[str, str], wrong: Iterable[str], owner: str) -> None:
    key = next(iter(wrong), None)
    if key is not None:
        problem = f"has {key} = {facts[key][:60]!r}" if key in facts else f"lacks {key}"
        raise FileFormatError(f"{owner} {problem}, which qsdk does not write so; the file is damaged, export it again")


def _wrong_in(node: NodeProto, facts: Mapping[str, str], ranks: Mapping[str, int]) -> Iterator[str]:
    """Yield the notes of a node that are damaged, or that another one needs."""
    yield from (key for key, is_sound in _NODE_NOTES.items() if key in facts and not is_sound(facts[key]))
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
        ends = (ports["inputs"], len(node.input)), (ports["outputs"], len(node.output))
        if any(int(at) >= count for places, count in ends for at in places):
            yield "qsdk.island"


def _is_island(text: str) -> bool:
    """Return whether a text says by position the site and kind of inputs, and of outputs a tensor's name besides."""
    ends = _parsed(text)
    if not isinstance(ends, dict) or ends.keys() != {"inputs", "outputs"}:
        return False
    return all(
        isinstance(ports, dict)
        and all(
            re.fullmatch(r"\d{1,4}", at, re.ASCII) and _is_texts(facts) and len(facts) == count and facts[1] in _KINDS
            for at, facts in ports.items()
        )
        for ports, count in ((ends["inputs"], 2), (ends["outputs"], 3))
    )


def _is_nodes(text: str) -> bool:
    """Return whether a text says the nodes that a node stands for."""
    nodes = _parsed(text)
    try:
        return bool(nodes) and _is_texts(nodes) and all(NodeProto.FromString(b64decode(one)).output for one in nodes)
    except Exception:  # of base64 or protobuf, whose type has no stubs
        return False


def _is_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


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
    "qsdk.perm": lambda text: re.fullmatch(r"\d{1,4}(,\d{1,4})*", text, re.ASCII) is not None,
    "qsdk.island": _is_island,
    "qsdk.stands_for": _is_nodes,
    "qsdk.computes_in": _FLOATS.__contains__,
    "qsdk.enters": _FLOATS.__contains__,
    "qsdk.kernel_attributes": lambda text: all(pair.partition("=")[2] in _FLOATS for pair in text.split(",")),
}
