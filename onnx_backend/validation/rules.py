"""The rules on quantized models that the usual checkers lack; every finding names its node and a remedy.

Each rule looks at one node in its scope and yields findings: on types, on shapes, on stored values, on pairs, and on
what ONNX Runtime 1.31 (CPU) cannot load or run.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper

from onnx_backend.proto.external_data import array, bytes_of
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.opsets import LARGEST_OPSET, opset_of
from onnx_backend.proto.weightless import checkable
from onnx_backend.qdq.forms import FORM_KEY
from onnx_backend.validation.scope import (
    STANDARD,
    Finding,
    Quantizer,
    Scope,
    Shape,
    error,
    is_quantizer,
    quantizer_of,
    quantizers_in,
    scopes,
    type_name,
    warning,
)
from qsdk.core.arrays import Array
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


def conflict(q: Quantizer) -> Iterator[Finding]:
    """Yield an error if `output_dtype` contradicts the zero point, or the declared type the node's result."""
    asked, given, output = int(q.options.get("output_dtype", 0)), q.zero_point.type, q.node.output[0]
    if q.quantizes and asked and given and asked != given:
        problem = f"output_dtype {type_name(asked)} contradicts the zero point, which is {type_name(given)}"
        yield error(q.name, "output_dtype", problem, "drop one of the two, or make them agree")
        return
    declared = q.scope.types.get(output, 0)
    if q.made_type and declared and q.made_type != declared:
        problem = f"it makes {type_name(q.made_type)}, but the graph declares {output!r} as {type_name(declared)}"
        remedy = "correct the declared type"
        if q.quantizes and not asked and not q.zero_point.name:
            remedy = f"set output_dtype to {type_name(declared)}, or give a zero point of that type"
        yield error(q.name, "dtype", problem, remedy)


def quantized_type(q: Quantizer) -> Iterator[Finding]:
    """Yield an error if the opset lacks the quantized type, or a DequantizeLinear's zero point has another one."""
    code = q.made_type if q.quantizes else q.x.type
    if not q.quantizes:
        if code and q.zero_point.type and code != q.zero_point.type:
            problem = f"it reads {type_name(code)} with a zero point of {type_name(q.zero_point.type)}"
            yield error(q.name, "dtype", problem, "give the zero point the type of the data")
        if code == _T.INT32:
            return  # a bias
    since = _first(_SINCE, code, q, contrib=(*FLOAT8, _T.UINT16, _T.INT16, _T.UINT4, _T.INT4))
    if code and since > q.scope.opset:
        legal = f"it exists from opset {since} on" if since < _NEVER else "it is no quantized type"
        problem = f"{type_name(code)} at opset {q.scope.opset}: {legal}"
        remedy = f"export at opset {since}" if since <= LARGEST_OPSET else "choose an integer or float8 type"
        yield error(q.name, "dtype", problem, remedy)


def float_types(q: Quantizer) -> Iterator[Finding]:
    """Yield errors if the types of x, of the scale or of DequantizeLinear's result are not allowed."""
    opset, x, scale = q.scope.opset, q.x.type, q.scale.type
    since = _first(_SCALE_SINCE, scale, q, contrib=(_T.FLOAT16,))
    if scale and since > opset:
        legal = f"which scales may be from opset {since} on" if since < _NEVER else "which no scale may be"
        problem = f"at opset {opset} the scale {q.scale.name!r} is {type_name(scale)}, {legal}"
        yield error(q.name, "scale", problem, "store scales as float32")
    elif q.quantizes:
        since = _first(_X_SINCE, x, q, contrib=(_T.FLOAT16,))
        if x and since > opset:
            legal = f"which is possible from opset {since} on" if since < _NEVER else "which no opset allows"
            problem = f"at opset {opset} it quantizes {type_name(x)}, {legal}"
            yield error(q.name, "dtype", problem, "cast to float32 first")
        elif x and scale and x != scale and 19 <= opset < 23:
            problem = f"its scale is {type_name(scale)} and its input {type_name(x)}; before opset 23 they must agree"
            yield error(q.name, "scale", problem, "cast one of them")
    elif not q.is_contrib and q.made_type and q.made_type not in _FLOATS and opset >= 23:
        problem = f"it would give {type_name(q.made_type)}; DequantizeLinear gives FLOAT, FLOAT16 or BFLOAT16"
        yield error(q.name, "output_dtype", problem, "set output_dtype to FLOAT")


def node_attributes(q: Quantizer) -> Iterator[Finding]:
    """Yield findings for attributes that are newer than the opset, or that have no effect."""
    for attribute in q.options:
        first = _ATTRIBUTE_SINCE.get((q.node.op_type, attribute), 0)
        if first > q.scope.opset and not q.is_contrib:
            problem = f"{attribute} at opset {q.scope.opset}: {q.node.op_type} has it from opset {first} on"
            yield error(q.name, "opset", problem, f"export at opset {max(first, 21)}, or drop the attribute")
    if q.quantizes and q.options.get("saturate", 1) == 0 and q.made_type and q.made_type not in FLOAT8:
        problem = f"saturate=0 means nothing for {type_name(q.made_type)}, which always saturates"
        yield warning(q.name, "dtype", problem, "drop the attribute")
    precision = int(q.options.get("precision", 0))
    if precision and precision not in _FLOATS:
        problem = f"precision {type_name(precision)} is no type to divide in"
        yield error(q.name, "dtype", problem, "set precision to FLOAT, or drop it")
    elif precision and precision != _T.FLOAT:
        problem = f"precision {type_name(precision)} is ignored by ONNX Runtime, which divides in FLOAT"
        yield warning(q.name, "dtype", problem, "set precision to FLOAT: results will not depend on who runs the model")


def _first(table: Mapping[int, int], code: int, q: Quantizer, *, contrib: tuple[int, ...]) -> int:
    """Return the first opset that has a type; the runtime's own Q/DQ ops have some of them at every opset."""
    return 0 if q.is_contrib and code in contrib else table.get(code, _NEVER)


# --- shapes ----------------------------------------------------------------------------------------------------------


def shapes(q: Quantizer) -> Iterator[Finding]:
    """Yield errors if the shapes of scale and zero point do not fit each other, x, axis and block_size."""
    scale, x, zero_point = q.scale.shape, q.x.shape, q.zero_point.shape
    axis, block = int(q.options.get("axis", 1)), int(q.options.get("block_size", 0))
    if scale is None:
        return
    if zero_point is not None and not _same(zero_point, scale):
        problem = f"the zero point's shape {zero_point} is not the scale's {scale}"
        remedy = "give one zero point per scale, of the same shape"
        yield (warning if {zero_point, scale} == {(), (1,)} else error)(q.name, "shape", problem, remedy)
    problem = _without_x(scale, block) or (_against(x, scale, axis, block) if x is not None else "")
    if problem:
        yield error(q.name, "shape", problem, _REMEDY)


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


def scales(q: Quantizer) -> Iterator[Finding]:
    """Yield a finding unless scales are positive and finite, and zero points of float8 and int32 codes are 0."""
    stored = q.scope.stored.get(q.scale.name)
    if stored is not None and stored.data_type in _STORED_FLOATS and 0 not in stored.dims:
        low, high = _ends(array(stored))
        if not (low > 0 and np.isfinite(high)):
            bad = high if low > 0 else low
            problem = f"the scale {q.scale.name!r} holds {bad}; scales are positive and finite"
            yield error(q.name, "scale", problem, "calibrate again")
    zero_point = q.scope.stored.get(q.zero_point.name)
    if zero_point is None or zero_point.data_type not in (_T.INT32, *FLOAT8, _T.FLOAT4E2M1):
        return
    if array(zero_point).astype(np.float32).any():
        kind = type_name(zero_point.data_type)
        problem = f"the zero point of codes of {kind} is not 0"
        if kind == "INT32":
            yield warning(q.name, "zero_point", f"{problem}; not every runtime subtracts it", "drop the zero point")
        else:
            yield error(q.name, "zero_point", f"{problem}, which the runtime refuses", "drop the zero point")


def float_values(q: Quantizer) -> Iterator[Finding]:
    """Yield an error if a stored float tensor that the graph quantizes holds NaN, which has no code."""
    stored = q.scope.stored.get(q.x.name)
    is_float = stored is not None and stored.data_type in _STORED_FLOATS and 0 not in stored.dims
    if stored is not None and is_float and np.isnan(_ends(array(stored))[0]):
        problem = f"it quantizes {q.x.name!r}, which holds NaN"
        yield error(q.name, "grid", problem, "repair the weights and export again")


def grid(q: Quantizer) -> Iterator[Finding]:
    """Yield an error if codes or zero points are outside the grid that the metadata declares (`qsdk.dtype`)."""
    declared = metadata(q.node).get("qsdk.dtype")
    if declared is None:
        return
    name, code = q.name, q.x.type
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
        for tensor, what in ((q.x.name, "codes"), (q.zero_point.name, "zero points")):
            stored = q.scope.stored.get(tensor)
            if stored is not None and 0 not in stored.dims:
                yield from _on_grid(array(stored), dtype, what, name)


def _known(name: str) -> DType | None:
    try:
        return dtype_named(name)
    except ConfigError:
        return None


def _on_grid(values: Array, dtype: DType, what: str, name: str) -> Iterator[Finding]:
    low, high = _ends(values)
    if low < dtype.lo or high > dtype.hi:
        problem = f"its {what} reach from {low:g} to {high:g}, off the grid {dtype.lo:g}..{dtype.hi:g} of {dtype.name}"
        yield error(name, "grid", problem, "export the model again, or correct qsdk.dtype in the node's metadata")


def _ends(values: Array) -> tuple[float, float]:
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


def pairs(q: Quantizer) -> Iterator[Finding]:
    """Yield an error if a DequantizeLinear has not the scale, zero point, axis and block size of its QuantizeLinear."""
    maker = q.scope.makers.get(q.x.name)
    if maker is None or maker.op_type != "QuantizeLinear" or not is_quantizer(maker):
        return
    if FORM_KEY in metadata(q.node):  # it reads the codes of a product in front of it; opening the file tells
        return
    quantize = quantizer_of(maker, q.scope)
    for theirs, own, what in ((quantize.scale, q.scale, "scale"), (quantize.zero_point, q.zero_point, "zero point")):
        if not _same_values(theirs.name, own.name, q.scope):
            problem = f"its {what} is not that of {quantize.name!r}, whose output it reads"
            yield error(q.name, "pair", problem, f"give both nodes the same {what}")
    if q.scale.shape is None or math.prod(2 if n is None else n for n in q.scale.shape) <= 1:
        return  # per tensor, where axis means nothing
    for option, default in (("axis", 1), ("block_size", 0)):
        left, right = (one.options.get(option, default) for one in (quantize, q))
        if not _same_option(option, left, right, q.x.shape):
            problem = f"its {option} is not that of {quantize.name!r}, whose output it reads"
            yield error(q.name, "pair", problem, f"give both nodes the same {option}")


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


def unused(q: Quantizer) -> Iterator[Finding]:
    """Yield a warning if nothing reads the result; codes may also leave the model, or be read by integer ops."""
    if q.node.output[0] not in q.scope.read:
        yield warning(q.name, "unused", f"nothing reads its output {q.node.output[0]!r}", "remove the node")


# --- the runtime's CPU -----------------------------------------------------------------------------------------------


def versions(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning if IR version or opset is beyond the runtime's."""
    if model.ir_version > LARGEST_IR:
        problem = f"IR version {model.ir_version} is beyond the runtime's {LARGEST_IR}"
        yield warning("", "runtime", problem, f"stamp IR {LARGEST_IR} or lower (10 goes with opset 21)")
    if opset_of(model) > LARGEST_OPSET:
        problem = f"opset {opset_of(model)} is beyond the runtime's {LARGEST_OPSET}"
        yield warning("", "runtime", problem, "export at opset 21, or 25 for 2-bit types")


def kernels(q: Quantizer) -> Iterator[Finding]:
    """Yield a warning for types and forms of QuantizeLinear and DequantizeLinear without a kernel."""
    x, scale, code = q.x.type, q.scale.type, q.made_type if q.quantizes else q.x.type
    lacking = [t for t in (code, scale) if t in (_T.FLOAT4E2M1, *FLOAT6, _T.BFLOAT16, _T.FLOAT8E8M0)]
    if q.quantizes and x in (_T.INT32, _T.BFLOAT16):
        lacking.append(x)
    if lacking:
        problem = f"the runtime has no kernel for {q.node.op_type} with {type_name(lacking[0])}"
        yield warning(q.name, "kernel", problem, "choose another dtype to run it there")
    elif q.quantizes and x and scale and x != scale and q.scope.opset >= 23:
        problem = f"the runtime cannot quantize {type_name(x)} with a scale of {type_name(scale)}"
        yield warning(q.name, "kernel", problem, f"store the scale as {type_name(x)}")
    if q.scale.shape == (1,) and q.options.get("block_size", 0) > 0:
        problem = "the runtime refuses block_size where there is one scale for the whole of a vector"
        yield warning(q.name, "kernel", problem, "drop block_size and store the scale as a scalar")


# --- all of them -----------------------------------------------------------------------------------------------------


_Rule = Callable[[Quantizer], Iterator[Finding]]
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
            for q in quantizers_in(scope, nodes):
                found += [finding for rule in _RULES[q.node.op_type] for finding in rule(q)]
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
