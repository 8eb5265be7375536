"""Narrow regions: ops that compute in float16 or bfloat16, how they are noted, written and read back.

In the model that is lowered and simulated, the nodes of a region compute in float32, between casts to the narrow type
and back: so ONNX Runtime rounds wherever the casts say. Of ops that are in float16 themselves it runs most in float32,
and drops the roundings in front of them. `narrow_regions` writes them in their type, without the casts between nodes,
and `as_simulated` puts the casts back.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping

from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, initializers, names_in, producers, unique
from onnx_backend.proto.lazy_tensors import narrow
from onnx_backend.proto.nodes import (
    copied,
    drop_unused_initializers,
    is_mark,
    metadata,
    rename_inputs,
    replace_nodes,
    retain,
    set_metadata,
)
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import all_nodes, bodies
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.qdq.graph_editor import GraphEditor, type_of_mark
from onnx_backend.qdq.layer_inputs import with_quantized_inputs
from onnx_backend.qdq.read import FLOAT32, FLOAT_CODES, type_of_cast
from onnx_backend.workarounds.kernel_casts import takes_dtype
from qsdk.core.planning.plan import Plan

#: metadata of a node of a region: its narrow float type
TYPE_KEY = "qsdk.computes_in"
#: metadata of a cast that rounds what a region reads from outside
ENTRY_KEY = "qsdk.enters"
#: metadata of a node that is in its region's type: by position, the sites and kinds of what it reads and makes; of the
#: latter also the name of the float tensor
_SITES = "island"
_Sites = Mapping[str, Mapping[str, tuple[str, ...]]]
_STARTS = (
    "QLinear",
    "QGemm",
    "QAttention",
    "QOrdered",
    "QEmbed",
    "QMoE",
    "MatMulNBits",
    "MatMulInteger",
    "ConvInteger",
)
_PAIRS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "DynamicQuantize", "GatherBlockQuantized")
_CODES = frozenset(
    {TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT8E4M3FN}
    | {TensorProto.FLOAT8E5M2, TensorProto.FLOAT4E2M1}
)
NOTHING_QUANTIZED = "nothing in the file is quantized; give the file that qsdk.export or `qsdk quantize` wrote"


def region_type(node: NodeProto) -> str:
    """Return the narrow float type that a node computes in, or ""."""
    return metadata(node).get(TYPE_KEY, "")


def note_regions(model: ModelProto, plan: Plan) -> None:
    """Note on each node of a marked model, in place, the narrow type in which the plan has it compute.

    What an opened file notes on its nodes stays.
    """
    wanted = {site: decision.computes_in for site, decision in plan.decisions.items() if decision.computes_in}
    if not wanted:
        return
    made_by = producers(model.graph.node)
    for node in model.graph.node:
        if not is_mark(node) or type_of_mark(node) != FLOAT32:
            continue
        dtype = wanted.get(next(a.s.decode() for a in node.attribute if a.name == "key"), "")
        waiting = [node.input[0]] if dtype else []
        while waiting:
            maker = made_by.get(waiting.pop())
            if maker is not None and not is_mark(maker) and not region_type(maker):
                set_metadata(maker, **{TYPE_KEY.removeprefix("qsdk."): dtype})
                waiting += [name for _, name in float_inputs(maker, opset_of(model))]


def float_inputs(node: NodeProto, opset: int) -> Iterator[tuple[int, str]]:
    """Yield position and tensor of the inputs of a region's node that are of its type."""
    for at, name in enumerate(node.input):
        if name and takes_dtype(node.op_type, at, "float16", opset):
            yield at, name


def cast_site(node: NodeProto | None, dtype: str) -> str:
    """Return the site of a cast that is the first or second of a site kept in a narrow type; "" for any other node."""
    facts = {} if node is None or node.op_type != "Cast" else metadata(node)
    return facts.get("qsdk.site", "") if facts.get("qsdk.dtype") == dtype else ""


def round_entries(at: GraphEditor) -> None:
    """Round what regions read to their type: a pair of casts per tensor, or a stored tensor of their type and a cast.

    Nodes whose results do not all go to sites of their type, or to other nodes of the region, are none after all.
    """
    graph, opset = at.graph, opset_of(at.model)
    region = _with_closed_ends(graph.node, {value.name for value in graph.output})
    at.stored = initializers(graph)
    made_by = producers(graph.node)
    nodes: list[NodeProto] = []
    rounded: dict[tuple[str, str], str] = {}
    for node in graph.node:
        dtype = region_type(node)
        if dtype and node.output[0] not in region:
            retain(node.metadata_props, lambda entry: entry.key != TYPE_KEY)
        elif dtype:
            for place, name in float_inputs(node, opset):
                maker = made_by.get(name)
                inside = maker is not None and region_type(maker) == dtype
                if inside or cast_site(maker, dtype) or (maker is not None and ENTRY_KEY in metadata(maker)):
                    continue
                if (name, dtype) not in rounded:
                    casts = _rounding(at, name, dtype)
                    nodes += casts
                    rounded[name, dtype] = casts[-1].output[0]
                node.input[place] = rounded[name, dtype]
        nodes.append(node)
    if rounded:
        replace_nodes(graph, nodes)
        drop_unused_initializers(graph)


def _with_closed_ends(nodes: Iterable[NodeProto], outputs: set[str]) -> set[str]:
    """Return the first outputs of the noted nodes whose every reader is in the region or rounds to its type."""
    kept = {node.output[0]: node for node in nodes if region_type(node)}
    readers = consumers(nodes) if kept else {}

    def is_closed(node: NodeProto) -> bool:
        dtype = region_type(node)
        return not outputs.intersection(node.output) and all(
            (reader.output[0] in kept and region_type(reader) == dtype) or narrows(reader, dtype)
            for name in node.output
            for reader in readers.get(name, ())
        )

    while open_ended := [name for name, node in kept.items() if not is_closed(node)]:
        for name in open_ended:
            del kept[name]
    return set(kept)


def narrows(node: NodeProto, dtype: str) -> bool:
    """Return True if a node is the first cast of a site kept in a narrow type."""
    return bool(cast_site(node, dtype)) and type_of_cast(node) == dtype


def _rounding(at: GraphEditor, name: str, dtype: str) -> list[NodeProto]:
    code, result = FLOAT_CODES[dtype], []
    if name in at.stored:
        narrowed = at.once(name, dtype.encode(), narrow(at.values(name), code), f"_{dtype}")
    else:
        narrowed = at.fresh(f"{name}/{dtype}")
        result.append(helper.make_node("Cast", [name], [narrowed], f"{name}/enter", to=code))
    wide = at.fresh(f"{narrowed}/wide")
    result.append(helper.make_node("Cast", [narrowed], [wide], f"{narrowed}/enter_back", to=FLOAT_CODES[FLOAT32]))
    for cast in result:
        set_metadata(cast, **{ENTRY_KEY.removeprefix("qsdk."): dtype})
    return result


def remove_entries(model: ModelProto) -> None:
    """Take the casts of `round_entries` out again, in place; stored tensors are float32, of the rounded values."""
    stored, made_by = initializers(model.graph), producers(model.graph.node)
    taken = {*stored, *made_by, *(value.name for value in model.graph.input)}
    read_instead: dict[str, str] = {}
    widened: dict[str, str] = {}
    kept = []
    for node in model.graph.node:
        dtype = metadata(node).get(ENTRY_KEY) if node.op_type == "Cast" else None
        source = node.input[0] if node.input else ""
        if dtype is None:
            kept.append(node)
        elif source in stored:
            if source not in widened:
                # the name from before the export, so that exporting again gives the same file
                widened[source] = unique(source.removesuffix(f"_{dtype}"), taken)
                values = array(stored[source]).astype("float32")
                model.graph.initializer.append(numpy_helper.from_array(values, widened[source]))
            read_instead[node.output[0]] = widened[source]
        else:
            read_instead[node.output[0]] = read_instead.get(source, source)
    if read_instead:
        rename_inputs(kept, read_instead)
        replace_nodes(model.graph, kept)
        drop_unused_initializers(model.graph)


def narrow_regions(model: ModelProto, dtypes: Collection[str]) -> None:
    """Write the regions of a lowered model in their own types, in place, of those types that the runtime can run so.

    A node takes the narrow tensors themselves, and makes one. ONNX Runtime has hardly any kernel in bfloat16, so for it
    the casts stay there.
    """
    if not any(region_type(node) in dtypes for node in model.graph.node):
        return
    made_by, readers = producers(model.graph.node), consumers(model.graph.node)
    outputs = {value.name for value in model.graph.output}
    region = _narrowed(model, dtypes, made_by, readers, outputs)
    stored, opset = initializers(model.graph), opset_of(model)
    dropped: set[str] = set()
    made_instead: dict[str, str] = {}
    for node in region.values():
        dtype = region_type(node)
        sites: dict[str, dict[str, list[str]]] = {"inputs": {}, "outputs": {}}
        for at, name in float_inputs(node, opset):
            cast = made_by.get(name)
            if cast is not None and cast.op_type == "Cast":
                node.input[at] = cast.input[0]
                if cast.input[0] in stored and cast_site(cast, dtype):
                    sites["inputs"][str(at)] = _site_and_kind(cast)
        for at, name in enumerate(node.output):
            casts = [reader for reader in readers.get(name, ()) if narrows(reader, dtype)]
            if casts:
                sites["outputs"][str(at)] = [*_site_and_kind(casts[0]), name]
                made_instead[name] = casts[0].output[0]
                dropped.add(casts[0].output[0])
        set_metadata(node, **{_SITES: json.dumps(sites, separators=(",", ":"))})
    nodes = [node for node in model.graph.node if not (node.op_type == "Cast" and node.output[0] in dropped)]
    changed = {*made_instead, *made_instead.values(), *(name for node in region.values() for name in node.output)}
    for node in region.values():
        node.output[:] = [made_instead.get(name, name) for name in node.output]
    _replace(model, _without_dead_casts(nodes, outputs), changed)
    _move_to_end(model, [name for node in region.values() for name in node.input if name in stored])


def _site_and_kind(cast: NodeProto) -> list[str]:
    facts = metadata(cast)
    return [facts["qsdk.site"], facts["qsdk.kind"]]


def _narrowed(
    model: ModelProto,
    dtypes: Collection[str],
    made_by: Mapping[str, NodeProto],
    readers: Mapping[str, list[NodeProto]],
    outputs: set[str],
) -> dict[str, NodeProto]:
    """Return, by first output, the nodes of regions that can be written in their type."""
    kept = {node.output[0]: node for node in model.graph.node if region_type(node) in dtypes}
    opset = opset_of(model)

    def is_inside(node: NodeProto | None, dtype: str) -> bool:
        return node is not None and node.output[0] in kept and region_type(node) == dtype

    def fits(node: NodeProto) -> bool:
        """Return whether all that a node reads and all that reads it is, or ends, in the same type."""
        dtype = region_type(node)
        for _, name in float_inputs(node, opset):
            maker = made_by.get(name)
            facts = {} if maker is None else metadata(maker)
            if not (is_inside(maker, dtype) or facts.get(ENTRY_KEY) == dtype or cast_site(maker, dtype)):
                return False
        for name in node.output:
            known = readers.get(name, [])
            ends = [reader for reader in known if narrows(reader, dtype)]
            if name in outputs or (ends and len(known) > 1) or not all(is_inside(r, dtype) for r in known if not ends):
                return False
        return True

    while unfit := [name for name, node in kept.items() if not fits(node)]:
        for name in unfit:
            del kept[name]
    return kept


def _without_dead_casts(nodes: list[NodeProto], outputs: set[str]) -> list[NodeProto]:
    """Drop the casts of sites and entries that nothing reads any more."""
    while True:
        read = {*consumers(nodes), *outputs}
        kept = [
            node
            for node in nodes
            if node.op_type != "Cast"
            or node.output[0] in read
            or not {"qsdk.site", ENTRY_KEY}.intersection(metadata(node))
        ]
        if len(kept) == len(nodes):
            return kept
        nodes = kept


def _move_to_end(model: ModelProto, names: Iterable[str]) -> None:
    """Move stored tensors behind all others, in this order: an opened file, exported again, has them in the same."""
    stored = initializers(model.graph)
    last = list(dict.fromkeys(names))
    fresh = [tensor for name, tensor in stored.items() if name not in last] + [stored[name] for name in last]
    del model.graph.initializer[:]
    model.graph.initializer.extend(fresh)


def _replace(model: ModelProto, nodes: list[NodeProto], changed: set[str]) -> None:
    replace_nodes(model.graph, nodes)
    drop_unused_initializers(model.graph)
    retain(model.graph.value_info, lambda value: value.name not in changed)


def as_simulated(model: ModelProto) -> ModelProto:
    """Return a model, or a changed copy, in the form that has each site at a tensor of its own, as the sim has it.

    Nodes of `narrow_regions` become float32 ones between casts; layers that round their input to int8 have nodes for
    that. What `fast_forms` has written otherwise is pairs again.
    """
    model = with_quantized_inputs(with_pairs(model))
    if all(_sites_of(node) is None for node in model.graph.node):
        return model
    result = copied(model)
    _Widening(result).run()
    return result


class _Widening:
    """The nodes of a model so far, and the float32 tensors that stand for narrow ones."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.opset = model, opset_of(model)
        self.taken = names_in(model.graph)
        self.nodes: list[NodeProto] = []
        self.sites = {node.output[0]: found for node in model.graph.node if (found := _sites_of(node)) is not None}
        #: narrow tensor -> its site and kind, if it has one
        self.site_at: dict[str, tuple[str, str]] = {}
        self.inner: set[str] = set()  # the results of regions that are no sites
        #: narrow tensor and its site -> the tensor that it is cast back to
        self.wide: dict[tuple[str, str], str] = {}
        for node in model.graph.node:
            facts = metadata(node)
            if node.op_type == "Cast" and (facts.get("qsdk.site") or ENTRY_KEY in facts):
                site = facts.get("qsdk.site", "")
                if type_of_cast(node) == FLOAT32:
                    self.wide[node.input[0], site] = node.output[0]
                elif site:
                    self.site_at[node.output[0]] = site, facts["qsdk.kind"]
            elif node.output and node.output[0] in self.sites:
                made = self.sites[node.output[0]]["outputs"]
                self.site_at |= {node.output[int(at)]: (site, kind) for at, (site, kind, _) in made.items()}
                self.inner.update(name for at, name in enumerate(node.output) if str(at) not in made)

    def run(self) -> None:
        """Widen every node of a region."""
        changed = set(self.inner)
        for node in self.model.graph.node:
            sites = self.sites.get(node.output[0]) if node.output else None
            if sites is None:
                self.nodes.append(node)
                site, kind = self.site_at.get(node.output[0], ("", "")) if node.output else ("", "")
                if site and (node.output[0], site) not in self.wide:  # its readers were all narrow
                    self._cast_back(node.output[0], metadata(node)["qsdk.dtype"], site, kind)
            else:
                changed |= self._widen(node, sites)
        _replace(self.model, self.nodes, changed)

    def _widen(self, node: NodeProto, sites: _Sites) -> set[str]:
        dtype = region_type(node)
        for at, name in float_inputs(node, self.opset):
            if name not in self.inner:
                site, kind = sites["inputs"].get(str(at)) or self.site_at.get(name, ("", ""))
                if (name, site) not in self.wide:
                    self._cast_back(name, dtype, site, kind)
                node.input[at] = self.wide[name, site]
        retain(node.metadata_props, lambda entry: entry.key != f"qsdk.{_SITES}")
        self.nodes.append(node)
        ends = {int(at): node.output[int(at)] for at in sites["outputs"]}
        for at, name in ends.items():
            site, kind, exact = sites["outputs"][str(at)]
            node.output[at] = unique(exact, self.taken)
            self._cast(node.output[at], name, f"{site}/cast", dtype, {"site": site, "dtype": dtype, "kind": kind})
            if (name, site) not in self.wide:
                self._cast_back(name, dtype, site, kind)
        return set(ends.values())

    def _cast_back(self, name: str, dtype: str, site: str, kind: str) -> None:
        """Cast a narrow tensor back, by its site or, if it has none, by where it enters the region."""
        wide = unique(f"{site}/{FLOAT32}" if site else f"{name}/wide", self.taken)
        facts = {"site": site, "dtype": dtype, "kind": kind} if site else {ENTRY_KEY.removeprefix("qsdk."): dtype}
        self._cast(name, wide, f"{site}/cast_back" if site else f"{name}/enter_back", FLOAT32, facts)
        self.wide[name, site] = wide

    def _cast(self, source: str, target: str, name: str, dtype: str, facts: Mapping[str, str]) -> None:
        cast = helper.make_node("Cast", [source], [target], name, to=FLOAT_CODES[dtype])
        set_metadata(cast, **facts)
        self.nodes.append(cast)


def sites_inside(node: NodeProto) -> list[str]:
    """Return the sites that a node in its region's type reads or makes without a cast."""
    found = _sites_of(node)
    return [] if found is None else [site for port in found.values() for site, *_ in port.values()]


def _sites_of(node: NodeProto) -> _Sites | None:
    text = metadata(node).get(f"qsdk.{_SITES}")
    if text is None:
        return None
    found = json.loads(text)
    return {port: {at: tuple(facts) for at, facts in found[port].items()} for port in ("inputs", "outputs")}


def is_anything_quantized(model: ModelProto) -> bool:
    """Return True if a model, its functions and bodies included, holds anything quantized."""
    nodes = [node for part in (model.graph, *model.functions) for node in all_nodes(part.node)]
    stored = [tensor.data_type for tensor in model.graph.initializer]
    stored += [tensor.data_type for node in nodes for _, body in bodies(node) for tensor in body.initializer]
    return any(code in _CODES for code in stored) or any(_is_quantized(node) for node in nodes)


def _is_quantized(node: NodeProto) -> bool:
    if node.op_type in _PAIRS or node.op_type.startswith(_STARTS):
        return True
    return _is_narrow_site(node)


def has_narrow_sites(model: ModelProto) -> bool:
    """Return True if our export kept a site of a model in a narrow float type."""
    return any(_is_narrow_site(node) for node in model.graph.node)


def _is_narrow_site(node: NodeProto) -> bool:
    facts = metadata(node)
    return (node.op_type == "Cast" and "qsdk.site" in facts) or TYPE_KEY in facts
