"""Sampling: one float pass that looks at the values of every site."""

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

from onnx import ModelProto, TensorProto, helper

from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import MARK_DOMAIN, attributes, is_mark, replace_nodes
from onnx_backend.runtime.feeds import as_feeds, batches_of, run_session
from onnx_backend.runtime.session import simulation_session
from qsdk.core.precision.samples import SiteSample


def sample_sites(marked: ModelProto, data: Iterable[Any], *, progress: bool = True) -> dict[str, SiteSample]:
    """Take a bounded sample of the float values at every site of a marked float model.

    Raises:
        DataError: no data, or data the model does not take.
    """
    model, tensors = exposed(marked)
    session = simulation_session(model)
    names = [output.name for output in session.get_outputs()]
    found: defaultdict[str, SiteSample] = defaultdict(SiteSample)
    for number, batch in batches_of(data, "sample", progress):
        where = f"batch {number}"
        values = run_session(session, as_feeds(batch, session.get_inputs(), where), where)
        for name, value in zip(names, values, strict=True):
            found[tensors[name]].add(value)
    return dict(found)


def exposed(marked: ModelProto, sites: Container[str] | None = None) -> tuple[ModelProto, dict[str, str]]:
    """The float model with these computed sites (None for all) as its outputs; gives tensor name -> site."""
    model = load(marked)
    stored = {tensor.name for tensor in model.graph.initializer}
    tensors: dict[str, str] = {}
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
    replace_nodes(model.graph, nodes)
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in tensors)
    kept = [entry for entry in model.opset_import if entry.domain != MARK_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model, tensors
