"""Zeros around the input of a convolution, written as its own padding: no Pad and no pair of its own is left to run.

The Pad's pair has the encoding of the pair in front, and 0 has a code, so the convolution's own zeros are the same
codes. What stood in front of the convolution is noted at it, so that the file is read back with the Pad's site.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, initializers, names_in, producers, unique
from onnx_backend.proto.nodes import (
    attributes,
    drop_unused_initializers,
    metadata,
    node_label,
    replace_nodes,
    set_metadata,
)
from qsdk.core.errors import FileFormatError

PADDED_KEY = "qsdk.padded"  # metadata of a Conv: the Pad in front of it and the site behind that, as JSON
_PIECES = ("pad", "quantize", "dequantize")


def fold_pads(model: ModelProto) -> None:
    """Write a Pad of zeros that convolutions alone read, between pairs of one encoding, as their `pads`, in place."""
    graph = model.graph
    stored, makers, readers = initializers(graph), producers(graph.node), consumers(graph.node)
    outputs, dropped = {value.name for value in graph.output}, set[str]()
    for pad in (node for node in graph.node if node.op_type == "Pad"):
        chain = _chain(pad, stored, makers, readers)
        sizes = _zeros_around(pad, stored)
        convs = readers.get(chain[-1].output[0], []) if chain else []
        taken = [node.output[0] for node in chain]
        if not chain or sizes is None or outputs.intersection(taken) or not all(_can_pad(c, chain[-1]) for c in convs):
            continue
        facts = {name: [n.name, n.output[0]] for name, n in zip(_PIECES, chain, strict=True)}
        noted = {**facts, "pads": sizes, "inputs": len(pad.input), "facts": metadata(chain[-1])}
        for conv in convs:
            own = attributes(conv).get("pads")
            conv.input[0] = pad.input[0]
            _set_pads(conv, [a + b for a, b in zip(_spatial(sizes), own or repeat(0), strict=False)])
            set_metadata(conv, **{PADDED_KEY.removeprefix("qsdk."): json.dumps({**noted, "own": own})})
        dropped.update(taken)
    replace_nodes(graph, [node for node in graph.node if not dropped.intersection(node.output)])
    drop_unused_initializers(graph)


def unfold_pads(model: ModelProto) -> ModelProto:
    """Return the model, or a changed copy, with the Pads that `fold_pads` had folded.

    Raises:
        FileFormatError: a convolution does not have the padding or the input that is noted at it.
    """
    if not any(PADDED_KEY in metadata(node) for node in model.graph.node):
        return model
    result = ModelProto()
    result.CopyFrom(model)
    graph, made, behind = result.graph, set[str](), dict[str, list[NodeProto]]()
    makers, taken = producers(graph.node), names_in(graph)
    for node in graph.node:
        noted = metadata(node).get(PADDED_KEY)
        if noted is None:
            continue
        facts = json.loads(noted)
        _require_folded(node, facts, makers)
        if facts["dequantize"][1] not in made:
            made.add(facts["dequantize"][1])
            # behind the pair in front, where export finds it: an opened file, exported again, comes out the same
            behind.setdefault(node.input[0], []).extend(_unfolded(result, node.input[0], facts, makers, taken))
        node.input[0] = facts["dequantize"][1]
        _set_pads(node, facts["own"])
        kept = [entry for entry in node.metadata_props if entry.key != PADDED_KEY]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    replace_nodes(graph, [one for node in graph.node for one in (node, *behind.get(next(iter(node.output), ""), []))])
    return result


def _require_folded(conv: NodeProto, facts: Mapping[str, Any], makers: Mapping[str, NodeProto]) -> None:
    dequantize = makers.get(conv.input[0])
    quantize = None if dequantize is None else makers.get(dequantize.input[0])
    pair = [None if node is None else node.op_type for node in (quantize, dequantize)]
    sizes = [a + b for a, b in zip(_spatial(facts["pads"]), facts["own"] or repeat(0), strict=False)]
    if pair != ["QuantizeLinear", "DequantizeLinear"] or list(attributes(conv).get("pads", ())) != sizes:
        raise FileFormatError(
            f"the node {node_label(conv)!r} does not have the input and the padding {sizes} that {PADDED_KEY} notes; "
            "the file was changed, export it again"
        )


def _unfolded(
    model: ModelProto, source: str, facts: Mapping[str, Any], makers: Mapping[str, NodeProto], taken: set[str]
) -> list[NodeProto]:
    """Return a Pad of the tensor that a convolution reads, and its pair, with the scale of the pair in front."""
    before = makers[source]
    scale = array(next(tensor for tensor in model.graph.initializer if tensor.name == before.input[1]))
    inputs = [source]
    for name, value in (("pads", np.array(facts["pads"], np.int64)), ("zero", np.zeros((), scale.dtype))):
        if len(inputs) < facts["inputs"]:
            inputs.append(unique(f"{facts['pad'][1]}/{name}", taken))
            model.graph.initializer.append(numpy_helper.from_array(value, inputs[-1]))
    (pad, padded), (quantize, codes), (dequantize, result) = (facts[name] for name in _PIECES)
    nodes = [helper.make_node("Pad", inputs, [padded], pad)]
    for old, given, output, name in (
        (makers[before.input[0]], padded, codes, quantize),
        (before, codes, result, dequantize),
    ):
        node = NodeProto()
        node.CopyFrom(old)
        node.name = name
        del node.input[0]
        del node.output[:]
        del node.metadata_props[:]
        node.input.insert(0, given)
        node.output.append(output)
        nodes.append(node)
    for key, value in dict(facts["facts"]).items():
        nodes[-1].metadata_props.add(key=key, value=value)
    return nodes


def _chain(
    pad: NodeProto,
    stored: Mapping[str, TensorProto],
    makers: Mapping[str, NodeProto],
    readers: Mapping[str, list[NodeProto]],
) -> list[NodeProto]:
    """Return a Pad and its pair, if the pair in front has the same encoding; else nothing."""
    before = makers.get(pad.input[0])
    first = makers.get(before.input[0]) if before is not None and before.op_type == "DequantizeLinear" else None
    quantize = _only(pad, readers)
    dequantize = None if quantize is None else _only(quantize, readers)
    if before is None or first is None or quantize is None or dequantize is None:
        return []
    pair = (first.op_type, quantize.op_type, dequantize.op_type)
    if pair != ("QuantizeLinear", "QuantizeLinear", "DequantizeLinear"):
        return []
    same = [_operands(node, stored) for node in (first, before, quantize, dequantize)]
    return [pad, quantize, dequantize] if all(found == same[0] for found in same) and same[0] is not None else []


def _operands(node: NodeProto, stored: Mapping[str, TensorProto]) -> tuple[bytes | float, ...] | None:
    """Return the scale and zero point of a node of a pair, comparable; None where they are not stored numbers."""
    if any(name not in stored for name in node.input[1:]):
        return None
    values = [array(stored[name]) for name in node.input[1:]]
    zero = int(values[1].reshape(-1)[0]) if len(values) > 1 and values[1].size == 1 else 0
    return (values[0].tobytes(), zero) if values[0].size == 1 else None


def _only(node: NodeProto, readers: Mapping[str, list[NodeProto]]) -> NodeProto | None:
    found = readers.get(node.output[0], [])
    return found[0] if len(found) == 1 else None


def _zeros_around(pad: NodeProto, stored: Mapping[str, TensorProto]) -> list[int] | None:
    """Return the sizes of a Pad that puts zeros around the axes behind the channels, else None."""
    if attributes(pad).get("mode", "constant") not in ("constant", b"constant") or len(pad.input) > 3:
        return None
    if pad.input[1] not in stored or (len(pad.input) > 2 and pad.input[2] and pad.input[2] not in stored):
        return None
    if len(pad.input) > 2 and pad.input[2] and array(stored[pad.input[2]]).any():
        return None
    sizes = [int(size) for size in array(stored[pad.input[1]]).reshape(-1)]
    rank = len(sizes) // 2
    beside = [*sizes[:2], *sizes[rank : rank + 2]]
    return sizes if rank > 2 and not any(beside) and min(sizes) >= 0 else None


def _can_pad(node: NodeProto, dequantize: NodeProto) -> bool:
    facts = attributes(node)
    own = facts.get("auto_pad", "NOTSET") in ("NOTSET", b"NOTSET")
    return node.op_type == "Conv" and own and list(node.input).count(dequantize.output[0]) == 1


def _spatial(sizes: list[int]) -> list[int]:
    rank = len(sizes) // 2
    return [*sizes[2:rank], *sizes[rank + 2 :]]


def _set_pads(conv: NodeProto, sizes: Sequence[int] | None) -> None:
    kept = [entry for entry in conv.attribute if entry.name != "pads"]
    del conv.attribute[:]
    conv.attribute.extend([*kept, *([] if sizes is None else [helper.make_attribute("pads", sizes)])])
