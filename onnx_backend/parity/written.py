"""Compare a file with what its sim would write now: nodes, wiring, attributes and every stored number.

Running the sites shows where a file computes other codes than its simulation on the given data. Comparing the nodes
also finds what the data does not reach or what changes no code (a float bias, an epsilon, a bound that is never met).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto

from onnx_backend.calibration.stored_tensors import stored_names
from onnx_backend.lower import lower
from onnx_backend.opening.from_trace import TracedModel
from onnx_backend.parity.same_function import NodeDifference, differences, stored_at_sites
from onnx_backend.passes.static_sizes import leave_out
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.lazy_tensors import LoweredModel, is_stub, rows_of
from onnx_backend.proto.nodes import metadata
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.qdq.older_opsets import LOWEST
from onnx_backend.qdq.read import QdqPair, stored_tensors
from onnx_backend.runtimes.registry import RUNTIMES, noted_form
from onnx_backend.runtimes.runtime import Prefer, Runtime
from onnx_backend.single_ops.write import write_single_ops
from qsdk.core.comparing.tally import Tally, lsb
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan

Array = npt.NDArray[Any]
_OPSETS = range(LOWEST, 26)  # those that `lower` writes
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_NAMED = 3  # nodes that a note names


@dataclass(frozen=True)
class ExpectedModel:
    """What a sim would write now; `opened` is the Q/DQ model that an adopted sim runs as it stands."""

    traced: TracedModel
    plan: Plan
    encodings: Mapping[str, Encoding]
    opened: ModelProto | None = None

    def forms_of(self, model: ModelProto) -> Iterator[LoweredModel]:
        """Yield the sim's Q/DQ model in each form that a file may have, at its opset: that which it notes, else all."""
        if self.opened is not None:
            yield LoweredModel(self.opened, {}, [])
        version = opset_of(model)
        opset = version if version in _OPSETS else OPSET
        noted = noted_form(model)
        # files of older versions note nothing; of the form that is nearest, the differences are the file's own
        every: list[tuple[Runtime, Prefer]] = [(runtime, "size") for runtime in RUNTIMES.values()]
        every.insert(0, (RUNTIMES["onnxruntime"], "speed"))
        for runtime, prefer in every if noted is None else [noted]:
            options: dict[str, Any] = {"opset": opset, "dialect": runtime, "prefer": prefer}
            form = lower(self.traced.model, self.plan, self.encodings, weights=self.traced.weights, **options)
            if open_inputs(model):
                runtime.with_sizes(form.model)
            if runtime.single_ops:
                write_single_ops(form.model)
            yield form

    def sites(self) -> dict[str, tuple[str, str]]:
        """Return name of a stored tensor of the float model -> its site and kind."""
        names = stored_names(self.traced.model, self.plan)
        return {name: (site, str(self.plan.decisions[site].kind)) for site, name in names.items()}


def _without_inputs_that_lack(model: ModelProto, wanted: LoweredModel) -> LoweredModel:
    """Return an expected model without the caches that a file has left out because its past is empty."""
    gone = set(input_names(wanted.model.graph)).difference(input_names(model.graph))
    if not gone:
        return wanted
    shorter = ModelProto()
    shorter.CopyFrom(wanted.model)
    try:
        leave_out(shorter, gone, asked=SHAPE_OPS)
    except ConfigError:
        return wanted  # the file lacks something else, and the differences show it
    return replace(wanted, model=shorter)


def compare_written(model: ModelProto, expected: ExpectedModel, tallies: dict[str, Tally]) -> int:
    """Fill the tallies with what a file stores or computes otherwise than its sim.

    Return the number of nodes that are written in another way, as by a tool that simplifies or fuses; only the sites
    and outputs can show if they compute the same.
    """
    found: list[NodeDifference] | None = None
    kept: dict[str, Tally] = {}
    sites = expected.sites()
    for form in expected.forms_of(model):
        wanted = _without_inputs_that_lack(model, form)
        tallies_of_floats, same = _kept_floats(model, wanted, sites)
        differing = differences(model, wanted, same)
        if found is None or len(differing) < len(found):
            found, kept = differing, tallies_of_floats
        if not found:
            break
    found = found or []
    for site, tally in kept.items():
        tallies.setdefault(site, tally)
    for difference in found:
        if difference.altered:
            site = difference.site or difference.node
            note = f"node {difference.node!r}: {difference.problem}" if difference.node else difference.problem
            tallies.setdefault(site or "the model", Tally("node")).fail(note)
    rewritten = [difference.node for difference in found if not difference.altered]
    if rewritten:
        _name_rewritten(rewritten, tallies)
    return len(rewritten)


def _name_rewritten(nodes: Sequence[str], tallies: Mapping[str, Tally]) -> None:
    """Name the nodes that are written in another way wherever values differ: one of them may be the cause."""
    named = ", ".join(repr(node) for node in nodes[:_NAMED]) + (" and others" if len(nodes) > _NAMED else "")
    for tally in tallies.values():
        if tally.largest > 1:
            tally.note = tally.note or f"the file writes {named} in another way than the simulation"


def _kept_floats(
    model: ModelProto, wanted: LoweredModel, sites: Mapping[str, tuple[str, str]]
) -> tuple[dict[str, Tally], dict[str, str]]:
    """Compare the float tensors of the same name in both; return tallies by site, and the names that differ."""
    ours = {tensor.name: tensor for tensor in wanted.model.graph.initializer}
    of_pairs = set(_parameters(model)) | set(stored_at_sites(model))
    tallies: dict[str, Tally] = {}
    same: dict[str, str] = {}
    for tensor in model.graph.initializer:
        other = ours.get(tensor.name)
        if other is None or tensor.name in of_pairs or tensor.data_type not in _FLOATS:
            continue
        if other.data_type != tensor.data_type or list(other.dims) != list(tensor.dims):
            continue
        value = array(tensor)
        right = wanted.large[tensor.name].value() if is_stub(other) else array(other)
        steps = lsb(value, right.astype(value.dtype, copy=False))
        site, kind = sites.get(tensor.name, (tensor.name, "constant"))
        if steps.any():
            same[tensor.name] = tensor.name
        if steps.any() or tensor.name in sites:
            tally = tallies[site] = Tally(kind)
            tally.add(steps)
            if not np.isfinite(value).all() and np.isfinite(right).all():
                tally.fail(f"the model stores NaN or infinity in {tensor.name!r}, the simulation finite numbers")
            elif steps.any():
                tally.note = f"the model stores other numbers in {tensor.name!r} than the simulation"
    return tallies, same


def _parameters(model: ModelProto) -> Iterator[str]:
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            yield from node.input[1:]


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
