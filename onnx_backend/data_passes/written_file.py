"""The last act of an export: open the written file as a user does, and compare what it gives with the simulation."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import GraphProto, ModelProto

from onnx_backend.data_passes.overflow import overflow_reason
from onnx_backend.opening.normalize_qdq import normalize_qdq
from onnx_backend.parity.cuts import right_behind
from onnx_backend.parity.float_outputs import NoisyRuns, unexplained, verdict
from onnx_backend.profiling.speed import kernels_by_site, open_watched, slow_in
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers, producers
from onnx_backend.proto.lazy_tensors import is_stub
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import attributes
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import dtype_name
from onnx_backend.proto.write_file import StagedModel
from onnx_backend.qdq.narrow_regions import as_simulated
from onnx_backend.runtime.compare_runs import RANDOM_OPS
from onnx_backend.runtime.feeds import as_declared
from onnx_backend.runtime.providers import CPU_ONLY
from onnx_backend.runtime.user_session import EndedProcessError, Level, UserSession, user_session
from onnx_backend.workarounds.kernel_casts import has_other_floats
from onnx_backend.workarounds.onnxruntime_barriers import HALVES, needed_options
from qsdk.core.arrays import Array
from qsdk.core.comparing.tally import NOT_CAPTURED, OutputNoises
from qsdk.core.errors import ExportError, QsdkError
from qsdk.core.numerics import affine
from qsdk.core.report import Report

_MOST = 2**30  # bytes of a file; a session takes two to three times as much
_MEASURED = (1, 31)  # the oldest version whose default level the tables of forms were measured on
_FEW = 2**24  # bytes of a file for which more threads than one take longer to start than they save
_LOWER: tuple[Level, ...] = ("extended", "basic", "none")
_NAMES = {"extended": "ORT_ENABLE_EXTENDED", "basic": "ORT_ENABLE_BASIC", "none": "ORT_DISABLE_ALL"}


@dataclass(frozen=True)
class ExampleRun:
    """One run of a sim.

    Attributes:
        batch: that the sim was run on.
        feeds: its values, by the names of a file's inputs.
        outputs: of the simulation, in graph order.
        place: what it ran on; what a device other than the CPU multiplies may have fewer bits than float32.
    """

    batch: Any
    feeds: Mapping[str, Array]
    outputs: Sequence[Array]
    place: str = "cpu"


@dataclass(frozen=True)
class Opened:
    """What a session shows of a file.

    Attributes:
        said: what it does differently, or why it was not asked; "" if it computes what the sim does.
        kernels: site -> the kernels that run it; empty where that is not known.
        slow: what it computes in floats for nothing, each with the remedy.
    """

    said: str
    kernels: Mapping[str, str]
    slow: Sequence[str]


Run = Callable[[], ExampleRun | str]
Parity = Callable[[ModelProto, Any], Report]


class _WrongError(Exception):
    """What an ordinary session does with a file that is wrong there."""


class _UnloadableError(_WrongError):
    """Why there is no ordinary session of a file."""


def check_written(file: StagedModel, run: Run, parity: Parity, *, strict: bool) -> Opened:
    """Open a file in an ordinary session, and compare its outputs with those of the simulation.

    Where rounding alone does not explain a difference of the outputs, every site is compared, fed with the simulation's
    values: in the runtime's kernels a site may be a step off, and a network makes more of it on the way to its outputs.

    Args:
        file: as written.
        run: runs the sim, or says why it cannot.
        parity: compares an opened model with the sim in such sessions, on a batch.
        strict: the file must be right there; else what is wrong is said.
    """
    if file.size > _MOST:
        said = f"not opened: {file.size:,} bytes, and up to {_MOST:,} are; qsdk parity {file.path.name} compares it"
        return Opened(said, {}, [])
    try:
        session, graph = _opened(file)
        said = _compared(session, file, run, parity)
        if graph is None:
            return Opened(said, {}, [])
        return Opened(said, kernels_by_site(file.model, graph), [f"{one}: {one.cure}" for one in slow_in(graph)])
    except _WrongError as error:
        found = f"in an ordinary session of ONNX Runtime {ort.__version__} it {error}"
        if not strict:
            return Opened(found, {}, [])
        if tuple(int(part) for part in ort.__version__.split(".")[:2]) < _MEASURED:
            said = f"{found}; files are written for ONNX Runtime {'.'.join(map(str, _MEASURED))} and later"
            return Opened(said, {}, [])
        lower_ones = _LOWER if isinstance(error, _UnloadableError) else ()
        level = next((level for level in lower_ones if _opens(file.staged, level)), None)
        lower = f", for sessions at {_NAMES[level]}" if level else ""
        raise ExportError(
            f"{file.path} was not written: {found}; leave the layer float by set_precision, or write the file as it is "
            f"with check=False{lower}"
        ) from error


def _compared(session: UserSession, file: StagedModel, run: Run, parity: Parity) -> str:
    example = run()
    if isinstance(example, str):
        return f"opened, and not run: {example}"
    edges = {edge.name: edge for edge in session.get_inputs()}
    feeds = {name: as_declared(value, edges[name].type) for name, value in example.feeds.items() if name in edges}
    sized = {name: _of_size(value, edges[name].shape) for name, value in feeds.items()}
    misfit = next((name for name in edges if name not in sized or not _fits(sized[name], edges[name])), None)
    if misfit is not None:
        return f"opened, and not run: the example does not fit its input {misfit!r}"
    try:
        got = session.run(None, sized)
    except (EndedProcessError, RuntimeError) as error:
        raise _WrongError(f"does not run on the example: {_words(error, file)}") from error
    if any(sized[name].shape != value.shape for name, value in feeds.items()):
        return "run, and not compared: its sizes are not those of the example"
    if any(node.op_type in RANDOM_OPS for node in all_nodes(file.model.graph.node)):
        return "run, and not compared: the model draws random numbers"
    if _as_simulated(file.model, got, example.outputs):
        return ""
    opened = normalize_qdq(load(file.staged))
    try:
        report = parity(opened, example.batch)
    except QsdkError as error:
        raise _WrongError(f"cannot be compared with the sim: {error}") from error
    apart = partial(_apart, got, example)
    wrong = [row for row in report.rows if row.get("note") or row["max_lsb"] > 1]
    left_out = [row["site"] for row in wrong if row.get("note") == NOT_CAPTURED]
    not_comparable = {*left_out, *right_behind(opened, left_out)}
    wrong = [row for row in wrong if row["site"] not in not_comparable]
    if left_out and not wrong:
        others = f" and {len(left_out) - 1} others" if left_out[1:] else ""
        return f"{apart()}: on the example the model leaves out {left_out[0]}{others}, which the file computes"
    try:
        explained = not wrong and _explained(opened, feeds, got, example.outputs)
    except QsdkError as error:
        return f"{apart()}; what rounding explains cannot be measured: {error}"
    if explained:
        return f"{apart()}: each site is within a step of it, and roundings that turned add up on the way"
    worst = max(wrong, key=lambda row: (bool(row.get("note")), row["max_lsb"]), default=None)
    if worst is None and needed_options(opened):
        return f"{apart()}: open it with the entries that session_options names"
    if (worst is None or not worst.get("note")) and has_other_floats(opened, HALVES):
        return f"{apart()}: the runtime rounds float16 and bfloat16 at other places{_shown(worst)}"
    if reason := overflow_reason(opened):
        return f"{apart()}: {reason}"
    if example.place != "cpu":
        return f"{apart()}: the sim runs on {example.place}{_shown(worst)}"
    raise _WrongError(f"computes something else than the simulation{_shown(worst) or ': ' + apart()}")


def _explained(model: ModelProto, feeds: Mapping[str, Array], got: Sequence[Array], wanted: Sequence[Array]) -> bool:
    """Return True if the outputs are no further off than steps at the sites and float rounding bring about."""
    names = [value.name for value in model.graph.output]
    runs = NoisyRuns(as_simulated(model), names, CPU_ONLY, steps=True)
    return not unexplained(runs, feeds, dict(zip(names, got, strict=True)), dict(zip(names, wanted, strict=True)))


def _apart(got: Sequence[Array], example: ExampleRun) -> str:
    noise = OutputNoises()
    both = [dict(enumerate(values)) for values in (got, example.outputs)]
    noise.add(*({str(place): np.asarray(value) for place, value in values.items()} for values in both))
    worst = noise.decibels()
    return (
        "other integers than the simulation's"
        if worst is None
        else f"{worst:.1f} dB from the simulation at the worst output"
    )


def _shown(row: Mapping[str, Any] | None) -> str:
    """Return what is wrong at the worst site, if one is."""
    return f", {row['site']}: {row.get('note') or format(row['max_lsb'], 'g') + ' steps off'}" if row else ""


def _opened(file: StagedModel) -> tuple[UserSession, GraphProto | None]:
    options = {"intra_op_num_threads": 1} if file.size < _FEW else {}
    try:
        with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
            return open_watched(file.staged, options, folder)
    except (EndedProcessError, RuntimeError) as error:
        raise _UnloadableError(f"does not load: {_words(error, file)}") from error


def _opens(path: Path, level: Level) -> bool:
    try:
        user_session(path, level=level, options={"intra_op_num_threads": 1})
    except (EndedProcessError, RuntimeError):
        return False
    return True


def _words(error: Exception, file: StagedModel) -> str:
    return " ".join(str(error).replace(file.staged.name, file.path.name).split())


def _of_size(value: Array, sizes: Sequence[Any]) -> Array:
    """Return an array of the sizes that an input takes, its values repeated; of another rank, as it is."""
    if len(sizes) != value.ndim:
        return value
    shape = tuple(size if isinstance(size, int) else own for size, own in zip(sizes, value.shape, strict=True))
    return value if shape == value.shape else np.resize(value, shape)


def _fits(value: Array, edge: Any) -> bool:
    """Return True if an input takes an array as it is."""
    sizes, narrow = edge.shape, edge.type == "tensor(bfloat16)"
    if len(sizes) != value.ndim or any(isinstance(n, int) and n != m for n, m in zip(sizes, value.shape, strict=True)):
        return False
    wanted = {"float": "float32", "double": "float64"}.get(name := edge.type[len("tensor(") : -1], name)
    return narrow or value.dtype.name == wanted or (wanted == "string" and value.dtype == object)


def _as_simulated(model: ModelProto, got: Sequence[Array], wanted: Sequence[Array]) -> bool:
    """Return True if every output is within a step of its site, or, where it is none, within float rounding."""
    makers, stored = producers(model.graph.node), initializers(model.graph)
    if not len(got) == len(wanted) == len(model.graph.output):
        return False
    for value, left, right in zip(model.graph.output, got, wanted, strict=True):
        maker = makers.get(value.name)
        scale = stored.get(maker.input[1]) if maker is not None and maker.op_type == "DequantizeLinear" else None
        found = verdict(left, np.asarray(right), (), dtype_name(value.type.tensor_type.elem_type))
        if found.passed:
            continue
        if found.problem or maker is None or scale is None or is_stub(scale):
            return False
        facts = attributes(maker)
        axis = facts.get("axis", 1) if len(scale.dims) else None
        step = affine.align(array(scale).astype(np.float64), left.shape, axis, facts.get("block_size") or None)
        if (np.abs(left.astype(np.float64) - right.astype(np.float64)) > 1.001 * step).any():
            return False
    return True
