"""Write islands in their own type, and read them back: the casts between their nodes go, and come again."""

import json
from collections.abc import Collection, Iterable, Mapping

from onnx import ModelProto, NodeProto, helper

from onnx_backend.dialects.dialect import Dialect
from onnx_backend.proto.graph_queries import consumers, initializers, names_in, producers, unique
from onnx_backend.proto.nodes import drop_unused_initializers, metadata, replace_nodes, set_metadata
from onnx_backend.proto.opsets import opset_of
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.qdq.islands.entries import ENTRY_KEY, cast_site, float_inputs, island_type, narrows
from onnx_backend.qdq.layer_inputs import with_quantized_inputs
from onnx_backend.qdq.read import FLOAT32, FLOAT_CODES, type_of_cast

#: metadata of a node that is in its island's type: by position, the sites and kinds of what it reads and makes; of the
#: latter also the name of the float tensor
_SITES = "island"
_Sites = Mapping[str, Mapping[str, tuple[str, ...]]]


def narrow_islands(model: ModelProto, dialect: Dialect) -> None:
    """Write the islands of a lowered model in their own types, in place, where the dialect can run them so.

    A node takes the narrow tensors themselves, and makes one. ONNX Runtime has hardly any kernel in bfloat16, so in its
    dialect the casts stay there.
    """
    dtypes = ("float16", "bfloat16") if dialect == "onnx" else ("float16",)
    if not any(island_type(node) in dtypes for node in model.graph.node):
        return
    made_by, readers = producers(model.graph.node), consumers(model.graph.node)
    outputs = {value.name for value in model.graph.output}
    island = _narrowed(model, dtypes, made_by, readers, outputs)
    stored, opset = initializers(model.graph), opset_of(model)
    dropped: set[str] = set()
    made_instead: dict[str, str] = {}
    for node in island.values():
        dtype = island_type(node)
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
    changed = {*made_instead, *made_instead.values(), *(name for node in island.values() for name in node.output)}
    for node in island.values():
        node.output[:] = [made_instead.get(name, name) for name in node.output]
    _replace(model, _without_dead_casts(nodes, outputs), changed)
    _move_to_end(model, [name for node in island.values() for name in node.input if name in stored])


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
    """Return, by first output, the nodes of islands that can be written in their type."""
    kept = {node.output[0]: node for node in model.graph.node if island_type(node) in dtypes}
    opset = opset_of(model)

    def is_inside(node: NodeProto | None, dtype: str) -> bool:
        return node is not None and node.output[0] in kept and island_type(node) == dtype

    def fits(node: NodeProto) -> bool:
        """Return whether all that a node reads and all that reads it is, or ends, in the same type."""
        dtype = island_type(node)
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
    declared = [value for value in model.graph.value_info if value.name not in changed]
    del model.graph.value_info[:]
    model.graph.value_info.extend(declared)


def as_simulated(model: ModelProto) -> ModelProto:
    """Return a model, or a changed copy, in the form that has each site at a tensor of its own, as the sim has it.

    Nodes of `narrow_islands` become float32 ones between casts; layers that round their input to int8 have nodes for
    that. What `fast_forms` has written otherwise is pairs again.
    """
    model = with_quantized_inputs(with_pairs(model))
    if all(_sites_of(node) is None for node in model.graph.node):
        return model
    result = ModelProto()
    result.CopyFrom(model)
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
        self.inner: set[str] = set()  # the results of islands that are no sites
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
        """Widen every node of an island."""
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
        dtype = island_type(node)
        for at, name in float_inputs(node, self.opset):
            if name not in self.inner:
                site, kind = sites["inputs"].get(str(at)) or self.site_at.get(name, ("", ""))
                if (name, site) not in self.wide:
                    self._cast_back(name, dtype, site, kind)
                node.input[at] = self.wide[name, site]
        kept = [(entry.key, entry.value) for entry in node.metadata_props if entry.key != f"qsdk.{_SITES}"]
        del node.metadata_props[:]
        for key, value in kept:
            node.metadata_props.add(key=key, value=value)
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
        """Cast a narrow tensor back, by its site or, if it has none, by where it enters the island."""
        wide = unique(f"{site}/{FLOAT32}" if site else f"{name}/wide", self.taken)
        facts = {"site": site, "dtype": dtype, "kind": kind} if site else {ENTRY_KEY.removeprefix("qsdk."): dtype}
        self._cast(name, wide, f"{site}/cast_back" if site else f"{name}/enter_back", FLOAT32, facts)
        self.wide[name, site] = wide

    def _cast(self, source: str, target: str, name: str, dtype: str, facts: Mapping[str, str]) -> None:
        cast = helper.make_node("Cast", [source], [target], name, to=FLOAT_CODES[dtype])
        set_metadata(cast, **facts)
        self.nodes.append(cast)


def sites_inside(node: NodeProto) -> list[str]:
    """Return the sites that a node in its island's type reads or makes without a cast."""
    found = _sites_of(node)
    return [] if found is None else [site for port in found.values() for site, *_ in port.values()]


def _sites_of(node: NodeProto) -> _Sites | None:
    text = metadata(node).get(f"qsdk.{_SITES}")
    if text is None:
        return None
    found = json.loads(text)
    return {port: {at: tuple(facts) for at, facts in found[port].items()} for port in ("inputs", "outputs")}
