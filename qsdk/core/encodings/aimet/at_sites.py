"""From the tensor names of an AIMET file to sites, with the axes that the file leaves to the model."""

from collections.abc import Sequence
from difflib import get_close_matches

from qsdk.core.encodings.aimet.read import AimetFile
from qsdk.core.encodings.aimet.stated import complete
from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.encodings.tensor_facts import TensorFacts, by_name
from qsdk.core.errors import FileFormatError
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding


def at_sites(file: AimetFile, tensors: Sequence[TensorFacts] | None, where: str) -> StoredEncodings:
    """Return the encodings of a file by site.

    Args:
        file: the content.
        tensors: of the model; None where there is none: the names of the file then serve as sites.
        where: its name, for messages.

    Returns:
        The entries that fit the model; the others are in `misfits` with the reason.

    Raises:
        FileFormatError: without a model, an entry that only a model could complete.
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
