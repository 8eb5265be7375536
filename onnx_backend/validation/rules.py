"""The rules on quantized models that the usual checkers lack; every finding names its node and a remedy.

Each rule looks at one node in its scope and yields findings: on types, on shapes, on stored values, on pairs, and on
what ONNX Runtime 1.31 (CPU) cannot load or run.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array, bytes_of
from onnx_backend.proto.nodes import attributes, metadata
from onnx_backend.proto.opsets import LARGEST_OPSET, opset_of
from onnx_backend.proto.weightless import checkable
from onnx_backend.validation.scope import (
    CONTRIB,
    STANDARD,
    Finding,
    Scope,
    Shape,
    error,
    is_quantizer,
    scopes,
    type_name,
    warning,
)
from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.numerics.dtypes import WHOLE_BYTES, DType, dtype_named
from qsdk.core.numerics.encoding import storage_type

LARGEST_IR = 13
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
_STORED_FLOATS = (*_FLOATS, _T.FLOAT8E8M0, _T.DOUBLE)
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
_REMEDY = "give one scale per tensor, per index of axis, or per block"
#: the range of each type, for the int32 fields in which a file may store it
_HELD: Mapping[int, tuple[int, int]] = {
    _T.INT8: (-128, 127),
    _T.UINT8: (0, 255),
    _T.INT16: (-(2**15), 2**15 - 1),
    _T.UINT16: (0, 2**16 - 1),
}


# --- types -----------------------------------------------------------------------------------------------------------


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


# --- shapes ----------------------------------------------------------------------------------------------------------


def shapes(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield errors if the shapes of scale and zero point do not fit each other, x, axis and block_size."""
    name, options = scope.name(node), attributes(node)
    scale, x = scope.shape(scope.input(node, 1)), scope.shape(node.input[0])
    axis, block = int(options.get("axis", 1)), int(options.get("block_size", 0))
    if scale is None:
        return
    zero_point = scope.shape(scope.input(node, 2)) if scope.input(node, 2) else None
    if zero_point is not None and not _same(zero_point, scale):
        problem = f"the zero point's shape {zero_point} is not the scale's {scale}"
        remedy = "give one zero point per scale, of the same shape"
        yield (warning if {zero_point, scale} == {(), (1,)} else error)(name, "shape", problem, remedy)
    problem = _without_x(scale, block) or (_against(x, scale, axis, block) if x is not None else "")
    if problem:
        yield error(name, "shape", problem, _REMEDY)


def _without_x(scale: Shape, block: int) -> str:
    """Return a problem of the scale's shape for any x, or ""."""
    if 0 in scale:
        return f"the scale of shape {scale} is empty"
    if block < 0:
        return f"block_size {block} is negative"
    if not block and len(scale) > 1:
        return f"a scale of shape {scale} needs block_size"
    return f"block_size {block} with one scale of shape ()" if block and not scale else ""


def _against(x: Shape, scale: Shape, axis: int, block: int) -> str:
    if scale == () or (scale == (1,) and not block):
        return ""  # per tensor
    if not -len(x) <= axis < len(x):
        return f"axis {axis} does not exist in a tensor of shape {x}"
    axis %= len(x)
    if not block:
        return "" if _agree(scale[0], x[axis]) else f"{scale[0]} scales for {x[axis]} channels on axis {axis} of {x}"
    if len(scale) != len(x):
        return f"a scale of shape {scale} has not the rank of {x}, which blocks need"
    length, count = x[axis], scale[axis]
    wanted = tuple(_blocks(length, block) if i == axis else n for i, n in enumerate(x))
    if _same(scale, wanted):
        return ""
    text = f"a scale of shape {scale} does not fit blocks of {block} along axis {axis} of {x}; it would be {wanted}"
    legal = _legal_blocks(length, count) if length is not None and count is not None else ""
    return f"{text}{legal}"


def _blocks(length: int | None, block: int) -> int | None:
    return None if length is None else -(-length // block)


def _legal_blocks(length: int, count: int) -> str:
    """Return the block sizes that give this count of blocks: ceil(D/S) to ceil(D/(S-1)) - 1, by the spec."""
    smallest = -(-length // count)
    largest = length if count == 1 else -(-length // (count - 1)) - 1
    if smallest > largest:
        return f", and no block size cuts {length} into {count}"
    return f", or block_size {smallest}" + (f" to {largest}" if largest > smallest else "")


def _same(left: Shape, right: Shape) -> bool:
    return len(left) == len(right) and all(_agree(a, b) for a, b in zip(left, right, strict=True))


def _agree(left: int | None, right: int | None) -> bool:
    return left is None or right is None or left == right


# --- stored values ---------------------------------------------------------------------------------------------------


def scales(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield a finding unless scales are positive and finite, and zero points of float8 and int32 codes are 0."""
    name, stored = scope.name(node), scope.stored.get(scope.input(node, 1))
    if stored is not None and stored.data_type in _STORED_FLOATS and 0 not in stored.dims:
        low, high = _ends(array(stored))
        if not (low > 0 and np.isfinite(high)):
            bad = high if low > 0 else low
            problem = f"the scale {node.input[1]!r} holds {bad}; scales are positive and finite"
            yield error(name, "scale", problem, "calibrate again")
    zero_point = scope.stored.get(scope.input(node, 2))
    if zero_point is None or zero_point.data_type not in (_T.INT32, *FLOAT8, _T.FLOAT4E2M1):
        return
    if array(zero_point).astype(np.float32).any():
        kind = type_name(zero_point.data_type)
        problem = f"the zero point of codes of {kind} is not 0"
        if kind == "INT32":
            yield warning(name, "zero_point", f"{problem}; not every runtime subtracts it", "drop the zero point")
        else:
            yield error(name, "zero_point", f"{problem}, which the runtime refuses", "drop the zero point")


def float_values(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if a stored float tensor that the graph quantizes holds NaN, which has no code."""
    stored = scope.stored.get(node.input[0])
    is_float = stored is not None and stored.data_type in _STORED_FLOATS and 0 not in stored.dims
    if stored is not None and is_float and np.isnan(_ends(array(stored))[0]):
        problem = f"it quantizes {node.input[0]!r}, which holds NaN"
        yield error(scope.name(node), "grid", problem, "repair the weights and export again")


def grid(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if codes or zero points are outside the grid that the metadata declares (`qsdk.dtype`)."""
    declared = metadata(node).get("qsdk.dtype")
    if declared is None:
        return
    name, code = scope.name(node), scope.type(node.input[0])
    dtype = _known(declared)
    if dtype is None or not dtype.is_quantized:
        yield error(name, "grid", f"its metadata declares {declared!r}, which is no quantized dtype", "update qsdk")
        return
    if type_name(code) == WHOLE_BYTES.get(dtype.container, "").upper():
        dtype = replace(dtype, container=WHOLE_BYTES[dtype.container])
    container = int(helper.np_dtype_to_tensor_dtype(storage_type(dtype)))
    if code and code != container:
        problem = (
            f"its metadata declares {dtype.name}, which is stored as {type_name(container)}, not {type_name(code)}"
        )
        yield error(name, "grid", problem, "export the model again")
    elif dtype.narrows_container:
        for position, what in ((0, "codes"), (2, "zero points")):
            stored = scope.stored.get(scope.input(node, position))
            if stored is not None and 0 not in stored.dims:
                yield from _on_grid(array(stored), dtype, what, name)


def _known(name: str) -> DType | None:
    try:
        return dtype_named(name)
    except ConfigError:
        return None


def _on_grid(values: npt.NDArray[Any], dtype: DType, what: str, name: str) -> Iterator[Finding]:
    low, high = _ends(values)
    if low < dtype.lo or high > dtype.hi:
        problem = f"its {what} reach from {low:g} to {high:g}, off the grid {dtype.lo:g}..{dtype.hi:g} of {dtype.name}"
        yield error(name, "grid", problem, "export the model again, or correct qsdk.dtype in the node's metadata")


def _ends(values: npt.NDArray[Any]) -> tuple[float, float]:
    """Return the smallest and largest value; both are NaN if one is. Only types unknown to NumPy are copied."""
    if values.dtype.kind not in "fiu":
        values = values.astype(np.int8 if "int" in values.dtype.name else np.float32)
    return float(values.min()), float(values.max())


def stored_tensors(scope: Scope) -> Iterator[Finding]:
    """Yield an error for a stored tensor with too few bytes for its shape, or values beyond its type."""
    for name, tensor in scope.own.items():
        if tensor.data_location == _T.EXTERNAL or not bytes_of(tensor.data_type, tensor.dims):
            continue
        problem = _size_problem(tensor) or _overflow_problem(tensor)
        if problem:
            yield error(scope.path + name, "stored", problem, "the file is damaged; export it again")


def _size_problem(tensor: TensorProto) -> str:
    needed = bytes_of(tensor.data_type, tensor.dims)
    if tensor.HasField("raw_data"):
        size = len(tensor.raw_data)  # one tensor at a time is copied for this
        return "" if size == needed else f"the stored tensor has {size} bytes where {tuple(tensor.dims)} needs {needed}"
    try:
        array(tensor)
    except ValueError as wrong:
        return f"the stored tensor does not hold what its shape {tuple(tensor.dims)} needs ({wrong})"
    return ""


def _overflow_problem(tensor: TensorProto) -> str:
    if tensor.data_type not in _HELD or not tensor.int32_data:
        return ""
    (low, high), ends = _HELD[tensor.data_type], (min(tensor.int32_data), max(tensor.int32_data))
    if low <= ends[0] and ends[1] <= high:
        return ""
    return f"the stored tensor reaches from {ends[0]} to {ends[1]}, which {type_name(tensor.data_type)} cannot hold"


# --- pairs -----------------------------------------------------------------------------------------------------------


def pairs(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if a DequantizeLinear has not the scale, zero point, axis and block size of its QuantizeLinear."""
    quantize = scope.makers.get(node.input[0])
    if quantize is None or quantize.op_type != "QuantizeLinear" or not is_quantizer(quantize):
        return
    name, other = scope.name(node), scope.name(quantize)
    for position, what in ((1, "scale"), (2, "zero point")):
        if not _same_values(scope.input(quantize, position), scope.input(node, position), scope):
            problem = f"its {what} is not that of {other!r}, whose output it reads"
            yield error(name, "pair", problem, f"give both nodes the same {what}")
    left, right = attributes(quantize), attributes(node)
    scale = scope.shape(scope.input(node, 1))
    if scale is None or math.prod(2 if n is None else n for n in scale) <= 1:
        return  # per tensor, where axis means nothing
    for option, default in (("axis", 1), ("block_size", 0)):
        if not _same_option(option, left.get(option, default), right.get(option, default), scope.shape(node.input[0])):
            problem = f"its {option} is not that of {other!r}, whose output it reads"
            yield error(name, "pair", problem, f"give both nodes the same {option}")


def _same_option(option: str, left: int, right: int, shape: tuple[int | None, ...] | None) -> bool:
    if option == "axis" and shape is not None and len(shape):
        return left % len(shape) == right % len(shape)
    return left == right


def _same_values(left: str, right: str, scope: Scope) -> bool:
    """Return True if two parameters hold the same; an absent one is 0, and computed ones pass."""
    if left == right:
        return True
    if any(name and name not in scope.stored for name in (left, right)):
        return True
    first, second = (array(scope.stored[name]).astype(np.float32) if name else np.zeros(()) for name in (left, right))
    if not (first.any() or second.any()):
        return True
    fits = first.shape == second.shape or first.size == 1 or second.size == 1
    return fits and bool((first == second).all())


def unused(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield a warning if nothing reads the result; codes may also leave the model, or be read by integer ops."""
    if node.output[0] not in scope.read:
        yield warning(scope.name(node), "unused", f"nothing reads its output {node.output[0]!r}", "remove the node")


# --- the runtime's CPU -----------------------------------------------------------------------------------------------


def versions(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning if IR version or opset is beyond the runtime's."""
    if model.ir_version > LARGEST_IR:
        problem = f"IR version {model.ir_version} is beyond the runtime's {LARGEST_IR}"
        yield warning("", "runtime", problem, f"stamp IR {LARGEST_IR} or lower (10 goes with opset 21)")
    if opset_of(model) > LARGEST_OPSET:
        problem = f"opset {opset_of(model)} is beyond the runtime's {LARGEST_OPSET}"
        yield warning("", "runtime", problem, "export at opset 21, or 25 for 2-bit types")


def kernels(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield a warning for types and forms of QuantizeLinear and DequantizeLinear without a kernel."""
    name, x, scale = scope.name(node), scope.type(node.input[0]), scope.type(scope.input(node, 1))
    quantizes = node.op_type == "QuantizeLinear"
    code = scope.made_type(node) if quantizes else x
    lacking = [t for t in (code, scale) if t in (_T.FLOAT4E2M1, *FLOAT6, _T.BFLOAT16, _T.FLOAT8E8M0)]
    if quantizes and x in (_T.INT32, _T.BFLOAT16):
        lacking.append(x)
    if lacking:
        problem = f"the runtime has no kernel for {node.op_type} with {type_name(lacking[0])}"
        yield warning(name, "kernel", problem, "choose another dtype to run it there")
    elif quantizes and x and scale and x != scale and scope.opset >= 23:
        problem = f"the runtime cannot quantize {type_name(x)} with a scale of {type_name(scale)}"
        yield warning(name, "kernel", problem, f"store the scale as {type_name(x)}")
    shape = scope.shape(scope.input(node, 1))
    if shape == (1,) and attributes(node).get("block_size", 0) > 0:
        problem = "the runtime refuses block_size where there is one scale for the whole of a vector"
        yield warning(name, "kernel", problem, "drop block_size and store the scale as a scalar")


# --- all of them -----------------------------------------------------------------------------------------------------


_Rule = Callable[[NodeProto, Scope], Iterator[Finding]]
_BOTH: tuple[_Rule, ...] = (
    conflict,
    quantized_type,
    float_types,
    node_attributes,
    shapes,
    scales,
    kernels,
    unused,
)
_RULES: Mapping[str, tuple[_Rule, ...]] = {
    "QuantizeLinear": (*_BOTH, float_values),
    "DequantizeLinear": (*_BOTH, grid, pairs),
}


def findings(model: ModelProto) -> Iterator[Finding]:
    """Yield what the rules find, and if nothing is wrong, what onnx's own checker finds."""
    known = list(scopes(model))
    found = list(versions(model))
    for scope, _ in known:
        found += stored_tensors(scope)
    if not any(finding.severity == "error" for finding in found):  # the values can be read
        for scope, nodes in known:
            for node in nodes:
                if is_quantizer(node) and len(node.input) > 1:
                    for rule in _RULES[node.op_type]:
                        found.extend(rule(node, scope))
    yield from found
    if not any(finding.severity == "error" for finding in found):
        yield from _checker(model)


def require_valid(model: ModelProto, where: str) -> None:
    """Refuse a model that cannot be loaded as it is; the FileFormatError names `where` and the node.

    A model that only lacks a kernel can still be opened, read and validated, and weights of any dtype can be simulated.
    """
    for finding in findings(model):
        if finding.severity == "error" or finding.rule == "runtime":
            at = f", node {finding.node!r}" if finding.node else ""
            raise FileFormatError(f"{where}{at}: {finding.problem}; {finding.remedy}")


def _checker(model: ModelProto) -> Iterator[Finding]:
    """Yield the error of onnx's own checker, last, because it repeats these findings without the node's name."""
    standard = all(entry.domain in STANDARD for entry in model.opset_import)
    try:
        onnx.checker.check_model(checkable(model), full_check=standard)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as wrong:
        problem = " ".join(str(wrong).split())
        yield error("", "checker", problem, "export the model again, or correct it where the checker says")
