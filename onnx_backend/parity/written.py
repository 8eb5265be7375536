"""Compare a file with what its sim would write now: nodes, wiring, attributes and every stored number.

Running the sites shows where a file computes other codes than its simulation on the given data. Comparing the nodes
also finds what the data does not reach or what changes no code (a float bias, an epsilon, a bound that is never met).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backend.calibration.stored_tensors import stored_names
from onnx_backend.lower import lower
from onnx_backend.opening.from_trace import TracedModel
from onnx_backend.passes.static_sizes import leave_out
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import input_names, says_zero
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.lazy_tensors import LargeTensor, LoweredModel, is_stub, rows_of
from onnx_backend.proto.nodes import attributes, is_constant, metadata, node_label
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.proto.subgraphs import bodies
from onnx_backend.qdq.older_opsets import LOWEST
from onnx_backend.qdq.read import LITERAL_KEY, QdqPair, stored_tensors
from onnx_backend.readers import COPY_KEY
from onnx_backend.runtimes.registry import RUNTIMES, noted_form
from onnx_backend.runtimes.runtime import Prefer, Runtime
from onnx_backend.single_ops.write import write_single_ops
from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import Tally, lsb
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan

_OPSETS = range(LOWEST, 26)  # those that `lower` writes
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_NAMED = 3  # nodes that a note names


@dataclass(frozen=True)
class ExpectedModel:
    """What a sim would write now; `opened` is the Q/DQ model that an adopted sim runs as it stands."""

    traced: TracedModel
    plan: Plan
    encodings: Mapping[str, Encoding]
    opened: ModelProto | None = None

    def forms_of(self, model: ModelProto) -> Iterator[LoweredModel]:
        """Yield the sim's Q/DQ model in each form that a file may have, at its opset: that which it notes, else all."""
        if self.opened is not None:
            yield LoweredModel(self.opened, {}, [])
        version = opset_of(model)
        opset = version if version in _OPSETS else OPSET
        noted = noted_form(model)
        # files of older versions note nothing; of the form that is nearest, the differences are the file's own
        every: list[tuple[Runtime, Prefer]] = [(runtime, "size") for runtime in RUNTIMES.values()]
        every.insert(0, (RUNTIMES["onnxruntime"], "speed"))
        for runtime, prefer in every if noted is None else [noted]:
            options: dict[str, Any] = {"opset": opset, "dialect": runtime, "prefer": prefer}
            form = lower(self.traced.model, self.plan, self.encodings, weights=self.traced.weights, **options)
            if open_inputs(model):
                runtime.with_sizes(form.model)
            if runtime.single_ops:
                write_single_ops(form.model)
            yield form

    def sites(self) -> dict[str, tuple[str, str]]:
        """Return name of a stored tensor of the float model -> its site and kind."""
        names = stored_names(self.traced.model, self.plan)
        return {name: (site, str(self.plan.decisions[site].kind)) for site, name in names.items()}


def _without_inputs_that_lack(model: ModelProto, wanted: LoweredModel) -> LoweredModel:
    """Return an expected model without the caches that a file has left out because its past is empty."""
    gone = set(input_names(wanted.model.graph)).difference(input_names(model.graph))
    if not gone:
        return wanted
    shorter = ModelProto()
    shorter.CopyFrom(wanted.model)
    try:
        leave_out(shorter, gone, asked=SHAPE_OPS)
    except ConfigError:
        return wanted  # the file lacks something else, and the differences show it
    return replace(wanted, model=shorter)


def compare_written(model: ModelProto, expected: ExpectedModel, tallies: dict[str, Tally]) -> int:
    """Fill the tallies with what a file stores or computes otherwise than its sim.

    Return the number of nodes that are written in another way, as by a tool that simplifies or fuses; only the sites
    and outputs can show if they compute the same.
    """
    found: list[NodeDifference] | None = None
    kept: dict[str, Tally] = {}
    sites = expected.sites()
    for form in expected.forms_of(model):
        wanted = _without_inputs_that_lack(model, form)
        tallies_of_floats, same = _kept_floats(model, wanted, sites)
        differing = differences(model, wanted, same)
        if found is None or len(differing) < len(found):
            found, kept = differing, tallies_of_floats
        if not found:
            break
    found = found or []
    for site, tally in kept.items():
        tallies.setdefault(site, tally)
    for difference in found:
        if difference.altered:
            site = difference.site or difference.node
            note = f"node {difference.node!r}: {difference.problem}" if difference.node else difference.problem
            tallies.setdefault(site or "the model", Tally("node")).fail(note)
    rewritten = [difference.node for difference in found if not difference.altered]
    if rewritten:
        _name_rewritten(rewritten, tallies)
    return len(rewritten)


def _name_rewritten(nodes: Sequence[str], tallies: Mapping[str, Tally]) -> None:
    """Name the nodes that are written in another way wherever values differ: one of them may be the cause."""
    named = ", ".join(repr(node) for node in nodes[:_NAMED]) + (" and others" if len(nodes) > _NAMED else "")
    for tally in tallies.values():
        if tally.largest > 1:
            tally.note = tally.note or f"the file writes {named} in another way than the simulation"


def _kept_floats(
    model: ModelProto, wanted: LoweredModel, sites: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, Tally], dict[str, str]]:
    """Compare the float tensors of the same name in both; return tallies by site, and the names that differ."""
    ours = {tensor.name: tensor for tensor in wanted.model.graph.initializer}
    of_pairs = set(_parameters(model)) | set(stored_at_sites(model))
    tallies: dict[str, Tally] = {}
    same: dict[str, str] = {}
    for tensor in model.graph.initializer:
        other = ours.get(tensor.name)
        if other is None or tensor.name in of_pairs or tensor.data_type not in _FLOATS:
            continue
        if other.data_type != tensor.data_type or list(other.dims) != list(tensor.dims):
            continue
        value = array(tensor)
        right = wanted.large[tensor.name].value() if is_stub(other) else array(other)
        steps = lsb(value, right.astype(value.dtype, copy=False))
        site, kind = sites.get(tensor.name, (tensor.name, "constant"))
        if steps.any():
            same[tensor.name] = tensor.name
        if steps.any() or tensor.name in sites:
            tally = tallies[site] = Tally(kind)
            tally.add(steps)
            if not np.isfinite(value).all() and np.isfinite(right).all():
                tally.fail(f"the model stores NaN or infinity in {tensor.name!r}, the simulation finite numbers")
            elif steps.any():
                tally.note = f"the model stores other numbers in {tensor.name!r} than the simulation"
    return tallies, same


def _parameters(model: ModelProto) -> Iterator[str]:
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield from node.input[1:]


def compare_encodings(found: Iterable[QdqPair], encodings: Mapping[str, Encoding], tallies: dict[str, Tally]) -> None:
    """Fail every site whose scale, zero point or dtype differs from the simulation's, or that one side lacks."""
    seen = set()
    for place in found:
        seen.add(place.site)
        wanted = encodings.get(place.site)
        if wanted is None:
            tallies[place.site].fail("the simulation has no encoding here")
        elif wanted != place.encoding:
            tallies[place.site].fail("the model has another scale, zero point or dtype than the simulation")
    for site, encoding in encodings.items():
        if encoding.dtype.is_quantized and site not in seen:
            tallies.setdefault(site, Tally("activation")).fail("the model does not quantize this site")


def compare_stored(
    model: ModelProto, found: Iterable[QdqPair], stored: Mapping[str, Array], tallies: dict[str, Tally]
) -> None:
    """Count the steps between the stored codes of a model and those of the simulation's values."""
    tensors, places = stored_tensors(model), list(found)
    for place in places:
        if place.stored is None:
            continue
        tally = tallies[place.site]
        # a slice of all of a tensor is a site of its own, whose values are stored elsewhere
        site = next((p.site for p in (place, *places) if p.site in stored and _same_codes(p, place)), None)
        if site is None:
            tally.fail("the simulation stores no tensor here")
            continue
        codes = array(tensors[place.stored])
        if place.permutation is not None:
            codes = codes.transpose(np.argsort(place.permutation))
        wanted = np.asarray(stored[site], np.float32)
        if wanted.shape != codes.shape:
            tally.fail(f"the model stores the shape {codes.shape}, the simulation {wanted.shape}")
            continue
        for rows, encoding in rows_of(place.encoding, codes.shape):
            tally.add(lsb(codes[rows], encoding.quantize(wanted[rows])))
    for site, (kind, values) in _stored_casts(model, tensors).items():
        tallies[site] = tally = Tally(kind)
        if site not in stored or stored[site].shape != values.shape:
            tally.fail("the simulation stores no tensor of this shape here")
        else:
            with np.errstate(over="ignore"):
                tally.add(lsb(values, stored[site].astype(values.dtype)))
    for site in stored:
        if site not in tallies:
            tallies[site] = Tally("weight")
            tallies[site].fail("the model stores no tensor here")


def _same_codes(place: QdqPair, other: QdqPair) -> bool:
    """Return True if two sites read one stored tensor in one way."""
    facts = (place.stored, place.permutation, place.encoding)
    return facts == (other.stored, other.permutation, other.encoding)


def _stored_casts(model: ModelProto, tensors: Mapping[str, TensorProto]) -> dict[str, tuple[str, Array]]:
    """Return site -> kind and value of every tensor stored as float16 or bfloat16."""
    found = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type == "Cast" and "qsdk.site" in facts and node.input[0] in tensors:
            found[facts["qsdk.site"]] = (facts["qsdk.kind"], array(tensors[node.input[0]]))
    return found


# --- Decide from nodes and stored numbers, without running them, if two models compute the same function --------------

# Two tensors are the same if the same op computes them, with the same attributes, from the same tensors. Nodes that
# only repeat a tensor (Identity, a Sum of one operand) and the way a zero point of 0 is written make no difference.
# This is value numbering, as compilers use it.

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
