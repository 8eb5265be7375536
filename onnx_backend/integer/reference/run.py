"""A NumPy reference of integer-only models on exact integers, from the ONNX standard, independent of ONNX Runtime.

An op is `op(attributes, *inputs)`, exact or an error: accumulators are computed exactly, and an int32 overflow raises
instead of wrapping. Sums of products are computed in float64 by BLAS, which is exact as long as they stay below 2**53,
or in int64.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.integer.ir.values import Array
from qsdk.core.errors import DataError, IntegerError
from qsdk.core.numerics import affine

# --- the ops ----------------------------------------------------------------------------------------------------------


Attributes = Mapping[str, Any]
_EXACT = 2.0**53


def _int32(values: Array) -> Array:
    """Return values as int32; raise OverflowError where they do not fit."""
    if values.size and (values.min() < -(1 << 31) or values.max() >= 1 << 31):
        worst = int(values.flat[np.argmax(np.abs(values))])
        raise OverflowError(f"the accumulator reaches {worst}, beyond int32")
    return values.astype(np.int32)


def _product(left: Array, right: Array) -> Array:
    """Return an exact matrix product of small integers as int32."""
    depth = left.shape[-1]
    reach = float(np.abs(left).max(initial=0)) * float(np.abs(right).max(initial=0)) * depth
    kind: Any = np.float64 if reach < _EXACT else np.int64
    return _int32(np.matmul(left.astype(kind), right.astype(kind)))


def _centred(values: Array, zero_point: Array | None) -> Array:
    return values.astype(np.int64) - (0 if zero_point is None else zero_point.astype(np.int64))


def _matmul_integer(attrs: Attributes, a: Array, b: Array, za: Array | None = None, zb: Array | None = None) -> Array:
    return _product(_centred(a, za), _centred(b, zb))


def _matmul(attrs: Attributes, a: Array, b: Array) -> Array:
    """Return the product of matrices of int32 or int64, refusing one that could leave its type on the way."""
    rows = np.abs(a.astype(np.float64)).sum(-1).max(initial=0.0)
    reach = float(rows) * float(np.abs(b.astype(np.float64)).max(initial=0.0))
    if reach >= 2.0 ** (8 * a.dtype.itemsize - 1):
        raise OverflowError(f"sums of products can reach {reach:.4g}, beyond {a.dtype}")
    kind: Any = np.float64 if reach < _EXACT else a.dtype
    return np.asarray(np.matmul(a.astype(kind), b.astype(kind)).astype(a.dtype))


def _geometry(attrs: Attributes, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], ...]:
    """Return strides, dilations, pads at the beginning and at the end, and output sizes."""
    rank = len(sizes)
    strides, dilations = (list(attrs.get(key, [1] * rank)) for key in ("strides", "dilations"))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    pads = list(attrs.get("pads", [0] * 2 * rank))
    begin, end = pads[:rank], pads[rank:]
    auto = attrs.get("auto_pad", b"NOTSET").decode()
    if auto.startswith("SAME"):
        whole = [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in zip(sizes, strides, spans, strict=True)]
        small, large = [w // 2 for w in whole], [w - w // 2 for w in whole]
        begin, end = (small, large) if auto == "SAME_UPPER" else (large, small)
    elif auto == "VALID":
        begin = end = [0] * rank
    outputs = []
    for n, s, span, b, e in zip(sizes, strides, spans, begin, end, strict=True):
        room = n + b + e - span
        count = (-(-room // s) if attrs.get("ceil_mode", 0) else room // s) + 1
        if attrs.get("ceil_mode", 0) and (count - 1) * s >= n + b:
            count -= 1  # a window may not start in the padding at the end
        outputs.append(count)
    return strides, dilations, begin, end, outputs


def _windows(x: Array, kernel: Sequence[int], attrs: Attributes, fill: int) -> Array:
    """Return every window: shape (taps, N, C, *outputs)."""
    strides, dilations, begin, end, outputs = _geometry(attrs, x.shape[2:], kernel)
    extra = [
        max((o - 1) * s + (k - 1) * d + 1 - (n + b + e), 0)
        for o, s, k, d, n, b, e in zip(outputs, strides, kernel, dilations, x.shape[2:], begin, end, strict=True)
    ]
    widths = [(0, 0), (0, 0), *((b, e + more) for b, e, more in zip(begin, end, extra, strict=True))]
    padded = np.pad(x, widths, constant_values=fill)
    taps = []
    for tap in itertools.product(*(range(k) for k in kernel)):
        index = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, dilations, outputs, strides, strict=True)
        )
        taps.append(padded[(slice(None), slice(None), *index)])
    return np.stack(taps)


def _conv_integer(attrs: Attributes, x: Array, w: Array, zx: Array | None = None, zw: Array | None = None) -> Array:
    x, w = _centred(x, zx), _centred(w, zw)
    groups, (filters, depth, *kernel) = attrs.get("group", 1), w.shape
    columns = _windows(x, kernel, attrs, 0)  # (taps, N, C, *out): padding is real zero
    taps, batch, _, *outputs = columns.shape
    columns = columns.reshape(taps, batch, groups, depth, -1)
    columns = columns.transpose(2, 1, 3, 0, 4).reshape(groups, batch, depth * taps, -1)
    rows = w.reshape(groups, 1, filters // groups, depth * taps)
    found = _product(rows, columns)  # (groups, N, filters / groups, positions)
    return found.transpose(1, 0, 2, 3).reshape(batch, filters, *outputs)


def _max_pool(attrs: Attributes, x: Array) -> Array:
    return np.asarray(_windows(x, attrs["kernel_shape"], attrs, int(np.iinfo(x.dtype).min)).max(0))


def _exactly(values: Array, dtype: Any) -> Array:
    """Cast integers, refusing values the type cannot hold (a cast must never wrap silently)."""
    if np.issubdtype(dtype, np.integer) and values.size and values.dtype != np.bool_:
        low, high = int(values.min()), int(values.max())
        info = np.iinfo(dtype)
        if low < info.min or high > info.max:
            raise OverflowError(f"a cast of {low}..{high} to {np.dtype(dtype).name} would wrap")
    return values.astype(dtype)


def _cast(attrs: Attributes, x: Array) -> Array:
    return _exactly(x, helper.tensor_dtype_to_np_dtype(attrs["to"]))


def _arithmetic(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    """Make an elementwise op that raises instead of wrapping."""

    def operation(attrs: Attributes, a: Array, b: Array) -> Array:
        found = function(a, b)
        if found.dtype.itemsize < 8:
            return _exactly(function(a.astype(np.int64), b.astype(np.int64)), a.dtype)
        approximate = function(a.astype(np.float64), b.astype(np.float64))
        top = 2.0**63 if found.dtype == np.int64 else 2.0**64
        if approximate.size and (approximate.max() >= top or approximate.min() < (-top if top == 2.0**63 else 0)):
            raise OverflowError(f"{found.dtype} arithmetic overflows")
        return found

    return operation


def _div(attrs: Attributes, a: Array, b: Array) -> Array:
    quotient = np.abs(a) // np.abs(b)  # integer Div truncates toward zero
    return np.asarray(np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype))


def _clip(attrs: Attributes, x: Array, lo: Array | None = None, hi: Array | None = None) -> Array:
    return np.asarray(np.clip(x, lo, hi).astype(x.dtype))


def _bit_shift(attrs: Attributes, x: Array, by: Array) -> Array:
    return np.asarray(x >> by if attrs["direction"] == b"RIGHT" else x << by)


def _reshape(attrs: Attributes, x: Array, shape: Array) -> Array:
    zero_copies = not attrs.get("allowzero", 0)
    wanted = [x.shape[i] if n == 0 and zero_copies else int(n) for i, n in enumerate(shape.tolist())]
    return x.reshape(wanted)


def _flatten(attrs: Attributes, x: Array) -> Array:
    axis = attrs.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _squeeze(attrs: Attributes, x: Array, axes: Array | None = None) -> Array:
    return np.squeeze(x, None if axes is None else tuple(int(a) for a in axes))


def _unsqueeze(attrs: Attributes, x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(int(a) for a in axes))


def _slice(
    attrs: Attributes, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Array:
    along = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    index = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts.tolist(), ends.tolist(), along, strides, strict=True):
        # an end far below zero means "past the first element" when walking backwards
        stop = None if step < 0 and end < -x.shape[axis] else end
        index[axis] = slice(start, stop, step)
    return x[tuple(index)]


def _split(attrs: Attributes, x: Array, sizes: Array | None = None) -> tuple[Array, ...]:
    axis = attrs.get("axis", 0)
    if sizes is None:
        length = -(-x.shape[axis] // attrs["num_outputs"])
        cuts: Any = range(length, x.shape[axis], length)
    else:
        cuts = np.cumsum(sizes)[:-1]
    return tuple(np.split(x, list(cuts), axis))


def _pad(attrs: Attributes, x: Array, pads: Array, fill: Array | None = None, axes: Array | None = None) -> Array:
    mode = {b"constant": "constant", b"reflect": "reflect", b"edge": "edge", b"wrap": "wrap"}[
        attrs.get("mode", b"constant")
    ]
    along = list(range(x.ndim)) if axes is None else [int(a) for a in axes]
    widths = [(0, 0)] * x.ndim
    for i, axis in enumerate(along):
        widths[axis] = (int(pads[i]), int(pads[i + len(along)]))
    for axis, (begin, end) in enumerate(widths):  # negative widths cut
        cut = slice(max(-begin, 0), x.shape[axis] - max(-end, 0))
        x = x[(slice(None),) * axis + (cut,)]
    grown = [(max(b, 0), max(e, 0)) for b, e in widths]
    more: dict[str, Any] = {"constant_values": 0 if fill is None else fill} if mode == "constant" else {}
    return np.pad(x, grown, mode=mode, **more)  # type: ignore[call-overload,no-any-return]


def _reduce(function: Callable[..., Array]) -> Callable[..., Array]:
    def operation(attrs: Attributes, x: Array, axes: Array | None = None) -> Array:
        if (axes is None or axes.size == 0) and attrs.get("noop_with_empty_axes", 0):
            return x
        along = tuple(int(a) for a in axes) if axes is not None and axes.size else None
        found = function(x.astype(np.int64), axis=along, keepdims=bool(attrs.get("keepdims", 1)))
        return _exactly(np.asarray(found), x.dtype)

    return operation


def _cum_sum(attrs: Attributes, x: Array, axis: Array) -> Array:
    along = int(axis.reshape(-1)[0])
    turned = np.flip(x, along) if attrs.get("reverse", 0) else x
    sums = np.cumsum(turned.astype(np.int64), along)
    if attrs.get("exclusive", 0):
        sums = sums - turned
    return _exactly(np.flip(sums, along) if attrs.get("reverse", 0) else sums, x.dtype)


def _gather(attrs: Attributes, x: Array, index: Array) -> Array:
    return np.take(x, index, axis=attrs.get("axis", 0))


def _gather_elements(attrs: Attributes, x: Array, index: Array) -> Array:
    axis = attrs.get("axis", 0) % x.ndim
    # take_along_axis would broadcast; the standard reads only the index's own rows
    rows = tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(index.shape))
    return np.take_along_axis(x[rows], index.astype(np.int64), axis)


def _gather_nd(attrs: Attributes, x: Array, index: Array) -> Array:
    if attrs.get("batch_dims", 0):
        raise OverflowError("GatherND with batch_dims is not an op of integer-only models")
    return np.asarray(x[tuple(np.moveaxis(index, -1, 0))])


def _shape(attrs: Attributes, x: Array) -> Array:
    return np.asarray(x.shape, np.int64)[attrs.get("start", 0) : attrs.get("end")]


def _arg(function: Callable[..., Any]) -> Callable[..., Array]:
    def operation(attrs: Attributes, x: Array) -> Array:
        axis = attrs.get("axis", 0)
        last = attrs.get("select_last_index", 0)
        found = x.shape[axis] - 1 - function(np.flip(x, axis), axis) if last else function(x, axis)
        return np.asarray(np.expand_dims(found, axis) if attrs.get("keepdims", 1) else found, np.int64)

    return operation


def _resize(attrs: Attributes, x: Array, _roi: None, _scales: None, sizes: Array) -> Array:
    how = (attrs.get("mode"), attrs.get("coordinate_transformation_mode"), attrs.get("nearest_mode"))
    if how != (b"nearest", b"asymmetric", b"floor"):
        raise OverflowError(f"Resize with {how} is not an op of integer-only models")
    for axis, size in zip(attrs.get("axes", range(x.ndim)), sizes.tolist(), strict=True):
        x = np.take(x, np.arange(size) * x.shape[axis] // size, axis)
    return x


def _quantize(attrs: Attributes, x: Array, scale: Array, zero_point: Array) -> Array:
    info = np.iinfo(zero_point.dtype)
    with np.errstate(over="ignore"):
        codes = affine.quantize(x, scale, zero_point.astype(np.float32), info.min, info.max)
    return np.asarray(codes).astype(zero_point.dtype)


def _dequantize(attrs: Attributes, x: Array, scale: Array, zero_point: Array | None = None) -> Array:
    axis = int(attrs.get("axis", 1)) if scale.ndim else None
    zero_point = np.zeros_like(scale) if zero_point is None else zero_point
    scales, zeros = (affine.align(part, x.shape, axis, None) for part in (scale, zero_point.astype(np.float32)))
    return np.asarray(affine.dequantize(x.astype(np.float32), scales, zeros))


def _top_k(attrs: Attributes, x: Array, k: Array) -> tuple[Array, Array]:
    axis = attrs.get("axis", -1)
    keys = x.astype(np.int64) * (-1 if attrs.get("largest", 1) else 1)
    # a stable sort leaves the smaller index first among equals, as the standard asks
    order = np.argsort(keys, axis=axis, kind="stable").take(np.arange(int(k.reshape(-1)[0])), axis)
    return np.take_along_axis(x, order, axis), order.astype(np.int64)


def _scatter_nd(attrs: Attributes, x: Array, indices: Array, updates: Array) -> Array:
    found = x.copy()
    rows = indices.reshape(-1, indices.shape[-1])
    blocks = updates.reshape(len(rows), *x.shape[indices.shape[-1] :])
    choose = _CHOICES[attrs.get("reduction", b"none")]
    for row, block in zip(rows.tolist(), blocks, strict=True):
        found[tuple(row)] = choose(found[tuple(row)], block)
    return found


def _scatter_elements(attrs: Attributes, x: Array, indices: Array, updates: Array) -> Array:
    found, axis = x.copy(), attrs.get("axis", 0) % x.ndim
    choose = _CHOICES[attrs.get("reduction", b"none")]
    for place in np.ndindex(*indices.shape):
        target = (*place[:axis], int(indices[place]), *place[axis + 1 :])
        found[target] = choose(found[target], updates[place])
    return found


#: The new value of a scattered element, from the old value and the one that is written.
_CHOICES: Mapping[bytes, Callable[[Any, Any], Any]] = MappingProxyType(
    {b"none": lambda old, new: new, b"max": np.maximum, b"min": np.minimum, b"add": np.add}
)


def _depth_to_space(attrs: Attributes, x: Array) -> Array:
    size = attrs["blocksize"]
    n, c, h, w = x.shape
    if attrs.get("mode", b"DCR") == b"DCR":
        blocks = x.reshape(n, size, size, c // size**2, h, w).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(n, c // size**2, size, size, h, w).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(n, c // size**2, h * size, w * size)


def _space_to_depth(attrs: Attributes, x: Array) -> Array:
    size = attrs["blocksize"]
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // size, size, w // size, size).transpose(0, 3, 5, 1, 2, 4)
    return blocks.reshape(n, c * size**2, h // size, w // size)


OPS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "Abs": lambda a, x: np.abs(x),
        "Add": _arithmetic(np.add),
        "And": lambda a, x, y: x & y,
        "ArgMax": _arg(np.argmax),
        "ArgMin": _arg(np.argmin),
        "BitShift": _bit_shift,
        "BitwiseAnd": lambda a, x, y: x & y,
        "BitwiseOr": lambda a, x, y: x | y,
        "Cast": _cast,
        "Clip": _clip,
        "Concat": lambda a, *parts: np.concatenate(parts, a["axis"]),
        "ConvInteger": _conv_integer,
        "CumSum": _cum_sum,
        "DepthToSpace": _depth_to_space,
        "DequantizeLinear": _dequantize,
        "Div": _div,
        "Equal": lambda a, x, y: x == y,
        "Expand": lambda a, x, shape: x * np.ones([int(n) for n in shape], x.dtype),
        "Flatten": _flatten,
        "Gather": _gather,
        "GatherElements": _gather_elements,
        "GatherND": _gather_nd,
        "Greater": lambda a, x, y: x > y,
        "GreaterOrEqual": lambda a, x, y: x >= y,
        "Identity": lambda a, x: x,
        "Less": lambda a, x, y: x < y,
        "LessOrEqual": lambda a, x, y: x <= y,
        "MatMul": _matmul,
        "MatMulInteger": _matmul_integer,
        "Max": lambda a, *parts: reduce(np.maximum, parts),
        "MaxPool": _max_pool,
        "Min": lambda a, *parts: reduce(np.minimum, parts),
        "Mod": lambda a, x, y: np.mod(x, y),
        "Mul": _arithmetic(np.multiply),
        "Not": lambda a, x: ~x,
        "Or": lambda a, x, y: x | y,
        "Pad": _pad,
        "QuantizeLinear": _quantize,
        "Range": lambda a, start, limit, delta: np.arange(int(start), int(limit), int(delta), dtype=start.dtype),
        "ReduceMax": _reduce(np.max),
        "ReduceMin": _reduce(np.min),
        "ReduceSum": _reduce(np.sum),
        "Reshape": _reshape,
        "Resize": _resize,
        "ScatterElements": _scatter_elements,
        "ScatterND": _scatter_nd,
        "Shape": _shape,
        "Slice": _slice,
        "SpaceToDepth": _space_to_depth,
        "Split": _split,
        "Squeeze": _squeeze,
        "Sub": _arithmetic(np.subtract),
        "Tile": lambda a, x, repeats: np.tile(x, repeats),
        "TopK": _top_k,
        "Transpose": lambda a, x: x.transpose(a.get("perm")),
        "Unsqueeze": _unsqueeze,
        "Where": lambda a, condition, x, y: np.where(condition, x, y),
        "Xor": lambda a, x, y: x ^ y,
    }
)


# --- models -----------------------------------------------------------------------------------------------------------


def run_reference(model: ModelProto, inputs: Mapping[str, Array], *, every_tensor: bool = False) -> dict[str, Array]:
    """Execute an integer-only model and return its outputs by name (with `every_tensor`, all tensors).

    Args:
        model: as written by `integer.convert`, with float or integer edges.
        inputs: one array per graph input, in its dtype.
        every_tensor: also return the inner tensors, initializers and inputs.

    Raises:
        DataError: an input is missing or has another dtype than the graph declares.
        IntegerError: an accumulator leaves int32, or an op is not one of the integer models'.
    """
    tensors: dict[str, Array] = {t.name: _constant(t) for t in model.graph.initializer}
    for info in model.graph.input:
        if info.name in tensors:
            continue
        if info.name not in inputs:
            raise DataError(f"input {info.name!r} is missing; give one array per graph input")
        wanted = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        tensors[info.name] = np.asarray(inputs[info.name])
        if tensors[info.name].dtype != wanted:
            raise DataError(f"input {info.name!r} is {tensors[info.name].dtype}, the model takes {wanted}")
    _run_nodes(model.graph.node, tensors)
    return tensors if every_tensor else {info.name: tensors[info.name] for info in model.graph.output}


def _run_nodes(nodes: Iterable[NodeProto], tensors: dict[str, Array]) -> None:
    """Execute nodes in order and add their results to `tensors`."""
    for node in nodes:
        operation: Any = _scan if node.op_type == "Scan" else OPS.get(node.op_type)
        if operation is None or node.domain not in ("", "ai.onnx"):
            raise IntegerError(f"{node.op_type} {node.name!r} is not an op of integer-only models")
        attributes: dict[str, Any] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        arguments = [tensors[name] if name else None for name in node.input]
        try:
            found = operation(attributes, *arguments)
        except OverflowError as error:
            raise IntegerError(f"{node.op_type} {node.name!r}: {error}") from error
        results = found if isinstance(found, tuple) else (found,)
        tensors.update(zip(node.output, results, strict=False))


def _scan(attributes: Mapping[str, Any], *inputs: Array) -> tuple[Array, ...]:
    """Execute a Scan along first axes, whose body reads nothing from outside."""
    if attributes.get("scan_input_axes") or attributes.get("scan_output_axes"):
        raise OverflowError("a Scan along other axes than the first is not an op of integer-only models")
    graph, count = attributes["body"], attributes["num_scan_inputs"]
    kept = {tensor.name: _constant(tensor) for tensor in graph.initializer}
    states, names = list(inputs[:-count]), [info.name for info in graph.input]
    declared = graph.output[len(states) :]
    columns: list[list[Array]] = [[] for _ in declared]
    turned_in = attributes.get("scan_input_directions") or [0] * count
    turned_out = attributes.get("scan_output_directions") or [0] * len(columns)
    read = [x[::-1] if turned else x for x, turned in zip(inputs[-count:], turned_in, strict=True)]
    for parts in zip(*read, strict=True):
        given = [*states, *(np.asarray(part) for part in parts)]
        tensors = kept | dict(zip(names, given, strict=True))
        _run_nodes(graph.node, tensors)
        results = [tensors[info.name] for info in graph.output]
        for column, result in zip(columns, results[len(states) :], strict=True):
            column.append(result)
        states = results[: len(states)]
    stacks = [np.stack(column) if column else _empty(info) for column, info in zip(columns, declared, strict=True)]
    return (*states, *(x[::-1] if turned else x for x, turned in zip(stacks, turned_out, strict=True)))


def _empty(info: ValueInfoProto) -> Array:
    """Return the stack of results of a body that never ran; an undeclared size is 0."""
    kind = info.type.tensor_type
    sizes = [int(dim.dim_value) for dim in kind.shape.dim]
    return np.zeros((0, *sizes), helper.tensor_dtype_to_np_dtype(kind.elem_type))


def _constant(tensor: Any) -> Array:
    array = numpy_helper.to_array(tensor)
    # NumPy cannot compute on packed types; their values fit in 8 bits
    return array.astype(np.uint8) if array.dtype.name in ("uint4", "uint2") else array
