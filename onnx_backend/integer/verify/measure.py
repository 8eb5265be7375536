"""Measure an integer-only model against its Q/DQ model, the NumPy reference, and every runtime that is installed."""

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import distributions
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from onnx_backend.integer.ir.context import label
from onnx_backend.integer.ir.operations import Operation, Requantization
from onnx_backend.integer.ir.values import GRIDS, Codes
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.parity.cuts import Cut, with_outputs
from onnx_backend.parity.teacher import RunOn, SessionRunner, Teacher
from onnx_backend.proto.graph_queries import declared_sizes, initializers, input_names, producers
from onnx_backend.proto.nodes import attributes
from onnx_backend.runtime.feeds import as_feeds
from onnx_backend.runtime.session import simulation_session
from onnx_backend.runtimes.iree import IreeRunner
from onnx_backend.runtimes.openvino import OpenVinoRunner
from onnx_backend.runtimes.tract import TractRunner
from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import Tally
from qsdk.core.errors import DataError, IntegerError
from qsdk.core.graph.op_facts import VIEWS
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.encoding import Encoding

_DYNAMIC = 2  # length of a dynamic axis in the measurement
_LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
#: Elements of all tensors up to which onnx's evaluator runs too: it takes microseconds for each.
_EVALUATED = 1 << 22
_CODES: Mapping[Any, int] = MappingProxyType(
    {np.dtype(np.uint8): TensorProto.UINT8, np.dtype(np.uint16): TensorProto.UINT16}
)
_LOOK_UPS = ("Gather", "GatherElements", "GatherND")
_MOVES = VIEWS | {"Cast", "Concat", "Expand", "Slice", *_LOOK_UPS}


def measure(
    source: ModelProto,
    integer: ModelProto,
    inputs: Mapping[str, Array],
    *,
    edges: str,
    reference: bool = True,
    operations: Sequence[Operation] = (),
    bounds: Mapping[str, tuple[int, int]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run an integer-only model, with the Q/DQ model it comes from where the edges are float, and compare the outputs.

    Return `max_lsb` (in steps of the output's scale), `differing` (the share of elements) and `reference_equal`: True,
    since an output that is not that of the NumPy reference raises, or None without the reference, which knows integers
    only. The certificate's row of every requantization in `operations` gets the largest magnitude of its accumulators
    in the reference, as `accumulator_measured`; one beyond its proven bound raises too, as does any tensor of `bounds`.
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
    _require_equal(ours, expected, "ONNX Runtime and the integer reference", " or of the runtime")
    if reference:
        _note_accumulators([op for op in operations if isinstance(op, Requantization)], expected)
        require_bounds(bounds, expected)
    if edges != "float":
        return {"max_lsb": None, "differing": None, "reference_equal": reference or None}
    tally = Tally("output")
    for name, simulated in zip(names, theirs, strict=True):
        with np.errstate(invalid="ignore"):  # of two equal infinities, which are no distance apart
            off = np.where(ours[name] == simulated, 0, np.abs(ours[name] - simulated))
        steps = np.rint(off / _output_scale(integer, name, off.ndim))
        tally.add(np.nan_to_num(steps, nan=np.inf, posinf=np.inf))
    share = tally.differing / max(tally.elements, 1)
    return {"max_lsb": tally.largest, "differing": share, "reference_equal": reference or None}


def _require_equal(got: Mapping[str, Array], wanted: Mapping[str, Array], who: str, or_of: str = "") -> None:
    """Require the same integers of both at every output."""
    for name, values in got.items():
        if not np.array_equal(values, wanted[name]):
            raise IntegerError(
                f"{who} disagree on the output {name!r}; this is a defect of qsdk{or_of}, and the model was not written"
            )


def _require_numbers(outputs: Mapping[str, Array]) -> None:
    """Require that the Q/DQ model computes no NaN, which no integer represents."""
    for name, values in outputs.items():
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise IntegerError(
                f"the Q/DQ model gives NaN in the output {name!r} on the inputs of the measurement, which no integer "
                "stands for; calibrate so that no divisor's grid holds 0, or give inputs that it computes: data=[batch]"
            )


def _note_accumulators(requantizations: Sequence[Requantization], tensors: Mapping[str, Array]) -> None:
    """Compare the accumulators, zero point or bias applied, with their proven bound, and note the largest."""
    for op in requantizations:
        terms = [np.abs(tensors[term.name].astype(np.int64) - term.zero) for term in op.value.terms]
        largest = max(int(magnitude.max(initial=0)) for magnitude in terms)
        if largest > op.row["accumulator_bound"]:
            raise IntegerError(
                f"an accumulator of {op.label!r} reaches {largest} in the measurement, beyond its bound of "
                f"{op.row['accumulator_bound']}; this is a defect of qsdk, and the model was not written"
            )
        op.row["accumulator_measured"] = largest


def require_bounds(bounds: Mapping[str, tuple[int, int]], tensors: Mapping[str, Array]) -> None:
    """Require integers within their proven bounds, on which the choice of types and of shifts relies."""
    for name in bounds.keys() & tensors.keys():
        (low, high), values = bounds[name], tensors[name]
        if values.size and not low <= values.min() <= values.max() <= high:
            raise IntegerError(
                f"the integers of {name!r} reach {int(values.min())} to {int(values.max())} in the measurement, beyond "
                f"their bounds {low} to {high}; this is a defect of qsdk, and the model was not written"
            )


def measured_inputs(source: ModelProto, integer: ModelProto, data: Iterable[Any] | None) -> dict[str, Array]:
    """Return the first batch of `data` by input name, random inputs without data.

    For an input that takes codes, floats are quantized first, by the scale and zero point that the model states.
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


def index_bounds(model: ModelProto) -> dict[str, int]:
    """Return the number of rows of the smallest table that an input indexes, by input name; others are left out.

    Constants that are added to the indices, as where several tables lie in one, count.
    """
    nodes = [node for node in model.graph.node if node.op_type in _LOOK_UPS]
    if not nodes:
        return {}
    graph = shape_inference.infer_shapes(model).graph
    stored = initializers(graph)
    shapes = {name: list(tensor.dims) for name, tensor in stored.items()}
    for info in (*graph.input, *graph.value_info):
        shapes[info.name] = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
    makers, inputs, found = producers(model.graph.node), set(input_names(model.graph)), dict[str, int]()
    for node in nodes:
        name, shape, added = node.input[1], shapes.get(node.input[0], []), 0
        while name in makers and (maker := makers[name]).op_type in (*_MOVES, "Add"):
            name = maker.input[0]
            if maker.op_type == "Add":
                constants = [numpy_helper.to_array(stored[term]) for term in maker.input if term in stored]
                if not constants:
                    break
                name = next((term for term in maker.input if term not in stored), name)
                added += int(constants[0].max(initial=0))
        axis = int(attributes(node).get("axis", 0))
        rows = 0
        if node.op_type == "GatherND":
            rows = min(shape, default=0)
        elif -len(shape) <= axis < len(shape):
            rows = shape[axis]
        if name in inputs and rows > added:
            found[name] = min(rows - added, found.get(name, rows - added))
    return found


def compare_runtimes(model: ModelProto, standard: ModelProto, inputs: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Return the runtimes, with their versions, that give the integers of the NumPy reference, and what stopped others.

    A runtime that gives other integers raises, as does the same network of the standard target. Behind float edges the
    codes of the inputs are given: rounding a float to its code is each runtime's own.
    """
    tensors = run_reference(model, inputs, every_tensor=True)
    names = [info.name for info in model.graph.output]
    written = dict(zip(names, _session(standard).run(names, dict(inputs)), strict=True))
    _require_equal(written, tensors, "the portable and the standard form")
    model, feeds = _behind_its_inputs(model, tensors)
    pooled = any(node.op_type == "MaxPool" and "auto_pad" in attributes(node) for node in model.graph.node)
    # onnx's evaluator gives such a pool another shape than the standard says
    small = not pooled and sum(tensor.size for tensor in tensors.values()) <= _EVALUATED
    rows: list[dict[str, Any]] = []
    for runtime, version, note, run in _runtimes(model, small):
        try:
            found = run(feeds)
        except Exception as error:  # the runtimes' own exception types
            rows.append({"runtime": runtime, "version": version, "equal": None, "reason": f"does not run it: {error}"})
            continue
        who = f"{runtime} {version}{note} and the integer reference"
        _require_equal(dict(zip(names, found, strict=True)), tensors, who, " or of that runtime")
        if not rows or rows[-1]["runtime"] != runtime:
            rows.append({"runtime": runtime, "version": version, "equal": True})
    return rows


def _behind_its_inputs(model: ModelProto, tensors: Mapping[str, Array]) -> tuple[ModelProto, dict[str, Array]]:
    """Return a model whose inputs are the results of the QuantizeLinear nodes of its float inputs, and their values."""
    cut = ModelProto()
    cut.CopyFrom(model)
    floats = {info.name for info in cut.graph.input}
    edges = [node for node in cut.graph.node if node.op_type == "QuantizeLinear" and node.input[0] in floats]
    for node in edges:
        cut.graph.node.remove(node)
        name = node.output[0]
        kind, shape = _CODES[tensors[name].dtype], [None] * tensors[name].ndim
        cut.graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    read = {name for node in cut.graph.node for name in node.input}
    kept = [info for info in cut.graph.input if info.name in read]
    del cut.graph.input[:]
    cut.graph.input.extend(kept)
    return cut, {info.name: tensors[info.name] for info in kept}


def _session(model: ModelProto, level: str = "ORT_DISABLE_ALL") -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run_session(session: ort.InferenceSession, feeds: Mapping[str, Array]) -> Sequence[Array]:
    return list(session.run(None, dict(feeds)))


def _runtimes(
    model: ModelProto, small: bool
) -> Iterator[tuple[str, str, str, Callable[[Mapping[str, Array]], Sequence[Array]]]]:
    for level in _LEVELS:
        yield "onnxruntime", ort.__version__, f" at {level}", partial(_run_session, _session(model, level))
    if small:
        evaluator = ReferenceEvaluator(model)
        yield "onnx.reference", onnx.__version__, "", lambda feeds: list(evaluator.run(None, dict(feeds)))
    if importlib.util.find_spec("openvino") is not None:
        # sizes stay open, as in the file that is written
        runner = OpenVinoRunner(model, fixed_sizes=False)
        yield "openvino", runner.version, "", runner.run
    for name, package, opened in (("iree", "iree-base-compiler", IreeRunner), ("tract", "tract", TractRunner)):
        if any(distributions(name=package)):  # a folder of that name is none
            other = opened(model)
            yield name, other.version, "", other.run


# --- Teacher-forced parity: every quantizer of the Q/DQ model recomputed from the integer model's own codes -----------

# The Q/DQ model is cut at every QuantizeLinear: readers of its output read the integer model's codes instead. One run
# of that model computes, at every site, the Q/DQ result for exactly the inputs that the integer operation had, so a
# difference is that operation's alone.

_SIMULATED = RunOn(opener=lambda cut: SessionRunner(simulation_session(cut), "the codes of the integer model"))


def run_teacher_forced(
    source: ModelProto, integer: ModelProto, sites: Mapping[str, Codes], feeds: Mapping[str, Array]
) -> list[dict[str, Any]]:
    """Compare the operations of an integer model with those of its Q/DQ model, each on the same inputs.

    `sites` names the codes of each QuantizeLinear's output. Return a row for each that exists in the integer model:
    `site` (the QuantizeLinear), `op_type` of the op it quantizes, `max_lsb`, `differing` elements and `elements`.
    """
    computed = {name for node in integer.graph.node for name in node.output}
    kept = {name: codes for name, codes in sites.items() if codes.name in computed}
    names = sorted({found.name for found in kept.values()})
    watched = simulation_session(with_outputs(integer, names))
    codes = dict(zip(names, watched.run(names, dict(feeds)), strict=True))
    makers = {name: node for node in source.graph.node for name in node.output}
    quantizers = [makers[name] for name in kept]
    dtypes = {name: TensorProto.DataType.Name(found.encoding.dtype).lower() for name, found in kept.items()}
    cuts = [Cut(name, "", name, name, dtypes[name]) for name in kept]
    values = {name: _dequantized(codes[found.name], found) for name, found in kept.items()}
    forced = Teacher(source, cuts, {}, _SIMULATED).run({**feeds, **values})
    rows = []
    for node in quantizers:
        name, maker, tally = node.output[0], makers.get(node.input[0]), Tally("")
        offset = GRIDS[kept[name].encoding.dtype][0]
        tally.add(np.abs(forced.codes[name].astype(np.int64) + offset - codes[kept[name].name].astype(np.int64)))
        row = {"site": label(node), "op_type": "input" if maker is None else maker.op_type}
        rows.append(row | {"max_lsb": int(tally.largest), "differing": tally.differing, "elements": tally.elements})
    return rows


def _dequantized(codes: Array, found: Codes) -> Array:
    """Return the values of codes in float32, of which the model's own quantizer makes these codes again."""
    known = found.encoding
    return np.asarray((codes.astype(np.int64) - known.zero_point).astype(np.float32) * np.float32(known.scale))


def operations(parity: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise the rows of `run_teacher_forced`: the largest difference, and the share of elements that differ."""
    if not parity:
        return {"operations_max_lsb": None, "operations_differing": None}
    elements = max(sum(row["elements"] for row in parity), 1)
    differing = sum(row["differing"] for row in parity) / elements
    return {"operations_max_lsb": max(row["max_lsb"] for row in parity), "operations_differing": differing}


def add_op_parity(rows: Sequence[Mapping[str, Any]], parity: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the report rows, one per operation, with `max_lsb` against the QuantizeLinear (`site`) of each."""
    found = {row["site"]: row["max_lsb"] for row in parity}
    return [{**row, "max_lsb": found.get(row["site"])} for row in rows]
