"""qsdk's own encodings file: versioned JSON in which float32 scales survive digit for digit."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qsdk.core.dtypes import DType, bfloat16, dtype_named, float16
from qsdk.core.encoding import Encoding
from qsdk.core.errors import CalibrationError, ConfigError, FileFormatError

FORMAT = "qsdk.encodings"
VERSION = 2  # 1 had no float16 and bfloat16 sites
_FIELDS = {"dtype", "scale", "zero_point", "axis", "block_size", "shape", "frozen"}


@dataclass(frozen=True)
class StoredEncodings:
    """What an encodings file, or a Q/DQ model, says.

    Attributes:
        encodings: by site.
        casts: site -> float16 or bfloat16; None where a file of version 1 could not say.
        provenance: plain values that say where they come from.
    """

    encodings: Mapping[str, Encoding]
    casts: Mapping[str, DType] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


def dumps(
    encodings: Mapping[str, Encoding], provenance: Mapping[str, Any], casts: Mapping[str, DType] | None = None
) -> str:
    """Write encodings as JSON text, one line per site.

    Args:
        encodings: by site.
        provenance: plain values that say where they come from (config, method, versions).
        casts: site -> float16 or bfloat16.
    """
    entries = {site: _plain(encoding) for site, encoding in encodings.items()}
    entries |= {site: {"dtype": dtype.name} for site, dtype in (casts or {}).items()}
    body = ",\n".join(f"    {json.dumps(site)}: {json.dumps(entry)}" for site, entry in entries.items())
    head = f'  "format": "{FORMAT}",\n  "version": {VERSION},\n  "provenance": {json.dumps(dict(provenance))}'
    return f'{{\n{head},\n  "encodings": {{\n{body}\n  }}\n}}\n'


def loads(text: str, where: str) -> StoredEncodings:
    """Read what `dumps` wrote.

    Args:
        text: the file's content.
        where: its name, for messages.

    Raises:
        FileFormatError: the text is truncated, foreign, of a later version, or contradicts itself; the message names
            the file and the place in it.
    """
    data = _parsed(text, where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FileFormatError(f"{where} is no {FORMAT} file; write one with qsdk.save_encodings")
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise FileFormatError(f"{where} has version {version!r}, this qsdk reads up to {VERSION}; update qsdk")
    sites, provenance = data.get("encodings"), data.get("provenance", {})
    if not isinstance(sites, dict) or not isinstance(provenance, dict):
        raise FileFormatError(f"{where} has no mapping under 'encodings' or 'provenance'; write it again")
    casts = {site: dtype for site, entry in sites.items() if (dtype := _cast(entry)) is not None}
    encodings = {
        site: _encoding(entry, f"{where}, site {site!r}") for site, entry in sites.items() if site not in casts
    }
    return StoredEncodings(encodings, None if version == 1 else casts, provenance)


def _plain(encoding: Encoding) -> dict[str, Any]:
    # the shortest decimal that names a float32 reads back as that float32, also through a double
    return {
        "dtype": encoding.dtype.name,
        "scale": [float(str(value)) for value in encoding.scale.reshape(-1)],
        "zero_point": [int(value) for value in encoding.zero_point.reshape(-1)],
        "shape": list(encoding.scale.shape),
        "axis": encoding.axis,
        "block_size": encoding.block_size,
        "frozen": encoding.frozen,
    }


def _parsed(text: str, where: str) -> Any:
    def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if repeated:
            raise FileFormatError(f"{where} names {repeated[0]!r} twice; keep one of them")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=no_repeats)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise FileFormatError(f"{where} is truncated or no JSON at {place} ({error.msg}); write it again") from error
    except RecursionError as error:
        raise FileFormatError(f"{where} is nested too deeply to be an encodings file; write it again") from error


def _cast(entry: Any) -> DType | None:
    """The float dtype of an entry that is no more than one."""
    if not isinstance(entry, dict) or set(entry) != {"dtype"}:
        return None
    return next((dtype for dtype in (float16, bfloat16) if dtype.name == entry["dtype"]), None)


def _encoding(entry: Any, where: str) -> Encoding:
    if not isinstance(entry, dict) or not set(entry) <= _FIELDS or not {"dtype", "scale", "zero_point"} <= set(entry):
        raise FileFormatError(f"{where}: an entry has the fields {', '.join(sorted(_FIELDS))}; write the file again")
    scale = _numbers(entry["scale"], float, "scale", where)
    zero_point = _numbers(entry["zero_point"], int, "zero_point", where)
    axis, block_size = (_whole(entry.get(name), name, where) for name in ("axis", "block_size"))
    shape, frozen = entry.get("shape", [len(scale)]), entry.get("frozen", False)
    if not isinstance(shape, list) or any(type(n) is not int or n < 1 for n in shape) or type(frozen) is not bool:
        raise FileFormatError(f"{where}: shape is a list of positive integers and frozen true or false; correct them")
    if len(zero_point) != len(scale) or int(np.prod(shape)) != len(scale):
        message = f"{len(scale)} scales, {len(zero_point)} zero points and the shape {shape} contradict each other"
        raise FileFormatError(f"{where}: {message}; write the file again")
    try:
        with np.errstate(over="ignore"):
            scales = np.array(scale, np.float32).reshape(shape)
        zero_points = np.array(zero_point, np.int32).reshape(shape)
        return Encoding(dtype_named(entry["dtype"]), scales, zero_points, axis, block_size, frozen)
    except (CalibrationError, ConfigError, OverflowError, TypeError) as error:
        raise FileFormatError(f"{where}: {error}; write the file again") from error


def _numbers(value: Any, kind: type, name: str, where: str) -> list[Any]:
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(value, list) or not value or any(type(item) not in allowed for item in value):
        raise FileFormatError(f"{where}: {name} is a list of numbers, not {str(value)[:40]!r}; correct it")
    return value


def _whole(value: Any, name: str, where: str) -> int | None:
    if value is not None and (type(value) is not int or (name == "block_size" and value < 1)):
        raise FileFormatError(f"{where}: {name} is an integer or null, not {value!r}; correct it")
    return value
