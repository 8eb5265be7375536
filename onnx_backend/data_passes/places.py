"""The places of an ONNX model: its computed tensors with their names, grids, and the rounding of weights in front."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto

from onnx_backend.data_passes.place_names import names_of_tensors
from onnx_backend.opening.stored_encodings import UNMARKED
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, input_names
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.subgraphs import reads
from onnx_backend.qdq.read import QdqPair, qdq_pairs, stored_tensors
from qsdk.core.comparing.names import NOT_COUNTED
from qsdk.core.comparing.place import Place, epsilon_of, owner_names, rounding_noise

_CODES = "/quantized"  # behind the name of a site, the codes of that site
_NARROW = {name: epsilon_of(name) for name in ("float16", "bfloat16")}
_NO_TENSOR = ("Sequence", "Optional")


@dataclass(frozen=True)
class OnnxPlace:
    """A place of an ONNX model.

    Attributes:
        facts: its names and grid.
        tensor: the one that is read from a session.
        readers_read: the tensors that stand for it where it is read.
    """

    facts: Place
    tensor: str
    readers_read: tuple[str, ...]


@dataclass
class _Found:
    """What is known about the tensors of a model."""

    model: ModelProto
    pairs: Mapping[str, QdqPair]  # by the tensor that holds the codes
    outputs: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def places_of(model: ModelProto) -> list[OnnxPlace]:
    """Return the places of a model in the order of its nodes: float, Q/DQ, or integer-only with the names of sites.

    The tensor in front of a QuantizeLinear that nothing else reads is no place of its own: the quantized one has its
    names.
    """
    pairs = {pair.quantize.output[0]: pair for pair in qdq_pairs(model) if pair.quantize is not None}
    outputs = {value.name: index for index, value in enumerate(model.graph.output)}
    found = _Found(model, pairs, outputs, *names_of_tensors(model))
    return list(_places(found))


def _places(found: _Found) -> Iterator[OnnxPlace]:
    graph = found.model.graph
    constant, readers = set(stored_tensors(found.model)), consumers(graph.node)
    weights, carried = _weight_noises(found.model), dict[str, float]()
    for name in input_names(graph):
        if not _only_quantized(name, readers, found):
            facts = Place(name, values=(name,), given=True, output=found.outputs.get(name))
            yield OnnxPlace(facts, name, (name,))
    dequantized = _dequantized_of(graph.node)
    quantized = {pair.output: code for code, pair in found.pairs.items()}
    behind = {name for names in dequantized.values() for name in names} - set(quantized)
    for node in graph.node:
        read = reads(node)
        if all(name in constant for name in read) and node.op_type != "RandomNormal":
            constant.update(node.output)
            behind_weights = sum(weights.get(name, 0.0) for name in read)
            weights.update({name: behind_weights for name in node.output if name not in weights})
            continue
        noise = sum(weights.get(name, 0.0) + carried.get(name, 0.0) for name in read)
        for name in filter(None, node.output):
            carried[name] = noise
            if name in behind or name in found.pairs or node.op_type.startswith(_NO_TENSOR):
                continue
            if name in quantized:
                pair = found.pairs[quantized[name]]
                yield _of_pair(pair, noise, found, dequantized[quantized[name]])
            elif _only_quantized(name, readers, found):
                continue
            else:
                yield OnnxPlace(_facts(node, name, noise, found), name, (name,))
            carried[name] = 0.0


def _of_pair(pair: QdqPair, noise: float, found: _Found, read: Sequence[str]) -> OnnxPlace:
    assert pair.quantize is not None
    raw = pair.quantize.input[0]
    maker = next((node for node in found.model.graph.node if raw in node.output), None)
    names = (raw, pair.output, *((maker.name,) if maker is not None and len(maker.output) == 1 else ()))
    ours = "qsdk.site" in metadata(pair.dequantize)
    module, op = owner_names(pair.site if ours else "")
    modules = (*module, *found.modules.get(raw, ()), *found.modules.get(pair.output, ()))
    output = next((found.outputs[name] for name in (pair.output, *read) if name in found.outputs), None)
    facts = Place(
        pair.site,
        site=pair.site if ours else "",
        modules=tuple(dict.fromkeys(modules)),
        values=tuple(dict.fromkeys(name for name in names if name)),
        ops=tuple(dict.fromkeys((*op, *found.ops.get(raw, ())))),
        view=maker is not None and maker.op_type in NOT_COUNTED,
        encoding=pair.encoding,
        weight_noise=noise,
        output=output,
    )
    return OnnxPlace(facts, pair.output, tuple(dict.fromkeys((pair.output, *read))))


def _facts(node: NodeProto, name: str, noise: float, found: _Found) -> Place:
    codes = name.endswith(_CODES)
    shown = name.removesuffix(_CODES).removesuffix(UNMARKED)
    facts = metadata(node) if node.op_type == "Cast" and node.name.endswith("/cast_back") else {}
    site = facts.get("qsdk.site", "")
    site = shown if codes else site
    module, op = owner_names(site)
    return Place(
        shown if codes else site or shown,
        site=site,
        modules=(*module, *found.modules.get(name, ())),
        ops=(*op, *found.ops.get(name, ())),
        view=node.op_type in NOT_COUNTED,
        values=(shown, *((node.name,) if node.name and len(node.output) == 1 else ())),
        weight_noise=noise,
        epsilon=_NARROW.get(facts.get("qsdk.dtype", ""), 0.0),
        codes=codes,
        output=found.outputs.get(name),
    )


def _only_quantized(name: str, readers: Mapping[str, Sequence[NodeProto]], found: _Found) -> bool:
    """Return True if a tensor is read by the QuantizeLinear of a site, and by nothing else."""
    following = readers.get(name, ())
    return (
        bool(following)
        and name not in found.outputs
        and all(node.op_type == "QuantizeLinear" and node.output[0] in found.pairs for node in following)
    )


def _dequantized_of(nodes: Sequence[NodeProto]) -> dict[str, list[str]]:
    """Return tensor of codes -> the results of all DequantizeLinear that read it, copies of one pair included."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        if node.op_type == "DequantizeLinear":
            found.setdefault(node.input[0], []).append(node.output[0])
    return found


def _weight_noises(model: ModelProto) -> dict[str, float]:
    """Return name of a dequantized weight -> power of its rounding, relative to its own."""
    stored = stored_tensors(model)
    found = {}
    for pair in qdq_pairs(model):
        if pair.stored is None or pair.kind == "bias" or pair.encoding.dtype.name == "int32":
            continue
        codes = array(stored[pair.stored])
        if pair.permutation is not None:
            codes = codes.transpose(tuple(int(i) for i in np.argsort(pair.permutation)))
        found[pair.output] = rounding_noise(pair.encoding, pair.encoding.dequantize(codes))
    return found
