"""qsdk's own encodings file: versioned JSON in which float32 scales survive to the last digit.

`encodings.schema.json` beside this module is its JSON Schema.
"""

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import CalibrationError, ConfigError, FileFormatError
from qsdk.core.numerics.dtypes import DType, bfloat16, dtype_named, float16
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Kind
from qsdk.core.read_files import parse_json

FORMAT = "qsdk.encodings"
VERSION = 4  # 1 had no float16 and bfloat16 sites; 2 had no tensor names, and wrote defaults; 3 had all scales
_BEFORE = 3  # what a file without scales in a model says, so that earlier versions read it
_FIELDS = {"dtype", "scale", "digest", "zero_point", "axis", "block_size", "shape", "frozen", "tensor", "kind"}
_KINDS = get_args(Kind)
_MAX_RANK = 64  # of NumPy
_MANY = 1 << 16  # values that are formatted at a time
_IN_MODEL = "model"
#: encodings by site, of the model that a file takes scales from
Scales = Callable[[], Mapping[str, Encoding]]


@dataclass(frozen=True)
class StoredEncodings:
    """The content of an encodings file, or of the nodes of a Q/DQ model.

    Attributes:
        encodings: by site.
        casts: site -> float16 or bfloat16; None for a format without casts.
        provenance: plain values about the origin of the file.
        tensors: site -> name in the ONNX model, as far as the file holds it.
        kinds: site -> weight, bias, activation, input or output, as far as the file holds it.
        misfits: name -> why its entry fits nothing in the model that was given with it.
        moving: site -> dtype of a sim's activations whose ranges are found while the model runs.
    """

    encodings: Mapping[str, Encoding]
    casts: Mapping[str, DType] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)
    moving: Mapping[str, DType] = field(default_factory=dict)


def pieces(
    encodings: Mapping[str, Encoding],
    provenance: Mapping[str, Any],
    casts: Mapping[str, DType] | None = None,
    *,
    tensors: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    in_model: Collection[str] = (),
) -> Iterator[str]:
    """Yield the text of a file site by site: a language model has more scales than its text should take of memory.

    Casts, names in the ONNX model and kinds are by site, as encodings are; provenance are plain values about the origin
    of the encodings (config, method, versions). The scales and zero points of the sites `in_model` are left to the
    model that the file is written with.
    """
    version = VERSION if in_model else _BEFORE
    head = f'  "format": "{FORMAT}",\n  "version": {version},\n  "provenance": {json.dumps(dict(provenance))}'
    yield f'{{\n{head},\n  "encodings": {{\n'
    narrow = casts or {}
    sites = {**dict.fromkeys(encodings), **dict.fromkeys(narrow)}
    for number, site in enumerate(sites):
        fields = (
            {"dtype": json.dumps(narrow[site].name)} if site in narrow else _fields(encodings[site], site in in_model)
        )
        for key, texts in (("tensor", tensors), ("kind", kinds)):
            if texts is not None and site in texts:
                fields[key] = json.dumps(texts[site])
        entry = ", ".join(f'"{key}": {value}' for key, value in fields.items())
        yield f"{',' * (number > 0)}{chr(10) * (number > 0)}    {json.dumps(site)}: {{{entry}}}"
    yield "\n  }\n}\n"


def dumps(
    encodings: Mapping[str, Encoding],
    provenance: Mapping[str, Any],
    casts: Mapping[str, DType] | None = None,
    *,
    tensors: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a file as one string; see `pieces`."""
    return "".join(pieces(encodings, provenance, casts, tensors=tensors, kinds=kinds))


def loads(text: str, where: str) -> StoredEncodings:
    """Return the encodings in the text of a file; a FileFormatError names the file, `where`, and the place in it."""
    data = parse_json(text, where)
    if not is_own(data):
        raise FileFormatError(f"{where} is no {FORMAT} file; write one with qsdk.save_encodings")
    return read_own(data, where)


def is_own(data: Any) -> bool:
    """Return whether JSON data has the format of a qsdk encodings file."""
    return isinstance(data, dict) and data.get("format") == FORMAT


def read_own(data: Mapping[str, Any], where: str, scales: Scales | None = None) -> StoredEncodings:
    """Return the encodings in JSON data of this format; see `loads`.

    `scales` returns those of the model that the file was written with, and is called where it takes some from there.
    """
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FileFormatError(f"{where} has version {version!r}, this qsdk reads up to {VERSION}; update qsdk")
    sites, provenance = data.get("encodings"), data.get("provenance", {})
    if not isinstance(sites, dict) or not isinstance(provenance, dict):
        raise FileFormatError(f"{where} has no mapping under 'encodings' or 'provenance'; write it again")
    encodings: dict[str, Encoding] = {}
    casts: dict[str, DType] = {}
    tensors: dict[str, str] = {}
    kinds: dict[str, str] = {}
    left_to_model = [s for s, entry in sites.items() if isinstance(entry, dict) and entry.get("scale") == _IN_MODEL]
    if left_to_model and scales is None:
        raise FileFormatError(
            f"{where} takes the scales of {left_to_model[0]!r} from the model that it was written with; give the file "
            "by its path, beside that model"
        )
    of_model = scales() if left_to_model and scales is not None else {}
    for site, entry in sites.items():
        place = f"{where}, site {site!r}"
        if not isinstance(entry, dict) or not set(entry) <= _FIELDS or "dtype" not in entry:
            raise FileFormatError(
                f"{place}: an entry has the fields {', '.join(sorted(_FIELDS))}; write the file again"
            )
        if "tensor" in entry:
            tensors[site] = _text(entry["tensor"], "tensor", place)
        if "kind" in entry:
            kinds[site] = _text(entry["kind"], "kind", place)
        cast = _cast(entry)
        if cast is None:
            encodings[site] = _encoding(entry, place, of_model.get(site))
        else:
            casts[site] = cast
    return StoredEncodings(encodings, None if version == 1 else casts, provenance, tensors, kinds)


def _fields(encoding: Encoding, in_model: bool) -> dict[str, str]:
    """Return an entry's values as JSON, without defaults: zero points of 0, shape of a list, no axis, not frozen."""
    # the shortest decimal of a float32 is read back as that float32, also through a double
    result = {
        "dtype": json.dumps(encoding.dtype.name),
        "scale": json.dumps(_IN_MODEL) if in_model else _list(encoding.scale, lambda value: repr(float(str(value)))),
    }
    if in_model:
        result["digest"] = json.dumps(_digest(encoding))
    elif not encoding.symmetric:
        result["zero_point"] = _list(encoding.zero_point, lambda value: str(int(value)))
    if encoding.scale.ndim > 1:
        result["shape"] = json.dumps(list(encoding.scale.shape))
    if encoding.axis is not None:
        result["axis"] = str(encoding.axis)
    if encoding.block_size is not None:
        result["block_size"] = str(encoding.block_size)
    return {**result, "frozen": "true"} if encoding.frozen else result


def _list(values: npt.NDArray[Any], text: Callable[[Any], str]) -> str:
    """Return an array as a flat JSON list."""
    flat = values.reshape(-1)
    return f"[{', '.join(_texts(flat[at : at + _MANY], text) for at in range(0, len(flat), _MANY))}]"


def _texts(values: npt.NDArray[Any], text: Callable[[Any], str]) -> str:
    """Return values as text; each different one is formatted once, for scales in bfloat16 repeat."""
    different, places = np.unique(values, return_inverse=True)
    texts = [text(value) for value in different]
    return ", ".join([texts[place] for place in places])


def _cast(entry: Mapping[str, Any]) -> DType | None:
    """Return the float dtype of an entry without a scale, else None."""
    if not set(entry) <= {"dtype", "tensor", "kind"}:
        return None
    return next((dtype for dtype in (float16, bfloat16) if dtype.name == entry["dtype"]), None)


def _encoding(entry: Mapping[str, Any], where: str, of_model: Encoding | None) -> Encoding:
    if entry.get("scale") == _IN_MODEL:
        return _of_model(entry, where, of_model)
    scale = _numbers(entry.get("scale"), float, "scale", where)
    zero_point = _numbers(entry["zero_point"], int, "zero_point", where) if "zero_point" in entry else [0] * len(scale)
    axis, block_size = (_whole(entry.get(name), name, where) for name in ("axis", "block_size"))
    shape, frozen = entry.get("shape", [len(scale)]), entry.get("frozen", False)
    if not isinstance(shape, list) or any(type(n) is not int or n < 1 for n in shape) or type(frozen) is not bool:
        raise FileFormatError(f"{where}: shape is a list of positive integers and frozen true or false; correct them")
    if len(zero_point) != len(scale) or math.prod(shape) != len(scale) or len(shape) > _MAX_RANK:
        message = f"{len(scale)} scales, {len(zero_point)} zero points and the shape {shape} contradict each other"
        raise FileFormatError(f"{where}: {message}; write the file again")
    try:
        with np.errstate(over="ignore"):
            scales = np.array(scale, np.float32).reshape(shape)
        zero_points = np.array(zero_point, np.int32).reshape(shape)
        return Encoding(dtype_named(entry["dtype"]), scales, zero_points, axis, block_size, frozen)
    except (CalibrationError, ConfigError, OverflowError, TypeError) as error:
        raise FileFormatError(f"{where}: {error}; write the file again") from error


def _digest(encoding: Encoding) -> str:
    """Return a hash of scales and zero points, which tells them from those of another calibration."""
    return hashlib.sha256(encoding.scale.tobytes() + encoding.zero_point.tobytes()).hexdigest()[:16]


def _of_model(entry: Mapping[str, Any], where: str, held: Encoding | None) -> Encoding:
    """Return the encoding that the model has of a site, which must be as the entry describes it."""
    wanted = [entry.get(name) for name in ("dtype", "axis", "block_size", "shape")]
    if held is None or [held.dtype.name, held.axis, held.block_size, list(held.scale.shape)] != wanted:
        raise FileFormatError(f"{where}: the model has no scales of this form there; export it again")
    if entry.get("digest") != _digest(held):
        raise FileFormatError(
            f"{where}: the model has other scales, so it is not the one of this file; export it again"
        )
    frozen = entry.get("frozen", False)
    if type(frozen) is not bool:
        raise FileFormatError(f"{where}: frozen is true or false, not {frozen!r}; correct it")
    return replace(held, frozen=frozen)


def _numbers(value: Any, kind: type, name: str, where: str) -> list[Any]:
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(value, list) or not value or any(type(item) not in allowed for item in value):
        raise FileFormatError(f"{where}: {name} is a list of numbers, not {str(value)[:40]!r}; correct it")
    return value


def _whole(value: Any, name: str, where: str) -> int | None:
    if value is not None and (type(value) is not int or (name == "block_size" and value < 1)):
        raise FileFormatError(f"{where}: {name} is an integer or null, not {value!r}; correct it")
    return value


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or (name == "kind" and value not in _KINDS):
        wanted = f"one of {', '.join(_KINDS)}" if name == "kind" else "a name"
        raise FileFormatError(f"{where}: {name} is {wanted}, not {str(value)[:40]!r}; correct it")
    return value
