"""Time a model in ONNX Runtime on the CPU, as an application opens it: at its default level, all optimizers on."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, NodeProto

from onnx_backend.profiling.kernels import Kernel, Profile, precision_of
from onnx_backend.profiling.numbered import number_in
from onnx_backend.profiling.speed import is_own, open_watched
from onnx_backend.proto.nodes import attributes
from onnx_backend.proto.subgraphs import reads
from onnx_backend.runtime.feeds import run_session
from onnx_backend.runtime.user_session import EndedProcessError, UserSession
from qsdk.core.errors import ModelError

_KERNEL_TIME = "_kernel_time"
_WARM_UP = 3
_INT8_LEVEL = 4  # the level of accuracy at which MatMulNBits rounds its input to int8


def profile_in_onnxruntime(
    model: ModelProto, feeds: Mapping[str, npt.NDArray[Any]], *, threads: int | None, repeats: int
) -> Profile:
    """Return the kernels of a model, each with the median of its times.

    Args:
        model: with numbered nodes.
        feeds: input name -> value.
        threads: of the session; None for the runtime's own choice.
        repeats: runs that are timed, after a few that are not.

    Raises:
        ModelError: the runtime cannot load the model.
        DataError: it does not run on these values.
    """
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


def _seconds(session: UserSession, feeds: Mapping[str, npt.NDArray[Any]]) -> float:
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
