"""The one list of runtimes, which everything else asks by name."""

import json
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.profiling.kernels import Array, Profile, numbered, with_labels
from onnx_backend.proto.external_data import array
from onnx_backend.proto.model_io import set_properties
from onnx_backend.proto.nodes import attributes, metadata, node_label
from onnx_backend.proto.opsets import opset_of
from onnx_backend.readers import Readers, grid, is_shifted, quantizers, type_name
from onnx_backend.runtimes.iree import IREE
from onnx_backend.runtimes.onnxruntime import ONNXRUNTIME
from onnx_backend.runtimes.openvino import OPENVINO
from onnx_backend.runtimes.qnn import QNN
from onnx_backend.runtimes.runner import Runner
from onnx_backend.runtimes.runtime import Prefer, Runtime
from onnx_backend.runtimes.tables import lacks_zero_point, open_sizes, ranges_at_run_time
from onnx_backend.runtimes.tensorrt import TENSORRT
from onnx_backend.validation.scope import Finding, error, is_quantizer, warning
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.config.target import Target, load_target
from qsdk.core.errors import ConfigError, DataError, FileFormatError, ModelError
from qsdk.core.graph.op_facts import MOVEMENTS, SHAPE_OPS
from qsdk.core.numerics.dtypes import DTYPES

#: the standard's own form, for any runtime that reads it
STANDARD = Runtime(
    load_target("onnx"), opens=True, pair_types=("float16", "bfloat16"), narrow_scales=True, single_ops=True
)
RUNTIMES: Mapping[str, Runtime] = MappingProxyType(
    {runtime.name: runtime for runtime in (ONNXRUNTIME, STANDARD, OPENVINO, QNN, IREE, TENSORRT)}
)
_EXPLICIT = "zero points"  # the form of files for described targets: as `Target.zero_points`, else as the standard
WRITTEN_KEY = "qsdk.written_for"  # property of a model: the form in which it was written, as JSON


def runtime_named(dialect: AnyDialect | Runtime) -> Runtime:
    """Return the runtime of a dialect, or that which a `.toml` file describes; a ConfigError if there is none."""
    if isinstance(dialect, Runtime):
        return dialect
    return RUNTIMES.get(str(dialect)) or described(load_target(dialect))


def note_form(model: ModelProto, runtime: Runtime, prefer: str) -> None:
    """Note in a model, in place, the dialect that it is written in, its version, and whether for speed or size."""
    facts = {"dialect": runtime.name, "version": runtime.version, "prefer": prefer}
    if runtime.name not in RUNTIMES:
        facts["form"] = _EXPLICIT if runtime.explicit else STANDARD.name
    set_properties(model, {WRITTEN_KEY: json.dumps({name: fact for name, fact in facts.items() if fact})})


def noted_form(model: ModelProto) -> tuple[Runtime, Prefer] | None:
    """Return the runtime that a model says it is written for, and whether for speed or size; None if it says nothing.

    A dialect that this version does not know is a FileFormatError.
    """
    text = metadata(model).get(WRITTEN_KEY)
    if text is None:
        return None
    try:
        facts: dict[str, Any] = json.loads(text)
        dialect, prefer, form = facts["dialect"], facts["prefer"], facts.get("form")
    except (ValueError, RecursionError, TypeError, KeyError):
        dialect = prefer = form = text
    if form in (_EXPLICIT, STANDARD.name):
        return described(Target(str(dialect), zero_points=form == _EXPLICIT)), cast("Prefer", prefer)
    if dialect not in RUNTIMES or prefer not in ("speed", "size"):
        raise FileFormatError(
            f"the property {WRITTEN_KEY} of the file is {text!r}, which this version of qsdk does not know; update "
            "qsdk, or export the file again"
        )
    return RUNTIMES[dialect], cast("Prefer", prefer)


def open_in(name: str, model: ModelProto, *, whole: bool = True) -> Runner:
    """Open a model, or a part of one, in a runtime.

    A part, whose inputs may lack a rank, is compiled for the sizes of the values that it is run on. A ConfigError if
    there is no such runtime, or it is not installed; a ModelError if it cannot compile the model.
    """
    runtime = RUNTIMES.get(name)
    if runtime is None or runtime.open is None:
        known = ", ".join(one.name for one in RUNTIMES.values() if one.open is not None)
        raise ConfigError(f"runtime={name!r} is unknown; choose one of {known}")
    return runtime.open(model) if whole or runtime.open_part is None else runtime.open_part(model)


def timed_runtime(name: str) -> Runtime:
    """Return a runtime whose times can be taken; a ConfigError if it is unknown, or only emulated."""
    runtime = RUNTIMES.get(name)
    if runtime is None or runtime.time is None:
        known = ", ".join(one.name for one in RUNTIMES.values() if one.time is not None)
        if runtime is not None and runtime.open is not None:
            raise ConfigError(
                f"the processor of runtime={name!r} is emulated here, and the time of an emulation says nothing about "
                f"the device; profile on the device itself with its own tools, or another runtime: {known}"
            )
        raise ConfigError(f"runtime={name!r} is unknown; choose one of {known}")
    return runtime


def profile(
    model: ModelProto, feeds: Mapping[str, Array], *, runtime: str, threads: int | None, repeats: int
) -> Profile:
    """Time a model in a runtime, kernel by kernel; each time is the median of the repeats."""
    time = timed_runtime(runtime).time
    assert time is not None
    if repeats < 1 or (threads is not None and threads < 1):
        raise ConfigError(f"threads={threads} and repeats={repeats} must be 1 or more")
    try:
        return time(numbered(model), feeds, threads, repeats)
    except (ModelError, DataError) as error:
        raise type(error)(with_labels(str(error), model)) from error


# --- Runtimes that are described by a file alone: what a model must not have for the facts of a target to hold --------

_REQUANTIZE = "quantize with config.for_dialect(...) for this target"


def described(target: Target) -> Runtime:
    """Return the runtime of a target, which ONNX Runtime opens in its place."""
    return Runtime(target, opens=True, findings=partial(target_findings, target))


def target_findings(target: Target, model: ModelProto) -> Iterator[Finding]:
    """Yield what a target has not: the opset, dtypes, zero points, scales, blocks, encodings that differ, kernels."""
    lowest, highest = target.opsets
    if not lowest <= opset_of(model) <= highest:
        problem = f"{_name(target)} reads opset {lowest} to {highest}, and the model has {opset_of(model)}"
        yield error("", "opset", problem, f"export with opset={highest}")
    if target.fixed_sizes:
        yield from open_sizes(model)
    known = Readers(model.graph)
    for node in model.graph.node:
        yield from ranges_at_run_time(node)
        if is_quantizer(node):
            yield from _of_quantizer(target, node, known)
        else:
            yield from _of_op(target, node, known)


def _name(target: Target) -> str:
    return target.title or target.name


def _of_quantizer(target: Target, node: NodeProto, known: Readers) -> Iterator[Finding]:
    """Yield what a QuantizeLinear or DequantizeLinear cannot be."""
    label, name = node_label(node), _name(target)
    if target.zero_points:
        yield from lacks_zero_point(node, f"from which {name} takes the type of its codes", target.name)
    stored = known.stored.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
    if stored is None and node.op_type == "DequantizeLinear":
        return  # its QuantizeLinear is judged
    dtype = known.dtype(node) if stored is None else type_name(stored.data_type)
    is_bias = stored is not None and stored.data_type == TensorProto.INT32
    if is_bias and "*" in target.float_biases:
        yield error(label, "dialect", f"{name} reads no int32 bias", f"{_REQUANTIZE}, which leaves biases float")
    if not is_bias and not target.has(stored is not None, dtype):
        what = "activations" if stored is None else "weights"
        yield error(label, "dialect", f"{name} has no {what} of {dtype}", _REQUANTIZE)
    symmetric = target.symmetric_activations if stored is None else target.symmetric_weights
    if symmetric and is_shifted(node, known):
        yield error(label, "dialect", f"{name} has zero points of 0 alone here", _REQUANTIZE)
    scale = known.stored.get(node.input[1])
    scales = np.ones(1) if scale is None else np.asarray(array(scale), np.float64)
    if target.scale_bits is not None and np.any(np.modf(np.frexp(scales)[0] * 2.0**target.scale_bits)[0]):
        digits = "powers of two" if target.scale_bits == 1 else f"of {target.scale_bits} binary digits"
        yield error(label, "scale", f"the scales of {name} are {digits}, and this one is not", _REQUANTIZE)
    if stored is not None and not is_bias and scales.size > 1:
        size = int(attributes(node).get("block_size", 0))
        if size and target.block_sizes is not None and size not in target.block_sizes:
            yield error(label, "dialect", f"{name} has no scales per block of {size}", _REQUANTIZE)
        if not size and not target.per_channel:
            yield error(
                label, "dialect", f"{name} has one scale per weight, and this one has {scales.size}", _REQUANTIZE
            )


def _of_op(target: Target, node: NodeProto, known: Readers) -> Iterator[Finding]:
    """Yield where an op between pairs has no integer kernel, or other encodings than it must have."""
    label, name, behind = node_label(node), _name(target), quantizers(node, known)
    makers = [known.makers.get(source) for source in node.input if source]
    pairs = [maker for maker in makers if maker is not None and maker.op_type == "DequantizeLinear"]
    pairs = [pair for pair in pairs if pair.input[0] not in known.stored]
    if not pairs or not behind:
        return
    moves = node.op_type in MOVEMENTS or node.op_type in SHAPE_OPS
    if target.integer_ops is not None and node.op_type not in target.integer_ops and not moves:
        problem = f"{name} has no integer kernel for {node.op_type}, and computes it in floats between pairs"
        yield warning(label, "placement", problem, f"leave it float: {_REQUANTIZE}")
    if node.op_type in target.tied_ops and any(grid(one, known) != grid(behind[0], known) for one in pairs):
        problem = f"{name} computes {node.op_type} with one scale and zero point for its inputs and its result"
        yield error(label, "dialect", problem, _REQUANTIZE)
    if node.op_type in target.fixed_ranges:
        yield from _of_range(target, node, behind[0], known)


def _of_range(target: Target, node: NodeProto, quantize: NodeProto, known: Readers) -> Iterator[Finding]:
    """Yield a result whose range is another one than the target computes."""
    wanted, found = target.fixed_ranges[node.op_type], grid(quantize, known)
    if not found or len(found[0]) != 1:
        return
    dtype, scale, zero_point = DTYPES[known.dtype(quantize)], found[0][0], found[1][0] if len(found) > 1 else 0.0
    ends = [(end - zero_point) * scale for end in (dtype.lo, dtype.hi)]
    if any(abs(one - other) > scale / 2 for one, other in zip(ends, wanted, strict=True)):
        problem = (
            f"{_name(target)} computes {node.op_type} in the range {wanted[0]:g} to {wanted[1]:g}, and this pair has "
            f"{ends[0]:g} to {ends[1]:g}"
        )
        yield error(node_label(node), "dialect", problem, _REQUANTIZE)
