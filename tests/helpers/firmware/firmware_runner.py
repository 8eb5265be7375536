"""An interpreter of firmware programs in NumPy, from what `onnx_backend.integer.firmware.program` says about them.

It reads nothing but the archive. What is a plain ONNX operator runs in ONNX's own reference implementation.
"""

import io
import json

import numpy as np
from onnx import helper
from onnx.reference import ReferenceEvaluator


def load(data: bytes):
    with np.load(io.BytesIO(data), allow_pickle=False) as members:
        program = json.loads(str(members["program.json"]))
        arrays = {name: members[member] for name, member in program["arrays"].items()}
    return program, arrays


def run(data: bytes, inputs):
    """Run the program of an archive; `inputs` are codes by tensor, the results too."""
    program, arrays = load(data)
    tensors = {**arrays, **inputs}
    assert set(inputs) == {entry["tensor"] for entry in program["inputs"]}
    for op in program["ops"]:
        read = [tensors[name] if name else None for name in op["inputs"]]
        constants = {role: arrays[name] for role, name in op["parameters"].items()}
        function = OPS.get(op["op"])
        found = [function(op["attributes"], constants, *read)] if function else plain(op, program["opset"], read)
        for name, value, dtype, shape in zip(op["outputs"], found, op["dtypes"], op["shapes"], strict=True):
            tensors[name] = value.astype(dtype)
            np.testing.assert_array_equal(tensors[name], value)  # nothing wraps
            assert shape is None or len(shape) == value.ndim
            assert all(size in (None, n) for size, n in zip(shape or [], value.shape, strict=bool(shape)))
    return {entry["tensor"]: tensors[entry["tensor"]] for entry in program["outputs"]}


def feed(program, name, x):
    """Give the codes of a float input, by tensor."""
    return {
        entry["tensor"]: codes(entry, x) if "scale" in entry else x
        for entry in program["inputs"]
        if entry["model_name"] == name
    }


def codes(entry, x):
    info = np.iinfo(entry["dtype"])
    steps = np.rint(x / np.float32(entry["scale"])) + np.float32(entry["zero_point"])
    return np.clip(steps, info.min, info.max).astype(entry["dtype"])


def values(entry, found):
    """Give what an output stands for."""
    if "scale" not in entry or entry["dtype"] != str(found.dtype) or not np.size(entry["scale"]):
        return found
    scale, zero = np.float32(entry["scale"]), np.float32(entry["zero_point"])
    if entry["axis"] is not None:
        shape = [-1 if i == entry["axis"] else 1 for i in range(found.ndim)]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (found.astype(np.float32) - zero) * scale


def plain(op, opset, read):
    names = [f"i{i}" if value is not None else "" for i, value in enumerate(read)]
    outputs = [f"o{i}" for i in range(len(op["outputs"]))]
    node = helper.make_node(op["op"], names, outputs, **op["attributes"])
    graph = helper.make_graph(
        [node],
        "one",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for n, v in zip(names, read, strict=True)
            if n
        ],
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(np.dtype(d)), None)
            for n, d in zip(outputs, op["dtypes"], strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return ReferenceEvaluator(model).run(None, {n: v for n, v in zip(names, read, strict=True) if n})


def window_geometry(attrs, sizes, kernel):
    rank = len(sizes)
    strides, dilations, pads = attrs["strides"], attrs["dilations"], list(attrs["pads"])
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    how = attrs.get("auto_pad", "NOTSET")
    if how == "VALID":
        pads = [0] * 2 * rank
    elif how != "NOTSET":
        totals = [max(-(-n // s) * s - s + span - n, 0) for n, s, span in zip(sizes, strides, spans, strict=True)]
        less, more = [t // 2 for t in totals], [t - t // 2 for t in totals]
        pads = less + more if how == "SAME_UPPER" else more + less
    counts = [(n + pads[i] + pads[i + rank] - spans[i]) // strides[i] + 1 for i, n in enumerate(sizes)]
    return strides, dilations, pads, counts


def patches(x, attrs, kernel, fill=0):
    """Give (N, C, taps..., positions...) of an int64 tensor padded with a number."""
    strides, dilations, pads, counts = window_geometry(attrs, x.shape[2:], kernel)
    rank = len(kernel)
    x = np.pad(x, [(0, 0), (0, 0), *((pads[i], pads[i + rank]) for i in range(rank))], constant_values=fill)
    found = np.zeros((*x.shape[:2], *kernel, *counts), np.int64)
    for tap in np.ndindex(*kernel):
        index = tuple(
            slice(t * d, t * d + (c - 1) * s + 1, s) for t, d, c, s in zip(tap, dilations, counts, strides, strict=True)
        )
        found[(slice(None), slice(None), *tap)] = x[(slice(None), slice(None), *index)]
    return found


def accumulate_conv(attrs, constants, x):
    weight = constants["weight"].astype(np.int64)
    kernel, groups = weight.shape[2:], attrs["group"]
    columns = patches(x.astype(np.int64) - attrs["zero_point"], attrs, kernel)
    batch, channels = columns.shape[:2]
    positions = columns.shape[2 + len(kernel) :]
    columns = columns.reshape(batch, groups, channels // groups * int(np.prod(kernel)), -1)
    rows = weight.reshape(groups, weight.shape[0] // groups, -1)
    return np.einsum("gfk,ngkp->ngfp", rows, columns).reshape(batch, weight.shape[0], *positions)


def accumulate_matmul(attrs, constants, x):
    x, weight = x.astype(np.int64) - attrs["zero_point"], constants["weight"].astype(np.int64)
    return weight @ x if attrs["weight_first"] else x @ weight


def window_sum(attrs, constants, x):
    kernel = attrs["kernel_shape"]
    columns = patches(x.astype(np.int64) - attrs["zero_point"], attrs, kernel)
    return columns.sum(tuple(range(2, 2 + len(kernel))))


def max_pool(attrs, constants, x):
    kernel = attrs["kernel_shape"]
    whole = {"strides": [1] * len(kernel), "dilations": [1] * len(kernel), "pads": [0] * 2 * len(kernel), **attrs}
    return patches(x.astype(np.int64), whole, kernel, -1).max(tuple(range(2, 2 + len(kernel))))


def axis_sum(attrs, constants, x):
    return (x.astype(np.int64) - attrs["zero_point"]).sum(tuple(attrs["axes"]), keepdims=bool(attrs["keepdims"]))


def centred(attrs, left, right):
    return [side.astype(np.int64) - zero for side, zero in zip((left, right), attrs["zero_points"], strict=True)]


def round_shift(p, n, rounding):
    """Exact on Python integers."""
    if rounding == "gemmlowp":
        high = round_shift(p, min(n, 31), "half_up")
        return round_shift(high, n - 31, "half_away") if n > 31 else high
    floor, rest, half = p >> n, p & ((1 << n) - 1), 1 << (n - 1)
    up = {"half_even": floor % 2 == 1, "half_up": True, "half_away": p > 0}[rounding]
    return floor + (rest > half or (rest == half and up))


def requantize(attrs, constants, *inputs):
    mantissas = [constants[f"mantissa_{i}"].astype(object) for i in range(len(inputs))]
    wide = [x.astype(object) for x in inputs]
    if "bias" in constants:
        product = (wide[0] + constants["bias"].astype(object)) * mantissas[0]
    else:
        product = sum(x * m for x, m in zip(wide, mantissas, strict=True)) + constants["addend"].astype(object)
    product, shift = np.broadcast_arrays(product, constants["shift"].astype(object))
    rounded = [round_shift(p, n, attrs["rounding"]) for p, n in zip(product.flat, shift.flat, strict=True)]
    assert all(-(1 << 63) <= p < 1 << 63 for p in product.flat)
    codes = np.array(rounded, np.int64).reshape(product.shape) + attrs["zero_point"]
    return codes.clip(attrs["lo"], attrs["hi"])


OPS = {
    "AccumulateConv": accumulate_conv,
    "AccumulateMatMul": accumulate_matmul,
    "MatMulCodes": lambda attrs, constants, left, right: np.matmul(*centred(attrs, left, right)),
    "MultiplyCodes": lambda attrs, constants, left, right: np.multiply(*centred(attrs, left, right)),
    "WindowSum": window_sum,
    "AxisSum": axis_sum,
    "Requantize": requantize,
    # ONNX's reference implementation is wrong about auto_pad, and gathers from 64 elements at most
    "MaxPool": max_pool,
    "GatherElements": lambda attrs, constants, x, index: np.take_along_axis(x, index.astype(int), attrs["axis"]),
    "Table": lambda attrs, constants, x: constants["table"][x],
    "ClampCodes": lambda attrs, constants, x: np.clip(x, attrs["lo"], attrs["hi"]),
}
