"""This package as an ONNX backend: `prepare(model).run(inputs)`, as onnx.backend.base has it.

ONNX Runtime runs a model as it stands, without graph optimizations. What it has no kernel for, an opset that is newer
than the runtime, and edges of types that NumPy lacks (bfloat16, float8, 4 bits ...) are for the evaluator of onnx.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, inliner, shape_inference
from onnx.backend.base import Backend, BackendRep, namedtupledict
from onnx.reference import ReferenceEvaluator

from onnx_backend.passes.canonicalize import canonicalize
from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.model_io import load, with_weights
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import checkable
from onnx_backend.runtime.session_input import session_of
from qsdk.core.errors import ConfigError, DataError, ModelError, QsdkError

#: Operators that fail tests of ONNX in ONNX Runtime 1.32 and pass in onnx's evaluator (`benchmarks/backend_tests.py`).
_ELSEWHERE = frozenset({"Attention", "ConvInteger", "DFT", "Dropout", "MaxUnpool", "Resize", "STFT"})
#: Operators of which onnx's evaluator runs versions before `_SETTLED` as if they were the newest.
_OLD = frozenset({"BatchNormalization", "Hardmax", "LogSoftmax", "Scan", "Scatter", "Softmax"})
_SETTLED = 14
Source = ModelProto | bytes | str | os.PathLike[str]


class QsdkBackendRep(BackendRep):
    """A prepared model.

    Attributes:
        runs_in: `onnxruntime`, or `reference` for onnx's ReferenceEvaluator.
    """

    def __init__(self, model: ModelProto) -> None:
        self._given = [value for value in model.graph.input if value.name in set(input_names(model.graph))]
        self._outputs = [value.name for value in model.graph.output]
        self.runs_in, self._run = _evaluator(model)

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs as a tuple that can also be read by name.

        Args:
            inputs: a sequence in graph order, a mapping by name, or the one array. Arrays in the dtypes of the graph,
                those of ml_dtypes for bfloat16 and types narrower than 8 bits; lists for ONNX sequences.
            **kwargs: none is known; onnx.backend.base allows any.

        Raises:
            DataError: an input is missing, unknown or of another dtype.
            ModelError: it cannot be run on them.
        """
        fed = {value.name: _checked(value, found) for value, found in self._paired(inputs)}
        try:
            with np.errstate(all="ignore"):  # the ops of ONNX overflow in silence
                return namedtupledict("Outputs", self._outputs)(*self._run(fed))
        except Exception as error:  # of any type
            raise ModelError(
                f"{_line(error)}, by {self.runs_in}; check the inputs and attributes of its node"
            ) from error

    def _paired(self, inputs: Any) -> list[tuple[ValueInfoProto, Any]]:
        names = [value.name for value in self._given]
        if isinstance(inputs, Mapping):
            missing, unknown = [n for n in names if n not in inputs], [n for n in inputs if n not in names]
            if missing or unknown:
                raise DataError(f"the inputs are {names}; missing {missing}, unknown {unknown}")
            return [(value, inputs[value.name]) for value in self._given]
        # a lone list is the sequence of inputs, as onnx's own backends take it
        found = list(inputs) if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes) else [inputs]
        if len(found) != len(names):
            raise DataError(f"{len(found)} inputs are given; the model takes {len(names)}: {names}")
        return list(zip(self._given, found, strict=True))


def _evaluator(model: ModelProto) -> tuple[str, Callable[[Mapping[str, Any]], list[Any]]]:
    """Return who runs a model, and how: ONNX Runtime, or onnx's evaluator what the runtime does not open."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # what it fuses can be a step off
    ops = {node.op_type for node in all_nodes(model.graph.node)}
    is_old = opset_of(model) < _SETTLED and not ops.isdisjoint(_OLD)
    is_plain = all(_is_plain(value.type) for value in (*model.graph.input, *model.graph.output))
    if is_old or (is_plain and ops.isdisjoint(_ELSEWHERE)):
        try:
            session = session_of(model, options)
            return "onnxruntime", lambda fed: list(session.run(None, dict(fed)))
        except Exception as error:  # of private types: an op or a type that it has no kernel for, or too new an opset
            if is_old:
                raise ModelError(f"{_line(error)}; export the model at opset {_SETTLED} or above") from error
    try:
        evaluator = ReferenceEvaluator(with_weights(model))
    except Exception as error:  # of any type
        raise ModelError(
            f"neither ONNX Runtime nor onnx's evaluator opens the model: {_line(error)}; replace that node"
        ) from error
    return "reference", lambda fed: list(evaluator.run(None, dict(fed)))


def _type_of(value: Any) -> TypeProto:
    """Return the ONNX type of a value, without its shape; sparse tensors and maps are left untyped.

    An empty sequence, or an optional that holds nothing, is typed as float32.
    """
    if value is None:
        return helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    if isinstance(value, list):
        first = value[0] if value else np.zeros(0, np.float32)
        return helper.make_sequence_type_proto(_type_of(first))
    if isinstance(value, np.ndarray | np.generic):
        text = value.dtype.kind in "OUS"
        code = TensorProto.STRING if text else helper.np_dtype_to_tensor_dtype(value.dtype)
        return helper.make_tensor_type_proto(code, None)
    return TypeProto()


def _is_plain(kind: TypeProto) -> bool:
    """Return True for types whose values the runtime takes as they are."""
    while kind.HasField("sequence_type") or kind.HasField("optional_type"):
        kind = kind.sequence_type.elem_type if kind.HasField("sequence_type") else kind.optional_type.elem_type
    return kind.tensor_type.elem_type < TensorProto.BFLOAT16


def _checked(declared: ValueInfoProto, value: Any) -> Any:
    """Return an input as an array, if it is declared to be a tensor."""
    kind = declared.type.tensor_type.elem_type
    if not declared.type.HasField("tensor_type") or value is None:
        return value
    found = np.asarray(value)
    if kind not in (TensorProto.UNDEFINED, _type_of(found).tensor_type.elem_type):
        wanted = TensorProto.DataType.Name(kind)
        raise DataError(f"input {declared.name!r} is {found.dtype.name}, the model takes {wanted}; convert it")
    return found


class QsdkBackend(Backend):
    """The backend; all methods are class methods without state."""

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return True for devices that can be computed on, which is only the CPU; such as `CPU` or `CUDA:1`."""
        return device.split(":")[0] == "CPU"

    @classmethod
    def is_compatible(cls, model: Source, device: str = "CPU", **kwargs: Any) -> bool:
        """Return True if `prepare` accepts a model."""
        try:
            cls.prepare(model, device, **kwargs)
        except QsdkError:
            return False
        return True

    @classmethod
    def prepare(cls, model: Source, device: str = "CPU", **kwargs: Any) -> QsdkBackendRep:
        """Open a model.

        Args:
            model: a proto (copied), serialized bytes, or a path, which may have external data beside it.
            device: `CPU`.
            **kwargs: none is known; onnx.backend.base allows any.

        Raises:
            ConfigError: the device is not the CPU.
            FileFormatError: there is no such file, or it is no ONNX model.
            ModelError: onnx's checker refuses the model, or it has an op that nobody knows.
        """
        cls._require(device)
        found = _in_one_graph(load(model))
        try:
            super().prepare(checkable(found), device, **kwargs)
        except onnx.checker.ValidationError as error:
            raise ModelError(f"the model is no valid ONNX: {_line(error)}; export it again") from error
        canonicalize(found)
        return QsdkBackendRep(found)

    @classmethod
    def run_model(cls, model: Source, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """Prepare a model and run it once: see `prepare` and `QsdkBackendRep.run`, also for what they raise."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Run one node.

        Args:
            node: any op, with its inputs' names.
            inputs: one value per named input, in order.
            device: `CPU`.
            outputs_info: not needed; onnx.backend.base has it.
            **kwargs: `opset_version`, of the standard domain; the newest that onnx knows, if it is not given.

        Raises:
            ConfigError: the device is not the CPU.
            DataError: the number of inputs is not that of the node's.
            ModelError: onnx's checker refuses the node, or it cannot be run.
        """
        names = list(dict.fromkeys(name for name in node.input if name))
        found = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        if len(found) != len(names):
            raise DataError(f"{len(found)} inputs are given; the node takes {len(names)}: {names}")
        given = [ValueInfoProto(name=name, type=_type_of(value)) for name, value in zip(names, found, strict=True)]
        made = [ValueInfoProto(name=name, type=TypeProto()) for name in node.output if name]
        versions = {"": kwargs.pop("opset_version", onnx.defs.onnx_opset_version())}
        versions |= _newest(node.domain) if node.domain not in ("", "ai.onnx") else {}
        opsets = [helper.make_opsetid(*entry) for entry in versions.items()]
        graph = helper.make_graph([node], "one_node", given, made)
        cls._require(device)
        model = _in_one_graph(helper.make_model(graph, opset_imports=opsets))
        context = onnx.checker.C.CheckerContext()
        context.ir_version, context.opset_imports = model.ir_version, versions
        try:
            onnx.checker.check_node(model.graph.node[0], context)
        except onnx.checker.ValidationError as error:
            raise ModelError(f"the node is no valid ONNX: {_line(error)}; check it against the standard") from error
        canonicalize(model)
        return QsdkBackendRep(shape_inference.infer_shapes(model)).run(found)

    @classmethod
    def _require(cls, device: str) -> None:
        if not cls.supports_device(device):
            raise ConfigError(f"the device {device!r} is not supported: this backend computes on the CPU; pass 'CPU'")


def _line(error: Exception) -> str:
    """Return a message, which may have several lines or none, in one."""
    return " ".join(str(error).split()) or type(error).__name__


def _newest(domain: str) -> dict[str, int]:
    versions = [schema.since_version for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == domain]
    return {domain: max(versions, default=1)}


def _in_one_graph(model: ModelProto) -> ModelProto:
    """Return the model with its functions inlined and one name, the empty one, for the standard domain."""
    if model.functions:
        model = inliner.inline_local_functions(model)
    for entry in model.opset_import:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
    for node in all_nodes(model.graph.node):
        node.domain = "" if node.domain == "ai.onnx" else node.domain
    return model


supports_device = QsdkBackend.supports_device
is_compatible = QsdkBackend.is_compatible
prepare = QsdkBackend.prepare
run_model = QsdkBackend.run_model
run_node = QsdkBackend.run_node
