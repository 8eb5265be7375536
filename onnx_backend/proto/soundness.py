"""Checks before any tool opens a model: its functions are finite and fit their calls, no op lacks a needed input.

onnx's checker lets all of this pass; onnx's inliner and ONNX Runtime hang on it or end the process.
"""

import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


_NODES = 2**20  # the largest models that were met have some 10,000
_BYTES = 2**31 - 1  # of one protobuf message, the output of onnx's inliner
_DEPTH = 100  # calls within calls, as in ONNX Runtime; onnx's own tools recurse
_SHOWN = 10**15
_AGAIN = "export the model again"
Key = tuple[str, str, str]


def require_sound(model: ModelProto, where: str) -> None:
    """Refuse a model that the tools behind this package hang on or crash on.

    Args:
        model: is not changed.
        where: its name, for messages.

    Raises:
        FileFormatError: a function calls itself, its calls multiply or do not fit (the message names the function, and
            the way back to itself, the size or the call), a node omits an input that its op needs, or what qsdk notes
            in its files is damaged.
    """
    bodies = {_key(function): function for function in model.functions}
    if len(bodies) < len(model.functions):
        keys = [_key(function) for function in model.functions]
        raise FileFormatError(f"{where} holds two functions {_name(max(keys, key=keys.count))}; {_AGAIN}")
    if bodies:
        for nodes in (model.graph.node, *(function.node for function in model.functions)):
            for node in all_nodes(nodes):
                _require_fit(node, bodies.get(_called(node)), where)
        for function in model.functions:
            _require_outputs(function, where)
    order = _require_end(model, bodies, where) if bodies else []
    _require_inputs(model, [bodies[key] for key in order], where)
    require_own_metadata(model, where)


def _require_outputs(function: FunctionProto, where: str) -> None:
    computed = {name for node in function.node for name in node.output} | {*function.input}
    for name in function.output:
        if name not in computed:
            raise FileFormatError(f"{where}: the function {_name(_key(function))} does not make {name!r}; {_AGAIN}")


def _require_fit(node: NodeProto, function: FunctionProto | None, where: str) -> None:
    if function is None:
        return
    for what, given, known in (("inputs", node.input, function.input), ("outputs", node.output, function.output)):
        if len(given) > len(known):
            raise FileFormatError(
                f"{where}: the node {node_label(node)!r} calls {_name(_key(function))} with {len(given)} {what}, it "
                f"has {len(known)}; {_AGAIN}"
            )


def _require_end(model: ModelProto, bodies: Mapping[Key, FunctionProto], where: str) -> list[Key]:
    """Return the functions, each behind those that it calls."""
    called = {key: [name for name in _calls(bodies[key].node) if name in bodies] for key in bodies}
    nodes: dict[Key, int] = {}
    size: dict[Key, int] = {}
    order = _innermost_first(called, where)
    for key in order:
        nodes[key] = len(_calls(bodies[key].node)) + sum(nodes[name] for name in called[key])
        size[key] = bodies[key].ByteSize() + sum(size[name] for name in called[key])
    used = [name for name in _calls(model.graph.node) if name in bodies]
    total, total_bytes = sum(nodes[name] for name in used), sum(size[name] for name in used)
    if total > _NODES or total_bytes > _BYTES:
        worst = max(used, key=size.__getitem__)
        raise FileFormatError(
            f"{where}: the calls of its functions stand for {_shown(total)} nodes of {_shown(total_bytes)} bytes, "
            f"most of them in {_name(worst)}; up to {_NODES:,} nodes and 2 GiB can be opened. Export the model again, "
            "without functions that call each other over and over"
        )
    return order


def _require_inputs(model: ModelProto, functions: Sequence[FunctionProto], where: str) -> None:
    """Refuse omitted inputs that no op allows (spec: only optional ones may be ""); ONNX Runtime can crash on a Sum.

    Args:
        model: is not changed.
        functions: each behind those that it calls.
        where: the model's name, for messages.
    """
    known = {_key(function): function for function in functions}
    needed: dict[Key, frozenset[str]] = {}  # the inputs that a function cannot do without
    for function in functions:
        names = _require_given(function.node, function.opset_import, needed, known, where)
        needed[_key(function)] = names.intersection(function.input)
    _require_given(model.graph.node, model.opset_import, needed, known, where)


def _require_given(
    nodes: Iterable[NodeProto],
    opsets: Iterable[OperatorSetIdProto],
    needed: Mapping[Key, frozenset[str]],
    functions: Mapping[Key, FunctionProto],
    where: str,
) -> frozenset[str]:
    """Return the tensors that nodes cannot do without; refuse a node that omits one."""
    versions = {"" if entry.domain == "ai.onnx" else entry.domain: int(entry.version) for entry in opsets}
    names: set[str] = set()
    for node in all_nodes(nodes):
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
    """Return the key by which a call names a function: domain, name and overload."""
    return function.domain, function.name, function.overload


def _calls(nodes: Iterable[NodeProto]) -> list[Key]:
    return [_called(node) for node in all_nodes(nodes)]


def _called(node: NodeProto) -> Key:
    return node.domain, node.op_type, node.overload


def _innermost_first(called: Mapping[Key, Sequence[Key]], where: str) -> list[Key]:
    """Return the functions, each behind those that it calls; a loop, since a chain of calls could exhaust recursion."""
    done: dict[Key, None] = {}
    for start in called:
        path: dict[Key, Iterator[Key]] = {} if start in done else {start: iter(called[start])}
        while path:
            key = next(reversed(path))
            inner = next((name for name in path[key] if name not in done), None)
            if inner is None:
                del path[key]
                done[key] = None
                continue
            if inner in path:
                names = [_name(name) for name in path]
                way = " -> ".join([*names[list(path).index(inner) :], _name(inner)])
                raise FileFormatError(f"{where}: a function calls itself ({way}), which has no end; export it again")
            if len(path) == _DEPTH:
                raise FileFormatError(
                    f"{where}: functions call functions more than {_DEPTH} deep, from {_name(start)} on; export the "
                    "model again without them"
                )
            path[inner] = iter(called[inner])
    return list(done)


def _name(key: Key) -> str:
    return "::".join(part for part in key[:2] if part)


def _shown(count: int) -> str:
    return f"{count:,}" if count < _SHOWN else f"more than {_SHOWN:,}"
