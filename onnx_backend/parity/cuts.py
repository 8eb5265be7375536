"""Cut a Q/DQ model at its sites, so that the readers of each site read a new input."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backend.proto.graph_queries import names_in, producers, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import metadata, rename_inputs, replace_nodes
from onnx_backend.proto.subgraphs import reads
from onnx_backend.qdq.read import CAST_KEY, FLOAT32, FLOAT_CODES, dynamic_pairs, qdq_pairs, type_of_cast
from onnx_backend.runtime.providers import Providers
from onnx_backend.runtime.session import simulation_session
from onnx_backend.workarounds.onnxruntime_barriers import insert_barriers

_NUMPY_TYPES = frozenset({"uint8", "int8", "uint16", "int16", "float16"})  # that the runtime returns as arrays
Way = Literal["reads", "codes", "values"]
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
            codes, dtype = place.quantize.output[0], place.encoding.dtype.container
            kind = place.kind or "activation"
            cuts.append(Cut(place.site, kind, codes, place.output, dtype, tensor_type=place.tensor_type))
    for dynamic in dynamic_pairs(model):
        codes, *computed = dynamic.codes
        read, tensor_type = dynamic.output, dynamic.tensor_type
        stored = "int8" if dynamic.spec.dynamic == "token" else "uint8"
        cuts.append(Cut(dynamic.site, dynamic.kind, codes, read, stored, tuple(computed), tensor_type))
    first: dict[str, NodeProto] = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type != "Cast" or "qsdk.site" not in facts:
            continue
        site = facts["qsdk.site"]
        first.setdefault(site, node)
        if node.name.endswith("/cast_back") and first[site] is not node:
            narrow, dtype = first[site].output[0], facts["qsdk.dtype"]
            cuts.append(Cut(site, facts["qsdk.kind"], narrow, node.output[0], dtype, tensor_type=type_of_cast(node)))
    return cuts


def cut_model(
    model: ModelProto, cuts: Sequence[Cut], free: Collection[str] = (), way: Way = "reads"
) -> tuple[ModelProto, dict[str, str]]:
    """Return a copy whose outputs are the sites' codes, in order; and site -> the new input that its readers read.

    With `reads` the readers of a site read what is given as it is. With `codes` they read it behind a copy of the
    site's own pair, so that a runtime fuses what it fuses in the whole model. With `values` what is dequantized leaves
    in place of the codes besides: codes that leave the model would keep a runtime from removing a pair, with its
    rounding and its bounds. Scales and zero points that the model computes follow, then the outputs in `free`.
    """
    cut = load(model)
    graph, taken, makers = cut.graph, names_in(cut.graph), producers(model.graph.node)
    fed = {item.site: unique(f"{item.site}/fed", taken) for item in cuts}
    if way == "reads":
        renamed = {item.read: fed[item.site] for item in cuts}
        replace_nodes(graph, [node for node in graph.node if node.output[0] not in renamed])
        rename_inputs(graph.node, renamed)
    else:
        pairs = [_copied(makers[item.compared], fed[item.site], f"{item.site}/fed_codes", taken) for item in cuts]
        rename_inputs(graph.node, {item.compared: pair.output[0] for item, pair in zip(cuts, pairs, strict=True)})
        read = _tensors_read(graph)
        replace_nodes(graph, [*(pair for pair in pairs if pair.output[0] in read), *graph.node])
    read = _tensors_read(graph)
    fed = {site: name for site, name in fed.items() if name in read}
    outputs = [_compared(graph, item, makers, taken, way) for item in cuts]
    for item in cuts:
        outputs += [_value(name, code) for name, code in zip(item.computed, _DYNAMIC_TYPES, strict=False)]
    kept = {value.name: value for value in model.graph.output}
    outputs += [kept[name] for name in free]
    del graph.output[:], graph.value_info[:]
    graph.output.extend(outputs)
    for item in cuts:
        if item.site in fed:
            # a pair in float32 may stand in front of a cast to the type of the tensor
            in_float32 = way != "reads" and CAST_KEY in metadata(makers[item.read])
            graph.input.append(_value(fed[item.site], FLOAT_CODES[FLOAT32 if in_float32 else item.tensor_type]))
    return cut, fed


def _compared(
    graph: GraphProto, item: Cut, makers: Mapping[str, NodeProto], taken: set[str], way: Way
) -> ValueInfoProto:
    """Return the output in which a site is compared, with the node that makes it where that is no tensor yet."""
    if way == "values":
        maker = makers[item.read]
        dequantize = maker if maker.op_type == "DequantizeLinear" else makers[maker.input[0]]
        graph.node.append(_copied(dequantize, item.compared, f"{item.site}/value", taken))
        return _value(graph.node[-1].output[0], FLOAT_CODES[item.tensor_type if dequantize is maker else FLOAT32])
    if item.dtype in _NUMPY_TYPES:
        return _value(item.compared, TensorProto.DataType.Value(item.dtype.upper()))
    # the runtime's Python face knows no such arrays; the cast is exact
    name = unique(f"{item.site}/compared", taken)
    graph.node.append(helper.make_node("Cast", [item.compared], [name], name, to=TensorProto.FLOAT))
    return _value(name, TensorProto.FLOAT)


def _copied(node: NodeProto, source: str, name: str, taken: set[str]) -> NodeProto:
    again = NodeProto()
    again.CopyFrom(node)
    again.input[0] = source
    again.name = again.output[0] = unique(name, taken)
    return again


def _tensors_read(graph: GraphProto) -> set[str]:
    return {name for node in graph.node for name in reads(node)}


def _value(name: str, code: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, code, None)


def with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    """Return a copy of a model that also gives these tensors, behind its own outputs."""
    exposed = load(model)
    known = {value.name for value in (*exposed.graph.output, *exposed.graph.input)}
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    return exposed


def session_with_reads(model: ModelProto, providers: Providers) -> tuple[ort.InferenceSession, dict[str, str]]:
    """Return a session that also outputs what each site's readers read; and site -> name of that tensor."""
    exposed = load(model)
    cuts = find_cuts(exposed)
    known = {value.name for value in exposed.graph.output}
    types = {cut.read: FLOAT_CODES[cut.tensor_type] for cut in cuts if cut.read not in known}
    exposed.graph.output.extend(_value(name, code) for name, code in types.items())
    insert_barriers(exposed)
    return simulation_session(exposed, providers=providers), {cut.site: cut.read for cut in cuts}
