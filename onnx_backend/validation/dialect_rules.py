"""Rules on files for a runtime other than ONNX Runtime's CPU: what it refuses, misreads, or computes otherwise."""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto

from onnx_backend.dialects.dialect import writing_of
from onnx_backend.dialects.on_codes import RECURRENT, is_behind_constants, is_wrong_on_codes, pair_before
from onnx_backend.dialects.other_runtimes import PROBED, REFUSED, TABLES, Fault, RuntimeTable
from onnx_backend.dialects.readers import Readers, grid, is_shifted, quantizers, type_name
from onnx_backend.proto.external_data import array
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.nodes import node_label
from onnx_backend.validation import htp_rules, tensorrt_rules
from onnx_backend.validation.finding import Finding, error, warning
from onnx_backend.validation.scope import is_quantizer
from qsdk.core.graph.op_facts import MOVEMENTS, SHAPE_OPS
from qsdk.core.numerics.dtypes import DTYPES

_MISREAD = 16  # a difference of this part of the grid is no rounding any more


def dialect_findings(model: ModelProto, dialect: str) -> Iterator[Finding]:
    """Yield what the runtime of a dialect refuses or computes otherwise than the simulation.

    Args:
        model: with Q/DQ, valid.
        dialect: `openvino`, `qnn` or `tensorrt`; for others there is nothing to say.

    Raises:
        ConfigError: there is no such dialect.
    """
    writing, known = writing_of(dialect), Readers(model.graph)
    if writing.fixed_sizes and (opened := open_inputs(model)):
        problem = f"{', '.join(opened)} has open axes, and the runtime compiles for one size"
        yield error("", "sizes", problem, 'export with shapes={"name": sizes}')
    finders = htp_rules.pools_beyond_the_edge, htp_rules.softmax_of_long_rows
    beyond, long_rows = (find(model) if dialect == "qnn" else frozenset() for find in finders)
    if dialect == "openvino":
        yield from _quantized_by_the_runtime(model, known)
        yield from _behind_constants(model, known)
    for node in model.graph.node:
        if node.op_type == "DynamicQuantizeLinear" and not writing.for_onnxruntime and dialect != "onnx":
            problem = "ranges that are found while the model runs were not tried on this runtime"
            yield warning(node_label(node), "dialect", problem, "calibrate in place of dynamic_activations=True")
        if dialect == "tensorrt":
            yield from tensorrt_rules.placement_findings(node, known)
        if writing.off_codes and is_wrong_on_codes(node, known) and pair_before(node, known) is not None:
            problem = f"the runtime computes {node.op_type} on codes, wrong for some sizes and forms of pairs"
            yield error(node_label(node), "dialect", problem, f'export with dialect="{dialect}", which keeps it apart')
        if writing.off_codes and node.op_type in RECURRENT and pair_before(node, known) is not None:
            problem = f"the runtime does not compile {node.op_type} behind 8 bits, or computes it wrong without a word"
            remedy = 'give it and what it reads 16 bits, .override("its name", activation="uint16"), or leave it float'
            yield error(node_label(node), "dialect", problem, remedy)
        if dialect == "qnn":
            yield from htp_rules.findings(node, known, beyond, long_rows)
        if dialect in TABLES and node.op_type == "BitShift":
            yield from _wrong_shift(node, known, TABLES[dialect])
        if not is_quantizer(node):
            continue
        if writing.explicit:
            yield from _without_zero_point(node, dialect)
        if dialect == "tensorrt":
            yield from tensorrt_rules.quantizer_findings(node, known)
        if node.op_type == "QuantizeLinear" and known.dtype(node) in writing.clipped:
            yield from _unclipped(node, known)
        if dialect in TABLES and node.op_type == "DequantizeLinear":
            yield from _wrong_readers(node, known, TABLES[dialect])


def _quantized_by_the_runtime(model: ModelProto, known: Readers) -> Iterator[Finding]:
    """Yield one warning for all Linears with stored integers for weights that do not run in integers."""
    found = [node for node in model.graph.node if node.op_type in ("MatMul", "Gemm") and _is_decompressed(node, known)]
    if found:
        problem = (
            f"by default the runtime quantizes to 8 bits what this layer reads ({len(found)} such layers in the file), "
            "in groups of 32 and while it runs, on processors with VNNI"
        )
        remedy = 'compile the model with {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}, as check_parity does'
        yield warning(node_label(found[0]), "session", problem, remedy)


def _behind_constants(model: ModelProto, known: Readers) -> Iterator[Finding]:
    """Yield one warning for all pairs behind biases and other constants in a file with open axes."""
    found = [node for node in model.graph.node if node.op_type == "QuantizeLinear" and is_behind_constants(node, known)]
    if found and (opened := open_inputs(model)):
        problem = (
            f"{', '.join(opened)} has open axes, with which the runtime may add the first of several biases or "
            f"constants in front of this pair for all channels, without a word ({len(found)} such pairs in the file)"
        )
        remedy = 'export with dialect="openvino", which keeps them apart, or with shapes={"name": sizes}'
        yield warning(node_label(found[0]), "dialect", problem, remedy)


def _is_decompressed(layer: NodeProto, known: Readers) -> bool:
    """Return True if the runtime turns a Linear's stored integers into floats: they, or the inputs, are not 8 bits."""
    weight = known.weight(layer.input[1]).removesuffix(" blocks")
    return weight in ("int4", "uint4") or (weight in ("int8", "uint8") and pair_before(layer, known) is None)


def _wrong_shift(node: NodeProto, known: Readers, table: RuntimeTable) -> Iterator[Finding]:
    """Yield a shift of integers of 64 bits that are computed in 32, and one that is right below 2**31 alone."""
    dtype = known.integer_type(node)
    if dtype not in table.shifts:
        return
    remedy = 'write integer-only files with to_integer(target="portable")'
    if dtype == "uint64":
        problem = f"{table.title} computes integers of 64 bits in 32, and gives other codes without a word"
        yield error(node_label(node), "dialect", problem, remedy)
    else:
        problem = f"{table.title} computes integers of 32 bits without sign wrong from 2**31 on (measured)"
        yield warning(node_label(node), "dialect", problem, remedy)


def _without_zero_point(node: NodeProto, dialect: str) -> Iterator[Finding]:
    """Yield an error for a pair that states its type by an attribute, or not at all."""
    if len(node.input) > 2 and node.input[2]:
        return
    problem = (
        "it has no zero point, without which this runtime computes in floats; where the processor has no float16, it "
        "takes the codes for another type, without a word"
    )
    if dialect == "tensorrt":
        problem = "it has no zero point, from which this runtime takes the type of its codes"
    yield error(node_label(node), "zero_point", problem, f'export with dialect="{dialect}"')


def _unclipped(quantize: NodeProto, known: Readers) -> Iterator[Finding]:
    maker = known.makers.get(quantize.input[0])
    if maker is None or maker.op_type != "Clip":
        problem = f"the runtime removes pairs of {known.dtype(quantize)}, and values beyond their range then pass"
        yield error(node_label(quantize), "clip", problem, 'export with dialect="openvino", which clips them')


def _wrong_readers(dequantize: NodeProto, known: Readers, table: RuntimeTable) -> Iterator[Finding]:
    """Yield the readers of an activation that the table lists."""
    quantize = known.makers.get(dequantize.input[0])
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return
    dtype = known.dtype(quantize)
    if dtype not in table.refused:
        problem = f"activations of {dtype} are not computed as simulated on {table.title}"
        yield error(node_label(quantize), "dialect", problem, f"use one of {', '.join(table.refused)}")
        return
    for reader in known.readers.get(dequantize.output[0], []):
        label = known.label(reader, dequantize.output[0])
        if reader.op_type not in PROBED and reader.op_type not in SHAPE_OPS:
            problem = f"not probed on this runtime: {reader.op_type} behind {dtype}"
            yield warning(node_label(reader), "not_probed", problem, "compare it with check_parity(runtime=...)")
            continue
        fault = table.fault(dtype, label)
        if fault is None or not _applies(fault, dequantize, reader, known):
            continue
        what = f"{label.removesuffix('>').replace('/', ' with a weight of ')} behind {dtype}"
        if fault.steps == REFUSED:
            problem, remedy = f"{table.title} does not run {what}", _remedy(label, fault)
            yield error(node_label(reader), "dialect", problem, remedy)
        else:
            problem = f"{table.title} computes {what} up to {fault.steps:g} steps off the simulation (measured)"
            found = error if fault.steps >= 2 ** DTYPES[dtype].bits / _MISREAD else warning
            yield found(node_label(reader), "dialect", problem, _remedy(label, fault))


def _applies(fault: Fault, dequantize: NodeProto, reader: NodeProto, known: Readers) -> bool:
    """Return True if the pairs around a reader are those with which the table found its fault."""
    if fault.second_operand:
        second = known.makers.get(reader.input[1])
        if second is not None and second.op_type == "DequantizeLinear":
            return reader.input[1] == dequantize.output[0] and not _is_centred(dequantize, known)
        moved = None if second is None or second.op_type not in MOVEMENTS else pair_before(second, known)
        return moved is not None and not _is_centred(moved, known)
    behind = quantizers(reader, known)
    return fault.applies(
        input_shifted=is_shifted(dequantize, known),
        output_shifted=any(is_shifted(node, known) for node in behind),
        same_grid=bool(behind) and all(grid(node, known) == grid(dequantize, known) for node in behind),
    )


def _is_centred(dequantize: NodeProto, known: Readers) -> bool:
    """Return True if the zero point of a pair is the middle of its grid: 128 for unsigned 8 bits, 0 for signed ones."""
    zero_point = known.stored.get(dequantize.input[2]) if len(dequantize.input) > 2 else None
    if zero_point is None:
        return True
    dtype = DTYPES[type_name(zero_point.data_type)]
    return bool((array(zero_point) == (int(dtype.lo) + int(dtype.hi) + 1) // 2).all())


def _remedy(label: str, fault: Fault) -> str:
    if fault.second_operand:
        return "quantize with config.for_dialect(...), which puts the zero point of its second operand in the middle"
    if fault.between_grids:
        return "give both pairs one scale and zero point, as quantize does"
    change = "leave it float with .skip(...), or choose another dtype for it"
    return f"quantize with config.for_dialect(...), or {change}" if "/" in label else change
