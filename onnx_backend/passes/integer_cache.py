"""A cache of keys and values as integers at the edge of a file, which then takes a quarter of the memory between steps.

The file takes codes where it took floats, into a DequantizeLinear, and gives the codes of a QuantizeLinear: scales and
zero points stand in the file. The rest of it computes what it did, bit for bit, because values that were dequantized
and are quantized again have the codes that they had.
"""

import json
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import (
    copied,
    drop_unused_initializers,
    metadata,
    rename_inputs,
    replace_nodes,
    retain,
    set_metadata,
)
from onnx_backend.qdq.read import FLOAT32, dynamic_pairs, quantized_code
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import SHAPE_OPS

#: property of a file whose cache comes and goes as integers
CACHE_KEY, INTEGER = "qsdk.cache", "integer"
#: codes that Python can feed to a runtime; those of 4 bits two in a byte
_INT4 = TensorProto.INT4
_CODES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16, _INT4)


def has_integer_cache(model: ModelProto) -> bool:
    """Return whether a file takes and gives its cache as integers."""
    return metadata(model).get(CACHE_KEY) == INTEGER


def take_integer_cache(model: ModelProto, edges: Collection[str]) -> None:
    """Make a lowered model take and give the codes of its cache, in place.

    `edges` are the names of the inputs and outputs that hold keys and values.
    """
    if not edges:
        raise ConfigError(
            "cache='integer': the model takes and gives back no keys and values; choose kv_cache='int8' in the config, "
            "or give quantize an example of a step, with past_key_values"
        )
    with_scales = take_token_scales(model, edges)
    packed = {name: int(TensorProto.INT8) for name, is_packed in with_scales.items() if is_packed}
    edges = [name for name in edges if name not in with_scales]
    graph, index = model.graph, GraphIndex(model.graph)
    renamed: dict[str, str] = {}
    for info in (info for info in graph.output if info.name in edges):
        pair, quantize = _pair_before(index.makers, info.name)
        if pair is None or quantize is None or quantize.output[0] in renamed:
            raise _not_quantized("output", info.name)
        _set_type(info, quantized_code(quantize, index.stored))
        if pair.output[0] == info.name and info.name not in index.readers:
            quantize.metadata_props.extend(pair.metadata_props)  # the pair goes, and its site is still to be read
        renamed |= {info.name: index.fresh(f"{info.name}/dequantized"), quantize.output[0]: info.name}
    _rename(model, renamed)
    taken_in: dict[str, str] = {}
    for info in (info for info in graph.input if info.name in edges):
        quantizes = _quantizes_behind(index.readers, info.name)
        if not quantizes:
            raise _not_quantized("input", info.name)
        _set_type(info, quantized_code(quantizes[0], index.stored))
        taken_in |= {node.output[0]: info.name for node in quantizes}
    replace_nodes(graph, [node for node in graph.node if node.output[0] not in taken_in])
    rename_inputs(graph.node, taken_in)
    whole = [info for info in (*graph.input, *graph.output) if info.name in edges]
    packed |= {info.name: int(_INT4) for info in whole if info.type.tensor_type.elem_type == _INT4}
    pack_edges(model, packed)
    _finish(model)
    set_properties(model, {CACHE_KEY: INTEGER})


def with_float_cache(model: ModelProto) -> ModelProto:
    """Return a file as it would be with a cache of floats: the inverse of `take_integer_cache`.

    The property that says that it has integers stays.
    """
    if not has_integer_cache(model):
        return model
    result = copied(model)
    unpack_edges(result)
    drop_token_scales(result)
    graph, index = result.graph, GraphIndex(result.graph)
    first: list[NodeProto] = []
    last: list[NodeProto] = []
    renamed: dict[str, str] = {}
    for info in (info for info in graph.input if info.type.tensor_type.elem_type in _CODES):
        pair = next((node for node in index.readers.get(info.name, ()) if node.op_type == "DequantizeLinear"), None)
        if pair is not None:
            codes = index.fresh(f"{info.name}/quantized")
            rename_inputs(
                [node for node in index.readers[info.name] if node.op_type not in SHAPE_OPS], {info.name: codes}
            )
            first.append(_of_pair(pair, "QuantizeLinear", info.name, codes))
            if len(pair.input) < 3:
                first[-1].attribute.append(helper.make_attribute("output_dtype", info.type.tensor_type.elem_type))
            info.type.tensor_type.elem_type = index.stored[pair.input[1]].data_type
    for info in (info for info in graph.output if info.type.tensor_type.elem_type in _CODES):
        quantize = index.makers.get(info.name)
        if quantize is None or quantize.op_type != "QuantizeLinear":
            continue
        codes = renamed[info.name] = index.fresh(f"{info.name}/quantized")
        info.type.tensor_type.elem_type = index.stored[quantize.input[1]].data_type
        pair = next((node for node in index.readers.get(info.name, ()) if node.op_type == "DequantizeLinear"), None)
        if pair is not None:
            renamed[pair.output[0]] = info.name
        else:
            last.append(_of_pair(quantize, "DequantizeLinear", codes, info.name))
            last[-1].metadata_props.extend(quantize.metadata_props)
            del quantize.metadata_props[:]
    replace_nodes(graph, [*first, *graph.node])
    _rename(result, renamed)
    graph.node.extend(last)
    _finish(result)
    return result


def _pair_before(made_by: Mapping[str, NodeProto], name: str) -> tuple[NodeProto | None, NodeProto | None]:
    """Return the DequantizeLinear and the QuantizeLinear that a tensor comes from, casts between float types aside."""
    pair = made_by.get(name)
    while pair is not None and pair.op_type == "Cast":
        pair = made_by.get(pair.input[0])
    if pair is None or pair.op_type != "DequantizeLinear":
        return None, None
    quantize = made_by.get(pair.input[0])
    return pair, quantize if quantize is not None and quantize.op_type == "QuantizeLinear" else None


def _quantizes_behind(read: Mapping[str, list[NodeProto]], name: str) -> list[NodeProto]:
    """Return the QuantizeLinears that alone read an input, behind casts perhaps, all alike; none where others do."""
    readers = [node for node in read.get(name, []) if node.op_type not in SHAPE_OPS]
    while readers and all(node.op_type == "Cast" for node in readers):
        readers = [reader for node in readers for reader in read.get(node.output[0], [])]
    forms = [(node.op_type, [*node.input[1:]], [*node.attribute]) for node in readers]
    return readers if all(form[0] == "QuantizeLinear" and form == forms[0] for form in forms) else []


def _of_pair(node: NodeProto, op_type: str, source: str, result: str) -> NodeProto:
    """Return the other node of a pair, with the same scales."""
    made = helper.make_node(op_type, [source, *node.input[1:]], [result], f"{result}/{op_type}")
    made.attribute.extend(attribute for attribute in node.attribute if attribute.name in ("axis", "block_size"))
    return made


def _not_quantized(kind: str, name: str) -> ConfigError:
    return ConfigError(
        f"cache='integer': the {kind} {name!r} has no codes of its own; choose kv_cache='int8' in the config"
    )


def _set_type(info: ValueInfoProto, code: int) -> None:
    """Make an input or output one of these codes."""
    if code not in _CODES:
        kind = TensorProto.DataType.Name(code).lower()
        raise ConfigError(
            f"cache='integer': {info.name!r} has codes of {kind}, which NumPy does not have; choose kv_cache='int8' "
            "in the config, or leave the cache float"
        )
    info.type.tensor_type.elem_type = code


def _rename(model: ModelProto, names: Mapping[str, str]) -> None:
    """Rename tensors where they are made and where they are read, but not the edges of the model, in place."""
    rename_inputs(model.graph.node, names)
    for node in model.graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]


def _finish(model: ModelProto) -> None:
    """Drop what nothing reads any more."""
    graph = model.graph
    replace_nodes(graph, nodes_reaching(graph.node, {info.name for info in graph.output}))
    drop_unused_initializers(graph)
    inner = {name for node in graph.node for name in node.output} - {info.name for info in graph.output}
    retain(graph.value_info, lambda value: value.name in inner)


# --- A cache of integers in forms that a pair does not have: two codes of 4 bits in a byte, and a scale for each token

# Two codes lie in a byte as ONNX Runtime's GroupQueryAttention has them: each plus 8, the first in the lower half. The
# scales of tokens come and go as tensors of their own, `past_key_values.0.value_scale` [batch, heads, tokens, 1].

_SCALE = "_scale"  # behind the name of keys or values whose tokens have scales
_PART_KEY = "qsdk.cache_codes"  # metadata of a node that is there for the codes of tokens with scales
_PACK_KEY = "qsdk.cache_packs"  # metadata of a node that packs or unpacks: the type of the codes, and their edge
_STANDS_KEY = "qsdk.cache_values"  # metadata of the last node of a form: the nodes that it stands for, serialized
_NUMBERS: Mapping[str, Any] = {
    "low": np.array(15, np.uint8),
    "bits": np.array(4, np.uint8),
    "middle": np.array(8, np.int32),
    "first": np.array([0], np.int64),
    "second": np.array([1], np.int64),
    "last": np.array([-1], np.int64),
    "end": np.array([np.iinfo(np.int64).max], np.int64),
    "step": np.array([2], np.int64),
}


class _Nodes:
    """Nodes that are added to a model for one edge, with the numbers that they read, and a note in their metadata."""

    def __init__(self, model: ModelProto, index: GraphIndex, edge: str, **note: str) -> None:
        self.model, self.index, self.edge, self.note = model, index, edge, note
        self.made: list[NodeProto] = []

    def add(self, op: str, inputs: Sequence[str], output: str = "", **options: Any) -> str:
        """Add a node; return its result."""
        name = self.index.fresh(f"{self.edge}/{op.lower()}")
        self.made.append(helper.make_node(op, inputs, [output or name], name, **options))
        set_metadata(self.made[-1], **self.note)
        return output or name

    def number(self, name: str, value: Any = None) -> str:
        """Return the initializer of a number: one for the model, or with a value one for the edge."""
        full = f"qsdk.cache/{name}" if value is None else f"{self.edge}/{name}"
        if full not in {tensor.name for tensor in self.model.graph.initializer}:
            stored = _NUMBERS[name] if value is None else value
            self.model.graph.initializer.append(numpy_helper.from_array(stored, full))
        return full


def take_token_scales(model: ModelProto, edges: Collection[str]) -> dict[str, bool]:
    """Make a model take and give codes and scales where tokens have scales of their own, in place.

    Returns the names of the inputs and outputs that do now -> whether their codes have 4 bits, in an int8 each.
    """
    graph, index = model.graph, GraphIndex(model.graph)
    pairs = {pair.output: pair for pair in dynamic_pairs(model) if pair.spec.dynamic == "token"}
    inputs = {info.name: info for info in graph.input if info.name in edges}
    done: dict[str, bool] = {}
    for info in [info for info in graph.output if info.name in edges]:
        concat = index.makers.get(info.name)
        past, new = concat.input if concat is not None and len(concat.input) == 2 else ("", "")
        if concat is None or past not in inputs or new not in pairs or pairs[new].tensor_type != FLOAT32:
            continue
        if any(node is not concat and node.op_type not in SHAPE_OPS for node in index.readers[past]):
            continue
        codes, scale = pairs[new].codes
        multiply, nodes = index.makers[new], _Nodes(model, index, info.name, cache_codes=past)
        meant = [index.makers[multiply.input[0]], multiply, concat]
        values = index.fresh(f"{info.name}/dequantized")
        rename_inputs(graph.node, {info.name: values})
        axis = {"axis": 2}
        whole = nodes.add("Cast", [nodes.add("Concat", [past, codes], info.name, **axis)], to=TensorProto.FLOAT)
        scales = nodes.add("Concat", [past + _SCALE, scale], info.name + _SCALE, **axis)
        nodes.add("Mul", [whole, scales], values)
        text = json.dumps([b64encode(one.SerializeToString(deterministic=True)).decode() for one in meant])
        set_metadata(nodes.made[-1], **{_STANDS_KEY.removeprefix("qsdk."): text})
        at = next(place for place, node in enumerate(graph.node) if node is concat or node == concat)
        replace_nodes(graph, [*graph.node[:at], *nodes.made, *graph.node[at + 1 :]])
        for value, edge in ((inputs[past], graph.input), (info, graph.output)):
            edge.append(_scales_of(value))
            value.type.tensor_type.elem_type = TensorProto.INT8
            done[value.name] = pairs[new].spec.dtype.bits == 4
        index = GraphIndex(graph)
    return done


def drop_token_scales(model: ModelProto) -> None:
    """Undo `take_token_scales`, in place."""
    graph, renamed, nodes = model.graph, dict[str, str](), list[NodeProto]()
    places = {name: at for at, node in enumerate(graph.node) for name in node.output}
    behind: dict[int, list[NodeProto]] = {}
    for at, node in enumerate(graph.node):
        texts = json.loads(metadata(node).get(_STANDS_KEY, "[]"))
        *values, concat = (NodeProto.FromString(b64decode(text)) for text in texts) if texts else (node,)
        if texts:
            renamed[node.output[0]] = concat.output[0]
            behind.setdefault(places[values[0].input[0]], []).extend(values)
            behind.setdefault(at, []).append(concat)
    for at, node in enumerate(graph.node):
        nodes += [*([] if _PART_KEY in metadata(node) else [node]), *behind.get(at, ())]
    edges = {name for node in nodes for name in (*node.input, *node.output)}
    for values in (graph.input, graph.output) if renamed else ():
        names = {info.name for info in values}
        scaled = {name for name in names if name + _SCALE in names - edges}
        for info in (info for info in values if info.name in scaled):
            info.type.tensor_type.elem_type = TensorProto.FLOAT
        retain(values, partial(_is_no_scale, scaled))
    replace_nodes(graph, nodes)
    rename_inputs(graph.node, renamed)


def _is_no_scale(scaled: Collection[str], info: ValueInfoProto) -> bool:
    return info.name in scaled or info.name.removesuffix(_SCALE) not in scaled


def pack_edges(model: ModelProto, names: Mapping[str, int]) -> None:
    """Make inputs and outputs with codes of 4 bits take and give two codes in a byte, in place.

    `names` are those of the edges -> the type that the graph has the codes in, int4 or int8.
    """
    graph, index = model.graph, GraphIndex(model.graph)
    first, last = list[NodeProto](), list[NodeProto]()
    for info in (info for info in graph.input if info.name in names):
        nodes, size = _Nodes(model, index, info.name, cache_packs=f"{names[info.name]} {info.name}"), _halve(info)
        whole = index.fresh(f"{info.name}/codes")
        rename_inputs([node for node in index.readers[info.name] if node.op_type not in SHAPE_OPS], {info.name: whole})
        low = nodes.add("BitwiseAnd", [info.name, nodes.number("low")])
        high = nodes.add("BitShift", [info.name, nodes.number("bits")], direction="RIGHT")
        halves = [nodes.add("Unsqueeze", [half, nodes.number("last")]) for half in (low, high)]
        both = nodes.add("Concat", halves, axis=-1)
        rows = nodes.add("Reshape", [both, nodes.number("shape", np.array([0, 0, 0, size], np.int64))])
        raised = nodes.add("Cast", [rows], to=TensorProto.INT32)
        nodes.add("Cast", [nodes.add("Sub", [raised, nodes.number("middle")])], whole, to=names[info.name])
        first += nodes.made
    for info in (info for info in graph.output if info.name in names):
        nodes = _Nodes(model, index, info.name, cache_packs=f"{names[info.name]} {info.name}")
        _halve(info)
        whole = index.fresh(f"{info.name}/codes")
        index.makers[info.name].output[0] = whole
        rename_inputs(graph.node, {info.name: whole})
        raised = nodes.add("Cast", [whole], to=TensorProto.INT32)
        codes = nodes.add("Cast", [nodes.add("Add", [raised, nodes.number("middle")])], to=TensorProto.UINT8)
        cut = [nodes.number("end"), nodes.number("last"), nodes.number("step")]
        low, high = (nodes.add("Slice", [codes, nodes.number(place), *cut]) for place in ("first", "second"))
        shifted = nodes.add("BitShift", [high, nodes.number("bits")], direction="LEFT")
        nodes.add("BitwiseOr", [low, shifted], info.name)
        last += nodes.made
    replace_nodes(graph, [*first, *graph.node, *last])


def unpack_edges(model: ModelProto) -> None:
    """Undo `pack_edges`, in place."""
    graph, parts = model.graph, dict[str, list[NodeProto]]()
    for node in graph.node:
        if _PACK_KEY in metadata(node):
            parts.setdefault(metadata(node)[_PACK_KEY], []).append(node)
    renamed: dict[str, str] = {}
    for note, nodes in parts.items():
        code, _, edge = note.partition(" ")
        info = next(info for info in (*graph.input, *graph.output) if info.name == edge)
        renamed[nodes[-1].output[0] if nodes[0].input[0] == edge else nodes[0].input[0]] = edge
        info.type.tensor_type.elem_type = int(code)
        info.type.tensor_type.shape.dim[-1].dim_value *= 2
    replace_nodes(graph, [node for node in graph.node if _PACK_KEY not in metadata(node)])
    for node in graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    rename_inputs(graph.node, renamed)


def _halve(info: ValueInfoProto) -> int:
    """Make an input or output hold two codes in a byte; return how many codes it has in a row."""
    last = info.type.tensor_type.shape.dim[-1]
    size = int(last.dim_value)
    if size < 2 or size % 2:
        raise ConfigError(
            f"cache='integer': {info.name!r} has rows of {size or 'any number of'} codes of 4 bits, which do not fill "
            "bytes; choose kv_cache='int8' in the config, or leave the cache float"
        )
    last.dim_value = size // 2
    info.type.tensor_type.elem_type = TensorProto.UINT8
    return size


def _scales_of(info: ValueInfoProto) -> ValueInfoProto:
    """Return the input or output with the scales of the tokens of another one."""
    scales = ValueInfoProto()
    scales.CopyFrom(info)
    scales.name = info.name + _SCALE
    dims = scales.type.tensor_type.shape.dim
    dims[-1].Clear()
    dims[-1].dim_value = 1
    return scales
