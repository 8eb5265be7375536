"""Loading, stamping and saving ONNX models, and the small questions one asks of a graph."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.data_file import require_data
from onnx_backend.proto.external_data import INLINE, external_array, is_reference, read_external_data
from onnx_backend.proto.soundness import require_sound
from onnx_backend.proto.subgraphs import all_nodes, names_of, reads, rename_reads
from onnx_backend.proto.weightless import checkable, refilled, skeleton
from qsdk.core.atomic_files import write_bytes
from qsdk.core.errors import ConfigError, FileFormatError, ModelError

OPSET = 21
MARK_DOMAIN = "qsdk"
MARK_OP = "Quantizer"
LARGEST_OPSET = 26  # what onnxruntime 1.31 takes, with IR 13; 1.32 loads 28, but has no QuantizeLinear of it
_IR_OF_OPSET = {21: 10, 22: 10, 23: 11, 24: 12, 25: 13, 26: 13}
_TWO_GIB = 2**31 - 1


def load(
    source: str | os.PathLike[str] | bytes | ModelProto, *, inline: int = INLINE, whole: bool = False
) -> ModelProto:
    """Give a model of its own from a path, serialized bytes or a proto (copied).

    Weights in other files are read, except large ones: of these the model says where they are, and `array` gives them
    from there, so that the files must stay as they are while the model is in use.

    Args:
        source: a path may have external data beside it.
        inline: external weights of up to so many bytes are read at once.
        whole: hold all the data of an exported model against its hash, not only a sample.

    Raises:
        ConfigError: the source is none of these, but a sim, say.
        FileFormatError: the file is missing, truncated, or no ONNX model, its data is another model's, its functions
            have no end, or a node omits an input that its op needs.
    """
    if isinstance(source, ModelProto):
        require_sound(source, "the model")
        model = ModelProto()
        model.CopyFrom(source)
        return model
    if isinstance(source, bytes):
        return _decoded(source, "the given bytes")
    path = path_of(source)
    if not path.is_file():
        said = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise FileFormatError(f"{said}; check the path, or export the model first")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    model = _decoded(data, str(path))
    del data  # the proto holds its own copy
    require_data(model, path, whole=whole)
    read_external_data(model, path, inline=inline)
    return model


def path_of(source: Any) -> Path:
    """The path that a user gave for a model.

    Raises:
        ConfigError: it is something else.
    """
    if isinstance(source, str | os.PathLike):
        return Path(source)
    what = type(source).__name__
    remedy = "give the path of an ONNX file, or an onnx model"
    if hasattr(source, "plan") and hasattr(source, "coverage"):
        remedy = 'write it first, and give that path: qsdk.export(sim, "model.onnx")'
    raise ConfigError(f"expected an ONNX model, got a {what}; {remedy}")


def _decoded(data: bytes, where: str) -> ModelProto:
    remedy = "it is truncated or no ONNX model; export or download it again"
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise FileFormatError(f"{where} cannot be read as ONNX: {remedy}") from error
    if not model.opset_import or not model.graph.output:
        raise FileFormatError(f"{where} has no opset or no graph outputs: {remedy}")
    require_sound(model, where)
    return model


def is_quantized(model: ModelProto) -> bool:
    """Whether a node of the model, at any depth, quantizes or dequantizes, or multiplies integers."""
    bodies = (model.graph.node, *(function.node for function in model.functions))
    names = {node.op_type for body in bodies for node in all_nodes(body)}
    return any("quant" in name.lower() or name.endswith("Integer") or name.startswith("QLinear") for name in names)


def save(model: ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to `path` atomically.

    Raises:
        ExportError: the folder cannot be written.
        ModelError: the model is larger than one protobuf message can be.
    """
    write_bytes(path, serialized(model))


def serialized(model: ModelProto) -> bytes:
    """Give a model's bytes; weights in files are read into them.

    Raises:
        ModelError: the model is larger than 2 GiB.
    """
    model = with_weights(model)
    if model.ByteSize() > _TWO_GIB:
        raise ModelError("the model is larger than 2 GiB, which one ONNX file cannot hold; store external data")
    return bytes(model.SerializeToString())


def with_weights(model: ModelProto) -> ModelProto:
    """The model, or a copy of it that holds the weights that the model leaves in files."""
    if not any(is_reference(tensor) for tensor in model.graph.initializer):
        return model
    found = load(model)
    for tensor in found.graph.initializer:
        if is_reference(tensor):
            tensor.CopyFrom(numpy_helper.from_array(array(tensor), tensor.name))
    return found


def opset_of(model: ModelProto, domain: str = "") -> int:
    """The imported version of a domain, 0 if it is not imported."""
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
    """Give the model at opset `least` or above, a copy converted by onnx's own converter and checked.

    Raises:
        ModelError: the model is newer than the runtime, or does not survive the conversion.
    """
    current = opset_of(model)
    if current > LARGEST_OPSET:
        raise ModelError(f"the model uses opset {current}; the runtime knows up to {LARGEST_OPSET}, export it lower")
    if current < least:
        try:
            light = skeleton(model)
            light.ir_version = max(light.ir_version, 8)  # before, the converter wants stored tensors among the inputs
            converted = onnx.version_converter.convert_version(light, least)
            # the converter keeps silent about what it could not do; the checker finds it
            onnx.checker.check_model(checkable(converted), full_check=True)
        except (RuntimeError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ModelError(f"the model cannot be raised from opset {current} to {least}: {error}") from error
        _carry_metadata(model, converted)
        model, current = refilled(converted, load(model)), least
    stamp(model, current)
    return model


def _carry_metadata(source: ModelProto, target: ModelProto) -> None:
    """Give converted nodes the metadata that the converter drops; a node is known by its first output."""
    said = {node.output[0]: node.metadata_props for node in source.graph.node if node.output}
    for node in target.graph.node:
        if node.output and node.output[0] in said and not node.metadata_props:
            node.metadata_props.extend(said[node.output[0]])


def is_mark(node: NodeProto) -> bool:
    """Whether a node marks a site."""
    return node.domain == MARK_DOMAIN and node.op_type == MARK_OP


def attributes(node: NodeProto) -> dict[str, Any]:
    """Decode a node's attributes to Python values; strings are str, tensors NumPy arrays."""
    return {attribute.name: _plain(helper.get_attribute_value(attribute)) for attribute in node.attribute}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def constant_tensor(node: NodeProto) -> TensorProto:
    """The tensor that a Constant node holds, under its output's name.

    Raises:
        ModelError: the node holds strings or a sparse tensor.
    """
    name = node.output[0]
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        if attribute.name == "value":
            tensor = TensorProto()
            tensor.CopyFrom(value)
            tensor.name = name
            return tensor
        if attribute.name in ("value_float", "value_floats"):
            return numpy_helper.from_array(np.asarray(value, np.float32), name)
        if attribute.name in ("value_int", "value_ints"):
            return numpy_helper.from_array(np.asarray(value, np.int64), name)
    raise ModelError(f"the Constant node {node.name or name!r} holds no numeric tensor; store it as an initializer")


def is_constant(node: NodeProto) -> bool:
    """Whether a node is a Constant that holds a dense numeric tensor."""
    if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(node.attribute) != 1:
        return False
    kind = node.attribute[0].name
    is_text = kind == "value" and node.attribute[0].t.data_type == TensorProto.STRING
    return kind in ("value", "value_float", "value_floats", "value_int", "value_ints") and not is_text


def lift_constants(model: ModelProto) -> None:
    """Turn Constant nodes with numeric values into initializers, in place."""
    kept = []
    for node in model.graph.node:
        if is_constant(node):
            model.graph.initializer.append(constant_tensor(node))
        else:
            kept.append(node)
    replace_nodes(model.graph, kept)


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto]) -> None:
    """Put `nodes` in the place of a graph's nodes."""
    fresh = list(nodes)
    del graph.node[:]
    graph.node.extend(fresh)


def initializers(graph: GraphProto) -> dict[str, TensorProto]:
    """Name -> stored tensor."""
    return {tensor.name: tensor for tensor in graph.initializer}


def producers(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Tensor name -> the node that makes it."""
    return {name: node for node in nodes for name in node.output if name}


def consumers(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """Tensor name -> the nodes that read it (also inside their bodies), once per reading node."""
    found: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in reads(node):
            found.setdefault(name, []).append(node)
    return found


def input_names(graph: GraphProto) -> list[str]:
    """The inputs that a caller feeds: those that no initializer provides."""
    stored = {tensor.name for tensor in graph.initializer}
    return [value.name for value in graph.input if value.name not in stored]


def names_in(graph: GraphProto) -> set[str]:
    """Every tensor and node name of a graph, bodies included."""
    return set(names_of(graph))


def unique(name: str, taken: set[str]) -> str:
    """Give `name`, numbered if it is taken, and remember it as taken."""
    fresh, count = name, 0
    while fresh in taken:
        count += 1
        fresh = f"{name}_{count}"
    taken.add(fresh)
    return fresh


def rename_inputs(nodes: Iterable[NodeProto], renamed: Mapping[str, str]) -> None:
    """Let nodes and their bodies read the new names, in place."""
    for node in nodes:
        rename_reads(node, renamed)


def drop_unused_initializers(graph: GraphProto) -> None:
    """Remove stored tensors that nothing reads, in place."""
    read = {name for node in graph.node for name in reads(node)} | {value.name for value in graph.output}
    unread = [index for index, tensor in enumerate(graph.initializer) if tensor.name not in read]
    for index in reversed(unread):  # what stays is not copied
        del graph.initializer[index]


def metadata(node: NodeProto) -> dict[str, str]:
    """A node's metadata."""
    return {entry.key: entry.value for entry in node.metadata_props}


def set_metadata(node: NodeProto, **facts: str) -> None:
    """Write metadata under the prefix `qsdk.`."""
    for key, value in facts.items():
        entry = node.metadata_props.add()
        entry.key, entry.value = f"qsdk.{key}", value


def set_properties(model: ModelProto, properties: Mapping[str, str]) -> None:
    """Write properties in place of those that an opened file brought along."""
    kept = [entry for entry in model.metadata_props if entry.key not in properties]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    for key, value in properties.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value


def array(tensor: TensorProto) -> npt.NDArray[Any]:
    """The value of a stored tensor (ml_dtypes' own types for 2 and 4 bits and minifloats)."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return external_array(tensor)
    return np.asarray(numpy_helper.to_array(tensor))
