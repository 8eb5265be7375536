"""Writing AIMET's encodings files, versions 1.0.0, 2.0.0 and 2.1.0; see `aimet_read.py` for the conventions.

Scales are written as doubles with the exact float32 values, so that readers of doubles compute with the same ones.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from qsdk.core.encodings.aimet_read import Stated, channel_axis_of, in_order, to_stated, with_sign_of
from qsdk.core.encodings.tensors import TensorFacts
from qsdk.core.errors import ConfigError, ExportError, FileFormatError
from qsdk.core.numerics.block_scales import TwoLevel, split_block_scales
from qsdk.core.numerics.dtypes import DTYPES, DType
from qsdk.core.numerics.encoding import Encoding

WRITTEN = ("1.0.0", "2.0.0", "2.1.0")
_FIRST = WRITTEN[0]


def dumps_aimet(
    encodings: Mapping[str, Encoding],
    casts: Mapping[str, DType],
    tensors: Mapping[str, TensorFacts],
    *,
    version: str,
    producer: str,
    moving: Mapping[str, DType] | None = None,
    allow_loss: bool = False,
) -> tuple[str, list[dict[str, Any]]]:
    """Return encodings by site as the text of an AIMET file, with one line per entry, and the rows of a report.

    A site that `tensors` lacks has no tensor in the file; the producer is the version of qsdk; `moving` has the sites
    whose ranges are found while the model runs. Rows have `site`, `tensor`, `dtype`, `form` and `loss`: the facts about
    the site that the file lacks. What the format cannot express is an ExportError that lists every such site; with
    `allow_loss` it is left out.
    """
    if version not in WRITTEN:
        raise ConfigError(f"no AIMET version {version!r} can be written; choose one of {', '.join(WRITTEN)}")
    sections: dict[str, list[tuple[str, Any]]] = {"activation_encodings": [], "param_encodings": [], "encodings": []}
    rows, unwritable = [], []
    listed: dict[str, Encoding | DType] = {**encodings, **casts, **(moving or {})}
    for site, result in listed.items():
        row: dict[str, Any] = {"site": site, "tensor": "", "dtype": _dtype_of(result).name, "form": "", "loss": ""}
        try:
            if site in (moving or {}):
                raise FileFormatError("its range is found while the model runs, which a file of fixed grids cannot say")
            tensor = tensors.get(site)
            if tensor is None:
                raise FileFormatError("no tensor of the model plays its part; give the float model that was quantized")
            row["tensor"] = tensor.name
            entry, row["form"], row["loss"] = _entry(result, tensor, version)
            section = "encodings"
            if version == _FIRST:
                section = "param_encodings" if tensor.stored else "activation_encodings"
            if entry is not None:
                sections[section].append((tensor.name, entry))
        except FileFormatError as error:
            unwritable.append(f"{site} ({error})")
            row["loss"] = f"left out: {error}"
        rows.append(row)
    if unwritable and not allow_loss:
        raise ExportError(
            f"version {version} cannot say the encodings of {'; '.join(unwritable)}; choose another version, or leave "
            "these sites out with allow_loss=True"
        )
    names = ("activation_encodings", "param_encodings") if version == _FIRST else ("encodings",)
    return _text(version, producer, {name: sections[name] for name in names}), rows


def _dtype_of(encoding: Encoding | DType) -> DType:
    return encoding.dtype if isinstance(encoding, Encoding) else encoding


def _text(version: str, producer: str, sections: Mapping[str, list[tuple[str, Any]]]) -> str:
    head = [f'"version": {json.dumps(version)}', f'"producer": {json.dumps({"package": "qsdk", "version": producer})}']
    for section, entries in sections.items():
        lines = ",\n".join(f"    {json.dumps({'name': name, **entry})}" for name, entry in entries)
        head.append(f'"{section}": [\n{lines}\n  ]' if lines else f'"{section}": []')
    return "{\n  " + ",\n  ".join(head) + "\n}\n"


def _entry(encoding: Encoding | DType, tensor: TensorFacts, version: str) -> tuple[Any, str, str]:
    """Return the entry, its form and its losses; None in place of a cast that the version leaves out by design."""
    if not isinstance(encoding, Encoding):
        return _cast(encoding, version)
    loss = ["frozen"] if encoding.frozen else []
    if encoding.dtype.exact_sums:  # a choice of scales, which these have
        encoding = replace(encoding, dtype=DTYPES[encoding.dtype.container])
    if encoding.dtype != DTYPES.get(encoding.dtype.name):
        raise FileFormatError(
            f"{encoding.dtype} has a grid that AIMET has no name for; use {encoding.dtype.name.removesuffix('_strict')}"
        )
    if version == _FIRST:
        if not encoding.dtype.is_integer:
            raise FileFormatError(f"it has no {encoding.dtype}; write version 2.0.0")
        if encoding.dtype.signed and not encoding.symmetric:
            if f"u{encoding.dtype.name}" not in DTYPES:
                raise FileFormatError(f"it has no {encoding.dtype} with zero points; write version 2.0.0")
            encoding = with_sign_of(encoding, DTYPES[f"u{encoding.dtype.name}"])
            loss.append("sign (the same values in an unsigned dtype)")
        if encoding.axis is not None:
            loss.append("axis (the reader's model gives it)")
    stated = to_stated(encoding, tensor)
    lost = ", ".join(loss)
    if version == _FIRST:
        return *_to_1_0_0(stated), lost
    return *_to_2(stated, nested=version == "2.1.0"), lost


def _cast(dtype: DType, version: str) -> tuple[Any, str, str]:
    if version != _FIRST:
        return None, "cast", "left out: versions from 2.0.0 have no casts"
    if dtype.name != "float16":
        raise FileFormatError(f"it has no {dtype}; use float16")
    return {"dtype": "FLOAT", "bw": 16, "enc_type": "PER_TENSOR"}, "cast", ""


def _to_1_0_0(stated: Stated) -> tuple[dict[str, Any], str]:
    parts, dtype = _two_levels(stated), stated.dtype
    scale: Any = stated.scale
    offset: Any = int(dtype.lo) - stated.zero_point.astype(np.int64)
    head: dict[str, Any] = {"dtype": "INT", "bw": dtype.bits, "is_sym": dtype.signed}
    if stated.granularity != "block":
        plain = {"scale": _plain(scale.reshape(-1)), "offset": offset.reshape(-1).tolist()}
        return {**head, **plain, "enc_type": f"PER_{stated.granularity.upper()}"}, stated.granularity
    assert stated.axis is not None
    if parts is None:
        scale, offset = in_order(scale, stated.axis), in_order(offset, stated.axis)
        plain = {"scale": _plain(scale), "offset": offset.tolist()}
        return {**head, **plain, "enc_type": "PER_BLOCK", "block_size": stated.block_size}, "block"
    wide = 2 * dtype.bits
    return {
        **head,
        "bw": wide,
        "compressed_bw": dtype.bits,
        "scale": _plain(parts.channel_scale.reshape(-1)),
        "offset": [-(1 << (wide - 1))] * parts.channel_scale.size,
        "enc_type": "LPBQ",
        "per_block_int_scale": in_order(parts.levels, stated.axis).tolist(),
        "block_size": stated.block_size,
    }, "two-level block"


def _to_2(stated: Stated, *, nested: bool) -> tuple[dict[str, Any], str]:
    parts, form = _two_levels(stated), stated.granularity
    entry: dict[str, Any] = {"output_dtype": stated.dtype.name}
    if parts is not None and nested:
        inner = {"x": parts.levels.tolist(), "x_scale": _plain(parts.channel_scale.reshape(-1))}
        entry["y_scale"] = {**inner, "axis": channel_axis_of(stated)}
    elif parts is not None:
        entry["per_block_int_scale"] = parts.levels.tolist()
        entry["per_channel_float_scale"] = _plain(parts.channel_scale)
    else:
        single = stated.granularity == "tensor"
        entry["y_scale"] = float(stated.scale.reshape(())) if single else _plain(stated.scale)
        if stated.zero_point.any():
            entry["y_zero_point"] = int(stated.zero_point.reshape(())) if single else stated.zero_point.tolist()
    if stated.axis is not None:
        entry["axis"] = stated.axis
    if stated.block_size is not None:
        entry["block_size"] = stated.block_size
    return entry, form if parts is None else "two-level block"


def _plain(values: Any) -> Any:
    return values.astype(np.float64).tolist()


def _two_levels(stated: Stated) -> TwoLevel | None:
    """Return the factors of block scales; AIMET has two levels where the product has twice the bits."""
    if stated.granularity != "block" or stated.dtype.name not in ("int4", "int8") or stated.zero_point.any():
        return None
    assert stated.axis is not None
    if stated.scale.shape[stated.axis] < 2:
        return None
    return split_block_scales(Encoding(stated.dtype, stated.scale, stated.zero_point, stated.axis, stated.block_size))
