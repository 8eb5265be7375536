"""Convert an old model to the opset that quantization needs: fix-ups, onnx's own converter, and a run of both forms.

The converter's errors are repaired here: a linear Resize of opset 10 and below is asymmetric; Hardmax below
opset 13 flattens; GroupNormalization 18 has one scale per group.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import names_in, unique
from onnx_backend.proto.nodes import (
    attributes,
    constant_tensor,
    copied,
    is_constant,
    node_label,
    replace_nodes,
    set_attributes,
)
from onnx_backend.proto.opsets import OPSET, converted_skeleton, opset_of, require_loadable_opset, stamp
from onnx_backend.proto.subgraphs import all_nodes, bodies, has_bodies
from onnx_backend.proto.weightless import refill
from onnx_backend.runtime.compare_runs import compare_runs, fits_one_message
from qsdk.core.errors import ModelError

_RANKS = 16  # no tensor has more dimensions
_FAILURES = (onnx.version_converter.ConvertError, onnx.shape_inference.InferenceError)
Fix = Callable[[NodeProto, set[str]], list[NodeProto]]


def require_known_opset(model: ModelProto) -> None:
    """Refuse a model that is newer than the runtime, or that states no opset."""
    current = opset_of(model)
    require_loadable_opset(current)
    if current < 1:
        raise ModelError("the model does not say which opset of ONNX it uses; export it again")
    if not 1 <= model.ir_version <= onnx.IR_VERSION:
        raise ModelError(
            f"the model has IR version {model.ir_version}, known are 1 to {onnx.IR_VERSION}; export it again"
        )


def raise_opset(model: ModelProto, feeds: Mapping[str, object] | None) -> tuple[ModelProto, tuple[str, ...]]:
    """Return the model at opset 21 or above, changed in place, with remarks on how that was verified.

    The model is sorted, with unique node names and without functions; `feeds` are the inputs of the runs that compare
    both forms, None for random ones.
    """
    current = opset_of(model)
    if current >= OPSET:
        stamp(model, current)
        return model, ()
    original = None
    if fits_one_message(model):  # else neither can be run from memory, and a copy is dear
        original = copied(model)
    fixes = _fixes(current)
    if fixes:
        _rewrite(model.graph, fixes, names_in(model.graph))
    try:
        light = converted_skeleton(model, OPSET)
    except (*_FAILURES, RuntimeError, ValueError, TypeError, KeyError, IndexError) as error:
        raise ModelError(_conversion_error(model, current, str(error))) from error
    names = [value.name for value in model.graph.output]
    if [value.name for value in light.graph.output] != names:
        raise ModelError(f"raising the model from opset {current} renamed its outputs; export it at opset {OPSET}")
    model = refill(light, model)
    if current < 11:
        _make_resizes_asymmetric(model.graph)
    stamp(model, OPSET)
    how = "not compared by running, because the model is larger than 2 GiB"
    if original is not None:
        how = compare_runs(original, model, feeds, f"raising the model from opset {current} to {OPSET}")
    return model, (f"raised from opset {current} to {OPSET}: {how}",)


def _conversion_error(model: ModelProto, current: int, error: str) -> str:
    """Return the message of a failed conversion, with the node that is to blame."""
    remedy = f"export the model at opset {OPSET} or above"
    for node in all_nodes(model.graph.node):
        if node.domain not in ("", "ai.onnx") or has_bodies(node):
            continue
        named = f"{node_label(node)!r} ({node.op_type})"
        try:
            schema = onnx.defs.get_schema(node.op_type, current)
        except onnx.defs.SchemaError:
            return f"the node {named} is no op of opset {current}, so the model cannot be raised; {remedy}"
        if schema.deprecated:
            return f"the node {named} is deprecated at opset {current}, so the model cannot be raised; {remedy}"
    return f"the model cannot be raised from opset {current} to {OPSET}: {error.strip()}; {remedy}"


def _fixes(current: int) -> dict[str, Fix]:
    found: dict[str, Fix] = {}
    if current < 13:
        found["Hardmax"] = _flat_hardmax
    if 18 <= current < 21:
        found["GroupNormalization"] = _grouped_instance_norm
    return found


def _rewrite(graph: GraphProto, fixes: Mapping[str, Fix], taken: set[str]) -> None:
    nodes: list[NodeProto] = []
    for node in graph.node:
        for _, body in bodies(node):
            _rewrite(body, fixes, taken)
        fix = fixes.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        nodes.extend([node] if fix is None else fix(node, taken))
    replace_nodes(graph, nodes)


def _flat_hardmax(node: NodeProto, taken: set[str]) -> list[NodeProto]:
    """Return nodes for a Hardmax over everything from `axis` on, as it was below opset 13."""
    source, result = node.input[0], node.output[0]
    shape, flat, hard = (unique(f"{result}/{part}", taken) for part in ("shape", "flat", "hard"))
    return [
        helper.make_node("Shape", [source], [shape]),
        helper.make_node("Flatten", [source], [flat], axis=attributes(node).get("axis", 1)),
        helper.make_node("Hardmax", [flat], [hard], node.name, axis=1),
        helper.make_node("Reshape", [hard, shape], [result]),
    ]


def _grouped_instance_norm(node: NodeProto, taken: set[str]) -> list[NodeProto]:
    """Return nodes for a GroupNormalization with one scale per group: InstanceNormalization over groups."""
    source, scale, bias = node.input
    result, facts = node.output[0], attributes(node)
    shape, groups, grouped, normed = (unique(f"{result}/{p}", taken) for p in ("shape", "groups", "grouped", "normed"))
    wanted = numpy_helper.from_array(np.array([0, facts["num_groups"], -1], np.int64), groups)
    return [
        helper.make_node("Shape", [source], [shape]),
        helper.make_node("Constant", [], [groups], value=wanted),
        helper.make_node("Reshape", [source, groups], [grouped]),
        helper.make_node(
            "InstanceNormalization", [grouped, scale, bias], [normed], node.name, epsilon=facts.get("epsilon", 1e-5)
        ),
        helper.make_node("Reshape", [normed, shape], [result]),
    ]


def _make_resizes_asymmetric(graph: GraphProto) -> None:
    """Make Resize nodes scale coordinates without a shift, as Upsample and the first Resize did, in place."""
    stored = {tensor.name: array(tensor) for tensor in graph.initializer if math.prod(tensor.dims) <= _RANKS}
    for node in all_nodes(graph.node):
        if is_constant(node):
            stored[node.output[0]] = array(constant_tensor(node))
        if node.op_type != "Resize":
            continue
        scales = stored.get(node.input[2]) if len(node.input) > 2 else None
        modes = {"coordinate_transformation_mode": "asymmetric"}
        if attributes(node).get("mode", "nearest") == "nearest":
            # the runtime rounded down where it enlarged and up where it shrank
            up, down = (True, False) if scales is None else (bool((scales >= 1).all()), bool((scales <= 1).all()))
            modes["nearest_mode"] = "floor" if up else "ceil"
            if not up and not down:
                continue
        set_attributes(node, modes)
