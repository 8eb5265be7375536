"""Run two forms of one model on the same inputs, to prove that a change preserved its function."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto, helper

from onnx_backend.proto.graph_queries import names_in, producers, unique
from onnx_backend.proto.nodes import copied, node_label, retain
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.runtime.feeds import random_feeds
from onnx_backend.runtime.session_input import session_of
from qsdk.core.errors import FileFormatError, ModelError

RANDOM_OPS = frozenset({"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike"}) | {
    "Bernoulli",
    "Multinomial",
}
_QUANTIZERS = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
# of a tensor's largest value; of a narrow type, in which ops round, a few units of that
_TOLERANCES = {"float32": 1e-4, "float64": 1e-4, "float16": 2.0**-8, "bfloat16": 2.0**-5}
_ROOM = 2**31 - 2**24  # bytes of weights beside which a graph still fits into one message


def compare_runs(before: ModelProto, after: ModelProto, feeds: Mapping[str, object] | None, change: str) -> str:
    """Run both models and return a sentence on how they were compared.

    `feeds` are by input name, None for random ones; `change` says what was done, for messages.
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
        where = "the example" if feeds is not None else "random inputs"
        outputs = _different_outputs(before, wanted, got)
        if not outputs:
            return f"equal outputs on {where}"
        found = _compare_at_equal_codes(before, after, values)
        if found is None or found.decides(outputs):
            raise ModelError(_difference_message(before, after, found, f"{change} changes the output {outputs[0]!r}"))
        return f"equal on {where} where every quantizer gives the same codes; roundings that turned change outputs"
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


def _different_outputs(model: ModelProto, wanted: list[Any], got: list[Any]) -> list[str]:
    """Return the names of the outputs that differ."""
    masks = {node.output[1] for node in model.graph.node if node.op_type == "Dropout" and len(node.output) > 1}
    found = []
    for value, left, right in zip(model.graph.output, wanted, got, strict=True):
        # the mask of a Dropout at inference was not defined before opset 12
        narrow = value.type.tensor_type.elem_type == TensorProto.BFLOAT16  # arrays of it are float32
        if value.name not in masks and not _equal(left, right, _TOLERANCES["bfloat16" if narrow else "float32"]):
            found.append(value.name)
    return found


@dataclass(frozen=True)
class _Differences:
    """What differs between two models of which the second reads the codes of the first.

    Attributes:
        tensors: names of those that differ, in order.
        quantizing: names of what the quantizers read and give.
    """

    tensors: Sequence[str]
    quantizing: frozenset[str]

    def decides(self, outputs: Sequence[str]) -> bool:
        """Return True if a quantizer differs, or an output among these that differ as the models are."""
        return not self.quantizing.union(outputs).isdisjoint(self.tensors)


def _compare_at_equal_codes(before: ModelProto, after: ModelProto, feeds: Mapping[str, object]) -> _Differences | None:
    """Compare all tensors, where the second model reads the codes of the first; None if that does not run.

    Kernels of two opsets may differ in the last bits of a float. Where such a value lies between two codes, a
    quantizer turns that into a whole step, and everything behind it differs. With equal codes handed on, no step is:
    each float must be equal, and the codes that a quantizer gives itself may differ by the one step.
    """
    kept = _shared_tensors(before, after)
    own = {name: name for name in kept}
    read, renamed = ({n: x for n, x in _sources(model).items() if n in own} for model in (before, after))
    makers = producers(before.graph.node)
    own |= {x: renamed[name] for name, x in read.items() if x in makers and x not in own}
    try:
        first = float_session(_with_outputs(before, own))
        types = {output.name: output.type[len("tensor(") : -1] for output in first.get_outputs()}
        codes = {name: TensorProto.DataType.Value(types[name].upper()) for name in read}
        wanted = _run(first, own, feeds)
        given = {n: ort.OrtValue.ortvalue_from_numpy_with_onnx_type(wanted[n], code) for n, code in codes.items()}
        fed, computed = _with_fed_tensors(after, codes)
        own = {name: computed.get(name, there) for name, there in own.items()}
        found = _run(float_session(_with_outputs(fed, own.values())), own.values(), {**feeds, **given})
    except Exception:  # the runtime's own exception types are private; the outputs alone decide then
        return None
    different = [
        name
        for name, there in own.items()
        if not (_within_one_step if name in read else _equal)(wanted[name], found[there])
    ]
    return _Differences(different, frozenset({*read, *read.values()}))


def _run(session: ort.InferenceSession, names: Iterable[str], feeds: Mapping[str, object]) -> dict[str, Any]:
    """Return the value of each named output."""
    asked = list(dict.fromkeys(names))
    return dict(zip(asked, session.run(asked, dict(feeds)), strict=True))


def _sources(model: ModelProto) -> dict[str, str]:
    """Return what a quantizer computes -> the tensor that it quantizes."""
    return {out: node.input[0] for node in model.graph.node if node.op_type in _QUANTIZERS for out in node.output}


def _shared_tensors(before: ModelProto, after: ModelProto) -> list[str]:
    """Return the names of the tensors that nodes of both models compute, in the order of the first."""
    kept = {name for node in after.graph.node for name in node.output}
    return [name for node in before.graph.node for name in node.output if name and name in kept]


def _difference_message(before: ModelProto, after: ModelProto, found: _Differences | None, what: str) -> str:
    """Return a message that names the first node whose output differs, if that was found."""
    remedy = "export the model at a newer opset, and report this"
    makers, kept = producers(before.graph.node), set(_shared_tensors(before, after))
    node = makers.get(found.tensors[0]) if found is not None and found.tensors else None
    while node is not None:  # a converted node that lost its tensor's name comes first
        lost = next((makers[name] for name in node.input if name in makers and name not in kept), None)
        if lost is None:
            break
        node = lost
    where = f": it first differs behind the {node.op_type} {node_label(node)!r}" if node is not None else ""
    return f"{what}{where}; {remedy}"


def _with_fed_tensors(model: ModelProto, types: Mapping[str, int]) -> tuple[ModelProto, dict[str, str]]:
    """Return a copy that takes some computed tensors as inputs, and the new names of the computed ones."""
    fed = copied(model)
    taken = names_in(fed.graph)
    renamed = {name: unique(f"{name}/computed", taken) for name in types}
    for node in fed.graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    retain(fed.graph.output, lambda value: value.name not in renamed)
    fed.graph.input.extend(helper.make_tensor_value_info(name, code, None) for name, code in types.items())
    return fed, renamed


def _with_outputs(model: ModelProto, names: Iterable[str]) -> ModelProto:
    exposed = copied(model)
    known = {value.name for value in exposed.graph.output}
    exposed.graph.output.extend(ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in known)
    return exposed


def _within_one_step(left: Any, right: Any) -> bool:
    """Return True if codes differ by one at most; a scale that a quantizer computes is a float."""
    if left.dtype.kind == "f" or left.shape != right.shape or left.dtype != right.dtype:
        return _equal(left, right)
    return int(np.abs(left.astype(np.int64) - right.astype(np.int64)).max(initial=0)) <= 1


def _equal(left: Any, right: Any, tolerance: float = 0.0) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(_equal(a, b, tolerance) for a, b in zip(left, right, strict=True))
    if left is None or isinstance(left, dict | str):
        return bool(left == right)
    left, right = np.asarray(left), np.asarray(right)
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.kind != "f":
        return bool((left == right).all())
    tolerance = max(tolerance, _TOLERANCES[left.dtype.name])
    finite = np.abs(left[np.isfinite(left)].astype(np.float64))
    scale = float(finite.max(initial=0.0))
    return bool(np.allclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True))
