"""Lower Resize: nearest moves codes, linear is a sum of two taps per axis with integer weights.

Coordinates follow the ONNX standard. Nearest indices are computed in float32, as runtimes do, since they are part of
what the model means. Linear weights stay exact fractions in int32 sums where their common denominators leave room, and
are rounded to a power of two with a stated error elsewhere; the product of the codes with a small matrix does the last
axis, whole rows are gathered for the others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnx_backend.integer.ir.context import Args, LoweringContext, constant_integers, label, require_codes
from onnx_backend.integer.ir.exact_bounds import one_rounding
from onnx_backend.integer.ir.operations import Accumulation
from onnx_backend.integer.ir.values import (
    ActivationEncoding,
    Array,
    Constant,
    Linear,
    Lookup,
    Movement,
    Refused,
    Term,
    Value,
)
from onnx_backend.integer.lowering.movement.moves import applied
from onnx_backend.proto.nodes import attributes

_LARGEST_DENOMINATOR = 1 << 12  # a scale such as float32(1.7) means 17/10


@dataclass(frozen=True)
class Geometry:
    """The resizing of one axis."""

    axis: int  # the axis
    inputs: int  # positions of the input
    outputs: int  # positions of the output
    scale: Fraction  # output per input positions, as the model states it: float32 exactly, or the ratio of two sizes
    mode: str  # the coordinate transformation
    region: tuple[float, float] = (0.0, 1.0)  # start and end of the region of `tf_crop_and_resize`


def axis_geometries(ctx: LoweringContext, node: NodeProto, args: Args) -> list[Geometry]:
    """Return the axes that the node names; one whose size and scale stay is included."""
    attrs, rank = attributes(node), ctx.rank(node.input[0])
    axes = [axis % rank for axis in attrs.get("axes", range(rank))]
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    if mode not in _COORDINATES:
        raise Refused(f"coordinate_transformation_mode={mode!r} is unknown", f"use one of {', '.join(_COORDINATES)}")
    scales = stated_scales(args)
    regions = _regions(args, len(axes)) if mode == "tf_crop_and_resize" else [(0.0, 1.0)] * len(axes)
    if scales is not None:
        chosen = [i for i in range(len(axes)) if scales[i] != 1 or mode == "tf_crop_and_resize"]
        inputs = dict(zip(chosen, ctx.sizes(node.input[0], [axes[i] for i in chosen]), strict=True))
        return [Geometry(axes[i], n, math.floor(n * scales[i]), scales[i], mode, regions[i]) for i, n in inputs.items()]
    inputs_ = ctx.sizes(node.input[0], axes)
    wanted = constant_integers(args[3]) if len(args) > 3 else None
    policy = attrs.get("keep_aspect_ratio_policy", "stretch")
    if wanted is None or policy != "stretch":
        outputs = ctx.sizes(node.output[0], axes)
        wanted = outputs if wanted is None else wanted
    else:
        outputs = wanted
    ratios = [Fraction(out, n) if n else Fraction(1) for out, n in zip(wanted, inputs_, strict=True)]
    if policy != "stretch":
        ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(axes)
    rows = zip(axes, inputs_, outputs, ratios, regions, strict=True)
    return [Geometry(axis, n, out, ratio, mode, region) for axis, n, out, ratio, region in rows]


def stated_scales(args: Args) -> list[Fraction] | None:
    """Return the scales that the node states, float32 exactly; None where it states sizes."""
    value = args[2] if len(args) > 2 else None
    if value is None or (isinstance(value, Constant) and value.values.size == 0):
        return None
    if not isinstance(value, Constant):
        raise Refused("its scales are not constant", "store the scales as an initializer")
    scales = value.values.reshape(-1).astype(np.float32)
    if not np.all(np.isfinite(scales) & (scales > 0)):
        raise Refused(f"one of its scales is {scales.min()}", "scales are positive and finite")
    return [Fraction(float(scale)) for scale in scales]


def _regions(args: Args, count: int) -> list[tuple[float, float]]:
    value = args[1] if len(args) > 1 else None
    if not isinstance(value, Constant) or value.values.size != 2 * count:
        raise Refused("its region of interest is not constant", "store roi as an initializer")
    bounds = value.values.reshape(2, count).tolist()
    return list(zip(bounds[0], bounds[1], strict=True))


def _half_pixel(g: Geometry, i: int) -> Fraction:
    return (i + Fraction(1, 2)) / g.scale - Fraction(1, 2)


def _symmetric(g: Geometry, i: int) -> Fraction:
    adjustment = g.outputs / (g.scale * g.inputs)
    return Fraction(g.inputs, 2) * (1 - adjustment) + _half_pixel(g, i)


def _crop(g: Geometry, i: int) -> Fraction:
    start, end = (Fraction(bound) for bound in g.region)
    if g.outputs == 1:
        return (start + end) / 2 * (g.inputs - 1)
    return start * (g.inputs - 1) + i * (end - start) * Fraction(g.inputs - 1, g.outputs - 1)


#: From an output position to the input position, exactly (ONNX Resize, coordinate_transformation_mode).
_COORDINATES: Mapping[str, Callable[[Geometry, int], Fraction]] = MappingProxyType(
    {
        "half_pixel": _half_pixel,
        "half_pixel_symmetric": _symmetric,
        "pytorch_half_pixel": lambda g, i: _half_pixel(g, i) if g.outputs > 1 else Fraction(0),
        "align_corners": lambda g, i: Fraction(i * (g.inputs - 1), g.outputs - 1) if g.outputs > 1 else Fraction(0),
        "asymmetric": lambda g, i: i / g.scale,
        "tf_crop_and_resize": _crop,
    }
)


def positions(geometry: Geometry) -> list[Fraction]:
    """Return the exact input position of every output position."""
    found = [_COORDINATES[geometry.mode](geometry, i) for i in range(geometry.outputs)]
    if geometry.mode == "tf_crop_and_resize" and (min(found) < 0 or max(found) > geometry.inputs - 1):
        raise Refused("its region reaches outside of the input", "crop inside of the input, and Pad afterwards")
    return found


def nearest_indices(geometry: Geometry, mode: str) -> Array:
    """Return the input index of every output position, from float32 coordinates as in ONNX Runtime."""
    positions(geometry)
    x = _float_positions(geometry)
    # ONNX Runtime treats a number this close to a half as one
    tie = np.abs(x - (np.trunc(x) + np.float32(0.5))) < 1e-6
    nearest = np.floor(x.astype(np.float64) + 0.5)
    rounded = {
        "round_prefer_floor": np.where(tie, np.floor(x), nearest),
        "round_prefer_ceil": np.where(tie, np.ceil(x), nearest),
        "floor": np.floor(x),
        "ceil": np.ceil(x),
    }.get(mode)
    if rounded is None:
        raise Refused(f"nearest_mode={mode!r} is unknown", "use floor, ceil, round_prefer_floor or round_prefer_ceil")
    return np.asarray(rounded.clip(0, geometry.inputs - 1).astype(np.int64))


def _float_positions(g: Geometry) -> Array:
    one, half = np.float32(1), np.float32(0.5)
    i, scale = np.arange(g.outputs, dtype=np.float32), np.float32(float(g.scale))
    inputs, outputs = np.float32(g.inputs), np.float32(g.outputs)
    if g.mode == "asymmetric":
        return np.asarray(i / scale)
    if g.mode == "align_corners":
        return np.asarray(i * (inputs - one) / (outputs - one)) if g.outputs > 1 else np.zeros(1, np.float32)
    if g.mode == "tf_crop_and_resize":
        start, end = (np.float32(bound) for bound in g.region)
        if g.outputs == 1:
            return np.asarray([half * (start + end) * (inputs - one)], np.float32)
        return np.asarray(start * (inputs - one) + (i * (end - start) * (inputs - one)) / (outputs - one))
    if g.mode == "pytorch_half_pixel" and g.outputs == 1:
        return np.zeros(1, np.float32)
    if g.mode == "half_pixel_symmetric":  # its sum is taken in float64
        offset = inputs / np.float32(2) * (one - outputs / (scale * inputs))
        exact = (i + half).astype(np.float64) / np.float64(scale)
        return np.asarray(np.float64(offset) + exact - 0.5, np.float32)
    return np.asarray((i + half) / scale - half)


@dataclass(frozen=True)
class Taps:
    """Linear interpolation along one axis with integer weights."""

    left: Array  # input index of the first tap of every output position
    right: Array  # of the second
    weight: Array  # of the second, out of `whole`; the first has the rest
    whole: int  # sum of both weights
    error: Fraction  # largest distance of a weight from the real one


def linear_taps(geometry: Geometry, room: int) -> Taps:
    """Return the taps of one axis with a sum of weights of at most `room`, exact if a common denominator fits."""
    last = geometry.inputs - 1
    exact = [min(max(x, Fraction(0)), Fraction(last)) for x in positions(geometry)]
    left = [min(math.floor(x), max(last - 1, 0)) for x in exact]
    parts = [x - i for x, i in zip(exact, left, strict=True)]
    whole = math.lcm(*(part.denominator for part in parts))
    if whole > room:
        near = [part.limit_denominator(_LARGEST_DENOMINATOR) for part in parts]
        whole = math.lcm(*(part.denominator for part in near))
        if whole > room or any(abs(a - b) > Fraction(1, 1 << 24) for a, b in zip(near, parts, strict=True)):
            whole = 1 << (room.bit_length() - 1)
    weight = [round(part * whole) for part in parts]
    error = max(abs(Fraction(w, whole) - part) for w, part in zip(weight, parts, strict=True))
    indices = np.asarray(left, np.int64)
    return Taps(indices, np.minimum(indices + 1, last), np.asarray(weight, np.int64), whole, error)


_FINE = 2.0**-8  # error of int32 sums, in input steps, above which they are taken in int64
_WEIGHTS = 1 << 17  # of a product that interpolates along all axes at once
_MATRIX = 512  # input positions up to which the last axis is interpolated by one matrix product


def resize(ctx: LoweringContext, node: NodeProto, args: Args) -> Value:
    """Lower Resize with mode nearest or linear."""
    attrs = attributes(node)
    mode = attrs.get("mode", "nearest")
    if mode not in ("nearest", "linear"):
        raise Refused(f"mode={mode!r} has no integer form", 'use mode="linear" or "nearest"')
    if attrs.get("antialias", 0):
        raise Refused("antialias=1 has no integer form", "resize without antialias, or pool first")
    repeated = _repeated(ctx, node, args) if mode == "nearest" else None
    if repeated is not None:
        return repeated
    whole = axis_geometries(ctx, node, args)
    # ONNX Runtime copies a tensor whose sizes all stay, whatever the scales are
    geometries = [] if all(g.inputs == g.outputs for g in whole) else [g for g in whole if not _unchanged(g)]
    if any(g.outputs < 1 or g.inputs < 1 for g in geometries):
        raise Refused("it resizes from or to nothing", "remove the node")
    if mode == "linear":
        return _interpolated(ctx, node, args, geometries)
    return _moved(ctx, node, args[0], geometries)


def _unchanged(geometry: Geometry) -> bool:
    return geometry.inputs == geometry.outputs and geometry.scale == 1 and geometry.mode != "tf_crop_and_resize"


_KERNEL = MappingProxyType({"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"})


def _moved(ctx: LoweringContext, node: NodeProto, value: Value | None, geometries: Sequence[Geometry]) -> Value:
    """Move codes by the integer kernel of Resize where it takes the same indices, else by a Gather per axis."""
    name = node.output[0]
    chosen = attributes(node).get("nearest_mode", "round_prefer_floor")
    indices = {g.axis: nearest_indices(g, chosen) for g in geometries}
    if geometries and all(np.array_equal(_kernel_indices(g), indices[g.axis]) for g in geometries):
        sizes = _every_size(ctx, node, value, geometries)
        if sizes:
            kernel = helper.make_node("Resize", ["x", "", "", "s"], ["y"], **_KERNEL)
            return applied(ctx, value, Movement(kernel, ("", "", sizes)), name)
    for geometry in geometries:
        gather = helper.make_node("Gather", ["x", "i"], ["y"], axis=geometry.axis)
        step = Movement(gather, (ctx.constant(indices[geometry.axis], np.int64),))
        value = applied(ctx, value, step, name)
    if value is None:
        raise Refused("it has no input", "remove the node")
    return value


def _every_size(ctx: LoweringContext, node: NodeProto, value: Value | None, geometries: Sequence[Geometry]) -> str:
    """Return all sizes of the result; "" where they are known only once the codes of a pending sum exist.

    All of them, not those of some `axes`: where ONNX Runtime moves a Transpose across a Resize with that attribute, it
    loses the sizes and refuses the model.
    """
    shape = ctx.shapes.get(node.input[0])
    wanted = {g.axis: g.outputs for g in geometries}
    if shape is None or (None in shape and not isinstance(value, Lookup)):
        return ""
    known = [wanted.get(axis, size) for axis, size in enumerate(shape)]
    if None not in known:
        return ctx.constant(known, np.int64)
    assert isinstance(value, Lookup)  # checked above
    given = ctx.node("Shape", [value.name])
    fixed = [-1 if size is None else size for size in known]
    free = ctx.constant(np.asarray(fixed) < 0)
    return ctx.node("Where", [free, given, ctx.constant(fixed, np.int64)])


def _kernel_indices(g: Geometry) -> Array:
    """Return the indices that the kernel reads for these sizes, none if float32 and exact arithmetic disagree."""
    exact = np.arange(g.outputs) * g.inputs // g.outputs
    plain = Geometry(g.axis, g.inputs, g.outputs, Fraction(g.outputs, g.inputs), "asymmetric")
    return exact if np.array_equal(nearest_indices(plain, "floor"), exact) else exact[:0]


def _repeated(ctx: LoweringContext, node: NodeProto, args: Args) -> Value | None:
    """Repeat codes a whole number of times along axes of dynamic sizes, with the integer kernel of Resize."""
    value, attrs = args[0], attributes(node)
    factors = _factors(ctx, node, args)
    if factors is None or not isinstance(value, Lookup):
        return None
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    for factor in factors:
        # the roundings that pass here do so by a margin: an index is off by one in the first periods or never
        geometry = Geometry(0, 4, 4 * factor, Fraction(factor), mode)
        found = nearest_indices(geometry, attrs.get("nearest_mode", "round_prefer_floor"))
        if not np.array_equal(found, np.arange(4 * factor) // factor):
            return None
    sizes = ctx.node("Mul", [ctx.node("Shape", [value.name]), ctx.constant(factors, np.int64)])
    return Lookup(
        ctx.node("Resize", [value.name, "", "", sizes], name=node.output[0], **_KERNEL), value.values, value.encoding
    )


def _factors(ctx: LoweringContext, node: NodeProto, args: Args) -> list[int] | None:
    """Return the whole number by which every axis grows; None if one does not, or if all sizes are static."""
    attrs, scales = attributes(node), stated_scales(args)
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    if mode not in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric") or scales is None:
        return None
    shape = ctx.shapes.get(node.input[0])
    rank = ctx.rank(node.input[0])
    axes = [axis % rank for axis in attrs.get("axes", range(rank))]
    resized = [axis for axis, scale in zip(axes, scales, strict=True) if scale != 1]
    if any(scale.denominator != 1 for scale in scales) or (shape and all(shape[axis] is not None for axis in resized)):
        return None
    factors = [1] * rank
    for axis, scale in zip(axes, scales, strict=True):
        factors[axis] = int(scale)
    return factors


def _interpolated(ctx: LoweringContext, node: NodeProto, args: Args, geometries: Sequence[Geometry]) -> Value:
    codes, encoding = require_codes(args[0])
    if not geometries:
        assert args[0] is not None  # encoded() refuses None
        return args[0]
    taps = _shared(geometries, ((1 << 31) - 1) // encoding.hi)
    product = None if ctx.composes or encoding.wide else _as_layer(ctx, node, (codes, encoding), geometries, taps)
    if product is not None:
        return product
    wide = encoding.hi * sum(along.error for along in taps) > _FINE
    if wide:
        taps = _shared(geometries, (1 << 62) // encoding.hi)
    rank, tensor, is_codes = ctx.rank(node.input[0]), codes, True
    # the last axis first: there it is a product of codes with a matrix, and the others then copy whole rows
    for geometry, along in sorted(zip(geometries, taps, strict=True), key=lambda pair: -pair[0].axis):
        last = geometry.axis == rank - 1
        if is_codes and last and not encoding.wide and along.whole <= 255 and geometry.inputs <= _MATRIX:
            tensor = _by_matrix(ctx, tensor, geometry, along)
        else:
            tensor = _by_gather(ctx, tensor, geometry, along, rank, np.int64 if wide else np.int32)
        is_codes = False
    whole = math.prod(along.whole for along in taps)
    # both weights of an axis err by the same amount in opposite directions, so the span of the codes counts once
    error = Fraction(encoding.scale) * encoding.hi * sum(along.error for along in taps)
    shift = max((encoding.hi * whole).bit_length() - 31, 0) if wide else 0
    if wide:
        tensor = _narrowed(ctx, tensor, shift)
        error += Fraction(encoding.scale) * 2**shift / (2 * whole) if shift else 0
    unit = whole / 2**shift
    zero, low, high = (np.asarray(v, np.int64) for v in (round(encoding.zero_point * unit), 0, encoding.hi * unit + 1))
    rest = encoding.zero_point * unit - float(zero)  # of the zero point, where the unit is no whole number
    scale = np.asarray(encoding.scale / unit, np.float64)
    constant = np.asarray(-rest * encoding.scale / unit, np.float64)
    terms = (Term(tensor, scale, zero, low, high),)
    # the unit, the rest of the zero point and the scale are quotients and products in float64
    error += 4 * one_rounding(terms, encoding.zero_point * encoding.scale)
    return Linear(terms, constant, source=label(node), error=error)


def _as_layer(
    ctx: LoweringContext,
    node: NodeProto,
    given: tuple[str, ActivationEncoding],
    geometries: Sequence[Geometry],
    taps: Sequence[Taps],
) -> Linear | None:
    """Write an interpolation as one product of rows of codes with a matrix, which a kernel requantizes; None if large.

    Its weights are those of all axes together, as whole numbers of 8 bits.
    """
    shape = ctx.shapes.get(node.input[0])
    first = min(geometry.axis for geometry in geometries)
    sizes = [size for size in (shape or ())[first:] if size is not None]
    if shape is None or first < 1 or len(sizes) < len(shape) - first or any(along.error for along in taps):
        return None
    along = {geometry.axis: (geometry, tap) for geometry, tap in zip(geometries, taps, strict=True)}
    outputs = [along[axis][0].outputs if axis in along else shape[axis] or 0 for axis in range(first, len(shape))]
    if math.prod(sizes) * math.prod(outputs) > _WEIGHTS:
        return None
    weight = np.ones((1, 1), np.int64)
    for axis, size in enumerate(sizes, first):
        weight = np.kron(weight, _matrix(*along[axis]) if axis in along else np.eye(size, dtype=np.int64))
    if weight.max() > 2 * 255:
        return None
    codes, encoding = given
    whole, lead = math.prod(tap.whole for tap in taps), [0] * first
    rows = ctx.node("Reshape", [codes, ctx.constant64([*lead, math.prod(sizes)])])
    if weight.max() > 255:  # codes that are read twice, with half of a weight each
        rows, weight = ctx.node("Concat", [rows, rows], axis=first), np.concatenate([weight >> 1, (weight + 1) >> 1])
    result, unit = ctx.fresh(f"{node.output[0]}.accumulator"), np.asarray(1.0 / whole)
    layer: tuple[Any, ...] = (
        "MatMul",
        rows,
        encoding,
        weight,
        0,
        8,
        unit,
        {},
        False,
        f"{node.output[0]}.weights",
        result,
        label(node),
        first + 1,
    )
    ctx.nodes.append(Accumulation(*layer))
    low, high = (np.asarray((end - encoding.zero_point) * whole, np.int64) for end in (0, encoding.hi))
    terms = (Term(result, encoding.scale * unit, np.zeros((), np.int64), low, high),)
    back = Movement(helper.make_node("Reshape", ["x", "s"], ["y"]), (ctx.constant64([*lead, *outputs]),))
    return Linear(terms, after=(back,), source=label(node), error=4 * one_rounding(terms, 0.0))


def _shared(geometries: Sequence[Geometry], room: int) -> list[Taps]:
    """Share the room of the sum between the axes: room that one axis does not need goes to the others."""
    found: dict[int, Taps] = {}
    left = sorted(geometries, key=lambda g: linear_taps(g, room).whole)
    for i, geometry in enumerate(left):
        share = math.floor(room ** (1 / (len(left) - i)) * (1 - 1e-12))
        found[geometry.axis] = linear_taps(geometry, max(share, 1))
        room //= found[geometry.axis].whole
    return [found[geometry.axis] for geometry in geometries]


def _narrowed(ctx: LoweringContext, tensor: str, shift: int) -> str:
    if shift:
        raised = ctx.node("Add", [tensor, ctx.constant(1 << (shift - 1), np.int64)])
        tensor = ctx.shifted_right(ctx.cast(raised, TensorProto.UINT64), shift)
    return ctx.cast(tensor, TensorProto.INT32)


def _by_matrix(ctx: LoweringContext, codes: str, geometry: Geometry, taps: Taps) -> str:
    return ctx.node("MatMulInteger", [codes, ctx.constant(_matrix(geometry, taps), np.uint8)])


def _matrix(geometry: Geometry, taps: Taps) -> Array:
    """Return the weights of an axis, shape (inputs, outputs)."""
    matrix = np.zeros((geometry.inputs, geometry.outputs), np.int64)
    columns = np.arange(geometry.outputs)
    np.add.at(matrix, (taps.left, columns), taps.whole - taps.weight)
    np.add.at(matrix, (taps.right, columns), taps.weight)
    return matrix


def _by_gather(ctx: LoweringContext, tensor: str, geometry: Geometry, taps: Taps, rank: int, kind: Any) -> str:
    shape = [1] * rank
    shape[geometry.axis] = -1
    sides = []
    for indices, weight in ((taps.left, taps.whole - taps.weight), (taps.right, taps.weight)):
        if not np.any(weight):
            continue
        picked = ctx.node("Gather", [tensor, ctx.constant(indices, np.int64)], axis=geometry.axis)
        wide = ctx.cast(picked, TensorProto.INT64 if kind == np.int64 else TensorProto.INT32)
        sides.append(ctx.node("Mul", [wide, ctx.constant(weight.reshape(shape), kind)]))
    return sides[0] if len(sides) == 1 else ctx.node("Add", sides)
