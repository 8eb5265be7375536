"""Read encodings from QuantizeLinear and DequantizeLinear nodes: the inverse of `insert`."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, producers
from onnx_backend.proto.nodes import attributes, constant_tensor, metadata, node_label, set_metadata
from onnx_backend.qdq.layer_inputs import PART_KEY
from onnx_backend.readers import COPY_KEY
from qsdk.core.errors import CalibrationError, ExportError, FileFormatError
from qsdk.core.numerics.dtypes import DTYPES, DType, dtype_named
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.numerics.spec import OF_WHOLE, Spec
from qsdk.core.planning.from_encodings import AS_GIVEN
from qsdk.core.planning.plan import OF_CACHE, Decision

_CONTAINERS = [dtype for dtype in DTYPES.values() if dtype.is_quantized and dtype.container == dtype.name]
#: metadata of a DequantizeLinear that is kept as it stands in the file and belongs to no site
LITERAL_KEY = "qsdk.kept"
#: metadata of a DequantizeLinear that computes the block scales of a site
SCALES_KEY = "qsdk.scales_of"
#: metadata of a cast between the type of a site's tensor and the float32 of its pair
CAST_KEY = "qsdk.cast_of"
FLOAT32 = "float32"
FLOAT_CODES: Mapping[str, int] = MappingProxyType(
    {
        "float16": int(TensorProto.FLOAT16),
        "bfloat16": int(TensorProto.BFLOAT16),
        "float64": int(TensorProto.DOUBLE),
        FLOAT32: int(TensorProto.FLOAT),
    }
)
FLOAT_NAMES: Mapping[int, str] = MappingProxyType({code: name for name, code in FLOAT_CODES.items()})
_CODES = {int(helper.np_dtype_to_tensor_dtype(storage_type(dtype))): dtype for dtype in _CONTAINERS}


@dataclass(frozen=True)
class QdqPair:
    """A DequantizeLinear with its QuantizeLinear or stored tensor, and their encoding.

    Attributes:
        site: from the node's metadata, else the name of the tensor that is quantized.
        kind: weight, bias, activation, input or output; "" where the file states none.
        dequantize: the node.
        quantize: the QuantizeLinear in front, or None behind a stored tensor.
        stored: the name of the stored tensor, or None behind a QuantizeLinear.
        encoding: of the two nodes; the DequantizeLinear's where they disagree.
        output: the tensor that readers read: the DequantizeLinear's, or that of its site's cast behind it.
        tensor_type: the float type of that tensor.
        permutation: by which the stored tensor was transposed on export, or None.
    """

    site: str
    kind: str
    dequantize: NodeProto
    quantize: NodeProto | None
    stored: str | None
    encoding: Encoding
    output: str
    tensor_type: str
    permutation: tuple[int, ...] | None = None


def read(model: ModelProto) -> dict[str, Encoding]:
    """Return the encoding of every quantized site, recovered from the Q/DQ nodes themselves.

    A scale or zero point that is computed, of a type that cannot be read, or not positive is a FileFormatError.
    """
    return {place.site: place.encoding for place in qdq_pairs(model)}


def read_casts(model: ModelProto) -> dict[str, str]:
    """Return site -> dtype name of every site that was exported as a pair of casts."""
    facts = [metadata(node) for node in model.graph.node if node.op_type == "Cast"]
    return {fact["qsdk.site"]: fact["qsdk.dtype"] for fact in facts if "qsdk.site" in fact}


def qdq_pairs(model: ModelProto) -> list[QdqPair]:
    """Return the DequantizeLinear of every quantized site in graph order, the first of each site; see `read`."""
    found: dict[str, QdqPair] = {}
    for place in _pairs(model):
        found.setdefault(place.site, place)
    return list(found.values())


def _pairs(model: ModelProto) -> Iterator[QdqPair]:
    stored: Mapping[str, TensorProto] = stored_tensors(model)
    made_by = producers(model.graph.node)
    casts = casts_behind_pairs(model.graph.node)
    scales = {node.input[1] for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type != "DequantizeLinear" or COPY_KEY in facts or LITERAL_KEY in facts or node.output[0] in scales:
            continue
        source = node.input[0]
        quantize = made_by.get(source)
        if quantize is not None and quantize.op_type != "QuantizeLinear":
            quantize = None
        if quantize is None and source not in stored:
            continue  # a tensor that arrives quantized has no site of its own
        permutation = _permutation(facts)
        encoding = encoding_of_pair(node, quantize, stored, made_by)
        site = facts.get("qsdk.site") or (source if quantize is None else quantize.input[0])
        stored_name = source if quantize is None else None
        cast = casts.get(node.output[0])
        output = (node if cast is None else cast).output[0]
        tensor_type = _type_of_result(node, stored) if cast is None else type_of_cast(cast)
        kind = facts.get("qsdk.kind", "")
        yield QdqPair(site, kind, node, quantize, stored_name, encoding, output, tensor_type, permutation)


def casts_behind_pairs(nodes: Iterable[NodeProto]) -> dict[str, NodeProto]:
    """Return result of a DequantizeLinear -> the cast behind it to the type of its site's tensor, if there is one."""
    casts = (node for node in nodes if node.op_type == "Cast" and CAST_KEY in metadata(node))
    return {node.input[0]: node for node in casts if type_of_cast(node) != FLOAT32}


def type_of_cast(node: NodeProto) -> str:
    """Return the float type that a cast casts to."""
    return FLOAT_NAMES.get(int(attributes(node)["to"]), FLOAT32)


def _type_of_result(node: NodeProto, stored: Mapping[str, TensorProto]) -> str:
    scale = stored.get(node.input[1])
    code = int(attributes(node).get("output_dtype", 0)) or (TensorProto.FLOAT if scale is None else scale.data_type)
    return FLOAT_NAMES.get(int(code), FLOAT32)


def encoding_of_pair(
    node: NodeProto,
    quantize: NodeProto | None,
    stored: Mapping[str, TensorProto],
    made_by: Mapping[str, NodeProto],
) -> Encoding:
    """Return the encoding of a DequantizeLinear and the QuantizeLinear in front of it, if there is one; see `read`."""
    facts = metadata(node)
    dtype = _dtype(node, quantize, stored)
    scale, zero_point = _parameters(node, stored, made_by)
    if "qsdk.dtype" in facts:
        dtype = dtype_named(facts["qsdk.dtype"])
    elif quantize is not None and "qsdk.site" not in facts:
        dtype = _narrowed(quantize, dtype, scale, zero_point, stored, made_by)
    return _encoding(node, dtype, scale, zero_point, _permutation(facts), "qsdk.site" in facts)


def stored_tensors(model: ModelProto) -> dict[str, TensorProto]:
    """Return name -> stored tensor, Constant nodes included."""
    found = initializers(model.graph)
    for node in model.graph.node:
        if node.op_type == "Constant" and any(a.name.startswith("value") for a in node.attribute):
            found[node.output[0]] = constant_tensor(node)
    return found


def quantized_code(quantize: NodeProto, stored: Mapping[str, TensorProto]) -> int:
    """Return the TensorProto type of a QuantizeLinear's result: its zero point's, else `output_dtype`, else UINT8."""
    if len(quantize.input) > 2 and quantize.input[2] in stored:
        return int(stored[quantize.input[2]].data_type)
    return int(attributes(quantize).get("output_dtype", 0)) or int(TensorProto.UINT8)


def _dtype(node: NodeProto, quantize: NodeProto | None, stored: Mapping[str, TensorProto]) -> DType:
    code = int(stored[node.input[0]].data_type) if quantize is None else quantized_code(quantize, stored)
    if code not in _CODES:
        kind = helper.tensor_dtype_to_string(code) if code in helper.get_all_tensor_dtypes() else str(code)
        raise FileFormatError(f"{node_label(node)} holds {kind}, which is no quantized dtype; quantize the model again")
    return _CODES[code]


def _parameters(
    node: NodeProto, stored: Mapping[str, TensorProto], made_by: Mapping[str, NodeProto]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    found = block_scales(node.input[1], stored, made_by)
    for name in node.input[1:3] if found is None else node.input[2:3]:
        if name and name not in stored:
            raise FileFormatError(f"{node_label(node)} computes its parameter {name!r}; only stored ones can be read")
    scale = array(stored[node.input[1]]).astype(np.float32) if found is None else found
    if len(node.input) > 2 and node.input[2]:
        return scale, array(stored[node.input[2]]).astype(np.float32).astype(np.int32)
    return scale, np.zeros(scale.shape, np.int32)


def block_scales(
    name: str, stored: Mapping[str, TensorProto], made_by: Mapping[str, NodeProto]
) -> npt.NDArray[np.float32] | None:
    """Return the scales that are computed from narrow ones and one float32 (NVFP4's two levels), or None.

    They are a quotient here, and the result of a DequantizeLinear in files of others.
    """
    node = made_by.get(name)
    if node is None or node.op_type not in ("DequantizeLinear", "Div") or len(node.input) != 2:
        return None
    cast = made_by.get(node.input[0]) if node.op_type == "Div" else None
    codes_name = cast.input[0] if cast is not None and cast.op_type == "Cast" else node.input[0]
    if codes_name not in stored or node.input[1] not in stored:
        return None
    codes, scale = array(stored[codes_name]), array(stored[node.input[1]])
    if scale.size != 1 or scale.dtype != np.float32:
        return None
    values, one = codes.astype(np.float32), scale.reshape(())
    return np.asarray(values / one if node.op_type == "Div" else values * one, np.float32)


def _permutation(facts: Mapping[str, str]) -> tuple[int, ...] | None:
    text = facts.get("qsdk.perm")
    return None if text is None else tuple(int(part) for part in text.split(","))


def _encoding(
    node: NodeProto,
    dtype: DType,
    scale: npt.NDArray[np.float32],
    zero_point: npt.NDArray[np.int32],
    permutation: tuple[int, ...] | None,
    ours: bool,
) -> Encoding:
    options = attributes(node)
    block_size = options.get("block_size", 0) or None
    # a foreign one-element vector is per tensor; ours is per channel of one channel
    per_tensor = scale.ndim == 0 or (scale.size == 1 and block_size is None and not ours)
    axis = None if per_tensor else int(options.get("axis", 1))
    if permutation is not None and axis is not None:
        axis = permutation[axis % len(permutation)]
        if block_size is not None:
            inverse = tuple(int(i) for i in np.argsort(permutation))
            scale, zero_point = scale.transpose(inverse), zero_point.transpose(inverse)
    shape = (1,) if per_tensor else scale.shape
    try:
        return Encoding(dtype, scale.reshape(shape), zero_point.reshape(shape), axis, block_size)
    except (CalibrationError, ValueError) as error:
        raise FileFormatError(f"{node_label(node)}: {error}; quantize the model again") from error


def _narrowed(
    quantize: NodeProto,
    dtype: DType,
    scale: npt.NDArray[np.float32],
    zero_point: npt.NDArray[np.int32],
    stored: Mapping[str, TensorProto],
    made_by: Mapping[str, NodeProto],
) -> DType:
    """Return a narrower grid in the same container, if a Clip in front holds the values exactly inside it."""
    clip = made_by.get(quantize.input[0])
    if clip is None or clip.op_type != "Clip" or len(clip.input) < 3 or scale.size != 1 or not dtype.is_integer:
        return dtype
    if any(name not in stored for name in clip.input[1:3]):
        return dtype
    low, high = (float(array(stored[name]).reshape(())) for name in clip.input[1:3])
    standard = [found for found in DTYPES.values() if found.container == dtype.name and found.is_integer]
    candidates = [*standard, *(found.strict for found in standard if found.signed)]
    for candidate in candidates:
        inside = (np.float32(zero_point.reshape(())) >= candidate.lo) and (zero_point.reshape(()) <= candidate.hi)
        if candidate.narrows_container and inside:
            encoding = Encoding(candidate, scale.reshape(1), zero_point.reshape(1))
            if (float(encoding.low[0]), float(encoding.high[0])) == (low, high):
                return candidate
    return dtype


def require_written(decisions: Iterable[Decision]) -> None:
    """Refuse activations with the range of each token: ONNX has no quantizer for them, and what computes it is slow.

    Those in blocks are refused too: ONNX Runtime has no float4, nor blocks whose scales are found at run time.
    """
    for decision in decisions:
        if decision.spec is not None and decision.spec.blocks is not None:
            raise ExportError(
                f"{decision.site} has blocks of {decision.spec.blocks} whose scales are found while the model runs: "
                "no ONNX runtime has a kernel for them; quantize the module in PyTorch and export with "
                'format="compressed-tensors", or choose another activation='
            )
        if (
            decision.spec is not None
            and decision.spec.dynamic == "token"
            and decision.reason not in (OF_CACHE, AS_GIVEN)
        ):
            raise ExportError(
                f"{decision.site} has the range of each token, for which an ONNX file has no quantizer; export the "
                'module with format="compressed-tensors", or choose dynamic_activations=True (the range of each tensor)'
            )


@dataclass(frozen=True)
class DynamicPair:
    """A dynamically quantized site.

    Attributes:
        site: from the node's metadata, else the name of the tensor that is quantized.
        kind: activation, input or output.
        spec: what is found while the model runs.
        codes: the tensor of codes, and those of their scale and zero point.
        source: the tensor that is quantized; where it is not float32, the pair has casts around it.
        output: the tensor that readers read.
        tensor_type: the float type of both.
    """

    site: str
    kind: str
    spec: Spec
    codes: tuple[str, ...]
    source: str
    output: str
    tensor_type: str


def dynamic_pairs(model: ModelProto) -> list[DynamicPair]:
    """List the dynamically quantized sites of a model in graph order, the first dequantizing node of each."""
    made_by = producers(model.graph.node)
    casts = casts_behind_pairs(model.graph.node)
    found: dict[str, DynamicPair] = {}
    for node in model.graph.node:
        quantize = made_by.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        facts, spec = metadata(node), OF_WHOLE
        if PART_KEY in facts:  # a layer rounds its own input: no site
            continue
        if quantize is not None and quantize.op_type == "DynamicQuantizeLinear" and node.input[:] == quantize.output[:]:
            codes, source = (*quantize.output,), quantize.input[0]
        elif node.op_type == "Mul" and (divide := _divided_by_token(made_by, node)) is not None:
            codes, source = (made_by[node.input[0]].input[0], node.input[1]), divide.input[0]
            spec = Spec(dtype_named(facts["qsdk.dtype"]), dynamic="token")
        else:
            continue
        site, kind = facts.get("qsdk.site") or source, facts.get("qsdk.kind") or "activation"
        output, tensor_type = node.output[0], FLOAT32
        if output in casts:
            source, output, tensor_type = made_by[source].input[0], casts[output].output[0], type_of_cast(casts[output])
        found.setdefault(site, DynamicPair(site, kind, spec, codes, source, output, tensor_type))
    return list(found.values())


#: from the codes of each token's values to the division by their scales, against the direction of the graph
TOKEN_FORM = ("Cast", "Cast", "Clip", "Round", "Div")


def _divided_by_token(made_by: Mapping[str, NodeProto], multiply: NodeProto) -> NodeProto | None:
    """Return the Div that begins the form of a site with a scale for each token, from the Mul that ends it."""
    node = multiply if "qsdk.dtype" in metadata(multiply) else None
    for op in TOKEN_FORM if node is not None else ():
        node = made_by.get(node.input[0]) if node is not None else None
        node = node if node is not None and node.op_type == op else None
    return node if node is not None and node.input[1] == multiply.input[1] else None


def mark_frozen(model: ModelProto, encodings: Mapping[str, Encoding]) -> None:
    """Note at the DequantizeLinear nodes of frozen encodings that they are frozen, in place."""
    frozen = {site: digest(encoding) for site, encoding in encodings.items() if encoding.frozen}
    for node in model.graph.node:
        site = metadata(node).get("qsdk.site") if node.op_type == "DequantizeLinear" else None
        if site in frozen:
            set_metadata(node, frozen=frozen[site])


def frozen_digests(model: ModelProto) -> dict[str, str]:
    """Return site -> digest of the encoding that was frozen there when the file was written."""
    facts = (metadata(node) for node in model.graph.node if node.op_type == "DequantizeLinear")
    return {
        entry["qsdk.site"]: entry["qsdk.frozen"] for entry in facts if "qsdk.frozen" in entry and "qsdk.site" in entry
    }


def digest(encoding: Encoding) -> str:
    """Return a digest of an encoding; an edited encoding has another one and is no longer frozen."""
    facts = repr((encoding.dtype.name, encoding.axis, encoding.block_size, encoding.scale.shape)).encode()
    return hashlib.sha256(facts + encoding.scale.tobytes() + encoding.zero_point.tobytes()).hexdigest()[:16]
