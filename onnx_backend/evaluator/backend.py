"""This package as an ONNX backend: `prepare(model).run(inputs)`, as onnx.backend.base has it.

The quantization ops are computed by NumPy kernels of our own, every other node by onnx's ReferenceEvaluator or by ONNX
Runtime, chosen by op and version: see `onnx_backend.evaluator.program`.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, inliner
from onnx.backend.base import Backend, BackendRep, namedtupledict

from onnx_backend.evaluator.one_node import type_of
from onnx_backend.evaluator.program import Evaluator, Program
from onnx_backend.passes.canonicalize import canonicalize
from onnx_backend.proto.graph_queries import input_names
from onnx_backend.proto.model_io import load
from onnx_backend.proto.opsets import opset_of
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import checkable
from qsdk.core.errors import ConfigError, DataError, ModelError, QsdkError

Source = ModelProto | bytes | str | os.PathLike[str]


class QsdkBackendRep(BackendRep):
    """A prepared model.

    Attributes:
        ran: (evaluator, op_type) -> how many nodes it has run, those of bodies included.
    """

    def __init__(self, model: ModelProto) -> None:
        self._opset = opset_of(model)
        self._given = [value for value in model.graph.input if value.name in set(input_names(model.graph))]
        self._outputs = [value.name for value in model.graph.output]
        versions = {entry.domain: int(entry.version) for entry in model.opset_import}
        self.ran: Counter[tuple[Evaluator, str]] = Counter()
        self._program = Program(model.graph, versions, self.ran)

    def evaluators(self) -> list[tuple[str, Evaluator]]:
        """Return the evaluator of each node of the graph, in order: (op_type, evaluator)."""
        return [(step.node.op_type, step.evaluator) for step in self._program.steps]

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the outputs as a tuple that can also be read by name.

        Args:
            inputs: a sequence in graph order, a mapping by name, or the one array. Arrays in the dtypes of the graph,
                those of ml_dtypes for bfloat16 and types narrower than 8 bits; lists for ONNX sequences.
            **kwargs: none is known; onnx.backend.base allows any.

        Raises:
            DataError: an input is missing, unknown or of another dtype.
            ModelError: a node cannot be run.
        """
        fed = {value.name: _checked(value, found) for value, found in self._paired(inputs)}
        return namedtupledict("Outputs", self._outputs)(*self._program.run(fed, {}))

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


def _checked(declared: ValueInfoProto, value: Any) -> Any:
    """Return an input as an array, if it is declared to be a tensor."""
    kind = declared.type.tensor_type.elem_type
    if not declared.type.HasField("tensor_type") or value is None:
        return value
    found = np.asarray(value)
    if kind not in (TensorProto.UNDEFINED, type_of(found).tensor_type.elem_type):
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
        """Bind every node of a model to its evaluator.

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
        given = [ValueInfoProto(name=name, type=type_of(value)) for name, value in zip(names, found, strict=True)]
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
        return QsdkBackendRep(model).run(found)

    @classmethod
    def _require(cls, device: str) -> None:
        if not cls.supports_device(device):
            raise ConfigError(f"the device {device!r} is not supported: this backend computes on the CPU; pass 'CPU'")


def _line(error: Exception) -> str:
    """Return a message of onnx's checker, which has several lines, in one."""
    return " ".join(str(error).split())


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


def supports_device(device: str) -> bool:
    """Return True for devices that can be computed on: see `QsdkBackend.supports_device`."""
    return QsdkBackend.supports_device(device)


def is_compatible(model: Source, device: str = "CPU", **kwargs: Any) -> bool:
    """Return True if `prepare` accepts a model."""
    return QsdkBackend.is_compatible(model, device, **kwargs)


def prepare(model: Source, device: str = "CPU", **kwargs: Any) -> QsdkBackendRep:
    """Bind every node of a model to its evaluator: see `QsdkBackend.prepare`, also for what it raises."""
    return QsdkBackend.prepare(model, device, **kwargs)


def run_model(model: Source, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
    """Prepare a model and run it once: see `QsdkBackend.run_model`, also for what it raises."""
    return QsdkBackend.run_model(model, inputs, device, **kwargs)


def run_node(
    node: NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
) -> tuple[Any, ...]:
    """Run one node: see `QsdkBackend.run_node`, also for what it raises."""
    return QsdkBackend.run_node(node, inputs, device, outputs_info, **kwargs)
