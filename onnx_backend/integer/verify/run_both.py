"""Measure an integer-only model against the Q/DQ model it was converted from, and against the NumPy reference."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from onnx_backend.integer.ir.operations import Operation, Requantization
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.integer.verify.index_bounds import index_bounds
from onnx_backend.proto.graph_queries import declared_sizes, initializers, input_names
from onnx_backend.runtime.feeds import as_feeds
from onnx_backend.runtime.session import simulation_session
from qsdk.core.errors import DataError, IntegerError
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import Encoding

Array = npt.NDArray[Any]
_DYNAMIC = 2  # length of a dynamic axis in the measurement


def measure(
    source: ModelProto,
    integer: ModelProto,
    inputs: Mapping[str, Array],
    *,
    edges: str,
    reference: bool = True,
    operations: Sequence[Operation] = (),
) -> dict[str, Any]:
    """Run both models once.

    Args:
        source: the Q/DQ model.
        integer: the integer-only model converted from it.
        inputs: of `integer`; with float edges also of `source`.
        edges: `float` or `integer`.
        reference: compare with the NumPy reference too, which knows integers only: no kernels, no float islands.
        operations: that `integer` was made of; the certificate's row of every requantization among them gets the
            largest magnitude of its accumulators in the reference, as `accumulator_measured`.

    Returns:
        `max_lsb`: the largest difference of an output, in steps of the output's scale (None with integer edges);
        `differing`: the share of output elements that differ; `reference_equal`: True, since a difference between ONNX
        Runtime and the NumPy integer reference raises, or None if they were not compared.

    Raises:
        DataError: the inputs are none that the model can compute on (an index beyond its table).
        IntegerError: ONNX Runtime and the reference disagree, an accumulator exceeds its bound, or the Q/DQ model
            gives NaN.
    """
    names = [info.name for info in integer.graph.output]
    session = simulation_session(integer)
    try:
        ours = dict(zip(names, session.run(names, dict(inputs)), strict=True))
    except Exception as error:  # the runtime's own exception types are private
        raise DataError(
            f"the integer model does not run on the inputs of the measurement ({error}); give inputs that the model "
            "takes: data=[batch]"
        ) from error
    theirs = [] if edges != "float" else simulation_session(source).run(names, dict(inputs))
    _require_numbers(dict(zip(names, theirs, strict=False)))
    expected = run_reference(integer, inputs, every_tensor=True) if reference else ours
    for name in names:
        if not np.array_equal(ours[name], expected[name]):
            raise IntegerError(
                f"ONNX Runtime and the integer reference disagree on the output {name!r}; this is a defect of qsdk or "
                "of the runtime, and the model was not written"
            )
    if reference:
        _note_accumulators([op for op in operations if isinstance(op, Requantization)], expected)
    if edges != "float":
        return {"max_lsb": None, "differing": None, "reference_equal": reference or None}
    scales = [_output_scale(integer, name, ours[name].ndim) for name in names]
    with np.errstate(invalid="ignore"):  # of two equal infinities, which are no distance apart
        off = [np.where(ours[n] == t, 0, np.abs(ours[n] - t)) for n, t in zip(names, theirs, strict=True)]
    steps = [np.nan_to_num(o / s, nan=np.inf, posinf=np.inf) for o, s in zip(off, scales, strict=True)]
    largest = max((float(np.rint(step).max()) for step in steps if step.size), default=0.0)
    elements = max(sum(step.size for step in steps), 1)
    differing = sum(int((step > 0.5).sum()) for step in steps) / elements
    return {"max_lsb": largest, "differing": differing, "reference_equal": reference or None}


def _require_numbers(outputs: Mapping[str, Array]) -> None:
    """Require that the Q/DQ model computes no NaN, which no integer represents.

    Raises:
        IntegerError: it computes NaN.
    """
    for name, values in outputs.items():
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise IntegerError(
                f"the Q/DQ model gives NaN in the output {name!r} on the inputs of the measurement, which no integer "
                "stands for; calibrate so that no divisor's grid holds 0, or give inputs that it computes: data=[batch]"
            )


def _note_accumulators(requantizations: Sequence[Requantization], tensors: Mapping[str, Array]) -> None:
    """Compare the accumulators, zero point or bias applied, with their proven bound, and note the largest.

    Raises:
        IntegerError: one is beyond the bound.
    """
    for op in requantizations:
        terms = [np.abs(tensors[term.name].astype(np.int64) - term.zero) for term in op.value.terms]
        largest = max(int(magnitude.max(initial=0)) for magnitude in terms)
        if largest > op.row["accumulator_bound"]:
            raise IntegerError(
                f"an accumulator of {op.label!r} reaches {largest} in the measurement, beyond its bound of "
                f"{op.row['accumulator_bound']}; this is a defect of qsdk, and the model was not written"
            )
        op.row["accumulator_measured"] = largest


def measured_inputs(source: ModelProto, integer: ModelProto, data: Iterable[Any] | None) -> dict[str, Array]:
    """Return the first batch of `data` by input name, random inputs without data.

    For an input that takes codes, floats are quantized first, by the scale and zero point that the model states.

    Raises:
        DataError: there is no batch, or the model does not take it.
    """
    if data is None:
        return random_inputs(integer, source, np.random.default_rng(0))
    batch = next(iter(data), None)
    if batch is None:
        raise DataError("data= holds no batch; give one, or leave it out to measure with random inputs")
    if not input_names(integer.graph):
        return {}
    feeds = as_feeds(batch, simulation_session(integer).get_inputs(), "batch 0 of data=")
    known = {prop.key: prop.value for prop in integer.metadata_props}
    return {info.name: _as_codes(feeds[info.name], info, known) for info in integer.graph.input if info.name in feeds}


def _as_codes(x: Array, info: ValueInfoProto, known: Mapping[str, str]) -> Array:
    """Return floats as the codes of an edge whose encoding the model's metadata has, anything else as it is."""
    key = f"qsdk.input.{info.name}"
    if f"{key}.scale" not in known or not np.issubdtype(x.dtype, np.floating):
        return x
    scale, zero_point = np.float32(known[f"{key}.scale"]), np.int32(known[f"{key}.zero_point"])
    codes = Encoding(dtype_named(known[f"{key}.dtype"]), np.array([scale]), np.array([zero_point])).quantize(x)
    return codes.astype(helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type))


def random_inputs(model: ModelProto, source: ModelProto, generator: np.random.Generator) -> dict[str, Array]:
    """Return an array per input of `model`: floats uniform over their quantizer's range, indices in their table."""
    wanted, rows = set(input_names(model.graph)), index_bounds(model)
    return {
        info.name: _random(info, source, generator, rows.get(info.name))
        for info in model.graph.input
        if info.name in wanted
    }


def _random(info: ValueInfoProto, source: ModelProto, generator: np.random.Generator, rows: int | None) -> Array:
    shape = [_DYNAMIC if size is None else size for size in declared_sizes(info.type)]
    dtype = helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
    if rows is not None:
        return generator.integers(0, rows, shape).astype(dtype)
    if np.issubdtype(dtype, np.integer):
        high = min(int(np.iinfo(dtype).max), 255)
        return generator.integers(max(int(np.iinfo(dtype).min), -128), high + 1, shape).astype(dtype)
    reader = next((n for n in source.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == info.name), None)
    low, high_value = (-1.0, 1.0) if reader is None else _range(reader, source)
    return generator.uniform(low, high_value, shape).astype(dtype)


def _range(quantize: NodeProto, source: ModelProto) -> tuple[float, float]:
    stored = initializers(source.graph)
    scale = float(numpy_helper.to_array(stored[quantize.input[1]]).reshape(-1)[0])
    zero_point, bounds = 0, ml_dtypes.iinfo(np.dtype(np.uint8))  # type: ignore[no-untyped-call]
    if len(quantize.input) > 2 and quantize.input[2]:
        point = numpy_helper.to_array(stored[quantize.input[2]])
        zero_point, bounds = int(point.reshape(-1)[0]), ml_dtypes.iinfo(point.dtype)  # type: ignore[no-untyped-call]
    return (int(bounds.min) - zero_point) * scale, (int(bounds.max) - zero_point) * scale


def _output_scale(integer: ModelProto, name: str, rank: int) -> Array:
    """Return the scale of an output, shaped to its rank; 1 for integer outputs."""
    stored = initializers(integer.graph)
    maker = next((n for n in integer.graph.node if name in n.output), None)
    if maker is None or maker.op_type != "DequantizeLinear":
        return np.ones((), np.float32)
    scale = numpy_helper.to_array(stored[maker.input[1]])
    axis = next((attribute.i for attribute in maker.attribute if attribute.name == "axis"), 1)
    return scale.reshape([-1 if i == axis else 1 for i in range(rank)]) if scale.size > 1 else scale.reshape(())
