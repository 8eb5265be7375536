"""Casts around the ops that ONNX Runtime's CPU provider has no kernel for in bfloat16, float64 or float16.

Such an op reads and computes float32, and its results are cast back, so that every tensor between two ops has the
values and the dtype that the model declares. The runtime neither removes such a pair of Casts nor moves it. In float16
it would insert casts by itself, without those that round between two such ops: only simulations need ours.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import consumers, names_in, producers, unique
from onnx_backend.proto.nodes import attributes, is_mark, metadata, rename_inputs, replace_nodes, retain, set_metadata
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import all_nodes, bodies
from onnx_backend.proto.weightless import dtype_name, inferred_skeleton
from onnx_backend.readers import words

_CAST, _ATTRIBUTES = "kernel_cast", "kernel_attributes"
ONE_ROUNDING = "one_rounding"  # metadata of a node whose result the module does not round on its own
_CODES: Mapping[str, int] = {
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
    "float16": TensorProto.FLOAT16,
}
_NAMES: Mapping[int, str] = {code: name for name, code in _CODES.items()}
_STANDARD = ("", "ai.onnx")
#: dtypes that a file needs the casts for
LACKING = frozenset({"bfloat16", "float64"})
#: dtypes that a simulation needs them for
ROUNDED = frozenset(_CODES)


_MOVING = words(
    "Cast CastLike Concat ConstantOfShape Flatten Gather GatherElements GatherND Identity Reshape ScatterElements "
    "ScatterND Shape Slice Split Squeeze Transpose Unsqueeze"
)
#: dtype -> ops whose CPU kernels take it wherever their schema does (measured, onnxruntime 1.32; of float16 only some);
#: `tests/onnx_backend/workarounds/test_kernel_casts.py` derives the table again on the installed runtime
KERNELS: Mapping[str, frozenset[str]] = {
    "bfloat16": _MOVING | words("IsInf Sign"),
    # those that move or choose values, and Q/DQ; all others round once, as float32 kernels between casts do
    "float16": _MOVING | words("Clip Compress DequantizeLinear Dropout Expand Max Min QuantizeLinear Sign"),
    "float64": _MOVING
    | words(
        "Abs Add ArgMax ArgMin Attention BatchNormalization Ceil Clip Compress Cos CumSum DepthToSpace Div Dropout "
        "Einsum Equal Exp Expand Floor Gemm Greater GreaterOrEqual GroupNormalization IsInf IsNaN LayerNormalization "
        "Less LessOrEqual Log LogSoftmax LpNormalization MatMul Max MaxPool Min Mod Mul Neg Pad Pow RMSNormalization "
        "Range Reciprocal ReduceL1 ReduceL2 ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare Relu ReverseSequence Round Shrink Sigmoid Sign Sin Size Softmax SpaceToDepth Sqrt Sub Sum "
        "Tanh Tile TopK Trilu Where"
    ),
}
#: ops whose kernels take every dtype, or whose operands no Cast can change
_ANY_DTYPE = words(
    "Constant If Loop Scan ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt "
    "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap SplitToSequence"
)
#: attributes that hold the number of a dtype
_DTYPE_ATTRIBUTES = words("dtype output_datatype output_dtype precision softmax_precision stash_type to")


@dataclass
class _Scope:
    """A graph whose nodes are being rewritten.

    Attributes:
        types: tensor of this graph -> dtype, "" where it is unknown.
        outer: the scope of the graph around a body.
        nodes: the rewritten nodes so far.
        casts: tensor -> its values in float32.
    """

    types: dict[str, str]
    outer: "_Scope | None"
    nodes: list[NodeProto] = field(default_factory=list)
    casts: dict[str, str] = field(default_factory=dict)

    def owner(self, name: str) -> "_Scope | None":
        """Return the scope that a tensor belongs to."""
        if name in self.types:
            return self
        return None if self.outer is None else self.outer.owner(name)

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor that a node of this graph names, "" where it is unknown."""
        owner = self.owner(name)
        return "" if owner is None else owner.types[name]


def insert_kernel_casts(model: ModelProto, dtypes: Collection[str] = LACKING) -> None:
    """Surround each op that has no kernel for the dtype of its tensors by Casts, in place; bodies too.

    A tensor has one Cast, which all its readers share, also those in bodies. Ops of other domains stay as they are.
    """
    if has_other_floats(model, dtypes):
        _Inserter(model, dtypes).rewrite(model.graph, inferred_skeleton(model).graph, None)


def note_single_roundings(model: ModelProto) -> None:
    """Note on each node of a traced module, in place, if the module computes its result inside of one of its own ops.

    Every op of the module ends in a mark. What it is exported as in several nodes, a Linear as MatMul and Add, it
    computes in float32 and rounds once; so does the file, where `insert_kernel_casts` casts these nodes.
    """
    if not has_other_floats(model, ROUNDED):
        return
    marked = {name for node in model.graph.node if is_mark(node) for name in node.input}
    rounded = marked | {value.name for value in model.graph.output}
    for node in model.graph.node:
        if not is_mark(node) and node.op_type not in _MOVING and not rounded.intersection(node.output):
            set_metadata(node, **{ONE_ROUNDING: "1"})


def has_other_floats(model: ModelProto, dtypes: Collection[str] = LACKING) -> bool:
    """Return True if a tensor of these dtypes is declared, stored or made anywhere in a model."""
    codes = {_CODES[dtype] for dtype in dtypes}
    return _declares(model.graph, codes) or any(_makes(node, codes) for node in all_nodes(model.graph.node))


def _declares(graph: GraphProto, codes: Collection[int]) -> bool:
    values = (*graph.input, *graph.output, *graph.value_info)
    declared = any(value.type.tensor_type.elem_type in codes for value in values)
    return declared or any(tensor.data_type in codes for tensor in graph.initializer)


def _makes(node: NodeProto, codes: Collection[int]) -> bool:
    """Return True if an attribute of a node, or the body that it carries, names one of the dtypes."""
    named = any(_code_of(attribute) in codes for attribute in node.attribute)
    return named or any(_declares(body, codes) for _, body in bodies(node))


def _code_of(attribute: AttributeProto) -> int:
    """Return the number of the dtype that an attribute names or holds, or 0."""
    if attribute.type == AttributeProto.TENSOR:
        return attribute.t.data_type
    return attribute.i if attribute.name in _DTYPE_ATTRIBUTES else 0


class _Inserter:
    """What all graphs of a model share while Casts are inserted: its opset and the names in use."""

    def __init__(self, model: ModelProto, dtypes: Collection[str]) -> None:
        self._codes = {dtype: _CODES[dtype] for dtype in dtypes}
        self._opset = min(opset_of(model), onnx.defs.onnx_opset_version())
        self._taken = names_in(model.graph)
        self._readers = consumers(model.graph.node)
        self._outputs = {value.name for value in model.graph.output}
        self._widened: set[str] = set()  # tensors that stay in float32, whatever the model declares

    def rewrite(self, graph: GraphProto, inferred: GraphProto, outer: _Scope | None) -> None:
        """Rewrite the nodes of a graph; `inferred` is the same graph with the types of its tensors."""
        scope = _Scope(_types_in(graph, inferred), outer)
        for node in graph.node:  # what inference leaves open, as it does behind GroupNormalization
            scope.types |= {name: _dtype_by_schema(node, name, scope, self._opset) for name in node.output if name}
        for node, typed in zip(graph.node, inferred.node, strict=True):
            for (_, body), (_, typed_body) in zip(bodies(node), bodies(typed), strict=True):
                self.rewrite(body, typed_body, scope)
            if self._runs(node, scope):
                scope.nodes.append(node)
            else:
                self._surround(node, scope)
        replace_nodes(graph, scope.nodes)
        if outer is None and self._widened:
            retain(graph.value_info, lambda value: value.name not in self._widened)

    def _runs(self, node: NodeProto, scope: _Scope) -> bool:
        if node.domain not in _STANDARD or node.op_type in _ANY_DTYPE:
            return True
        if self._widened.intersection(node.input):
            return False
        reads, writes = ([scope.dtype(name) for name in names] for names in (node.input, node.output))
        needed = {*reads, *writes, *map(self._dtype_of, node.attribute)} & self._codes.keys()
        if any(node.op_type not in KERNELS[dtype] for dtype in needed):
            return False
        known = [(at, dtype) for at, dtype in enumerate(reads) if dtype in needed]
        return all(takes_dtype(node.op_type, at, dtype, self._opset) for at, dtype in known)

    def _dtype_of(self, attribute: AttributeProto) -> str:
        """Return which of the dtypes an attribute names or holds, or ""."""
        name = _NAMES.get(_code_of(attribute), "")
        return name if name in self._codes else ""

    def _surround(self, node: NodeProto, scope: _Scope) -> None:
        for at, name in enumerate(node.input):
            if scope.dtype(name) in self._codes:
                node.input[at] = self._in_float32(name, scope)
        found = {attribute.name: self._dtype_of(attribute) for attribute in node.attribute}
        changed = {name: dtype for name, dtype in found.items() if dtype}
        if changed:
            set_metadata(node, **{_ATTRIBUTES: ",".join(f"{name}={dtype}" for name, dtype in changed.items())})
            _set_dtypes(node, dict.fromkeys(changed, TensorProto.FLOAT))
        scope.nodes.append(node)
        for at, name in enumerate(node.output):
            if name and self._stays_float32(node, name, scope):
                scope.types[name] = "float32"
                self._widened.add(name)
            elif name and scope.types[name] in self._codes:
                node.output[at] = unique(f"{name}/float32", self._taken)
                scope.nodes.append(self._cast(node.output[at], name, self._codes[scope.types[name]]))

    def _stays_float32(self, node: NodeProto, name: str, scope: _Scope) -> bool:
        """Return True if a result is rounded only behind its readers, which all compute in float32."""
        dtype = scope.types[name]
        if dtype not in self._codes or scope.outer is not None or f"qsdk.{ONE_ROUNDING}" not in metadata(node):
            return False
        readers = self._readers.get(name, [])
        lacking = all(
            reader.domain in _STANDARD
            and (reader.op_type not in KERNELS[dtype] | _ANY_DTYPE or f"qsdk.{ONE_ROUNDING}" in metadata(reader))
            for reader in readers
        )
        return bool(readers) and lacking and name not in self._outputs

    def _in_float32(self, name: str, scope: _Scope) -> str:
        """Return the float32 copy of a tensor, made just before its first reader in the graph that it belongs to."""
        owner = scope.owner(name) or scope
        if name not in owner.casts:
            owner.casts[name] = unique(f"{name}/as_float32", self._taken)
            owner.nodes.append(self._cast(name, owner.casts[name], TensorProto.FLOAT))
        return owner.casts[name]

    def _cast(self, source: str, target: str, code: int) -> NodeProto:
        cast = helper.make_node("Cast", [source], [target], unique(f"{target}/kernel_cast", self._taken), to=code)
        set_metadata(cast, **{_CAST: "1"})
        return cast


def _types_in(graph: GraphProto, inferred: GraphProto) -> dict[str, str]:
    types = {name: "" for node in graph.node for name in node.output if name}
    types.update((value.name, "") for value in graph.input)
    for value in (*inferred.value_info, *inferred.input, *inferred.output):
        # the output of a body may be a tensor from outside of it
        if value.name in types and value.type.HasField("tensor_type"):
            types[value.name] = dtype_name(value.type.tensor_type.elem_type) if value.type.tensor_type.elem_type else ""
    types.update((tensor.name, dtype_name(tensor.data_type)) for tensor in graph.initializer)
    return types


def _dtype_by_schema(node: NodeProto, name: str, scope: _Scope, opset: int) -> str:
    """Return the dtype of a node's result; where it is unknown, that of an operand which by the schema has the same."""
    if scope.types[name] or node.domain not in _STANDARD:
        return scope.types[name]
    at = list(node.output).index(name)
    return next((scope.dtype(node.input[of]) for of in _operands_alike(node.op_type, at, opset, len(node.input))), "")


@cache
def _operands_alike(op: str, at: int, opset: int, count: int) -> tuple[int, ...]:
    """Return which of its first operands have the dtype of an op's result, by its schema."""
    try:
        schema = onnx.defs.get_schema(op, opset)
    except onnx.defs.SchemaError:
        return ()
    if at >= len(schema.outputs):
        return ()
    wanted = schema.outputs[at].type_str
    return tuple(of for of, operand in enumerate(schema.inputs[:count]) if operand.type_str == wanted)


@cache
def takes_dtype(op: str, at: int, dtype: str, opset: int) -> bool:
    """Return True if the schema of a standard op lets the input at a position have a dtype."""
    try:
        inputs = onnx.defs.get_schema(op, opset).inputs
    except onnx.defs.SchemaError:
        return True  # the runtime names ops that there are not
    name = "double" if dtype == "float64" else dtype
    return not inputs or f"tensor({name})" in inputs[min(at, len(inputs) - 1)].types


def _set_dtypes(node: NodeProto, codes: Mapping[str, int]) -> None:
    """Change the dtypes that attributes of a node, by name, hold or name."""
    for attribute in node.attribute:
        if attribute.name not in codes:
            continue
        if attribute.type == AttributeProto.TENSOR:
            values = numpy_helper.to_array(attribute.t).astype(helper.tensor_dtype_to_np_dtype(codes[attribute.name]))
            attribute.t.CopyFrom(numpy_helper.from_array(values, attribute.t.name))
        else:
            attribute.i = codes[attribute.name]


def remove_kernel_casts(model: ModelProto) -> None:
    """Take the Casts of `insert_kernel_casts` out again, in place: ops read and write tensors of the model's dtypes."""
    _remove_in(model.graph)


def _remove_in(graph: GraphProto) -> None:
    for node in graph.node:
        for _, body in bodies(node):
            _remove_in(body)
    if not any(_is_kernel_cast(node) for node in graph.node):
        return
    outputs = {value.name for value in graph.output}
    readers, makers = consumers(graph.node), producers(graph.node)
    read_instead: dict[str, str] = {}
    made_instead: dict[str, str] = {}
    kept = []
    for node in graph.node:
        source, target = (node.input[0], node.output[0]) if _is_kernel_cast(node) else ("", "")
        if source and attributes(node)["to"] == TensorProto.FLOAT and target not in outputs:
            read_instead[target] = read_instead.get(source, source)
        elif source in makers and source not in outputs and readers[source] == [node]:
            made_instead[source] = target
        else:
            kept.append(node)
    rename_inputs(kept, read_instead)
    for node in kept:
        node.output[:] = [made_instead.get(name, name) for name in node.output]
        _restore_attributes(node)
    replace_nodes(graph, kept)


def _is_kernel_cast(node: NodeProto) -> bool:
    return node.op_type == "Cast" and f"qsdk.{_CAST}" in metadata(node)


def _restore_attributes(node: NodeProto) -> None:
    """Give the attributes that were changed their dtypes again."""
    for at, entry in enumerate(node.metadata_props):
        if entry.key == f"qsdk.{_ATTRIBUTES}":
            pairs = (pair.partition("=") for pair in entry.value.split(","))
            _set_dtypes(node, {name: _CODES[dtype] for name, _, dtype in pairs})
            del node.metadata_props[at]
            return
