"""Reading AIMET's encodings files, versions 0.6.1, 1.0.0, 2.0.0 and 2.1.0.

Conventions (AIMET 2.42): an offset is minus a zero point; 0.6.1 and 1.0.0 count it on the unsigned grid, also for a
signed dtype, which they call symmetric; 2.0.0 and 2.1.0 have QuantizeLinear's own operands.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from qsdk.core.arrays import Array
from qsdk.core.encodings.checked import Checked
from qsdk.core.encodings.tensors import TensorFacts, read_by
from qsdk.core.errors import CalibrationError, ConfigError, FileFormatError
from qsdk.core.numerics.dtypes import DTYPES, DType, dtype_named, float16
from qsdk.core.numerics.encoding import Encoding, FloatArray


@dataclass(frozen=True, eq=False)
class Stated:
    """An entry of a file that may lack its axis: 0.6.1 and 1.0.0 have none.

    Attributes:
        dtype: the stored type; the older versions call a type signed where it is symmetric.
        scale: float32; one per tensor, (C,) per channel, per block x's rank (other axes may have length 1), or where
            `axis` is None in the order channel, block.
        zero_point: int32, in scale's order and shape.
        granularity: of the scales.
        axis: channel or block axis, None where the file has none.
        block_size: elements per scale, where there are blocks.
    """

    dtype: DType
    scale: FloatArray
    zero_point: npt.NDArray[np.int32]
    granularity: Literal["tensor", "channel", "block"]
    axis: int | None = None
    block_size: int | None = None


def complete(stated: Stated, tensor: TensorFacts | None) -> Encoding:
    """Return the encoding of a tensor (None without a model) from its entry, with the sign that the plan wants.

    An unknown axis, or a number of scales that does not fit the tensor, is a FileFormatError.
    """
    axis = stated.axis
    scale: Array = stated.scale
    zero_point: Array = stated.zero_point
    shape = None if tensor is None else tensor.whole_shape
    if stated.granularity == "tensor":
        scale, zero_point, axis = scale.reshape(1), zero_point.reshape(1), None
    elif stated.granularity == "channel":
        axis = _channel_axis(stated, tensor, shape)
    elif axis is None:
        scale, zero_point, axis = _blocks(stated, tensor, shape)
    elif shape is not None:
        scale, zero_point = (_broadcast(values, shape, axis) for values in (scale, zero_point))
    elif scale.ndim > 2:
        raise FileFormatError("scales per block of a tensor with more than two axes need its shape; pass model=")
    try:
        result = Encoding(stated.dtype, scale, zero_point, axis, stated.block_size)
    except CalibrationError as error:
        raise FileFormatError(str(error)) from error
    return result if tensor is None or tensor.wanted is None else with_sign_of(result, tensor.wanted)


def with_sign_of(encoding: Encoding, wanted: DType) -> Encoding:
    """Return the same values in the codes of a dtype of equal width and the other sign, if that is all that differs."""
    have = encoding.dtype
    full = all(d.is_integer and (d.lo, d.hi) == (DTYPES[d.name].lo, DTYPES[d.name].hi) for d in (have, wanted))
    if not full or have.bits != wanted.bits or have.signed == wanted.signed:
        return encoding
    return replace(encoding, dtype=wanted, zero_point=encoding.zero_point + np.int32(wanted.lo - have.lo))


def to_stated(encoding: Encoding, tensor: TensorFacts) -> Stated:
    """Return the facts about an encoding that a file can state.

    Block scales of a tensor with more than two axes lose the others, which AIMET's scales do not have. Scales that
    differ along such an axis, and blocks that do not fill theirs, are a FileFormatError.
    """
    granularity: Literal["tensor", "channel", "block"] = "tensor"
    scale: Array = encoding.scale
    zero_point: Array = encoding.zero_point
    if encoding.block_size is not None and encoding.axis is not None:
        granularity = "block"
        axis, shape = encoding.axis % scale.ndim, tensor.whole_shape
        if shape is not None and shape[axis] % encoding.block_size:
            raise FileFormatError(
                f"blocks of {encoding.block_size} do not divide the {shape[axis]} elements of axis {axis}, which AIMET "
                "wants; choose a block size that does"
            )
        channel = _axis_of_channels(encoding, tensor)
        for other in range(scale.ndim):
            if other not in (axis, channel):
                scale, zero_point = (_alike(values, other) for values in (scale, zero_point))
    elif encoding.axis is not None:
        granularity = "channel"
    return Stated(encoding.dtype, scale, zero_point, granularity, encoding.axis, encoding.block_size)


def in_order(values: Array, axis: int) -> Array:
    """Return values flattened in the order channel, block, for blocks whose other axes have length 1."""
    return np.moveaxis(values, axis, -1).reshape(-1)


def channel_axis_of(stated: Stated) -> int:
    """Return the axis of channels of scales per block, whose other axes have length 1."""
    assert stated.axis is not None
    rank = stated.scale.ndim
    block = stated.axis % rank
    long = [axis for axis in range(rank) if axis != block and stated.scale.shape[axis] > 1]
    return long[0] if long else (1 if block == 0 else block - 1)


def _channel_axis(stated: Stated, tensor: TensorFacts | None, shape: tuple[int, ...] | None) -> int:
    count = stated.scale.size
    if stated.axis is not None:
        if shape is not None and not (-len(shape) <= stated.axis < len(shape) and shape[stated.axis] == count):
            raise FileFormatError(f"{count} scales along axis {stated.axis} do not fit the shape {list(shape)}")
        return stated.axis
    if tensor is None or shape is None:
        raise FileFormatError("this version has no channel axis, so the model must say; pass model= (--model)")
    if tensor.channel_axis is not None:
        if shape[tensor.channel_axis] == count:
            return tensor.channel_axis
        raise FileFormatError(
            f"{count} scales do not fit the {shape[tensor.channel_axis]} channels (axis {tensor.channel_axis}) of "
            f"{list(shape)}"
        )
    fitting = [axis for axis, length in enumerate(shape) if length == count]
    if len(fitting) != 1:
        raise FileFormatError(
            f"{count} scales fit {len(fitting)} axes of {list(shape)}; use a version with axes, 2.0.0"
        )
    return fitting[0]


def _blocks(stated: Stated, tensor: TensorFacts | None, shape: tuple[int, ...] | None) -> tuple[Array, Array, int]:
    """Return the scales in QuantizeLinear's own shape, from the order channel, block."""
    assert stated.block_size is not None
    if tensor is None or shape is None:
        raise FileFormatError("this version has no block axis, so the model must say; pass model= (--model)")
    channel, block = tensor.channel_axis, tensor.block_axis
    if channel is None or block is None:
        raise FileFormatError("it has no channels that blocks could divide; use a version with axes, 2.0.0")
    counts = (shape[channel], shape[block] // stated.block_size)
    if math.prod(counts) != stated.scale.size or shape[block] % stated.block_size:
        raise FileFormatError(
            f"{stated.scale.size} scales for blocks of {stated.block_size} do not fit {list(shape)}, with channels on "
            f"axis {channel} and blocks along axis {block}"
        )
    one = [1] * len(shape)
    one[channel], one[block] = counts

    def shaped(values: Array) -> Array:
        ordered = values.reshape(counts) if channel < block else values.reshape(counts).T
        return _broadcast(ordered.reshape(one), shape, block)

    return shaped(stated.scale), shaped(stated.zero_point), block


def _broadcast(values: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Return values repeated along all axes but that of the blocks, to the shape of the tensor."""
    if values.ndim != len(shape) or not -len(shape) <= axis < len(shape):
        raise FileFormatError(f"scales of shape {list(values.shape)} along axis {axis} do not fit {list(shape)}")
    wanted = list(shape)
    wanted[axis] = values.shape[axis]
    try:
        return np.broadcast_to(values, wanted)
    except ValueError as error:
        raise FileFormatError(f"scales of shape {list(values.shape)} do not fit the shape {list(shape)}") from error


def _axis_of_channels(encoding: Encoding, tensor: TensorFacts) -> int | None:
    """Return the only axis besides that of the blocks along which scales may differ."""
    assert encoding.axis is not None
    rank, block = encoding.scale.ndim, encoding.axis % encoding.scale.ndim
    if tensor.channel_axis is not None:
        return tensor.channel_axis % rank
    others = [axis for axis in range(rank) if axis != block]
    long = [axis for axis in others if not np.array_equal(encoding.scale, _repeated(encoding.scale, axis))]
    return others[0] if len(others) == 1 else long[0] if len(long) == 1 else None


def _repeated(values: Array, axis: int) -> Array:
    return np.broadcast_to(values.take([0], axis), values.shape)


def _alike(values: Array, axis: int) -> Array:
    if not np.array_equal(values, _repeated(values, axis)):
        raise FileFormatError(f"its block scales differ along axis {axis}, and AIMET's are per channel and block")
    return values.take([0], axis)


SECTIONS = ("activation_encodings", "param_encodings")
VERSIONS = ("0.6.1", "1.0.0", "2.0.0", "2.1.0")


@dataclass(frozen=True)
class AimetFile:
    """The content of an AIMET encodings file.

    Attributes:
        version: of the format.
        entries: by tensor name.
        casts: tensor name -> float16; None for the versions that leave casts out.
        parameters: the tensors that are parameters; None for the versions without that fact.
        provenance: of the file, as stated in it.
    """

    version: str
    entries: Mapping[str, Stated]
    casts: Mapping[str, DType] | None
    parameters: frozenset[str] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def is_aimet(data: Any) -> bool:
    """Return whether JSON data has the sections of an AIMET encodings file."""
    if not isinstance(data, dict) or "format" in data:
        return False
    return any(name in data for name in SECTIONS) or isinstance(data.get("encodings"), list)


def read_aimet(data: Mapping[str, Any], where: str) -> AimetFile:
    """Return the content of JSON data of any of the four versions, by tensors or by modules.

    Without a version, the shape of the data decides. An unknown version, or an entry that is incomplete, foreign or
    contradicts itself, is a FileFormatError that names the file, `where`, and the tensor.
    """
    if _goes_by_modules(data):
        data = _by_tensors(data, where)
    version = data.get("version", _version_by_shape(data))
    if version not in VERSIONS:
        raise FileFormatError(
            f"{where} has the AIMET version {version!r}; qsdk reads {', '.join(VERSIONS)}: export one of these"
        )
    provenance = {name: value for name, value in data.items() if name not in (*SECTIONS, "encodings")}
    readers: dict[str, Callable[[Any, str], Stated | DType]] = {"0.6.1": _from_0_6_1, "1.0.0": _from_1_0_0}
    read = readers.get(version, _from_2)
    entries: dict[str, Stated] = {}
    casts: dict[str, DType] = {}
    for name, entry in _named(data, version, where, SECTIONS if version in readers else ("encodings",)):
        place = f"{where}, tensor {name!r}"
        if name in entries or name in casts:
            raise FileFormatError(f"{place} has two entries; keep one of them")
        result = read(entry, place)
        if isinstance(result, Stated):
            entries[name] = _on_its_grid(result, place)
        else:
            casts[name] = result
    if version not in readers:
        return AimetFile(version, entries, None, None, provenance)
    stored = frozenset(name for name, _ in _named(data, version, where, SECTIONS[1:]))
    return AimetFile(version, entries, casts, stored, provenance)


def _goes_by_modules(data: Mapping[str, Any]) -> bool:
    """Return whether JSON data of AIMET name modules, or are objects under a version that has lists.

    Such is what `QuantizationSimModel.export` of aimet-torch writes beside the ONNX model, whatever version it is set
    to: `{module: {"input" | "output": {index: entry}}}` for activations, and parameters by path.
    """
    parts = [data[name] for name in SECTIONS if data.get(name)]
    if not parts or not all(isinstance(part, dict) for part in parts):
        return False
    modules = data.get(SECTIONS[0]) or {}
    return data.get("version") == "1.0.0" or any(isinstance(entry, dict) for entry in modules.values())


def _by_tensors(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the same content by tensors: results of modules by site, arguments as `tensors.read_by` names them."""
    activations: dict[str, Any] = {}
    for module, ports in (data.get(SECTIONS[0]) or {}).items():
        if not isinstance(ports, dict) or not all(
            port in ("input", "output") and isinstance(entries, dict) for port, entries in ports.items()
        ):
            raise FileFormatError(
                f"{where}, module {module!r}: a file that goes by modules has input and output of each, with entries "
                "by index; write it again"
            )
        for port, entries in ports.items():
            for index, entry in entries.items():
                name = read_by(module, index) if port == "input" else f"{module}:output" + str(index) * (index != "0")
                activations[name] = entry if isinstance(entry, list) else [entry]
    return {**data, "version": "0.6.1", SECTIONS[0]: activations}


def _version_by_shape(data: Mapping[str, Any]) -> str:
    sections = [data[name] for name in SECTIONS if name in data]
    return "2.0.0" if not sections else "1.0.0" if all(isinstance(part, list) for part in sections) else "0.6.1"


def _named(data: Mapping[str, Any], version: str, where: str, sections: Sequence[str]) -> list[tuple[str, Any]]:
    result: list[tuple[str, Any]] = []
    for section in sections:
        part = data.get(section, {} if version == "0.6.1" else [])
        kind = dict if version == "0.6.1" else list
        if not isinstance(part, kind):
            shown = "an object" if kind is dict else "a list"
            raise FileFormatError(f"{where}: {section} is {shown} in version {version}; write the file again")
        if isinstance(part, dict):
            result += part.items()
            continue
        for index, entry in enumerate(part):
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise FileFormatError(f"{where}: {section}[{index}] has no name; write the file again")
            result.append((entry["name"], {key: value for key, value in entry.items() if key != "name"}))
    return result


def _entry(entry: Any, where: str, required: Collection[str], optional: Collection[str] = ()) -> Checked:
    """Return an entry for typed reading; raise an error for missing and unknown fields."""
    if not isinstance(entry, dict):
        raise FileFormatError(f"{where}: an entry is an object, not {repr(entry)[:40]}; write it again")
    known = (*required, *optional)
    missing, unknown = set(required) - set(entry), set(entry) - set(known)
    if missing or unknown:
        what = f"lacks {', '.join(sorted(missing))}" if missing else f"has the unknown {', '.join(sorted(unknown))}"
        raise FileFormatError(f"{where}: the entry {what}; its version has {', '.join(known)}")
    return Checked(entry, "", where, FileFormatError)


def _require_no_shift(part: Checked, *, whole: bool = False) -> None:
    """Raise an error for a zero point between two codes: a shift that is not 0 (with `whole`: not whole)."""
    if part.is_given and (part.array() % 1 if whole else part.array()).any():
        raise FileFormatError(
            f"{part.where} puts zero between two codes, which ONNX cannot; write it without, from a sim whose zero "
            "points are whole"
        )


def _from_0_6_1(entry: Any, where: str) -> Stated | DType:
    if not isinstance(entry, list) or not entry:
        raise FileFormatError(f"{where}: an entry of version 0.6.1 is a list with one object per channel; correct it")
    if entry == [{"bitwidth": 16, "dtype": "float"}]:
        return float16
    known = ("bitwidth", "dtype", "is_symmetric", "min", "max", "scale", "offset")
    parts = [_entry(part, where, known) for part in entry]
    types = {(p.part("bitwidth").whole(), p.part("dtype").text(), p.part("is_symmetric").flag(False)) for p in parts}
    if len(types) > 1:
        raise FileFormatError(f"{where}: its channels have different types; write the file again")
    ((width, kind, symmetric),) = types
    if kind != "int":
        raise FileFormatError(f"{where}: the dtype {kind!r} is neither int nor a float of 16 bits")
    dtype = _integer(width, symmetric, where)
    scale, offset = (np.array([p.part(name).number() for p in parts]) for name in ("scale", "offset"))
    for name, steps in (("min", offset), ("max", offset + 2.0**dtype.bits - 1)):
        stated = np.array([p.part(name).number() for p in parts])
        # half a step: other tools round these two for display
        if not (np.abs(stated - steps * scale) <= 0.5 * scale + 1e-5 * np.abs(stated)).all():
            raise FileFormatError(f"{where}: {name} contradicts scale and offset; write the file again")
    return _flat(dtype, scale, offset, "tensor" if len(parts) == 1 else "channel", where)


def _from_1_0_0(entry: Any, where: str) -> Stated | DType:
    if entry == {"bw": 16, "dtype": "FLOAT", "enc_type": "PER_TENSOR"}:
        return float16
    base = ("bw", "dtype", "enc_type", "is_sym", "scale", "offset")
    blocks, two_levels = ("block_size",), ("block_size", "compressed_bw", "per_block_int_scale")
    extra = {"PER_TENSOR": (), "PER_CHANNEL": (), "PER_BLOCK": blocks, "LPBQ": two_levels}
    kind = Checked(entry, "", where, FileFormatError).part("enc_type").text()
    if kind not in extra:
        raise FileFormatError(f"{where}: qsdk has no encodings of the kind {kind!r}; use {', '.join(extra)}")
    part = _entry(entry, where, (*base, *extra[kind]), ("zero_point_shift",)).part
    _require_no_shift(part("zero_point_shift"))
    if part("dtype").text() != "INT":
        raise FileFormatError(f"{where}: the dtype {part('dtype').text()!r} is neither INT nor a FLOAT of 16 bits")
    dtype = _integer(part("compressed_bw" if kind == "LPBQ" else "bw").whole(), part("is_sym").flag(False), where)
    scale, offset = part("scale").array(1), part("offset").array(1)
    if kind == "LPBQ":
        wide = part("bw").whole()
        middle = -(2.0 ** (wide - 1)) if 1 <= wide <= 32 else math.nan
        if not dtype.signed or not (offset == middle).all():
            raise FileFormatError(f"{where}: two-level scales are symmetric, with the offset {middle:.0f}")
        levels = part("per_block_int_scale").levels()
        if levels.size % scale.size:
            raise FileFormatError(f"{where}: {levels.size} block scales for {scale.size} channels")
        scale = (levels.reshape(scale.size, -1) * _float32(scale).astype(np.float64)[:, None]).reshape(-1)
        offset = np.full(scale.shape, dtype.lo)
    granularity = {"PER_TENSOR": "tensor", "PER_CHANNEL": "channel"}.get(kind, "block")
    return _flat(dtype, scale, offset, granularity, where, part("block_size").whole(1) if extra[kind] else None)


def _flat(dtype: DType, scale: Any, offset: Any, granularity: Any, where: str, block_size: int | None = None) -> Stated:
    """Return an entry of the versions without axes."""
    if scale.shape != offset.shape or (granularity == "tensor" and scale.size != 1):
        raise FileFormatError(f"{where}: {scale.size} scales and {offset.size} offsets per {granularity}")
    zero_point = dtype.lo - offset
    return Stated(dtype, _float32(scale), _codes(zero_point, where), granularity, None, block_size)


def _from_2(entry: Any, where: str) -> Stated | DType:
    two_levels = {"per_block_int_scale", "per_channel_float_scale"} & set(entry)
    scales = ("per_block_int_scale", "per_channel_float_scale") if two_levels else ("y_scale",)
    part = _entry(entry, where, ("output_dtype", *scales), ("y_zero_point", "axis", "block_size")).part
    dtype = _named_dtype(part("output_dtype").text(), where)
    axis = part("axis").whole() if "axis" in entry else None
    block_size = part("block_size").whole(1) if "block_size" in entry else None
    if two_levels:
        levels, channels = part("per_block_int_scale").levels(), part("per_channel_float_scale").array()
        scale = _product(levels, channels, axis, where)
    elif isinstance(entry["y_scale"], dict):
        inner = _entry(entry["y_scale"], f"{where}, y_scale", ("x", "x_scale"), ("axis",)).part
        levels, channels = inner("x").levels(), inner("x_scale").array()
        along = inner("axis").whole() if inner("axis").is_given else None
        if channels.ndim == 1 and along is not None and -levels.ndim <= along < levels.ndim:
            channels = channels.reshape([channels.size if i == along % levels.ndim else 1 for i in range(levels.ndim)])
        scale = _product(levels, channels, axis, where)
    else:
        scale = part("y_scale").array()
    zero_point = np.zeros(scale.shape)
    if entry.get("y_zero_point") is not None:
        _require_no_shift(part("y_zero_point"), whole=True)
        zero_point = part("y_zero_point").array()
    if zero_point.shape != scale.shape:
        raise FileFormatError(f"{where}: y_zero_point and y_scale have different shapes; write the file again")
    return _placed(dtype, scale, zero_point, axis, block_size, where)


def _placed(dtype: DType, scale: Any, zero_point: Any, axis: int | None, block_size: int | None, where: str) -> Stated:
    """Return an entry with QuantizeLinear's own axis."""
    if axis is None and (scale.size != 1 or block_size is not None):
        raise FileFormatError(f"{where}: {scale.size} scales without an axis; write the file again")
    if axis is not None and block_size is None and scale.ndim != 1:
        raise FileFormatError(f"{where}: scales per channel are a list of numbers; write the file again")
    if block_size is not None and (scale.ndim < 2 or axis is None or not -scale.ndim <= axis < scale.ndim):
        raise FileFormatError(f"{where}: scales per block have the tensor's rank and an axis in it")
    granularity: Any = "tensor" if axis is None else "channel" if block_size is None else "block"
    return Stated(dtype, _float32(scale), _codes(zero_point, where), granularity, axis, block_size)


def _product(levels: Any, channels: Any, axis: int | None, where: str) -> Any:
    """Return two-level scales as one: products of levels and float32 channel scales, as in AIMET's own Q/DQ models."""
    if axis is not None and channels.ndim == 1 and levels.ndim == 2:
        channels = channels.reshape((1, -1) if axis % 2 == 0 else (-1, 1))
    try:
        product = levels * _float32(channels).astype(np.float64)
    except ValueError as error:
        raise FileFormatError(f"{where}: its two levels of scales have shapes that do not fit: {error}") from error
    if product.shape != levels.shape:
        raise FileFormatError(f"{where}: its two levels of scales have shapes that do not fit; write the file again")
    return product


def _float32(values: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.asarray(values, np.float64).astype(np.float32)


def _codes(values: Any, where: str) -> Any:
    values = np.asarray(values, np.float64)
    if not ((np.abs(values) <= 2.0**31) & (values == np.rint(values))).all():
        raise FileFormatError(f"{where}: a zero point is no whole number of 32 bits, which the dtypes here all need")
    return values.astype(np.int32)


def _integer(bits: int, signed: bool, where: str) -> DType:
    return _named_dtype(f"{'int' if signed else 'uint'}{bits}", where)


def _named_dtype(name: str, where: str) -> DType:
    if name not in DTYPES or not DTYPES[name].is_quantized:
        try:
            dtype_named(name)
        except ConfigError as error:
            raise FileFormatError(f"{where}: {error}") from error
        raise FileFormatError(f"{where}: {name} has no scale; leave its entry out")
    return DTYPES[name]


def _on_its_grid(stated: Stated, where: str) -> Stated:
    scale, zero_point, dtype = stated.scale, stated.zero_point, stated.dtype
    if not (np.isfinite(scale).all() and (scale > 0).all()):
        raise FileFormatError(f"{where}: a scale is not a positive, finite float32; calibrate again")
    low, high = (dtype.lo, dtype.hi) if dtype.is_integer else (0, 0)
    if (zero_point < low).any() or (zero_point > high).any():
        raise FileFormatError(f"{where}: a zero point lies outside the grid {low}..{high} of {dtype}; calibrate again")
    return stated
