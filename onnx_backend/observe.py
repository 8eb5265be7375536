"""Ranges of activations, reduced inside the graph, so that no activation is ever kept."""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.feeding import as_feeds, batches_of, run_session
from onnx_backend.model import attributes, is_mark, load, replace_nodes, unique
from onnx_backend.session import simulation_session
from qsdk.core.encoding import Encoding
from qsdk.core.errors import CalibrationError, DataError
from qsdk.core.plan import Plan
from qsdk.core.ranges import Range, encoding_from_range

METHODS = MappingProxyType({"min_max": "min_max", "post_training_tf": "min_max", "moving_average": "moving_average"})
_MOMENTUM = np.float32(0.1)
_REDUCTIONS = ("low", "high", "finite")


def observe(
    marked: ModelProto, plan: Plan, batches: Iterable[Any], method: str, *, progress: bool = True
) -> dict[str, Encoding]:
    """Find the encodings of all activations that have one of their own, in one float pass.

    Args:
        marked: the float model with marks.
        plan: says which sites are quantized, tied, or fixed.
        batches: see `feeding.as_feeds`.
        method: `min_max` or `moving_average`.
        progress: show a progress bar.

    Raises:
        DataError: no data, data the model does not take, or NaN or inf in it (names site and batch).
        CalibrationError: a site that no batch reached.
    """
    wanted = [site for site in plan.calibrated_sites() if not plan.decisions[site].passes_through]
    model, sites = _reducing(marked, wanted)
    session = simulation_session(model)
    outputs = [output.name for output in session.get_outputs()]
    ranges: dict[str, Range] = {}
    for number, batch in batches_of(batches, "calibrate", progress):
        where = f"batch {number}"
        values = dict(
            zip(outputs, run_session(session, as_feeds(batch, session.get_inputs(), where), where), strict=True)
        )
        for site in sites:
            low, high, finite = (np.float32(values[f"{site}/{what}"]).reshape(1) for what in _REDUCTIONS)
            if low[0] > high[0]:
                continue  # an empty tensor
            if not np.isfinite(finite).all():
                raise DataError(
                    f"NaN or inf at the site {site} in {where}; clean the data, or skip the owner if its float values "
                    "are meant to be infinite"
                )
            ranges[site] = _merged(ranges.get(site), Range(low, high), method)
    return _encodings(plan, wanted, ranges)


def _merged(before: Range | None, new: Range, method: str) -> Range:
    if before is None:
        return new
    if method == "min_max":
        return before.merge(new)
    low, high = (old + _MOMENTUM * (now - old) for old, now in ((before.low, new.low), (before.high, new.high)))
    return Range(low, high)


def _reducing(marked: ModelProto, wanted: Iterable[str]) -> tuple[ModelProto, list[str]]:
    """The float model whose outputs are minimum, maximum and finiteness of every wanted site."""
    model, sites = load(marked), []
    remaining = set(wanted)
    taken = {name for node in model.graph.node for name in (*node.input, *node.output)}
    zero = unique("zero", taken)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), zero))
    nodes = []
    del model.graph.output[:]
    for node in model.graph.node:
        if not is_mark(node):
            nodes.append(node)
            continue
        site, tensor = str(attributes(node)["key"]), node.output[0]
        nodes.append(helper.make_node("Identity", node.input, node.output))
        if site not in remaining:
            continue
        remaining.remove(site)
        sites.append(site)
        # 0 * x sums to 0 unless x holds NaN or an infinity, which minimum and maximum may hide
        nodes += [
            helper.make_node("ReduceMin", [tensor], [f"{site}/low"], keepdims=0),
            helper.make_node("ReduceMax", [tensor], [f"{site}/high"], keepdims=0),
            helper.make_node("Mul", [tensor, zero], [f"{site}/zeros"]),
            helper.make_node("ReduceSum", [f"{site}/zeros"], [f"{site}/finite"], keepdims=0),
        ]
        for what in _REDUCTIONS:
            model.graph.output.append(helper.make_tensor_value_info(f"{site}/{what}", TensorProto.FLOAT, ()))
    replace_nodes(model.graph, nodes)
    kept = [entry for entry in model.opset_import if entry.domain != "qsdk"]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model, sites


def _encodings(plan: Plan, wanted: Iterable[str], ranges: dict[str, Range]) -> dict[str, Encoding]:
    merged: dict[str, Range] = {}
    for site, observed in ranges.items():
        home = plan.decisions[site].encoding_site
        merged[home] = merged[home].merge(observed) if home in merged else observed
    found, unseen = {}, []
    for site in wanted:
        decision = plan.decisions[site]
        if decision.tied_to or decision.spec is None:
            continue
        if decision.spec.fixed_range is not None:
            low, high = (np.array([end], np.float32) for end in decision.spec.fixed_range)
            found[site] = encoding_from_range(Range(low, high), decision.spec)
        elif site in merged:
            found[site] = encoding_from_range(merged[site], decision.spec)
        else:
            unseen.append(site)
    if unseen:
        raise CalibrationError(
            f"no batch reached {', '.join(unseen[:8])}; calibrate with data that takes this path through the model, or "
            "skip these owners"
        )
    return found
