"""Frozen encodings in a Q/DQ file: their DequantizeLinear nodes say so, with a digest of what was frozen."""

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
    """Site -> digest of the encoding that was frozen there when the file was written."""
    facts = (metadata(node) for node in model.graph.node if node.op_type == "DequantizeLinear")
    return {said["qsdk.site"]: said["qsdk.frozen"] for said in facts if "qsdk.frozen" in said and "qsdk.site" in said}


def digest(encoding: Encoding) -> str:
    """What tells an encoding from another: an edited one is frozen no more."""
    facts = repr((encoding.dtype.name, encoding.axis, encoding.block_size, encoding.scale.shape)).encode()
    return hashlib.sha256(facts + encoding.scale.tobytes() + encoding.zero_point.tobytes()).hexdigest()[:16]
