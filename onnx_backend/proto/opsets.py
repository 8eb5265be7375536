"""The opsets that this project reads and writes, and the conversion of a model to a newer one."""

import onnx
from onnx import ModelProto, helper

from onnx_backend.proto.nodes import copied
from onnx_backend.proto.weightless import checkable, refill, skeleton
from qsdk.core.errors import ModelError

OPSET = 21
LARGEST_OPSET = 26  # the newest that onnxruntime 1.31 loads, with IR 13; 1.32 loads 28, but has no QuantizeLinear of it
_IR_OF_OPSET = {21: 10, 22: 10, 23: 11, 24: 12, 25: 13, 26: 13}


def opset_of(model: ModelProto, domain: str = "") -> int:
    """Return the imported version of a domain, 0 if it is not imported."""
    names = ("", "ai.onnx") if domain == "" else (domain,)
    return max((int(entry.version) for entry in model.opset_import if entry.domain in names), default=0)


def stamp(model: ModelProto, opset: int) -> None:
    """Set the default opset and the IR version that belongs to it."""
    kept = [entry for entry in model.opset_import if entry.domain not in ("", "ai.onnx")]
    del model.opset_import[:]
    model.opset_import.append(helper.make_opsetid("", opset))
    model.opset_import.extend(kept)
    model.ir_version = _IR_OF_OPSET[opset]


def at_opset(model: ModelProto, least: int = OPSET) -> ModelProto:
    """Return the model at opset `least` or above; a conversion by onnx's own converter is checked."""
    current = opset_of(model)
    require_loadable_opset(current)
    if current < least:
        try:
            converted = converted_skeleton(model, least)
            # the converter does not report its failures; the checker finds them
            onnx.checker.check_model(checkable(converted), full_check=True)
        except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ModelError(f"the model cannot be raised from opset {current} to {least}: {error}") from error
        model, current = refill(converted, copied(model)), least
    stamp(model, current)
    return model


def converted_skeleton(model: ModelProto, opset: int) -> ModelProto:
    """Return the skeleton of a model as onnx's own converter raises it; what that raises is passed on."""
    light = skeleton(model)
    light.ir_version = max(light.ir_version, 8)  # before, the converter wants stored tensors among the inputs
    converted = onnx.version_converter.convert_version(light, opset)
    carry_metadata(model, converted)
    return converted


def require_loadable_opset(opset: int) -> None:
    """Refuse an opset that is newer than the runtime."""
    if opset > LARGEST_OPSET:
        raise ModelError(f"the model uses opset {opset}; the runtime knows up to {LARGEST_OPSET}, export it lower")


def carry_metadata(source: ModelProto, target: ModelProto) -> None:
    """Copy the metadata that the converter drops to converted nodes; a node is known by its first output."""
    metadata_of = {node.output[0]: node.metadata_props for node in source.graph.node if node.output}
    for node in target.graph.node:
        if node.output and node.output[0] in metadata_of and not node.metadata_props:
            node.metadata_props.extend(metadata_of[node.output[0]])
