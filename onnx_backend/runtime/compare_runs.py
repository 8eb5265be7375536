"""Run two forms of one model on the same inputs, to prove that a change preserved its function."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto

from onnx_backend.proto.graph_queries import producers
from onnx_backend.proto.nodes import node_label
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.runtime.random_feeds import random_feeds
from onnx_backend.runtime.session_input import session_of
from qsdk.core.errors import FileFormatError, ModelError

Array = npt.NDArray[Any]
RANDOM_OPS = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"}) | {
    "Bernoulli",
    "Multinomial",
}
_TOLERANCE = 1e-4  # of an output's largest value; of a narrow type, in which ops round, a few units of that
_NARROW_TOLERANCE: Mapping[int, float] = {TensorProto.FLOAT16: 2.0**-8, TensorProto.BFLOAT16: 2.0**-5}
_ROOM = 2**31 - 2**24  # bytes of weights beside which a graph still fits into one message


def compare_runs(before: ModelProto, after: ModelProto, feeds: Mapping[str, object] | None, change: str) -> str:
    """Run both models and return a sentence on how they were compared.

    Args:
        before: the model as given.
        after: the changed model.
        feeds: by input name, or None for random ones.
        change: the name of the change, for messages.

    Raises:
        FileFormatError: the runtime refuses the model as given.
        ModelError: the changed model does not load or run, or an output differs; names it.
    """
    if any(node.op_type in RANDOM_OPS for node in all_nodes(before.graph.node)):
        return "not compared by running, because the model draws random numbers"
    try:
        old = float_session(before)
    except Exception as error:  # the runtime's own exception types are private
        raise FileFormatError(unloadable_message("the model", error)) from error
    try:
        new = float_session(after)
    except Exception as error:  # as above
        raise ModelError(f"{change} gives a model that the runtime cannot load: {error}; export it newer") from error
    tried = [feeds] if feeds is not None else random_feeds(before)
    reason = "no inputs of the declared types could be made"
    for values in tried:
        try:
            wanted = old.run(None, dict(values))
        except Exception as error:  # as above
            reason = _short(error)
            continue
        try:
            got = new.run(None, dict(values))
        except Exception as error:  # as above
            raise ModelError(f"{change} gives a model that no longer runs: {error}; export it newer") from error
        different = _first_different_output(before, wanted, got)
        if different:
            raise ModelError(_difference_message(before, after, values, f"{change} changes the output {different!r}"))
        return "equal outputs on " + ("the example" if feeds is not None else "random inputs")
    where = "the example" if feeds is not None else "random inputs"
    return f"not compared by running: the original does not run on {where} ({reason}); pass an example that it takes"


def unloadable_message(where: str, error: Exception) -> str:
    """Return the message for a model that the runtime refuses."""
    return (
        f"the runtime cannot load {where}: {error}; the file is damaged or uses what the runtime does not have, export "
        "it again"
    )


def float_session(model: ModelProto) -> ort.InferenceSession:
    """Open a session that runs a float model as it is written."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # else each session starts threads
    options.enable_mem_reuse = False  # planning the reuse of memory takes time quadratic in the nodes
    return session_of(model, options)


def _short(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def fits_one_message(model: ModelProto) -> bool:
    """Return True if a model's weights leave it small enough for one protobuf message."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) < _ROOM


def _first_different_output(model: ModelProto, wanted: list[Any], got: list[Any]) -> str:
    """Return the name of the first output that differs, or ""."""
    masks = {node.output[1] for node in model.graph.node if node.op_type == "Dropout" and len(node.output) > 1}
    for value, left, right in zip(model.graph.output, wanted, got, strict=True):
        # the mask of a Dropout at inference was not defined before opset 12
        tolerance = _NARROW_TOLERANCE.get(value.type.tensor_type.elem_type, _TOLERANCE)
        if value.name not in masks and not _equal(left, right, tolerance):
            return str(value.name)
    return ""


def _difference_message(before: ModelProto, after: ModelProto, feeds: Mapping[str, object], what: str) -> str:
    """Return a message that names the first node whose output differs."""
    remedy = "export the model at a newer opset, and report this"
    kept = {name for node in after.graph.node for name in node.output}
    names = [name for node in before.graph.node for name in node.output if name and name in kept]
    try:
        runs = [float_session(_with_outputs(model, names)).run(names, dict(feeds)) for model in (before, after)]
    except Exception:  # the runtime's own exception types are private; the place is a courtesy
        return f"{what}; {remedy}"
    first = next((n for n, left, right in zip(names, *runs, strict=True) if not _equal(left, right)), "")
    makers = producers(before.graph.node)
    node = makers.get(first)
    while node is not None:  # a converted node that lost its tensor's name comes first
        lost = next((makers[name] for name in node.input if name in makers and name not in kept), None)
        if lost is None:
            break
        node = lost
    where = f": it first differs behind the {node.op_type} {node_label(node)!r}" if node is not None else ""
    return f"{what}{where}; {remedy}"


def _with_outputs(model: ModelProto, names: Sequence[str]) -> ModelProto:
    exposed = ModelProto()
    exposed.CopyFrom(model)
    known = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in known)
    return exposed


def _equal(left: Any, right: Any, tolerance: float = _TOLERANCE) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(_equal(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if left is None or isinstance(left, dict | str):
        return bool(left == right)
    left, right = np.asarray(left), np.asarray(right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.kind != "f":
        return bool((left == right).all())
    finite = np.abs(left[np.isfinite(left)].astype(np.float64))
    scale = float(finite.max(initial=0.0))
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
