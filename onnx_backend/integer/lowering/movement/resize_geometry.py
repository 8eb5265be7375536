"""The geometry of a Resize per axis: input positions, nearest indices, and the weights of linear interpolation.

The taps follow the coordinate transformations of the ONNX standard. Nearest indices are computed in float32, as
runtimes do, since they are part of what the model means; linear weights are exact fractions wherever their common
denominator leaves room, and otherwise rounded to a power of two with the error that this makes stated.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnx_backend.integer.ir.context import Args, LoweringContext, constant_integers
from onnx_backend.integer.ir.values import Array, Constant, Refused
from onnx_backend.proto.nodes import attributes

_LARGEST_DENOMINATOR = 1 << 12  # a scale such as float32(1.7) means 17/10


@dataclass(frozen=True)
class Geometry:
    """The resizing of one axis.

    Attributes:
        axis: the axis.
        inputs: positions of the input.
        outputs: positions of the output.
        scale: output per input positions, as the model states it: float32 exactly, or the ratio of two sizes.
        mode: the coordinate transformation.
        region: start and end of the region of `tf_crop_and_resize`.
    """

    axis: int
    inputs: int
    outputs: int
    scale: Fraction
    mode: str
    region: tuple[float, float] = (0.0, 1.0)


def axis_geometries(ctx: LoweringContext, node: NodeProto, args: Args) -> list[Geometry]:
    """Return the axes that the node names; one whose size and scale stay is included.

    Raises:
        Refused: a size is not static, or an attribute or operand is unknown.
    """
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
    """Return the scales that the node states, float32 exactly; None where it states sizes.

    Raises:
        Refused: they are not constant, or not positive and finite.
    """
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
    """Return the exact input position of every output position.

    Raises:
        Refused: `tf_crop_and_resize` reaches outside of the input, where a constant would have to be filled in.
    """
    found = [_COORDINATES[geometry.mode](geometry, i) for i in range(geometry.outputs)]
    if geometry.mode == "tf_crop_and_resize" and (min(found) < 0 or max(found) > geometry.inputs - 1):
        raise Refused("its region reaches outside of the input", "crop inside of the input, and Pad afterwards")
    return found


def nearest_indices(geometry: Geometry, mode: str) -> Array:
    """Return the input index of every output position, from float32 coordinates as in ONNX Runtime.

    Raises:
        Refused: the mode is unknown, or the region leaves the input.
    """
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
    """Linear interpolation along one axis with integer weights.

    Attributes:
        left: input index of the first tap of every output position.
        right: of the second.
        weight: of the second, out of `whole`; the first has the rest.
        whole: sum of both weights.
        error: largest distance of a weight from the real one.
    """

    left: Array
    right: Array
    weight: Array
    whole: int
    error: Fraction


def linear_taps(geometry: Geometry, room: int) -> Taps:
    """Return the taps of one axis with a sum of weights of at most `room`, exact if a common denominator fits.

    Raises:
        Refused: the region of `tf_crop_and_resize` reaches outside of the input.
    """
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
