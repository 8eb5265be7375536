"""Store a marked tensor as integers, or narrow floats, behind a DequantizeLinear."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.proto.lazy_tensors import as_array, quantize_tensor
from onnx_backend.proto.nodes import attributes, metadata, retain, set_metadata
from onnx_backend.proto.opsets import opset_of
from onnx_backend.qdq.graph_editor import GraphEditor, dequantize_to, pair_type, scales_as, write_site
from onnx_backend.qdq.read import FLOAT32
from qsdk.core.arrays import Array
from qsdk.core.errors import ExportError
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.numerics.block_scales import float8_scales, scale_dtype_of
from qsdk.core.numerics.dtypes import DTYPES, WHOLE_BYTES, float8e4m3fn, float8e8m0
from qsdk.core.numerics.encoding import Encoding, storage_type
from qsdk.core.numerics.exact_sums import are_exact
from qsdk.core.numerics.spec import Kind
from qsdk.core.planning.plan import Plan

_NARROW_SCALES = 24  # the opset from which float8e8m0 is a type of scales


def store(
    at: GraphEditor, site: str, kind: Kind, encoding: Encoding, source: str, output: str, tensor_type: str = FLOAT32
) -> NodeProto:
    """Replace a mark by the stored `source`, quantized, and a DequantizeLinear, which is returned.

    A tensor that every reader transposes is stored transposed: `nn.Linear` keeps [out, in], and the runtime fuses only
    a DequantizeLinear of [in, out], with blocks along axis 0, into MatMulNBits.
    """
    values = at.values(source)
    permutation = _foldable(at, output, len(values.dims))
    try:
        codes = quantize_tensor(encoding, values, permutation)
    except ValueError as error:
        raise ExportError(f"the encoding of {site} does not fit its shape {values.dims}: {error}") from error
    if encoding.dtype.exact_sums and not are_exact(encoding.quantize(values.value()), encoding.axis):
        raise ExportError(
            f"products of the weights at {site} do not add up exactly on every processor, as {encoding.dtype} says: "
            "their scales were given or frozen; calibrate them, or choose weight='int8', exact with VNNI and on ARM"
        )
    scale, zero_point, axis = encoding.scale, encoding.zero_point, encoding.axis
    if permutation is not None:
        if axis is not None:
            axis = permutation.index(axis % len(values.dims))
        if encoding.block_size is not None:
            scale, zero_point = scale.transpose(permutation), zero_point.transpose(permutation)
        output = _fold(at, output)
    stored = at.once(source, _fingerprint(encoding, permutation), codes, "_quantized")
    own_type = pair_type(at, tensor_type, encoding)
    parameters, options = _parameters(at, site, encoding, scales_as(scale, own_type), zero_point)
    name = at.target(site, output, "dequantized")
    options |= where(encoding, axis)
    cast_type = FLOAT32 if own_type == tensor_type else tensor_type
    dequantize = dequantize_to(at, site, [stored, *parameters], name, cast_type, **options)
    write_site(dequantize, site, encoding, "" if kind == "weight" else kind)
    if permutation is not None:
        set_metadata(dequantize, perm=",".join(str(i) for i in permutation))
    at.row(site, encoding.dtype.name, _form(kind, encoding), zero_point_bytes(encoding) if len(parameters) == 1 else 0)
    return dequantize


def in_whole_bytes(plan: Plan, encodings: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """Return the encodings with 8 bits for every number of a 4-bit weight that no kernel of the runtime reads packed.

    Those are the weights of layers beside quantized activations: packed, they are dequantized in every run.
    """
    found = dict(encodings)
    if plan.only_weights():
        return found  # MatMulNBits reads packed ones, and convolutions compute in floats: see `fast_forms`
    sites = [site for site, d in plan.decisions.items() if d.kind == "weight" and d.op_type in LINEAR]
    for site in sites:
        encoding = found.get(site)
        if encoding is not None and encoding.block_size is None and encoding.dtype.container in WHOLE_BYTES:
            container = WHOLE_BYTES[encoding.dtype.container]
            found[site] = replace(encoding, dtype=replace(encoding.dtype, container=container))
    return found


def bytes_of_whole(model: ModelProto) -> int:
    """Return the bytes by which weights of 4 bits in 8 are longer than packed ones."""
    named = {node.input[0]: metadata(node).get("qsdk.dtype", "") for node in model.graph.node if node.input}
    whole = {name for name, dtype in named.items() if dtype.removesuffix("_strict") in WHOLE_BYTES}
    stored = [tensor for tensor in model.graph.initializer if tensor.name in whole]
    return sum(math.prod(t.dims) // 2 for t in stored if t.data_type in (TensorProto.INT8, TensorProto.UINT8))


# --- the layout ---------------------------------------------------------------------------------------------------


def _foldable(at: GraphEditor, output: str, rank: int) -> list[int] | None:
    """Return the permutation that every reader of a stored tensor applies, or None if they differ or apply none."""
    readers = at.readers.get(output, [])
    if rank < 2 or not readers or output in at.outputs:
        return None
    found = {_permutation(at, node, output, rank) for node in readers}
    permutation = found.pop()
    return None if found or permutation is None else list(permutation)


def _permutation(at: GraphEditor, reader: NodeProto, tensor: str, rank: int) -> tuple[int, ...] | None:
    options = attributes(reader)
    if reader.op_type == "Transpose" and reader.output[0] not in at.outputs:
        return tuple(options.get("perm") or reversed(range(rank)))
    if _transposes(reader) and list(reader.input).count(tensor) == 1 and reader.input[1] == tensor:
        return (1, 0)
    return None


def _transposes(reader: NodeProto) -> bool:
    return reader.op_type == "Gemm" and bool(attributes(reader).get("transB", 0))


def _fold(at: GraphEditor, output: str) -> str:
    """Remove the permutation from every reader of `output`; return the tensor that they read from now on."""
    transposes = [str(node.output[0]) for node in at.readers[output] if node.op_type == "Transpose"]
    for node in filter(_transposes, at.readers[output]):
        retain(node.attribute, lambda attribute: attribute.name != "transB")
    at.folded.update(transposes)
    if not transposes:
        return output
    at.renamed.update(dict.fromkeys((output, *transposes[1:]), transposes[0]))
    return transposes[0]


# --- scale and zero point -----------------------------------------------------------------------------------------


def _parameters(
    at: GraphEditor, site: str, encoding: Encoding, scale: Array, zero_point: Array
) -> tuple[list[str], dict[str, int]]:
    """Return the inputs of a DequantizeLinear after its codes, and the attributes that these need.

    Where runtimes read them, block scales of float8 and float4 tensors are stored in the narrow type that holds them.
    """
    narrow = scale_dtype_of(encoding) if at.narrow_scales and not encoding.dtype.is_integer else None
    if narrow == float8e8m0 and opset_of(at.model) >= _NARROW_SCALES:
        exponents = np.ascontiguousarray(scale).astype(ml_dtypes.float8_e8m0fnu)
        return [at.initializer(exponents, f"{site}/scale")], {"output_dtype": int(TensorProto.FLOAT)}
    with_zero_point = not encoding.symmetric or at.explicit
    factors = float8_scales(encoding) if narrow == float8e4m3fn else None
    if factors is None:
        return parameters(at, site, encoding, scale, zero_point, with_zero_point), {}
    # two levels: a DequantizeLinear of the scales would multiply, which no number makes equal to this quotient
    exact = np.array((scale * factors.divisor).astype(factors.codes.dtype), order="C")
    codes = at.initializer(exact, f"{site}/scale_codes")
    divisor = at.initializer(np.array(factors.divisor), f"{site}/scale_divisor")
    values, scales = at.fresh(f"{site}/scale_values"), at.fresh(f"{site}/scale")
    at.add("Cast", [codes], values, at.fresh(f"{site}/scale_cast"), to=int(TensorProto.FLOAT))
    set_metadata(at.add("Div", [values, divisor], scales, at.fresh(f"{site}/scale_divide")), scales_of=site)
    return [scales], {}


def parameters(
    at: GraphEditor, site: str, encoding: Encoding, scale: Array, zero_point: Array, with_zero_point: bool
) -> list[str]:
    """Store a scale and, if wanted, a zero point; return their names."""
    shape = () if encoding.axis is None else scale.shape
    lazily = at.lazy_scales and encoding.block_size is not None
    held = as_array(scale) if lazily else np.array(scale.reshape(shape), order="C")
    found = [at.initializer(held, f"{site}/scale")]
    if with_zero_point:
        typed = zero_point.reshape(shape).astype(storage_type(encoding.dtype))
        found.append(at.initializer(typed, f"{site}/zero_point"))
    return found


def where(encoding: Encoding, axis: int | None) -> dict[str, int]:
    """Return the attributes that assign scales to elements."""
    if axis is None:
        return {}
    return {"axis": axis} if encoding.block_size is None else {"axis": axis, "block_size": encoding.block_size}


def zero_point_bytes(encoding: Encoding) -> int:
    """Return the bytes that an explicit zero point would take."""
    return -(-encoding.scale.size * DTYPES[encoding.dtype.container].bits // 8)


def _fingerprint(encoding: Encoding, permutation: Sequence[int] | None) -> bytes:
    facts = (encoding.dtype.name, encoding.axis, encoding.block_size, permutation)
    digest = hashlib.sha256(repr(facts).encode())
    for part in (encoding.scale, encoding.zero_point):
        digest.update(np.ascontiguousarray(part).data)
    return digest.digest()


def _form(kind: Kind, encoding: Encoding) -> str:
    if kind == "bias" and encoding.dtype.name == "int32":
        return "int32 bias"
    return "integer initializer" if encoding.dtype.is_integer else "minifloat initializer"
