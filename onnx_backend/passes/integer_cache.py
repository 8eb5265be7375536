"""A cache of keys and values as integers at the edge of a file, which then takes a quarter of the memory between steps.

The file takes codes where it took floats, into a DequantizeLinear, and gives the codes of a QuantizeLinear: scales and
zero points stand in the file. The rest of it computes what it did, bit for bit, because values that were dequantized
and are quantized again have the codes that they had.
"""

from collections.abc import Collection, Mapping

from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backend.passes.packed_cache import drop_token_scales, pack_edges, take_token_scales, unpack_edges
from onnx_backend.proto.graph_queries import GraphIndex, nodes_reaching
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import copied, drop_unused_initializers, metadata, rename_inputs, replace_nodes, retain
from onnx_backend.qdq.read import quantized_code
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
