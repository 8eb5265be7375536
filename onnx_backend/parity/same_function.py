"""Decide from nodes and stored numbers, without running them, if two models compute the same function.

Two tensors are the same if the same op computes them, with the same attributes, from the same tensors. Nodes that only
repeat a tensor (Identity, a Sum of one operand) and the way a zero point of 0 is written make no difference. This is
value numbering, as compilers use it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import says_zero
from onnx_backend.proto.lazy_tensors import LargeTensor, LoweredModel, is_stub
from onnx_backend.proto.nodes import attributes, is_constant, metadata, node_label
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import bodies
from onnx_backend.qdq.read import LITERAL_KEY
from onnx_backend.readers import COPY_KEY

Array = npt.NDArray[Any]
Key = tuple[Any, ...]
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_STANDARD = ("", "ai.onnx")


@dataclass(frozen=True)
class NodeDifference:
    """A node that does not compute what the node of the same output does in the other model.

    Attributes:
        node: its name, else its first output's.
        site: of the Q/DQ node that it is or that reads it; "" where there is none.
        problem: how the two nodes differ.
        altered: True if the node itself is another one; else several nodes were written in another way.
    """

    node: str
    site: str
    problem: str
    altered: bool


@dataclass
class _ValueNumbers:
    """The value numbers of one model: tensors that are equal functions of the inputs have equal numbers."""

    model: ModelProto
    large: Mapping[str, LargeTensor]
    numbers: dict[str, int] = field(default_factory=dict)
    makers: dict[str, NodeProto] = field(default_factory=dict)
    stored: dict[str, TensorProto] = field(default_factory=dict)
    depth: int = 0

    def __post_init__(self) -> None:
        self.stored = {tensor.name: tensor for tensor in self.model.graph.initializer}
        self.makers = {name: node for node in self.model.graph.node for name in node.output if name}
        self.opset = {entry.domain: opset_of(self.model, entry.domain) for entry in self.model.opset_import}


class _NumberTable:
    """The table of value numbers, one for each different function of the inputs."""

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}

    def of(self, key: Key) -> int:
        """Return the number of a value; a key that is new gets the next one."""
        return self.known.setdefault(key, len(self.known))


def differences(model: ModelProto, wanted: LoweredModel, same: Mapping[str, str]) -> list[NodeDifference]:
    """Return the nodes of a file that compute something else than the same nodes of the wanted model.

    The numbers of the stored tensors in `same` (by name, with their counterparts) are compared elsewhere.
    """
    numbers = _NumberTable()
    ours = _ValueNumbers(wanted.model, wanted.large)
    _number_inputs(ours, numbers)
    for node in ours.model.graph.node:
        _number(node, ours, numbers)
    theirs = _ValueNumbers(model, {})
    _number_inputs(theirs, numbers)
    theirs.numbers.update({name: ours.numbers[other] for name, other in same.items() if other in ours.numbers})
    found = []
    sites = _sites_of_readers(model)
    for node in model.graph.node:
        _number(node, theirs, numbers)
        known = [name for name in node.output if name in ours.numbers]
        if any(theirs.numbers[name] != ours.numbers[name] for name in known):
            found.append(_describe_difference(node, known[0], theirs, ours, sites))
            theirs.numbers.update(
                {name: ours.numbers[name] for name in known}
            )  # so that the nodes behind it are compared on their own
    return found + list(_output_differences(theirs, ours))


def _output_differences(theirs: _ValueNumbers, ours: _ValueNumbers) -> Iterator[NodeDifference]:
    names = [[value.name for value in facts.model.graph.output] for facts in (theirs, ours)]
    if len(names[0]) != len(names[1]):
        yield NodeDifference("", "", f"it has {len(names[0])} outputs, the simulation {len(names[1])}", altered=True)
        return
    for name, other in zip(*names, strict=True):
        if theirs.numbers.get(name) != ours.numbers.get(other):
            altered = name in ours.numbers
            yield NodeDifference(name, "", "this output is not computed as the simulation's", altered)


def _number_inputs(facts: _ValueNumbers, numbers: _NumberTable) -> None:
    graph = facts.model.graph
    for value in graph.input:
        facts.numbers[value.name] = numbers.of(("input", value.name))
    at_sites = stored_at_sites(facts.model)
    for name, tensor in facts.stored.items():
        key = ("site", at_sites[name]) if name in at_sites else _content(tensor, facts.large)
        facts.numbers[name] = numbers.of(key)


def stored_at_sites(model: ModelProto) -> dict[str, str]:
    """Return stored tensor -> the site whose DequantizeLinear reads it; its codes are compared elsewhere."""
    stored = {tensor.name for tensor in model.graph.initializer}
    found: dict[str, str] = {}
    for node in model.graph.node:
        facts = metadata(node)
        kept = COPY_KEY in facts or LITERAL_KEY in facts
        if node.op_type == "DequantizeLinear" and not kept and node.input[0] in stored and "qsdk.site" in facts:
            found.setdefault(node.input[0], facts["qsdk.site"])
    return found


def _sites_of_readers(model: ModelProto) -> dict[str, str]:
    """Return tensor -> the site that quantizes it."""
    found: dict[str, str] = {}
    by_codes = {node.input[0]: metadata(node).get("qsdk.site", "") for node in model.graph.node if node.input}
    for node in model.graph.node:
        if node.op_type in _PAIR or "qsdk.site" in metadata(node):
            site = metadata(node).get("qsdk.site") or by_codes.get(node.output[0], "")
            for name in (node.input[0], *node.output):
                found.setdefault(name, site)
    return found


def _content(tensor: TensorProto, large: Mapping[str, LargeTensor]) -> Key:
    dims = tuple(tensor.dims)
    if is_stub(tensor) and tensor.name not in large:
        return ("stub", tensor.name)
    if tensor.data_type == TensorProto.STRING:
        return ("strings", dims, tuple(tensor.string_data))
    value = large[tensor.name].value() if is_stub(tensor) else array(tensor)
    return ("stored", *content_of(value))


def content_of(value: Array) -> Key:
    """Return a key that differs for different arrays: dtype, shape and bytes."""
    return value.dtype.name, value.shape, hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()


def _number(node: NodeProto, facts: _ValueNumbers, numbers: _NumberTable) -> None:
    """Assign a value number to every output of a node."""
    if _repeats(node):
        facts.numbers[node.output[0]] = facts.numbers.get(node.input[0], numbers.of(("unknown", node.input[0])))
        return
    if is_constant(node):
        kind = attributes(node)
        value = np.asarray(next(iter(kind.values())))
        facts.numbers[node.output[0]] = numbers.of(("stored", *content_of(_typed(value, next(iter(kind))))))
        return
    key = _key(node, facts.numbers, facts, numbers)
    for place, name in enumerate(node.output):
        if name:
            facts.numbers[name] = numbers.of((*key, place))


def _repeats(node: NodeProto) -> bool:
    standard = node.domain in _STANDARD
    return standard and (node.op_type == "Identity" or (node.op_type == "Sum" and len(node.input) == 1))


def _typed(value: Array, attribute: str) -> Array:
    """Return the value of a Constant in the dtype that its attribute implies."""
    if attribute in ("value_float", "value_floats"):
        return value.astype(np.float32)
    return value.astype(np.int64) if attribute in ("value_int", "value_ints") else value


def _key(node: NodeProto, seen: Mapping[str, int], facts: _ValueNumbers, numbers: _NumberTable) -> Key:
    domain = "" if node.domain in _STANDARD else node.domain
    names = list(node.input)
    while names and not names[-1]:
        names.pop()
    if node.op_type in _PAIR and domain == "":
        return (node.op_type, *_pair_key(node, seen, facts))
    read = tuple(seen.get(name, ("unknown", name)) if name else None for name in names)
    inner = tuple((name, _body_key(body, seen, facts, numbers)) for name, body in bodies(node))
    return (domain, node.op_type, read, _attributes(node, facts), inner, len(node.output))


def _pair_key(node: NodeProto, seen: Mapping[str, int], facts: _ValueNumbers) -> Key:
    """Return a key of a QuantizeLinear or DequantizeLinear, independent of how its zero point is written."""
    options = dict(attributes(node))
    scale = facts.stored.get(node.input[1])
    per_tensor = scale is not None and not any(n != 1 for n in scale.dims)
    name = node.input[2] if len(node.input) > 2 else ""
    zero = facts.stored.get(name)
    code = int(options.pop("output_dtype", 0))
    if zero is not None and node.op_type == "QuantizeLinear":
        code = zero.data_type
    if node.op_type == "QuantizeLinear":
        code = code or TensorProto.UINT8
    none = not name or (zero is not None and not is_stub(zero) and not np.any(array(zero).astype(np.float32)))
    axis = None if per_tensor else int(options.pop("axis", 1))
    options.pop("axis", None)
    rest = tuple(sorted((key, repr(value)) for key, value in options.items() if value or key == "saturate"))
    read = tuple(seen.get(name, ("unknown", name)) for name in node.input[:2])
    return (*read, code, 0 if none else seen.get(name, ("unknown", name)), axis, rest)


def _attributes(node: NodeProto, facts: _ValueNumbers) -> Key:
    """Return the attributes of a node, defaults filled in, bodies and those without any effect left out."""
    found, opsets = {}, facts.opset
    domain = "" if node.domain in _STANDARD else node.domain
    try:
        version = max((n for name, n in opsets.items() if (name or "") in (node.domain, domain)), default=1)
        schema = onnx.defs.get_schema(node.op_type, version, domain)
        found = {
            name: _plain(attribute.default_value)
            for name, attribute in schema.attributes.items()
            if attribute.default_value.type != AttributeProto.UNDEFINED
        }
    except onnx.defs.SchemaError:
        found = {}  # an op of another domain: its attributes as they stand
    graphs = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    found.update({entry.name: _plain(entry) for entry in node.attribute if entry.type not in graphs})
    if node.op_type == "Reshape" and len(node.input) > 1 and not says_zero(node.input[1], facts.stored, facts.makers):
        found.pop("allowzero", None)  # it says what a 0 in the shape means, and there is none
    return tuple(sorted(found.items(), key=lambda item: item[0]))


def _plain(attribute: AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return content_of(array(value))
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else repr(value)


def _body_key(graph: GraphProto, outer: Mapping[str, int], facts: _ValueNumbers, numbers: _NumberTable) -> Key:
    """Return a key of what a body computes from its own inputs and from outside."""
    seen = dict(outer)
    seen.update({value.name: numbers.of(("argument", facts.depth, place)) for place, value in enumerate(graph.input)})
    seen.update({tensor.name: numbers.of(_content(tensor, facts.large)) for tensor in graph.initializer})
    stored = {**facts.stored, **{tensor.name: tensor for tensor in graph.initializer}}
    inside = _ValueNumbers(facts.model, facts.large, depth=facts.depth + 1)
    inside.stored, inside.numbers = stored, seen
    for node in graph.node:
        _number(node, inside, numbers)
    return tuple(inside.numbers.get(value.name, -1) for value in graph.output)


# --- description of a difference ------------------------------------------------------------------------------------


def _describe_difference(
    node: NodeProto, output: str, theirs: _ValueNumbers, ours: _ValueNumbers, sites: Mapping[str, str]
) -> NodeDifference:
    site = metadata(node).get("qsdk.site") or next((sites[name] for name in node.output if name in sites), "")
    other = ours.makers.get(output)
    if other is None:
        problem, altered = "the simulation stores this tensor", False
    elif node.op_type != other.op_type:
        read = [[facts.numbers.get(n) for n in maker.input] for facts, maker in ((theirs, node), (ours, other))]
        problem = f"it is {node.op_type} where the simulation has {other.op_type}"
        altered = _repeats(node) or read[0] == read[1] or set(read[0]) == set(read[1])
    elif changed := _changed_attributes(node, other, theirs, ours):
        problem, altered = changed, True
    else:
        problem, altered = _changed_inputs(node, other, theirs, ours)
    return NodeDifference(node_label(node), site, problem, altered)


def _changed_attributes(node: NodeProto, other: NodeProto, theirs: _ValueNumbers, ours: _ValueNumbers) -> str:
    mine, wanted = dict(_attributes(node, theirs)), dict(_attributes(other, ours))
    if node.op_type in _PAIR:
        mine.pop("output_dtype", None), wanted.pop("output_dtype", None)
    if "allowzero" not in mine or "allowzero" not in wanted:  # without effect in one of them
        mine.pop("allowzero", None), wanted.pop("allowzero", None)
    for name in sorted({*mine, *wanted}):
        if mine.get(name) != wanted.get(name):
            return f"its {name} is {mine.get(name)}, the simulation's {wanted.get(name)}"
    return ""


def _changed_inputs(node: NodeProto, other: NodeProto, theirs: _ValueNumbers, ours: _ValueNumbers) -> tuple[str, bool]:
    """Return what a node reads otherwise than the other one, and whether it is another node for that."""
    if len(node.input) != len(other.input):
        return f"it has {len(node.input)} inputs, the simulation's {len(other.input)}", True
    for mine, wanted in zip(node.input, other.input, strict=True):
        if theirs.numbers.get(mine) != ours.numbers.get(wanted):
            are_stored = mine in theirs.stored, wanted in ours.stored
            if are_stored == (True, True):
                return f"its stored {mine!r} holds other numbers than the simulation's", True
            return f"it reads {mine!r} where the simulation reads {wanted!r}", are_stored[0] == are_stored[1]
    return "its body computes something else than the simulation's", True
