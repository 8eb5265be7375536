"""Compare the encodings and the stored tensors of a Q/DQ model with those of its simulation, number by number."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto

from onnx_backend.parity.tally import Tally, lsb
from onnx_backend.proto.external_data import array
from onnx_backend.proto.lazy_tensors import rows_of
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.read import QdqPair, stored_tensors
from qsdk.core.numerics.encoding import Encoding

Array = npt.NDArray[Any]


def compare_encodings(found: Iterable[QdqPair], encodings: Mapping[str, Encoding], tallies: dict[str, Tally]) -> None:
    """Fail every site whose scale, zero point or dtype differs from the simulation's, or that one side lacks."""
    seen = set()
    for place in found:
        seen.add(place.site)
        wanted = encodings.get(place.site)
        if wanted is None:
            tallies[place.site].fail("the simulation has no encoding here")
        elif wanted != place.encoding:
            tallies[place.site].fail("the model has another scale, zero point or dtype than the simulation")
    for site, encoding in encodings.items():
        if encoding.dtype.is_quantized and site not in seen:
            tallies.setdefault(site, Tally("activation")).fail("the model does not quantize this site")


def compare_stored(
    model: ModelProto, found: Iterable[QdqPair], stored: Mapping[str, Array], tallies: dict[str, Tally]
) -> None:
    """Count the steps between the stored codes of a model and those of the simulation's values."""
    tensors, places = stored_tensors(model), list(found)
    for place in places:
        if place.stored is None:
            continue
        tally = tallies[place.site]
        # a slice of all of a tensor is a site of its own, whose values are stored elsewhere
        site = next((p.site for p in (place, *places) if p.site in stored and _same_codes(p, place)), None)
        if site is None:
            tally.fail("the simulation stores no tensor here")
            continue
        codes = array(tensors[place.stored])
        if place.permutation is not None:
            codes = codes.transpose(np.argsort(place.permutation))
        wanted = np.asarray(stored[site], np.float32)
        if wanted.shape != codes.shape:
            tally.fail(f"the model stores the shape {codes.shape}, the simulation {wanted.shape}")
            continue
        for rows, encoding in rows_of(place.encoding, codes.shape):
            tally.add(lsb(codes[rows], encoding.quantize(wanted[rows])))
    for site, (kind, values) in _stored_casts(model, tensors).items():
        tallies[site] = tally = Tally(kind)
        if site not in stored or stored[site].shape != values.shape:
            tally.fail("the simulation stores no tensor of this shape here")
        else:
            with np.errstate(over="ignore"):
                tally.add(lsb(values, stored[site].astype(values.dtype)))
    for site in stored:
        if site not in tallies:
            tallies[site] = Tally("weight")
            tallies[site].fail("the model stores no tensor here")


def _same_codes(place: QdqPair, other: QdqPair) -> bool:
    """Return True if two sites read one stored tensor in one way."""
    facts = (place.stored, place.permutation, place.encoding)
    return facts == (other.stored, other.permutation, other.encoding)


def _stored_casts(model: ModelProto, tensors: Mapping[str, TensorProto]) -> dict[str, tuple[str, Array]]:
    """Return site -> kind and value of every tensor stored as float16 or bfloat16."""
    found = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type == "Cast" and "qsdk.site" in facts and node.input[0] in tensors:
            found[facts["qsdk.site"]] = (facts["qsdk.kind"], array(tensors[node.input[0]]))
    return found
