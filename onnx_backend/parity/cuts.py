"""Cut a Q/DQ model at its sites, so that the readers of each site read a new input."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import cycle

import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.graph_queries import names_in, producers, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import metadata, rename_inputs, replace_nodes
from onnx_backend.proto.subgraphs import reads
from onnx_backend.qdq.dynamic import dynamic_pairs
from onnx_backend.qdq.fusion_barriers import insert_barriers
from onnx_backend.qdq.read import CAST_KEY, FLOAT32, FLOAT_CODES, qdq_pairs, type_of_cast
from onnx_backend.runtime.providers import Providers
from onnx_backend.runtime.session import simulation_session

#: dtypes that the runtime returns as NumPy arrays
_NUMPY_TYPES = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "float16": TensorProto.FLOAT16} | {
    "uint16": TensorProto.UINT16,
    "int16": TensorProto.INT16,
}
_NUMPY_CODES = frozenset({"uint8", "int8", "uint16", "int16"})  # codes that the runtime returns as NumPy arrays
_DYNAMIC_TYPES = (TensorProto.FLOAT, TensorProto.UINT8)  # of the scale and zero point of DynamicQuantizeLinear


@dataclass(frozen=True)
class Cut:
    """An activation site where a model can be cut.

    Attributes:
        site: its name.
        kind: activation, input or output.
        compared: the tensor that holds its codes (or its float16 values).
        read: the tensor that its readers read.
        dtype: of `compared`: a container, `float16` or `bfloat16`.
        computed: the tensors that hold its scale and zero point, if the model computes them.
        tensor_type: the float type of `read`.
    """

    site: str
    kind: str
    compared: str
    read: str
    dtype: str
    computed: tuple[str, ...] = ()
    tensor_type: str = FLOAT32


def chosen_behind(model: ModelProto, cuts: Sequence[Cut]) -> dict[str, set[str]]:
    """Return site -> the sites between which and it a TopK stands, which may break ties of theirs in any way."""
    makers, read_at = producers(model.graph.node), {cut.read: cut.site for cut in cuts}
    found: dict[str, set[str]] = {}
    for cut in cuts if any(node.op_type == "TopK" for node in model.graph.node) else ():
        waiting, seen = [(makers[cut.compared].input[0], False)], set[tuple[str, bool]]()
        while waiting:
            name, chosen = place = waiting.pop()
            if place in seen:
                continue
            seen.add(place)
            if name in read_at and chosen:
                found.setdefault(cut.site, set()).add(read_at[name])
            maker = None if name in read_at else makers.get(name)
            if maker is not None:
                waiting += [(source, chosen or maker.op_type == "TopK") for source in maker.input if source]
    return found


def right_behind(model: ModelProto, sites: Collection[str]) -> set[str]:
    """Return the sites and the outputs (`name:output`) that a path from one of these reaches with no other between."""
    read_at = {cut.read: cut.site for cut in find_cuts(model)}
    reached, found = {name for name, site in read_at.items() if site in sites}, set[str]()
    for node in model.graph.node if reached else ():
        if reached.intersection(reads(node)):
            found |= {read_at[name] for name in node.output if name in read_at}
            reached |= {name for name in node.output if name not in read_at}
    return found | {f"{value.name}:output" for value in model.graph.output if value.name in reached}


def find_cuts(model: ModelProto) -> list[Cut]:
    """Return the activation sites of a Q/DQ model, float16 and bfloat16 ones included, in graph order."""
    cuts = []
    for place in qdq_pairs(model):
        if place.quantize is not None:
            kind = place.kind or "activation"
            container = place.encoding.dtype.container
            cuts.append(
                Cut(place.site, kind, place.quantize.output[0], place.output, container, tensor_type=place.tensor_type)
            )
    for dynamic in dynamic_pairs(model):
        codes, *computed = dynamic.quantize.output
        cuts.append(
            Cut(dynamic.site, dynamic.kind, codes, dynamic.output, "uint8", tuple(computed), dynamic.tensor_type)
        )
    first: dict[str, NodeProto] = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type != "Cast" or "qsdk.site" not in facts:
            continue
        site = facts["qsdk.site"]
        if site not in first:
            first[site] = node
        if node.name.endswith("/cast_back") and first[site] is not node:
            cuts.append(
                Cut(
                    site,
                    facts["qsdk.kind"],
                    first[site].output[0],
                    node.output[0],
                    facts["qsdk.dtype"],
                    tensor_type=type_of_cast(node),
                )
            )
    return cuts


def cut_model(model: ModelProto, cuts: Sequence[Cut], free: Collection[str] = ()) -> tuple[ModelProto, dict[str, str]]:
    """Return the model in which every cut's tensor is an output, in order, and its readers read a new input.

    Scales and zero points that cuts compute follow, in the same order, then the outputs that stay.

    Args:
        model: it is not changed.
        cuts: the sites.
        free: outputs of the model that stay, which are no cut's.

    Returns:
        The model, and site -> name of its new input, for every site that something reads.
    """
    cut = load(model)
    feeds = {item.read: f"{item.site}/fed" for item in cuts}
    replace_nodes(cut.graph, [node for node in cut.graph.node if node.output[0] not in feeds])
    rename_inputs(cut.graph.node, feeds)
    kept = {value.name: value for value in model.graph.output if value.name in free}
    del cut.graph.output[:]
    for item in cuts:
        name, code = item.compared, _NUMPY_TYPES.get(item.dtype)
        if code is None:
            # the runtime's Python face knows no such arrays; both casts are exact
            signed = item.dtype.startswith("int")
            code = TensorProto.FLOAT if "float" in item.dtype else TensorProto.INT8 if signed else TensorProto.UINT8
            name = f"{item.site}/compared"
            cut.graph.node.append(helper.make_node("Cast", [item.compared], [name], name, to=code))
        cut.graph.output.append(helper.make_tensor_value_info(name, code, None))
    for name, code in zip((name for item in cuts for name in item.computed), cycle(_DYNAMIC_TYPES), strict=False):
        cut.graph.output.append(helper.make_tensor_value_info(name, code, []))
    cut.graph.output.extend(kept[name] for name in free)
    read = {name for node in cut.graph.node for name in reads(node)}
    fed = {item.site: feeds[item.read] for item in cuts if feeds[item.read] in read}
    types = {feeds[item.read]: FLOAT_CODES[item.tensor_type] for item in cuts}
    cut.graph.input.extend(helper.make_tensor_value_info(name, types[name], None) for name in fed.values())
    del cut.graph.value_info[:]
    return cut, fed


def cut_at_codes(model: ModelProto, cuts: Sequence[Cut], free: Sequence[str] = ()) -> tuple[ModelProto, dict[str, str]]:
    """Return the model in which every site's codes are an output, and its readers read a new input, quantized alike.

    Args:
        model: it is not changed.
        cuts: the sites, each of which has a QuantizeLinear.
        free: outputs of the model that stay, which are no cut's; they follow the codes.

    Returns:
        The model, and site -> name of its new float input, for every site that something reads.
    """
    cut = load(model)
    taken, makers = names_in(cut.graph), producers(cut.graph.node)
    renamed, fed, types, added = {}, {}, {}, []
    for item in cuts:
        fed[item.site] = unique(f"{item.site}/fed", taken)
        in_float32 = CAST_KEY in metadata(makers[item.read])  # the pair is, and its tensor is cast behind it
        types[fed[item.site]] = FLOAT_CODES[FLOAT32 if in_float32 else item.tensor_type]
        again = type(makers[item.compared])()
        again.CopyFrom(makers[item.compared])
        renamed[item.compared] = again.output[0] = unique(f"{item.site}/fed_codes", taken)
        again.input[0], again.name = fed[item.site], unique(f"{item.site}/fed_quantize", taken)
        added.append(again)
    rename_inputs(cut.graph.node, renamed)
    read = {name for node in cut.graph.node for name in reads(node)}
    kept = [node for node in added if node.output[0] in read]
    fed = {site: name for site, name in fed.items() if any(node.input[0] == name for node in kept)}
    for node in reversed(kept):
        cut.graph.node.insert(0, node)
    kept_outputs = {value.name: value for value in model.graph.output if value.name in free}
    del cut.graph.output[:]
    for item in cuts:
        name, code = item.compared, TensorProto.DataType.Value(item.dtype.upper())
        if item.dtype not in _NUMPY_CODES:
            # the runtime's Python face knows no such arrays; the cast is exact
            name, code = unique(f"{item.site}/compared", taken), TensorProto.FLOAT
            cut.graph.node.append(helper.make_node("Cast", [item.compared], [name], name, to=code))
        cut.graph.output.append(helper.make_tensor_value_info(name, code, None))
    cut.graph.output.extend(kept_outputs[name] for name in free)
    cut.graph.input.extend(helper.make_tensor_value_info(name, types[name], None) for name in fed.values())
    del cut.graph.value_info[:]
    return cut, fed


def cut_at_values(
    model: ModelProto, cuts: Sequence[Cut], free: Sequence[str] = ()
) -> tuple[ModelProto, dict[str, str]]:
    """Return the model of `cut_at_codes` with what each site's readers read as its outputs, in place of the codes.

    A runtime that removes a pair of nodes, with its rounding and its bounds, does so behind these outputs too, while
    codes that leave the model would keep it from that.
    """
    cut, fed = cut_at_codes(model, cuts, free)
    makers, taken = producers(model.graph.node), names_in(cut.graph)
    left = list(cut.graph.output)[len(cuts) :]
    del cut.graph.output[:]
    for item in cuts:
        maker = makers[item.read]
        found = maker if maker.op_type == "DequantizeLinear" else makers[maker.input[0]]
        again = NodeProto()
        again.CopyFrom(found)
        again.input[0], again.output[0] = item.compared, unique(f"{item.site}/value", taken)
        again.name = unique(f"{item.site}/dequantize_again", taken)
        cut.graph.node.append(again)
        type_code = FLOAT_CODES[item.tensor_type if found is maker else FLOAT32]
        cut.graph.output.append(helper.make_tensor_value_info(again.output[0], type_code, None))
    cut.graph.output.extend(left)
    return cut, fed


def session_with_reads(model: ModelProto, providers: Providers) -> tuple[ort.InferenceSession, dict[str, str]]:
    """Return a session that also outputs what each site's readers read; and site -> name of that tensor."""
    exposed = load(model)
    cuts = find_cuts(exposed)
    reads = {cut.site: cut.read for cut in cuts}
    known = {value.name for value in exposed.graph.output}
    types = {cut.read: FLOAT_CODES[cut.tensor_type] for cut in cuts}
    wanted = [name for name in dict.fromkeys(reads.values()) if name not in known]
    exposed.graph.output.extend(helper.make_tensor_value_info(name, types[name], None) for name in wanted)
    insert_barriers(exposed)
    return simulation_session(exposed, providers=providers), reads
