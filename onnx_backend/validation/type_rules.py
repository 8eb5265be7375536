"""Rules on types: those that each opset has, and those allowed for zero points, `output_dtype` and scales."""

from collections.abc import Iterator, Mapping

from onnx import NodeProto, TensorProto

from onnx_backend.proto.nodes import attributes
from onnx_backend.proto.opsets import LARGEST_OPSET
from onnx_backend.validation.finding import Finding, error, warning
from onnx_backend.validation.scope import CONTRIB, Scope, type_name

_T = TensorProto
FLOAT8 = (_T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2, _T.FLOAT8E5M2FNUZ)
FLOAT6 = (27, 28)  # which older onnx does not name
_NEVER = 10**6
#: quantized type -> first opset whose QuantizeLinear and DequantizeLinear have it
_SINCE: Mapping[int, int] = {
    **dict.fromkeys((_T.UINT8, _T.INT8), 10),
    **dict.fromkeys(FLOAT8, 19),
    **dict.fromkeys((_T.UINT16, _T.INT16, _T.UINT4, _T.INT4), 21),
    _T.FLOAT4E2M1: 23,
    **dict.fromkeys((_T.UINT2, _T.INT2), 25),
    **dict.fromkeys(FLOAT6, 28),
}
#: type of x of a QuantizeLinear, or of a scale -> first opset that has it
_X_SINCE: Mapping[int, int] = {_T.FLOAT: 10, _T.INT32: 10, _T.FLOAT16: 19, _T.BFLOAT16: 19}
_SCALE_SINCE: Mapping[int, int] = {_T.FLOAT: 10, _T.FLOAT16: 19, _T.BFLOAT16: 19, _T.FLOAT8E8M0: 24}
_FLOATS = (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16)
_ATTRIBUTE_SINCE: Mapping[tuple[str, str], int] = {
    ("QuantizeLinear", "axis"): 13,
    ("QuantizeLinear", "saturate"): 19,
    ("QuantizeLinear", "block_size"): 21,
    ("QuantizeLinear", "output_dtype"): 21,
    ("QuantizeLinear", "precision"): 23,
    ("DequantizeLinear", "axis"): 13,
    ("DequantizeLinear", "block_size"): 21,
    ("DequantizeLinear", "output_dtype"): 23,
}


def conflict(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if `output_dtype` contradicts the zero point, or the declared type the node's result."""
    asked, name = int(attributes(node).get("output_dtype", 0)), scope.name(node)
    zero_point = scope.type(scope.input(node, 2)) if scope.input(node, 2) else 0
    if node.op_type == "QuantizeLinear" and asked and zero_point and asked != zero_point:
        problem = f"output_dtype {type_name(asked)} contradicts the zero point, which is {type_name(zero_point)}"
        yield error(name, "output_dtype", problem, "drop one of the two, or make them agree")
        return
    result, declared = scope.made_type(node), scope.types.get(node.output[0], 0)
    if result and declared and result != declared:
        problem = f"it makes {type_name(result)}, but the graph declares {node.output[0]!r} as {type_name(declared)}"
        if node.op_type == "QuantizeLinear" and not asked and not scope.input(node, 2):
            remedy = f"set output_dtype to {type_name(declared)}, or give a zero point of that type"
        else:
            remedy = "correct the declared type"
        yield error(name, "dtype", problem, remedy)


def quantized_type(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if the opset lacks the quantized type, or a DequantizeLinear's zero point has another one."""
    name = scope.name(node)
    if node.op_type == "QuantizeLinear":
        code = scope.made_type(node)
    else:
        code = scope.type(node.input[0])
        zero_point = scope.type(scope.input(node, 2)) if scope.input(node, 2) else 0
        if code and zero_point and code != zero_point:
            problem = f"it reads {type_name(code)} with a zero point of {type_name(zero_point)}"
            yield error(name, "dtype", problem, "give the zero point the type of the data")
        if code == _T.INT32:
            return  # a bias
    since = _first(_SINCE, code, node, contrib=(*FLOAT8, _T.UINT16, _T.INT16, _T.UINT4, _T.INT4))
    if code and since > scope.opset:
        legal = f"it exists from opset {since} on" if since < _NEVER else "it is no quantized type"
        problem = f"{type_name(code)} at opset {scope.opset}: {legal}"
        remedy = f"export at opset {since}" if since <= LARGEST_OPSET else "choose an integer or float8 type"
        yield error(name, "dtype", problem, remedy)


def float_types(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield errors if the types of x, of the scale or of DequantizeLinear's result are not allowed."""
    name, x, scale = scope.name(node), scope.type(node.input[0]), scope.type(scope.input(node, 1))
    since = _first(_SCALE_SINCE, scale, node, contrib=(_T.FLOAT16,))
    if scale and since > scope.opset:
        legal = f"which scales may be from opset {since} on" if since < _NEVER else "which no scale may be"
        problem = f"at opset {scope.opset} the scale {node.input[1]!r} is {type_name(scale)}, {legal}"
        yield error(name, "scale", problem, "store scales as float32")
    elif node.op_type == "QuantizeLinear":
        since = _first(_X_SINCE, x, node, contrib=(_T.FLOAT16,))
        if x and since > scope.opset:
            legal = f"which is possible from opset {since} on" if since < _NEVER else "which no opset allows"
            problem = f"at opset {scope.opset} it quantizes {type_name(x)}, {legal}"
            yield error(name, "dtype", problem, "cast to float32 first")
        elif x and scale and x != scale and 19 <= scope.opset < 23:
            problem = f"its scale is {type_name(scale)} and its input {type_name(x)}; before opset 23 they must agree"
            yield error(name, "scale", problem, "cast one of them")
    elif node.domain != CONTRIB:
        yield from _dequantized_type(node, scope)


def _dequantized_type(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    result = scope.made_type(node)
    if result and result not in _FLOATS and scope.opset >= 23:
        problem = f"it would give {type_name(result)}; DequantizeLinear gives FLOAT, FLOAT16 or BFLOAT16"
        yield error(scope.name(node), "output_dtype", problem, "set output_dtype to FLOAT")


def node_attributes(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield findings for attributes that are newer than the opset, or that have no effect."""
    name = scope.name(node)
    for attribute in node.attribute:
        first = _ATTRIBUTE_SINCE.get((node.op_type, attribute.name), 0)
        if first > scope.opset and node.domain != CONTRIB:
            problem = f"{attribute.name} at opset {scope.opset}: {node.op_type} has it from opset {first} on"
            yield error(name, "opset", problem, f"export at opset {max(first, 21)}, or drop the attribute")
    options, code = attributes(node), scope.made_type(node)
    if node.op_type == "QuantizeLinear" and options.get("saturate", 1) == 0 and code and code not in FLOAT8:
        problem = f"saturate=0 means nothing for {type_name(code)}, which always saturates"
        yield warning(name, "dtype", problem, "drop the attribute")
    precision = int(options.get("precision", 0))
    if precision and precision not in _FLOATS:
        problem = f"precision {type_name(precision)} is no type to divide in"
        yield error(name, "dtype", problem, "set precision to FLOAT, or drop it")
    elif precision and precision != _T.FLOAT:
        problem = f"precision {type_name(precision)} is ignored by ONNX Runtime, which divides in FLOAT"
        yield warning(name, "dtype", problem, "set precision to FLOAT: results will not depend on who runs the model")


def _first(table: Mapping[int, int], code: int, node: NodeProto, *, contrib: tuple[int, ...]) -> int:
    """Return the first opset that has a type; the runtime's own Q/DQ ops have some of them at every opset."""
    if node.domain == CONTRIB and code in contrib:
        return 0
    return table.get(code, _NEVER)
