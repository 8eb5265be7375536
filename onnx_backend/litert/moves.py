"""Ops that move values: most cost nothing, since they change the shape or the layout that a value is known by."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto

from onnx_backend.litert.program import Grid
from onnx_backend.litert.writer import Codes, Pending, Refused, Shape, Stored, Value, Writer

Attributes = Mapping[str, Any]


def reshape(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Give a value another shape (Reshape, Flatten, Squeeze, Unsqueeze)."""
    shape, name = w.shapes[node.output[0]], node.output[0]
    value = w.values.get(node.input[0])
    if isinstance(value, Stored):
        if value.grid is not None and value.grid.scale.size > 1:
            raise Refused("it reshapes a stored tensor with a scale for each channel", "give it one scale")
        return replace(value, values=value.values.reshape(shape), tensor=None)
    if isinstance(value, Pending) and value.own is None:
        return replace(
            value,
            shape=shape,
            write=lambda grid, own, act: w.reshaped(value.write(grid, f"{own}/before", act), shape, own),
        )
    return w.reshaped(w.codes(node.input[0]), shape, name)


def transpose(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Reorder the axes that a value is known by."""
    order = tuple(attrs.get("perm") or reversed(range(len(w.shapes[node.input[0]]))))
    value = w.values.get(node.input[0])
    if isinstance(value, Stored):
        grid = value.grid
        if grid is not None and grid.scale.size > 1:
            grid = Grid(grid.dtype, grid.scale, grid.zero_point, order.index(grid.axis))
        return replace(value, values=value.values.transpose(order), grid=grid, site="", tensor=None)
    if isinstance(value, Pending) and value.own is None:
        turned = tuple(value.shape[axis] for axis in order)
        return replace(value, shape=turned, write=lambda *given: _turned(value.write(*given), order))
    return _turned(w.codes(node.input[0]), order)


def _turned(value: Codes, order: Shape) -> Codes:
    shape = tuple(value.shape[axis] for axis in order)
    return Codes(value.tensor, shape, tuple(order.index(axis) for axis in value.perm))


def same(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Return the value itself."""
    return w.values[node.input[0]]


def concat(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write CONCATENATION, whose operands are brought to the grid of the result first."""
    shape = w.shapes[node.output[0]]
    axis = int(attrs["axis"]) % len(shape)
    known = [w.codes(name) for name in node.input if not isinstance(w.values.get(name), Stored)]
    if not known:
        raise Refused("all operands are stored", "fold it")
    perm = max(known, key=lambda value: int(np.prod(value.shape))).perm
    parts = [w.values[n] if isinstance(w.values[n], Stored) else w.at(w.codes(n), perm) for n in node.input]

    def written(out: Grid, name: str, _: int) -> Codes:
        """Bring the parts to one grid, and join them."""
        tensors = []
        for at, part in enumerate(parts):
            if isinstance(part, Codes):
                tensors.append(w.requantized(part, out, f"{name}/part{at}").tensor)
                continue
            assert isinstance(part, Stored)
            held, lies_so = part.tensor, perm == tuple(range(len(perm)))
            if held is not None and lies_so and part.grid is not None and part.grid.same(out):
                tensors.append(held)
                continue
            low, high = out.bounds
            codes = np.clip(np.rint(part.floats() / out.scale[0]) + out.zero, low, high)
            tensors.append(w.store(codes.transpose(perm), out, part.site or f"{name}/part{at}"))
        sizes = tuple(shape[one] for one in perm)
        options = {"axis": perm.index(axis), "fusedActivationFunction": 0}
        return Codes(w.emit("CONCATENATION", tensors, sizes, out, name, **options), shape, perm)

    grids = [w.grid(part) for part in known]
    if len(known) == len(node.input) and all(grids[0].same(grid) for grid in grids):
        return written(grids[0], node.output[0], 0)
    return Pending(shape, written)


def _cut(w: Writer, value: Codes, begin: Sequence[int], shape: Shape, name: str, steps: Sequence[int]) -> Codes:
    """Return a part of a value."""
    if shape == value.shape:
        return value
    grid, perm = w.grid(value), value.perm
    sizes = tuple(shape[axis] for axis in perm)
    first = w.ints([begin[axis] for axis in perm], f"{name}/begin")
    if all(step == 1 for step in steps):
        made = w.emit("SLICE", [value.tensor, first, w.ints(sizes, f"{name}/size")], sizes, grid, name)
    else:
        ends = [begin[axis] + (shape[axis] - 1) * steps[axis] + 1 for axis in perm]
        pace = w.ints([steps[axis] for axis in perm], f"{name}/steps")
        made = w.emit("STRIDED_SLICE", [value.tensor, first, w.ints(ends, f"{name}/end"), pace], sizes, grid, name)
    return Codes(made, shape, perm)


def cut(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write SLICE or STRIDED_SLICE."""
    value, shape = w.codes(node.input[0]), w.shapes[node.output[0]]
    rank = len(shape)
    starts, ends = w.constant(node.input[1]), w.constant(node.input[2])
    axes = w.constant(node.input[3]) if len(node.input) > 3 and node.input[3] else list(range(len(starts)))
    paces = w.constant(node.input[4]) if len(node.input) > 4 else [1] * len(starts)
    begin, steps = [0] * rank, [1] * rank
    for axis, start, end, pace in zip(axes, starts, ends, paces, strict=True):
        if pace < 1:
            raise Refused("it runs backwards", "flip the data in front of the model")
        begin[axis % rank], steps[axis % rank] = slice(start, end, pace).indices(value.shape[axis % rank])[0], pace
    return _cut(w, value, begin, shape, node.output[0], steps)


def split(w: Writer, node: NodeProto, attrs: Attributes) -> list[Value]:
    """Write a SLICE for each part."""
    value = w.codes(node.input[0])
    axis, begin = int(attrs.get("axis", 0)) % len(value.shape), [0] * len(value.shape)
    found: list[Value] = []
    for name in node.output:
        shape = w.shapes[name]
        found.append(_cut(w, value, begin, shape, name, [1] * len(shape)))
        begin[axis] += shape[axis]
    return found


def gather(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write a SLICE for one stored index, else GATHER; from a stored table by indices that are an input."""
    if isinstance(w.values.get(node.input[0]), Stored):
        return _looked_up(w, node, int(attrs.get("axis", 0)))
    value, shape, name = w.codes(node.input[0]), w.shapes[node.output[0]], node.output[0]
    axis, rank = int(attrs.get("axis", 0)) % len(value.shape), len(value.shape)
    indices = w.stored(node.input[1]).values.astype(np.int64) % value.shape[axis]
    if indices.size == 1:
        begin = [int(indices.reshape(-1)[0]) if one == axis else 0 for one in range(rank)]
        part = tuple(1 if one == axis else size for one, size in enumerate(value.shape))
        return w.reshaped(_cut(w, value, begin, part, f"{name}/part", [1] * rank), shape, name)
    if indices.ndim != 1:
        raise Refused("its indices have more than one axis", "index in front of the model")
    sizes, places = tuple(shape[one] for one in value.perm), w.ints(indices, f"{name}/indices")
    options = {"axis": value.perm.index(axis), "batchDims": 0}
    return replace(
        value, tensor=w.emit("GATHER", [value.tensor, places], sizes, w.grid(value), name, **options), shape=shape
    )


def _looked_up(w: Writer, node: NodeProto, axis: int) -> Value:
    """Write the rows of a stored table, as an embedding has them."""
    table, shape, name = w.stored(node.input[0]), w.shapes[node.output[0]], node.output[0]
    indices = w.values.get(node.input[1])
    if isinstance(indices, Stored):
        if table.grid is not None and table.grid.scale.size > 1:
            raise Refused("it indexes a stored tensor with a scale for each row", "give it one scale")
        return replace(table, values=np.take(table.values, indices.values.astype(np.int64), axis), site="", tensor=None)
    if table.grid is None or table.grid.dtype not in ("int8", "int16") or table.grid.scale.size > 1 or axis:
        raise Refused(
            f"its table {node.input[0]!r} is not of 8 or 16 bits with one scale, or it is indexed along another axis",
            "give it 8 bits and one scale",
        )
    held = w.store(table.values, table.grid, table.site or f"{name}/table")
    if table.site:
        w.note(table.site, "weight", held, table.values.shape, tuple(range(table.values.ndim)), table.own_perm)
    given = [held, w.integers(node.input[1])]
    made = w.emit("GATHER", given, shape, table.grid, name, axis=0, batchDims=0)
    return Codes(made, shape, tuple(range(len(shape))))


def pad(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write PAD for zeros, PADV2 for another number."""
    value, shape, name = w.codes(node.input[0]), w.shapes[node.output[0]], node.output[0]
    if attrs.get("mode", "constant") != "constant" or (len(node.input) > 3 and node.input[3]):
        raise Refused(f"its mode is {attrs.get('mode')}", "pad with a constant")
    ends, grid = np.array(w.constant(node.input[1])).reshape(2, -1).T, w.grid(value)
    if np.any(ends < 0):
        raise Refused("it cuts off (negative padding)", "use a Slice")
    number = float(w.stored(node.input[2]).floats().reshape(-1)[0]) if len(node.input) > 2 and node.input[2] else 0.0
    places = w.ints(ends[list(value.perm)], f"{name}/pads")
    sizes = tuple(shape[axis] for axis in value.perm)
    given = [value.tensor, places]
    if number:
        given.append(w.store(np.array([grid.code(number)]), grid, f"{name}/value"))
    made = w.emit("PADV2" if number else "PAD", given, sizes, grid, name)
    return replace(value, tensor=made, shape=shape)


def expand(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write TILE where an axis grows."""
    shape, name = w.shapes[node.output[0]], node.output[0]
    value = w.values.get(node.input[0])
    if isinstance(value, Stored):
        return replace(value, values=np.broadcast_to(value.values, shape), site="", tensor=None)
    codes = w.ranked(w.codes(node.input[0]), len(shape))
    if codes.shape == shape:
        return codes
    times = w.ints([shape[axis] // codes.shape[axis] for axis in codes.perm], f"{name}/times")
    sizes = tuple(shape[axis] for axis in codes.perm)
    return replace(codes, tensor=w.emit("TILE", [codes.tensor, times], sizes, w.grid(codes), name), shape=shape)


def resize(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Write RESIZE_NEAREST_NEIGHBOR or RESIZE_BILINEAR, which keeps the grid."""
    shape, mode = w.shapes[node.output[0]], attrs.get("mode", "nearest")
    value = w.codes(node.input[0])
    places, nearest = attrs.get("coordinate_transformation_mode", "half_pixel"), attrs.get("nearest_mode")
    known = {"half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"}
    if mode == "nearest":
        whole = all(after % before == 0 for before, after in zip(value.shape, shape, strict=True))
        floors = places == "asymmetric" and nearest == "floor"
        if not whole or not (floors or (places in ("half_pixel", "pytorch_half_pixel") and nearest != "ceil")):
            raise Refused(f"nearest with {places} and {nearest}", "use a whole factor, as torch's interpolate does")
        places = "asymmetric"
    if len(shape) != 4 or mode not in ("nearest", "linear") or shape[:2] != value.shape[:2] or places not in known:
        raise Refused(f"its mode is {mode} ({places}) of {len(shape)} axes", "resize images bilinearly or by nearest")
    value = w.at(value, (0, 2, 3, 1))
    options = {"alignCorners": places == "align_corners", "halfPixelCenters": places.endswith("half_pixel")}
    sizes, grid = tuple(shape[axis] for axis in value.perm), w.grid(value)
    kind = "RESIZE_NEAREST_NEIGHBOR" if mode == "nearest" else "RESIZE_BILINEAR"

    def written(out: Grid, wanted: str, _: int) -> Codes:
        inner = wanted if grid.same(out) else f"{wanted}/own_grid"
        made = w.emit(kind, [value.tensor, w.ints(shape[2:], f"{wanted}/size")], sizes, grid, inner, **options)
        return w.requantized(replace(value, tensor=made, shape=shape), out, wanted, rounded=mode != "nearest")

    return Pending(shape, written, own=grid)


def depth_to_space(w: Writer, node: NodeProto, attrs: Attributes) -> Value:
    """Move channels to positions by a TRANSPOSE between two RESHAPEs (PixelShuffle)."""
    value, name, size = w.codes(node.input[0]), node.output[0], int(attrs["blocksize"])
    n, channels, height, width = value.shape
    left = channels // size**2
    is_dcr = attrs.get("mode", "DCR") == "DCR"
    split_up = (n, size, size, left, height, width) if is_dcr else (n, left, size, size, height, width)
    order = (0, 3, 4, 1, 5, 2) if is_dcr else (0, 1, 4, 2, 5, 3)
    turned = _turned(w.reshaped(value, split_up, f"{name}/split"), order)
    turned = w.at(turned, (0, 2, 3, 4, 5, 1))
    return w.reshaped(turned, w.shapes[node.output[0]], name)
