"""Linear layers and pools: convolutions write channels last, with PAD where the format's own padding differs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.litert.program import Grid
from onnx_backend.litert.writer import FOR_LITERT, NONE, Array, Codes, Pending, Refused, Shape, Stored, Value, Writer

_SAME, _VALID = 0, 1
_IMAGE = (0, 2, 3, 1)
Attributes = Mapping[str, Any]


def _weight(w: Writer, name: str, axis: int) -> tuple[Stored, Grid]:
    """Return a stored weight with its grid: signed, zero points of 0, one scale or one for each index of `axis`."""
    weight = w.stored(name)
    if weight.grid is None:
        raise Refused(f"its weight {name!r} is not quantized", f"quantize it: {FOR_LITERT}")
    if np.any(weight.grid.zero_point):
        raise Refused(f"zero points of its weight {name!r} are not 0", FOR_LITERT)
    if weight.grid.dtype not in ("int8", "int4"):
        raise Refused(f"its weight {name!r} has {weight.grid.dtype}, and LiteRT has int8 and int4", FOR_LITERT)
    if weight.grid.scale.size > 1 and weight.grid.axis % weight.values.ndim != axis:
        raise Refused(f"the scales of its weight {name!r} are not those of output channels", FOR_LITERT)
    return weight, weight.grid


def _store_weight(w: Writer, stored: Stored, grid: Grid, values: Array, perm: Sequence[int], axis: int) -> int:
    """Store a weight in the order of the format; `values` is in ONNX's own, with the axes that `perm` reorders."""
    held = np.ascontiguousarray(values.transpose(perm))
    own = Grid(grid.dtype, grid.scale, grid.zero_point, axis if grid.scale.size > 1 else 0)
    number = w.store(held, own, stored.site)
    if stored.site:
        w.note(stored.site, "weight", number, values.shape, tuple(perm), stored.own_perm)
    return number


def _bias(w: Writer, name: str, grid: Grid, weight: Grid, count: int) -> int:
    """Store a bias as integers of the accumulator: its scale is that of the input times that of the weight."""
    scale = (np.float64(grid.scale[0]) * weight.scale.astype(np.float64)).astype(np.float32)
    wide = grid.dtype == "int16"
    stored = w.stored(name) if name else Stored(np.zeros(count, np.float32))
    codes = np.rint(stored.floats().astype(np.float64).reshape(-1) / scale)
    if stored.grid is not None and np.array_equal(stored.grid.scale, np.broadcast_to(scale, stored.grid.scale.shape)):
        codes = stored.values.reshape(-1)
    largest = float(np.abs(codes).max(initial=0))
    if largest >= 2.0 ** (47 if wide else 31):
        raise Refused(f"its bias {name!r} is larger than an accumulator holds", "widen the scales of its weight")
    own = Grid("int64" if wide else "int32", scale, np.zeros(scale.size, np.int64))
    number = w.store(codes, own, stored.site or f"{name or 'no'}/bias")
    if stored.site:
        w.note(stored.site, "bias", number, stored.values.shape, tuple(range(stored.values.ndim)))
    return number


def _ends(attrs: Attributes, rank: int, sizes: Sequence[int], window: Array, strides: Sequence[int]) -> Array:
    """Return the padding before and behind each axis, shape (2, rank)."""
    auto = attrs.get("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        steps = -(-np.array(sizes) // strides) - 1
        total = np.maximum(steps * strides + window - np.array(sizes), 0)
        half = total // 2
        return np.array([half, total - half] if auto == "SAME_UPPER" else [total - half, half])
    return np.array(attrs.get("pads") or [0] * 2 * rank).reshape(2, rank)


def _padding(pads: Array, sizes: Sequence[int], window: Array, strides: Sequence[int]) -> int | None:
    """Return the format's name for a padding, None where it has none."""
    if not pads.any():
        return _VALID
    total = np.maximum((-(-np.array(sizes) // strides) - 1) * strides + window - np.array(sizes), 0)
    return _SAME if np.array_equal(pads, [total // 2, total - total // 2]) else None


class _Image:
    """The input of a layer of images as it is written: rank 4, channels last; one axis of sound becomes a width."""

    def __init__(self, w: Writer, name: str, attrs: Attributes, window: Sequence[int] | None) -> None:
        value = w.codes(name)
        self.rank = len(value.shape) - 2
        if self.rank not in (1, 2):
            raise Refused(f"it has {self.rank} spatial axes, and LiteRT's integers have 1 or 2", "leave it out")
        self.w, self.name, self.batch, self.channels = w, name, value.shape[0], value.shape[1]
        self.sizes = [1] * (2 - self.rank) + list(value.shape[2:])
        self.window = self._pair(window or attrs["kernel_shape"], 1)
        self.strides = self._pair(attrs.get("strides"), 1)
        self.dilations = self._pair(attrs.get("dilations"), 1)
        reach = np.array([(k - 1) * d + 1 for k, d in zip(self.window, self.dilations, strict=True)])
        ends = _ends(attrs, self.rank, self.sizes[2 - self.rank :], reach[2 - self.rank :], self.strides[-self.rank :])
        self.pads = np.concatenate([np.zeros((2, 2 - self.rank), np.int64), ends], 1)
        if attrs.get("ceil_mode"):
            self._reach_last(reach)
        self.padding = _padding(self.pads, self.sizes, reach, self.strides)
        value = w.at(value, _IMAGE if self.rank == 2 else (0, 2, 1))
        self.grid = w.grid(value)
        self.tensor = w.reshape(value.tensor, (self.batch, *self.sizes, self.channels), f"{name}/image")

    def _pair(self, values: Sequence[int] | None, default: int) -> list[int]:
        found = list(values or [default] * self.rank)
        return [default] * (2 - len(found)) + found

    def _reach_last(self, reach: Array) -> None:
        """Pad behind so far that the last window, which sticks out, is whole."""
        for axis, (size, step) in enumerate(zip(self.sizes, self.strides, strict=True)):
            whole = size + self.pads[:, axis].sum()
            steps = -(-(whole - reach[axis]) // step)
            if (steps * step) >= size + self.pads[0, axis]:
                steps -= 1
            self.pads[1, axis] += max(steps * step + reach[axis] - whole, 0)

    def padded(self, fill: int | None = None) -> int:
        """Return the tensor with its padding written as an op, of zeros or of a code."""
        self.padding = _VALID
        if not self.pads.any():
            return self.tensor
        ends = self.w.ints(np.array([[0, 0], *self.pads.T.tolist(), [0, 0]]), f"{self.name}/pads")
        self.sizes = [int(n) for n in np.array(self.sizes) + self.pads.sum(0)]
        shape, name = (self.batch, *self.sizes, self.channels), f"{self.name}/padded"
        if fill is None:
            return self.w.emit("PAD", [self.tensor, ends], shape, self.grid, name)
        least = self.w.store(np.array([fill]), self.grid, f"{name}/value")
        return self.w.emit("PADV2", [self.tensor, ends, least], shape, self.grid, name)

    def options(self) -> dict[str, Any]:
        """Return the options that all layers of images have."""
        return {"padding": self.padding, "strideH": self.strides[0], "strideW": self.strides[1]}

    def shape(self, channels: int, shape: Shape) -> Shape:
        """Return the shape that an op writes for a result of an ONNX shape."""
        return (self.batch, *[1] * (2 - self.rank), *shape[2:], channels)

    def result(self, tensor: int, shape: Shape, name: str) -> Codes:
        """Return a result of rank 4 as a value of the ONNX graph."""
        perm = _IMAGE if self.rank == 2 else (0, 2, 1)
        return Codes(self.w.reshape(tensor, tuple(shape[axis] for axis in perm), name), shape, perm)


def conv(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write CONV_2D or DEPTHWISE_CONV_2D."""
    weight, grid = _weight(w, node.input[1], 0)
    image = _Image(w, node.input[0], attrs, weight.values.shape[2:])
    shape, groups = w.shapes[node.output[0]], int(attrs.get("group", 1))
    values = weight.values.reshape(*weight.values.shape[:2], *image.window)
    depthwise = groups == image.channels and groups > 1
    tensor = image.padded() if image.padding is None else image.tensor
    count = values.shape[0]
    if depthwise:
        held = _store_weight(w, weight, grid, values, (1, 2, 3, 0), 3)
    else:
        held = _store_weight(w, weight, grid, values, (0, 2, 3, 1), 0)
    bias = _bias(w, node.input[2] if len(node.input) > 2 else "", image.grid, grid, count)
    options = {"dilationHFactor": image.dilations[0], "dilationWFactor": image.dilations[1], **image.options()}
    if depthwise:
        options["depthMultiplier"] = count // image.channels

    def written(out: Grid, name: str, activation: int) -> Codes:
        op = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
        inner = name if image.rank == 2 else f"{name}/image"
        own = {**options, "fusedActivationFunction": activation}
        made = w.emit(op, [tensor, held, bias], image.shape(count, shape), _like(image.grid, out), inner, **own)
        return image.result(made, shape, name)

    return Pending(shape, written, fuses=True)


def _like(grid: Grid, out: Grid) -> Grid:
    if grid.dtype != out.dtype:
        raise Refused(
            f"it reads {grid.dtype} and makes {out.dtype}, and LiteRT's kernels keep the type",
            "give both activations the same number of bits",
        )
    return out


def conv_transpose(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write TRANSPOSE_CONV, whole or as the format's SAME, and cut off what the padding of ONNX takes."""
    weight, grid = _weight(w, node.input[1], 1)
    grid = replace(grid, dtype="int8")  # its kernel reads no int4
    image = _Image(w, node.input[0], {**attrs, "pads": None}, weight.values.shape[2:])
    shape = w.shapes[node.output[0]]
    if attrs.get("group", 1) != 1 or image.dilations != [1, 1] or image.rank != 2:
        raise Refused("it has groups, dilations or one axis", "use an upsampling and a Conv in its place")
    window, strides = np.array(image.window), np.array(image.strides)
    full = (np.array(image.sizes) - 1) * strides + window
    begin = np.array(attrs.get("pads") or [0] * 4)[:2]
    if np.any(begin + shape[2:] > full):
        raise Refused("its result reaches beyond what its windows cover (output_padding)", "leave output_padding out")
    total = np.maximum(window - strides, 0)
    same = np.array_equal(shape[2:], np.array(image.sizes) * strides) and np.array_equal(begin, total // 2)
    sizes = tuple(int(n) for n in (np.array(shape[2:]) if same else full))
    image.padding = _SAME if same else _VALID
    held = _store_weight(w, weight, grid, weight.values, (1, 2, 3, 0), 0)
    count = weight.values.shape[1]
    bias = _bias(w, node.input[2] if len(node.input) > 2 else "", image.grid, grid, count)
    written_shape = (image.batch, *sizes, count)

    def written(out: Grid, name: str, activation: int) -> Codes:
        """Write the layer, and cut off what its padding takes away."""
        cut = sizes != tuple(shape[2:])
        wanted = w.ints(written_shape, f"{name}/sizes")
        own = {**image.options(), "fusedActivationFunction": activation}
        given, inner = [wanted, held, image.tensor, bias], f"{name}/whole" if cut else name
        made = w.emit("TRANSPOSE_CONV", given, written_shape, _like(image.grid, out), inner, **own)
        if cut:
            places = w.ints([0, *begin, 0], f"{name}/begin"), w.ints(image.shape(count, shape), f"{name}/size")
            made = w.emit("SLICE", [made, *places], image.shape(count, shape), out, name)
        return image.result(made, shape, name)

    return Pending(shape, written)


def linear(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write FULLY_CONNECTED for a Gemm, or a MatMul with a stored weight; else BATCH_MATMUL."""
    if not isinstance(w.values.get(node.input[1]), Stored):
        return _product(w, node)
    if attrs.get("transA") or float(attrs.get("alpha", 1)) != 1 or float(attrs.get("beta", 1)) != 1:
        raise Refused("it has transA, alpha or beta", "write it as a Linear")
    transposed = bool(attrs.get("transB"))
    weight, grid = _weight(w, node.input[1], 0 if transposed else 1)
    value, values = w.codes(node.input[0], flat=True), weight.values
    if values.ndim != 2:
        raise Refused("its weight has more than 2 axes", "write it as a Linear")
    if value.before is not None:  # what was flattened lies in another order, and so do the weight's columns
        inner, order = value.before[1:], tuple(axis - 1 for axis in value.perm[1:])
        split = values.reshape((-1, *inner) if transposed else (*inner, values.shape[1]))
        perm = (0, *(axis + 1 for axis in order)) if transposed else (len(inner), *order)
    else:
        value = w.at(value, [*(axis for axis in value.perm if axis != len(value.shape) - 1), len(value.shape) - 1])
        split, perm = values, (0, 1) if transposed else (1, 0)
    count = values.shape[0 if transposed else 1]
    held = _store_weight(w, weight, grid, split, perm, 0)
    w.program.tensors[held] = _flat(w.program.tensors[held], count)
    own = w.grid(value)
    last = len(value.shape) - 1
    shape = (*value.shape[:last], count)
    order_out = value.perm if value.before is None else tuple(range(len(shape)))

    def pending(bias: Callable[[], int], biased: Callable[[str], Pending] | None = None) -> Pending:
        def written(out: Grid, name: str, activation: int) -> Codes:
            options = {"fusedActivationFunction": activation, "keepNumDims": len(shape) > 2}
            given, sizes = [value.tensor, held, bias()], tuple(shape[axis] for axis in order_out)
            made = w.emit("FULLY_CONNECTED", given, sizes, _like(own, out), name, **options)
            return Codes(made, shape, order_out)

        return Pending(shape, written, fuses=True, biased=biased)

    def with_bias(name: str) -> Pending:
        number = _bias(w, name, own, grid, count)
        return pending(lambda: number)

    if len(node.input) > 2 and node.input[2]:
        return with_bias(node.input[2])
    return pending(lambda: _bias(w, "", own, grid, count), with_bias)


def _flat(tensor: Any, count: int) -> Any:
    held = tensor.value.reshape(count, -1)
    return type(tensor)(tensor.name, held.shape, tensor.dtype, tensor.grid, held)


def _product(w: Writer, node: NodeProto) -> Value:
    left, right = w.codes(node.input[0]), w.codes(node.input[1])
    rank = max(len(left.shape), len(right.shape))
    if min(len(left.shape), len(right.shape)) < 2:
        raise Refused("it multiplies with a vector", "give both operands two axes or more")
    left, right = w.ranked(left, rank), w.ranked(right, rank)
    turned = (*range(rank - 2), rank - 1, rank - 2)
    flips = [value.perm == turned for value in (left, right)]
    sides = [value if flip else w.plain(value) for value, flip in zip((left, right), flips, strict=True)]
    shape, grid = w.shapes[node.output[0]], w.grid(left)
    _like(grid, w.grid(right))

    def written(out: Grid, name: str, _: int) -> Codes:
        options = {"adjX": flips[0], "adjY": flips[1]}
        made = w.emit("BATCH_MATMUL", [one.tensor for one in sides], shape, _like(grid, out), name, **options)
        return Codes(made, shape, tuple(range(rank)))

    return Pending(shape, written)


def max_pool(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write MAX_POOL_2D, whose result keeps the grid."""
    image = _Image(w, node.input[0], attrs, None)
    if image.dilations != [1, 1]:
        raise Refused("it has dilations", "use a pool without")
    tensor = image.padded(image.grid.bounds[0]) if image.padding is None else image.tensor
    shape, name = w.shapes[node.output[0]], node.output[0]
    options = {**image.options(), "filterHeight": image.window[0], "filterWidth": image.window[1]}
    made = w.emit("MAX_POOL_2D", [tensor], image.shape(image.channels, shape), image.grid, f"{name}/pool", **options)
    return image.result(made, shape, name)


def average_pool(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write AVERAGE_POOL_2D where the grid stays, else a DEPTHWISE_CONV_2D of equal weights, which rounds once."""
    image = _Image(w, node.input[0], attrs, None)
    counted = not image.pads.any() or bool(attrs.get("count_include_pad"))
    if attrs.get("ceil_mode") or image.dilations != [1, 1] or (image.padding is None and not counted):
        raise Refused("its windows stick out of the image", "pad in front of it, and pool without ceil_mode")
    tensor = image.padded() if counted else image.tensor
    shape, options = w.shapes[node.output[0]], image.options()
    taps = image.window[0] * image.window[1]

    def written(out: Grid, name: str, activation: int) -> Codes:
        """Write the pool, and what brings it to another grid."""
        sizes, inner = image.shape(image.channels, shape), name if image.rank == 2 else f"{name}/image"
        if image.grid.same(out) or not counted:
            size = {"filterHeight": image.window[0], "filterWidth": image.window[1]}
            made = w.emit("AVERAGE_POOL_2D", [tensor], sizes, image.grid, f"{inner}/pool", **options, **size)
            return w.requantized(image.result(made, shape, f"{name}/own_grid"), out, name, rounded=True)
        weights = np.full((1, *image.window, image.channels), 127)
        grid = Grid.of("int8", 1 / (127 * taps), 0)
        held, bias = w.store(weights, grid, f"{name}/taps"), _bias(w, "", image.grid, grid, image.channels)
        factors = {"dilationHFactor": 1, "dilationWFactor": 1, "depthMultiplier": 1}
        own = {**options, **factors, "fusedActivationFunction": NONE}
        made = w.emit("DEPTHWISE_CONV_2D", [tensor, held, bias], sizes, _like(image.grid, out), inner, **own)
        return image.result(made, shape, name)

    return Pending(shape, written)
