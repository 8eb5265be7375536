"""A marked model without its marks, whose nodes have a copy each of an initializer that they shared."""

from collections.abc import Collection, Mapping

from onnx import ModelProto, TensorProto

from onnx_backend.proto.graph_queries import initializers, names_in, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import MARK_DOMAIN, is_mark, rename_inputs, replace_nodes


def untied_model(marked: ModelProto, names: Collection[str]) -> tuple[ModelProto, Mapping[str, tuple[str, ...]]]:
    """Return an unmarked copy of a model, and the names of the copies of each initializer.

    The first node that reads one of these initializers keeps it, each further one reads a copy.
    """
    model = without_marks(marked)
    stored, taken = initializers(model.graph), names_in(model.graph)
    copies: dict[str, tuple[str, ...]] = {}
    for name in names:
        readers = [node for node in model.graph.node if name in node.input]
        made = []
        for node in readers[1:]:
            copy = TensorProto()
            copy.CopyFrom(stored[name])
            copy.name = unique(f"{name}/untied", taken)
            made.append(copy)
            rename_inputs([node], {name: copy.name})
        model.graph.initializer.extend(made)
        copies[name] = tuple(copy.name for copy in made)
    return model, copies


def without_marks(marked: ModelProto) -> ModelProto:
    """Return a copy of a marked model as `mark` was given it."""
    model = load(marked)
    nodes = [node for node in model.graph.node if not is_mark(node)]
    computed = {name for node in nodes for name in node.output}
    pairs = [(node.input[0], node.output[0]) for node in model.graph.node if is_mark(node)]
    rename_inputs(nodes, {output: source for source, output in pairs if source not in computed})
    outputs = {source: output for source, output in pairs if source in computed}
    rename_inputs(nodes, outputs)
    for node in nodes:
        for position, name in enumerate(node.output):
            node.output[position] = outputs.get(name, name)
    replace_nodes(model.graph, nodes)
    kept = [entry for entry in model.opset_import if entry.domain != MARK_DOMAIN]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    return model
