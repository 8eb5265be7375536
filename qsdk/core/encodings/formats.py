"""All the formats of encodings files, recognised by their content."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from qsdk.core.encodings.aimet_read import VERSIONS, AimetFile, complete, is_aimet, read_aimet
from qsdk.core.encodings.aimet_write import WRITTEN
from qsdk.core.encodings.qsdk_format import FORMAT, Scales, StoredEncodings, is_own, read_own
from qsdk.core.encodings.tensors import TensorFacts, by_name
from qsdk.core.errors import ConfigError, FileFormatError
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.read_files import parse_json

#: the value of `version=` for qsdk's own format, as None is
OWN = "qsdk"


def require_version(version: str | None) -> str:
    """Return the version of a format to write by its name, `qsdk` for None; raise ConfigError for others."""
    if version not in (None, OWN, *WRITTEN):
        raise ConfigError(
            f"no encodings version {version!r} can be written; choose one of {', '.join((OWN, *WRITTEN))}"
        )
    return version or OWN


def read_any(
    text: str, where: str, tensors: Sequence[TensorFacts] | None = None, scales: Scales | None = None
) -> StoredEncodings:
    """Return the encodings of a file of qsdk, or of AIMET in version 0.6.1, 1.0.0, 2.0.0 or 2.1.0.

    The tensors of the model determine the sites of AIMET's tensor names and, for its older versions, the axes; None
    keeps the names, and fails where an axis is missing. What is truncated, foreign, of an unknown version, or
    contradicts itself is a FileFormatError that names the file, `where`, and the place in it. See `read_own` for
    `scales`.
    """
    data = parse_json(text, where)
    if is_own(data):
        return read_own(data, where, scales)
    if is_aimet(data):
        return _at_sites(read_aimet(data, where), tensors, where)
    raise FileFormatError(
        f"{where} is no {FORMAT} file, nor one of AIMET ({', '.join(VERSIONS)}); write one with qsdk.save_encodings"
    )


def _at_sites(file: AimetFile, tensors: Sequence[TensorFacts] | None, where: str) -> StoredEncodings:
    """Return the entries of a file by site; those that do not fit the model are in `misfits` with the reason.

    Without a model the names of the file serve as sites, and an entry that only a model could complete is an error.
    """
    known = None if tensors is None else by_name(tensors)
    encodings: dict[str, Encoding] = {}
    casts: dict[str, DType] = {}
    names: dict[str, str] = {}
    misfits: dict[str, str] = {}
    for name in (*file.entries, *(file.casts or {})):
        tensor = None if known is None else known.get(name)
        if known is not None and tensor is None:
            near = get_close_matches(name, [facts.name for facts in tensors or ()], n=2, cutoff=0.5)
            misfits[name] = "no tensor has this name" + (f"; the nearest: {', '.join(near)}" if near else "")
            continue
        site = name if tensor is None else tensor.site
        first = names.setdefault(site, name)
        try:
            found = complete(file.entries[name], tensor) if name in file.entries else (file.casts or {})[name]
        except FileFormatError as error:
            if tensor is None:
                raise FileFormatError(f"{where}, tensor {name!r}: {error}") from error
            misfits[site] = str(error)
            continue
        # a file that goes by modules says the same of a tensor once for each that takes it
        if first != name and found != encodings.get(site, casts.get(site)):
            misfits[name] = f"another entry says what {site} is: {first}"
        elif isinstance(found, Encoding):
            encodings[site] = found
        else:
            casts[site] = found
    provenance = {"format": f"AIMET {file.version}", **file.provenance}
    stored = file.parameters
    kinds = {} if stored is None else {s: "weight" if n in stored else "activation" for s, n in names.items()}
    return StoredEncodings(encodings, None if file.casts is None else casts, provenance, names, kinds, misfits)


def facts_of(
    stored: StoredEncodings, tensors: Sequence[TensorFacts] | None, where: str, *, needs_kinds: bool
) -> dict[str, TensorFacts]:
    """Return the tensor of each entry of a file by site: from the model, or as far as the file states it.

    A site without a tensor in the model is left out. Without a model, a file that lacks names is a FileFormatError, and
    one that lacks kinds where it must be known which tensors are parameters (`needs_kinds`).
    """
    sites = (*stored.encodings, *(stored.casts or {}))
    if tensors is not None:
        known = by_name(tensors)
        result = {site: known.get(stored.tensors.get(site, site)) or known.get(site) for site in sites}
        return {site: tensor for site, tensor in result.items() if tensor is not None}
    for known_sites, what in ((stored.tensors, "names"), (stored.kinds, "kinds")):
        missing = [site for site in sites if site not in known_sites]
        if missing and (what == "names" or needs_kinds):
            raise FileFormatError(
                f"{where} does not say the {what} of the tensors at {', '.join(missing[:4])}; pass the float ONNX "
                "model (model=, or --model)"
            )
    stored_kinds = ("weight", "bias")
    return {site: TensorFacts(site, stored.tensors[site], stored.kinds.get(site) in stored_kinds) for site in sites}


def own_rows(stored: StoredEncodings) -> list[dict[str, Any]]:
    """Return the rows of a report on a file in qsdk's own format, which loses nothing."""
    listed: dict[str, Encoding | DType] = {**stored.encodings, **(stored.casts or {})}
    return [
        {
            "site": site,
            "tensor": stored.tensors.get(site, ""),
            "dtype": (result.dtype if isinstance(result, Encoding) else result).name,
            "form": _form(result),
            "frozen": isinstance(result, Encoding) and result.frozen,
            "loss": "",
        }
        for site, result in listed.items()
    ]


def _form(found: Encoding | DType) -> str:
    if not isinstance(found, Encoding):
        return "cast"
    return "tensor" if found.axis is None else "channel" if found.block_size is None else "block"
