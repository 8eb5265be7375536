"""What an ONNX file says of encodings: its Q/DQ nodes and casts, and the flags of the text that export embedded."""

from collections.abc import Mapping
from dataclasses import replace

from onnx import ModelProto

from onnx_backend.export import ENCODINGS_KEY
from onnx_backend.qdq_read import read, read_casts
from qsdk.core.dtypes import dtype_named
from qsdk.core.encoding import Encoding
from qsdk.core.encodings_file import StoredEncodings, loads


def stored_encodings(model: ModelProto) -> StoredEncodings:
    """Read the encodings of a Q/DQ model from its nodes, frozen where the embedded text says so.

    Raises:
        FileFormatError: a node or the embedded text cannot be read.
    """
    casts = {site: dtype_named(name) for site, name in read_casts(model).items()}
    return StoredEncodings(with_flags(model, read(model)), casts)


def with_flags(model: ModelProto, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings that nodes gave, frozen where the embedded text has the same one frozen.

    Raises:
        FileFormatError: the embedded text cannot be read.
    """
    text = {entry.key: entry.value for entry in model.metadata_props}.get(ENCODINGS_KEY)
    said = {} if text is None else loads(text, "the encodings in the model").encodings
    return {
        site: replace(encoding, frozen=True)
        if site in said and said[site].frozen and said[site] == encoding
        else encoding
        for site, encoding in encodings.items()
    }
