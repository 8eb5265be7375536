"""Hand the float values at sites to a visitor, in one pass over the data."""

from collections.abc import Callable, Collection, Container, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, helper

from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import MARK_DOMAIN, attributes, is_mark, replace_nodes
from onnx_backend.qdq.graph_editor import type_of_mark
from onnx_backend.qdq.read import FLOAT_CODES
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.session import simulation_session
from onnx_backend.sim import OnnxSim


def visit_sites(
    sim: OnnxSim,
    data: Iterable[Any],
    each: Callable[[str, npt.NDArray[Any]], None],
    *,
    title: str,
    sites: Collection[str] | None = None,
    progress: bool = True,
) -> None:
    """Run the float model and call `each(site, values)`, batch by batch, with float32 values.

    Args:
        sim: is left as it is.
        data: batches.
        each: the visitor.
        title: of the progress bar.
        sites: to be visited; None for all that are computed.
        progress: show a progress bar.

    Raises:
        DataError: no data, or data the model does not take.
    """
    model, tensors = with_sites_as_outputs(sim.traced().model, sites)
    session = simulation_session(model, providers=sim.providers)
    names = [output.name for output in session.get_outputs()]
    for number, batch in batches_of(data, title, progress):
        where = f"batch {number}"
        values = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        for name, value in zip(names, values, strict=True):
            each(tensors[name], np.asarray(value, np.float32))


def with_sites_as_outputs(marked: ModelProto, sites: Container[str] | None = None) -> tuple[ModelProto, dict[str, str]]:
    """Return the float model with these computed sites (None for all) as outputs; and tensor name -> site."""
    model = load(marked)
    stored = {tensor.name for tensor in model.graph.initializer}
    tensors: dict[str, str] = {}
    types: dict[str, int] = {}
    nodes = []
    for node in model.graph.node:
        if not is_mark(node):
            nodes.append(node)
            continue
        nodes.append(helper.make_node("Identity", node.input, node.output))
        if node.input[0] in stored:
            stored.add(node.output[0])
        elif sites is None or attributes(node)["key"] in sites:
            tensors[node.output[0]] = str(attributes(node)["key"])
            types[node.output[0]] = FLOAT_CODES[type_of_mark(node)]
    replace_nodes(model.graph, nodes)
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, types[name], None) for name in tensors)
    kept = [entry for entry in model.opset_import if entry.domain != MARK_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model, tensors
