"""ONNX Runtime on the CPU, at its default level as an application opens it: what files need, and how it is run."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto

from onnx_backend.profiling.kernels import Kernel, Profile, number_in, precision_of
from onnx_backend.profiling.speed import is_own, open_watched
from onnx_backend.proto.graph_queries import GraphIndex, initializers, producers
from onnx_backend.proto.inputs import open_inputs
from onnx_backend.proto.lazy_tensors import LargeTensor
from onnx_backend.proto.nodes import attributes, metadata
from onnx_backend.proto.opsets import OPSET, opset_of
from onnx_backend.proto.subgraphs import reads
from onnx_backend.proto.weightless import skeleton
from onnx_backend.qdq.fast_forms import write_fast_forms
from onnx_backend.qdq.layer_inputs import leave_inputs_to_kernels
from onnx_backend.qdq.zero_points import write_zero_points
from onnx_backend.readers import COPY_KEY
from onnx_backend.runtime.feeds import as_declared, run_session
from onnx_backend.runtime.user_session import EndedProcessError, UserSession, user_session
from onnx_backend.runtimes.runtime import Runtime
from onnx_backend.validation.scope import Finding, is_quantizer, warning
from onnx_backend.workarounds.kernel_casts import has_other_floats
from onnx_backend.workarounds.onnxruntime_barriers import (
    HALVES,
    insert_barriers,
    keep_functions_whole,
    keep_sums_apart,
    needed_options,
    reads_moved_batch,
)
from qsdk.core.arrays import Array
from qsdk.core.config.target import load_target
from qsdk.core.errors import ExportError, ModelError
from qsdk.core.numerics.encoding import Encoding

_WITHOUT_KERNELS = frozenset({"float4e2m1"})
_KERNEL_TIME = "_kernel_time"
_WARM_UP = 3
_INT8_LEVEL = 4  # the level of accuracy at which MatMulNBits rounds its input to int8


def _require_kernels(encodings: Mapping[str, Encoding]) -> None:
    """Refuse dtypes that the runtime cannot run at any level."""
    found = [site for site, encoding in encodings.items() if encoding.dtype.name in _WITHOUT_KERNELS]
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise ExportError(
            f"{', '.join(found[:4])}{more}: ONNX Runtime has no kernel for {encodings[found[0]].dtype}; export for "
            'other runtimes with dialect="onnx", or choose an integer or float8 dtype'
        )


def _adapt(model: ModelProto, large: Mapping[str, LargeTensor], only_weights: bool) -> Sequence[NodeProto]:
    insert_barriers(model, large, only_weights=only_weights)
    keep_sums_apart(model)
    keep_functions_whole(model)
    return write_zero_points(model)


def _speed_up(model: ModelProto) -> None:
    leave_inputs_to_kernels(model)
    write_fast_forms(model)


# --- what is said of other files ----------------------------------------------------------------------------------


def default_session(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning for each reader that export would separate from a quantized tensor by a barrier.

    Files that note the options with which a session is right have one for these.
    """
    yield from _ends_process(model)
    if opset_of(model) < OPSET or not any(is_quantizer(node) for node in model.graph.node):
        return  # the table was measured from this opset on
    for key, value in needed_options(model).items():
        problem = "ONNX Runtime's default level rounds the float input of layers with quantized weights to 8 bits"
        yield warning("", "default_session", problem, f"open sessions with the configuration entry {key}={value}")
    light = _headers(model)
    before = {name for node in light.graph.node for name in node.output}
    insert_barriers(light)
    known = GraphIndex(light.graph)
    for node in light.graph.node:
        if COPY_KEY not in metadata(node) or node.output[0] in before:
            continue
        for reader in known.readers.get(node.output[0], []):
            if COPY_KEY in metadata(reader):
                continue  # it has a barrier already
            if reads_moved_batch(reader, metadata(node)[COPY_KEY], known.makers):
                continue  # that was said
            name = reader.name or reader.output[0]
            problem = (
                f"ONNX Runtime's default level fails on {reader.op_type} beside {metadata(node)[COPY_KEY]!r}, as it is "
                "quantized, or may give other values"
            )
            remedy = "export with dialect='onnxruntime', or open sessions at ORT_ENABLE_BASIC; qsdk parity tells"
            yield warning(name, "default_session", problem, remedy)


def _ends_process(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning for each MatMul at which ONNX Runtime's default level ends its process."""
    if not open_inputs(model) or not has_other_floats(model, HALVES):
        return
    makers = producers(model.graph.node)
    for node in model.graph.node:
        if any(reads_moved_batch(node, tensor, makers) for tensor in node.input):
            problem = (
                "ONNX Runtime 1.32 ends its process at its default level where a MatMul in float16 or bfloat16 reads a "
                "Transpose that moves an open first axis"
            )
            remedy = "export with dialect='onnxruntime', fix the sizes, or open sessions at ORT_ENABLE_EXTENDED"
            yield warning(node.name or node.output[0], "default_session", problem, remedy)


def _headers(model: ModelProto) -> ModelProto:
    """Return the model with only names, types and shapes of its large weights; parameters of quantizers are whole."""
    light = skeleton(model)
    known = initializers(light.graph)
    whole = {name for node in model.graph.node if is_quantizer(node) for name in node.input[1:]}
    for tensor in model.graph.initializer:
        if tensor.name in known:
            continue
        if tensor.name in whole:
            light.graph.initializer.append(tensor)
        else:
            light.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    return light


# --- running and timing -------------------------------------------------------------------------------------------


class OnnxRuntimeRunner:
    """A model in ONNX Runtime's default session, in a process of its own."""

    def __init__(self, model: ModelProto) -> None:
        """Open a model; a ModelError if the runtime cannot load it at its default level."""
        self.title = f"ONNX Runtime {ort.__version__}"
        try:
            self.session = user_session(model)
        except (EndedProcessError, RuntimeError) as error:
            raise ModelError(f"{self.title} cannot load the model: {error}") from error
        self.types = {value.name: value.type for value in self.session.get_inputs()}

    def run(self, feeds: Mapping[str, Array]) -> list[Array]:
        """Run the model; see `Runner.run`."""
        known = {name: as_declared(value, self.types[name]) for name, value in feeds.items() if name in self.types}
        try:
            return [np.asarray(value) for value in self.session.run(None, known)]
        except (EndedProcessError, RuntimeError) as error:
            raise ModelError(f"{self.title} cannot run the model: {error}") from error


def _profile(model: ModelProto, feeds: Mapping[str, Array], threads: int | None, repeats: int) -> Profile:
    """Return the kernels of a model with numbered nodes, each with the median of its times."""
    title = f"ONNX Runtime {ort.__version__}"
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        options: dict[str, Any] = {"intra_op_num_threads": threads or 0, "enable_profiling": True}
        options["profile_file_prefix"] = str(Path(folder) / "profile")
        try:
            session, graph = open_watched(model, options, folder)
        except (EndedProcessError, RuntimeError) as error:
            raise ModelError(f"{title} cannot load the model: {error}") from error
        for _ in range(_WARM_UP + repeats):
            run_session(session, feeds, "the given input")
        events = json.loads(Path(session.end_profiling()).read_bytes())
        waits = [1e3 * _seconds(session, feeds) for _ in range(repeats)]
    if graph is None:
        raise ModelError(f"{title} does not write what it makes of the model, without which its kernels are not known")
    return Profile(title, tuple(waits), _kernels(graph.node, _timed(events), repeats), graph)


def _seconds(session: UserSession, feeds: Mapping[str, Array]) -> float:
    run_session(session, feeds, "the given input")
    return session.seconds


def _timed(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return kernel name -> its events, without those inside another kernel (the body of an If or Loop)."""
    found = defaultdict(list)
    end = 0
    for event in sorted((e for e in events if e["cat"] == "Node"), key=lambda e: (e["ts"], -e["dur"])):
        if event["name"].endswith(_KERNEL_TIME) and event["ts"] >= end:
            end = event["ts"] + event["dur"]
            found[event["name"].removesuffix(_KERNEL_TIME)].append(event)
    return found


def _kernels(nodes: list[NodeProto], timed: Mapping[str, list[dict[str, Any]]], repeats: int) -> tuple[Kernel, ...]:
    codes: set[str] = set()  # results of integer kernels
    found = []
    for node in nodes:
        events = timed.get(node.name, [])[-repeats:]
        if not events:
            continue
        facts, inputs = events[-1]["args"], tuple(reads(node))
        types = [{t for entry in facts[key] for t in entry} for key in ("input_type_shape", "output_type_shape")]
        precision = precision_of(
            node.op_type,
            *types,
            from_codes=not codes.isdisjoint(inputs),
            in_integers=_multiplies_integers(node),
        )
        own = is_own(node, number_in(node.name) is not None)
        if precision == "integer":
            codes.update(node.output)
        names = () if own else (node.name, *node.output)
        found.append(
            Kernel(
                node.name,
                node.op_type,
                inputs,
                tuple(node.output),
                names,
                "conversion" if own else precision,
                median(event["dur"] for event in events) / 1e3,
            )
        )
    return tuple(found)


def _multiplies_integers(node: NodeProto) -> bool:
    """Return True for the kernels with float scales among their inputs, or that quantize their input themselves."""
    if node.op_type == "MatMulNBits":
        return int(attributes(node).get("accuracy_level", 0)) == _INT8_LEVEL
    return node.op_type.startswith(("Q", "DynamicQuantize")) or "Integer" in node.op_type


ONNXRUNTIME = Runtime(
    load_target("onnxruntime"),
    "1.32",
    simulates=True,
    opens=True,
    by_zero_point=frozenset({"int8"}),
    pair_types=("float16",),
    kernel_casts=True,
    whole_bytes=True,
    refuse=_require_kernels,
    adapt=_adapt,
    speed_up=_speed_up,
    open=OnnxRuntimeRunner,
    time=_profile,
)
