"""Compare a file with what its sim would write now: nodes, wiring, attributes and every stored number.

Running the sites shows where a file computes other codes than its simulation on the given data. Comparing the nodes
also finds what the data does not reach or what changes no code (a float bias, an epsilon, a bound that is never met).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from onnx_backend.calibration.stored_tensors import stored_names
from onnx_backend.dialects.dialect import WRITING, Prefer, noted_form, writing_of
from onnx_backend.dialects.older_opsets import LOWEST
from onnx_backend.opening.from_trace import TracedModel
from onnx_backend.parity.same_function import NodeDifference, differences, stored_at_sites
from onnx_backend.parity.tally import Tally, lsb
from onnx_backend.passes.decided_sizes import leave_out
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.lazy_tensors import LoweredModel, is_stub
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.qdq.fusion_barriers import keep_constants_apart
from onnx_backend.qdq.insert import lower
from qsdk.core.errors import ConfigError
from qsdk.core.graph.op_facts import SHAPE_OPS
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan

_OPSETS = range(LOWEST, 26)  # those that `lower` writes
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_NAMED = 3  # nodes that a note names


@dataclass(frozen=True)
class ExpectedModel:
    """The model that a file is compared with.

    Attributes:
        forms: functions that return the sim's Q/DQ model in each form in which it may have been written: that which
            the file notes, else all.
        sites: name of a stored tensor of the float model -> its site and kind.
    """

    forms: tuple[Callable[[], LoweredModel], ...]
    sites: Mapping[str, tuple[str, str]]


def expected_model(
    traced: TracedModel,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    model: ModelProto,
    opened: ModelProto | None = None,
) -> ExpectedModel:
    """Return what a sim would write now.

    Args:
        traced: the float model with marks.
        plan: of the sim.
        encodings: of the sim.
        model: the file to compare; the expected model is written at its opset.
        opened: the Q/DQ model that an adopted sim runs as it stands, or None.

    Raises:
        FileFormatError: the file notes a form that this version does not know.
    """
    version = opset_of(model)
    opset = version if version in _OPSETS else OPSET

    def form(dialect: str, prefer: Prefer = "size") -> Callable[[], LoweredModel]:
        def make() -> LoweredModel:
            options: dict[str, Any] = {"opset": opset, "dialect": dialect, "prefer": prefer}
            found = lower(traced.model, plan, encodings, weights=traced.weights, **options)
            if writing_of(dialect).off_codes and open_inputs(model):
                keep_constants_apart(found.model)
            return found

        return make

    as_opened = () if opened is None else (lambda: LoweredModel(opened, {}, []),)
    decisions = plan.decisions
    names = stored_names(traced.model, plan)
    sites = {name: (site, str(decisions[site].kind)) for site, name in names.items()}
    noted = noted_form(model)
    # files of older versions note nothing; of the form that is nearest, the differences are the file's own
    written = (form("onnxruntime", "speed"), *map(form, WRITING)) if noted is None else (form(*noted),)
    return ExpectedModel((*as_opened, *written), sites)


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

    Returns:
        The number of nodes that are written in another way, as by a tool that simplifies or fuses; only the sites and
        outputs can show if they compute the same.
    """
    best: tuple[list[NodeDifference], dict[str, Tally]] | None = None
    for make in expected.forms:
        wanted = _without_inputs_that_lack(model, make())
        kept, same = _kept_floats(model, wanted, expected.sites)
        found = differences(model, wanted, same)
        if best is None or len(found) < len(best[0]):
            best = found, kept
        if not found:
            break
    if best is None:
        return 0
    found, kept = best
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
