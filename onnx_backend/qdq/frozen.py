"""Frozen encodings in a Q/DQ file: their DequantizeLinear nodes record a digest of the frozen encoding."""

import hashlib
from collections.abc import Mapping

from onnx import ModelProto

from onnx_backend.proto.nodes import metadata, set_metadata
from qsdk.core.numerics.encoding import Encoding


def mark_frozen(model: ModelProto, encodings: Mapping[str, Encoding]) -> None:
    """Note at the DequantizeLinear nodes of frozen encodings that they are frozen, in place."""
    frozen = {site: digest(encoding) for site, encoding in encodings.items() if encoding.frozen}
    for node in model.graph.node:
        site = metadata(node).get("qsdk.site") if node.op_type == "DequantizeLinear" else None
        if site in frozen:
            set_metadata(node, frozen=frozen[site])


def frozen_digests(model: ModelProto) -> dict[str, str]:
    """Return site -> digest of the encoding that was frozen there when the file was written."""
    facts = (metadata(node) for node in model.graph.node if node.op_type == "DequantizeLinear")
    return {
        entry["qsdk.site"]: entry["qsdk.frozen"] for entry in facts if "qsdk.frozen" in entry and "qsdk.site" in entry
    }


def digest(encoding: Encoding) -> str:
    """Return a digest of an encoding; an edited encoding has another one and is no longer frozen."""
    facts = repr((encoding.dtype.name, encoding.axis, encoding.block_size, encoding.scale.shape)).encode()
    return hashlib.sha256(facts + encoding.scale.tobytes() + encoding.zero_point.tobytes()).hexdigest()[:16]
