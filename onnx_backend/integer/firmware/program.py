"""An integer-only model as a program for firmware: a list of operations on integers and the arrays they use.

A program holds `inputs`, `ops` in the order of execution, `outputs`, and `arrays`. A tensor is known by its name; an
input of an op that is the name of an array is that constant, an empty name an optional input that is not there. Every
op is a dict: `op`, `node` (of the Q/DQ model it was made from, or a name), `inputs`, `outputs`, `dtypes` and `shapes`
of the outputs (a shape is null where its rank, a size is null where the size is not static), `attributes`, and
`parameters`, which gives the name of an array for each role. A shape follows NumPy's rules of broadcasting, for
parameters too.

Edges: an entry of `inputs` or `outputs` has the `tensor`, the `model_name` (of the model's own input or output),
`dtype`, `shape`, and where it holds codes `scale`, `zero_point` and `axis` (null per tensor) with `value = (code -
zero_point) * scale`. To feed a real x: `code = clamp(round_half_even(x / scale) + zero_point)` in float32, clamped to
the dtype.

The ops, on exact integers; codes are uint8, or int32 0..65535 where activations have 16 bits:

- `AccumulateConv` (inputs: codes; parameters: `weight` (filters, channels / group, kernel...), its zero point already
  subtracted): int32 `sum((code - zero_point) * weight)` over the window as ONNX Conv has it; outside the image `code -
  zero_point` is 0. Attributes `zero_point`, `strides`, `dilations`, `pads` (all begins, then all ends), `group`,
  `auto_pad` (if not `NOTSET`, it stands instead of `pads`), `weight_bits`.
- `AccumulateMatMul` (inputs: codes; parameters: `weight`): int32 `(code - zero_point) @ weight`, or `weight @ (code -
  zero_point)` where `weight_first`.
- `MatMulCodes`, `MultiplyCodes` (inputs: two tensors of codes): int32 `(a - zero_points[0]) @ (b - zero_points[1])`,
  or the product of their elements.
- `WindowSum` (inputs: codes): int32 sum of `code - zero_point` over windows of `kernel_shape`, channel by channel;
  padding adds 0. `strides`, `dilations`, `pads` as above.
- `AxisSum` (inputs: codes): int32 sum of `code - zero_point` over `axes`, which stay with size 1 where `keepdims`.
- `Requantize` (inputs: one or more accumulators or codes; parameters: `mantissa_0`, `mantissa_1`, ... one per input,
  `shift`, and `bias` or `addend`): codes `clamp(round_shift(p, shift) + zero_point, lo, hi)` with the 64-bit product
  `p = (input + bias) * mantissa_0` where there is a `bias`, else `p = input_0 * mantissa_0 + input_1 * mantissa_1 +
  ... + addend`. A mantissa is int32, or int64 where terms are far apart; no partial sum leaves int64. `round_shift`
  divides by `2 ** shift` with one rounding, to the nearest integer; what becomes of exact ties says `rounding`:
  `half_even`, `half_up` (towards plus infinity; also where no tie can occur, so that any rounding will do:
  `ties_possible` is false), `half_away` (from zero). `gemmlowp` rounds twice: by `min(shift, 31)` bits half up, then
  by the rest, if any, half away.
- `Table` (inputs: codes; parameters: `table`): `table[code]`.
- `ClampCodes` (inputs: codes): `clamp(code, lo, hi)`.
- Any other op is the ONNX operator of that name and attributes, of the program's `opset`, on integers. `Shape` of an
  input that is only measured may name a tensor of floats, whose dtype its entry in `inputs` says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper, shape_inference

from onnx_backend.integer.convert import IntegerResult
from onnx_backend.integer.ir.context import label as label_of
from onnx_backend.integer.ir.operations import (
    Accumulation,
    Join,
    Product,
    Recorded,
    Requantization,
    Table,
    WindowSum,
)
from onnx_backend.integer.ir.values import Array
from onnx_backend.proto.graph_queries import declared_sizes, unique
from onnx_backend.proto.nodes import attributes
from qsdk.core.errors import ConfigError, IntegerError

_NARROW: tuple[Any, ...] = (np.int8, np.int16, np.int32, np.int64)


@dataclass(frozen=True)
class FirmwareProgram:
    """An integer-only network without ONNX; the module's docstring defines its parts.

    Attributes:
        opset: of the ops that are ONNX operators.
        inputs: plain dicts.
        ops: in the order of execution, plain dicts.
        outputs: plain dicts.
        arrays: the constants by name.
        model: the integer-only model that computes the same.
        origins: name -> op type and name of the node of the Q/DQ model.
    """

    opset: int
    inputs: list[dict[str, Any]]
    ops: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    arrays: dict[str, Array]
    model: ModelProto
    origins: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the arrays as plain values."""
        return {"version": 1, "opset": self.opset, "inputs": self.inputs, "ops": self.ops, "outputs": self.outputs}


def firmware_program(result: IntegerResult) -> FirmwareProgram:
    """Return the program of a conversion to integers alone; raise ConfigError for kernels and float nodes."""
    certificate = result.certificate
    if certificate["target"] == "onnxruntime":
        raise ConfigError('firmware= needs target="standard": the kernels of a runtime have no program')
    if certificate["float_nodes"]:
        raise ConfigError(
            f"firmware= needs integers alone; {certificate['float_nodes'][0]!r} stays float by allow_float="
        )
    writer = _Writer(result)
    for operation in result.operations:
        if isinstance(operation, NodeProto):
            writer.plain(operation)
        else:
            writer.recorded(operation)
    return writer.finished()


class _Writer:
    """The writer of a program; ops that only measure a float input measure its codes instead."""

    def __init__(self, result: IntegerResult) -> None:
        graph = result.model.graph
        self._result = result
        self._dtypes, self._shapes = _inferred(result.model)
        self._constants = {tensor.name: tensor for tensor in result.constants}
        self._edges = {i.name for i in graph.input}, {o.name for o in graph.output}
        nodes = [op for op in result.operations if isinstance(op, NodeProto) and op.op_type == "QuantizeLinear"]
        self._renamed = {node.input[0]: node.output[0] for node in nodes if node.input[0] in self._edges[0]}
        self._quantized: dict[str, list[dict[str, Any]]] = {}
        self._ops: list[dict[str, Any]] = []
        self._outputs: dict[str, dict[str, Any]] = {}
        self._arrays: dict[str, Array] = {}
        self._known: dict[tuple[Any, ...], str] = {}
        self._taken = {*self._dtypes, *(name for op in result.operations for name in (*op.input, *op.output))}

    def plain(self, node: NodeProto) -> None:
        """Add an ONNX operator, or note an edge."""
        inputs, outputs = self._edges
        if node.op_type == "QuantizeLinear" and node.input[0] in inputs:
            entry = self._edge(node.output[0], node.input[0], *self._encoding(node))
            self._quantized.setdefault(node.input[0], []).append(entry)
        elif node.op_type == "DequantizeLinear" and node.output[0] in outputs:
            self._outputs[node.output[0]] = self._edge(node.input[0], node.output[0], *self._encoding(node))
        else:
            facts = attributes(node)
            if node.op_type == "Cast":  # the portable model holds uint32 in int32
                self._dtypes[node.output[0]] = np.dtype(helper.tensor_dtype_to_np_dtype(facts["to"])).name
            elif node.op_type == "BitShift" and node.input[0] in self._dtypes:
                self._dtypes[node.output[0]] = self._dtypes[node.input[0]]
            self._add(node.op_type, label_of(node), node.input, node.output, facts)

    def recorded(self, op: Recorded) -> None:
        """Add an operation of the conversion."""
        name, facts, arrays = _DESCRIBED[type(op)](op)
        if isinstance(op, Requantization | Table):  # the model may hold codes that only tables read in more bits
            self._dtypes[op.result] = np.dtype(op.encoding.kind).name
        parameters = {role: self._array(values, f"{op.result}.{role}") for role, values in arrays.items()}
        self._add(name, op.label, op.input, op.output, facts, parameters)

    def finished(self) -> FirmwareProgram:
        """Return the program; edges that are no float tensors are described as in the certificate."""
        graph, certificate = self._result.model.graph, self._result.certificate
        inputs: list[dict[str, Any]] = []
        for info in graph.input:
            row = certificate["inputs"].get(info.name) if info.name not in self._quantized else None
            inputs += self._quantized.get(info.name) or [self._own_edge(info.name, row)]
        for info in graph.output:
            self._outputs.setdefault(info.name, self._own_edge(info.name, certificate["outputs"].get(info.name)))
        outputs = [self._outputs[info.name] for info in graph.output]
        for name in (entry["tensor"] for entry in outputs):
            self._constant(name)
        opset = self._result.model.opset_import[0].version
        result = self._result
        return FirmwareProgram(opset, inputs, self._ops, outputs, self._arrays, result.model, result.origins)

    def _add(
        self,
        op: str,
        node: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        facts: Mapping[str, Any],
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        for name in inputs:
            self._constant(name)
        self._ops.append(
            {
                "op": op,
                "node": node,
                "inputs": [self._renamed.get(name, name) for name in inputs],
                "outputs": list(outputs),
                "dtypes": [self._dtypes.get(name) for name in outputs],
                "shapes": [self._shapes.get(name) for name in outputs],
                "attributes": dict(facts),
                "parameters": dict(parameters or {}),
            }
        )

    def _constant(self, name: str) -> None:
        if name in self._constants and name not in self._arrays:
            self._arrays[name] = _plain_array(self._constants[name])

    def _array(self, values: Array, stem: str) -> str:
        key = (str(values.dtype), values.shape, values.tobytes())
        if key not in self._known:
            name = unique(stem, self._taken)
            self._arrays[name], self._known[key] = values, name
        return self._known[key]

    def _encoding(self, node: NodeProto) -> tuple[Array, Array, int]:
        scale, zero = (numpy_helper.to_array(self._constants[name]) for name in node.input[1:3])
        return scale, zero, attributes(node).get("axis", 1)

    def _edge(self, tensor: str, name: str, scale: Array, zero: Array, axis: int) -> dict[str, Any]:
        return {
            **self._own_edge(name, None),
            "tensor": tensor,
            "dtype": str(zero.dtype),
            "scale": scale.tolist(),
            "zero_point": zero.tolist(),
            "axis": axis if scale.ndim else None,
        }

    def _own_edge(self, name: str, row: Mapping[str, Any] | None) -> dict[str, Any]:
        found: dict[str, Any] = {"tensor": name, "model_name": name}
        found |= {"dtype": self._dtypes.get(name), "shape": self._shapes.get(name)}
        return found if row is None else {**found, "scale": row["scale"], "zero_point": row["zero_point"], "axis": None}


def _inferred(model: ModelProto) -> tuple[dict[str, str], dict[str, list[int | None]]]:
    """Return the dtypes and the static shapes of the tensors of a model."""
    dtypes: dict[str, str] = {}
    shapes: dict[str, list[int | None]] = {}
    graph = shape_inference.infer_shapes(model, data_prop=True).graph
    for info in (*graph.input, *graph.output, *graph.value_info):
        kind = info.type.tensor_type
        dtypes[info.name] = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)).name
        if kind.HasField("shape"):
            shapes[info.name] = declared_sizes(info.type)
    return dtypes, shapes


def _plain_array(tensor: TensorProto) -> Array:
    array = numpy_helper.to_array(tensor)
    # NumPy archives have no dtypes of less than 8 bits
    return array.astype(np.uint8) if array.dtype.name in ("uint4", "uint2") else array


def narrowest(values: Array, kinds: Sequence[Any] = _NARROW) -> Array:
    """Return integers in the first of the dtypes that holds them all."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    for kind in kinds:
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return np.ascontiguousarray(values.astype(kind)).reshape(values.shape)
    raise IntegerError(f"integers {low}..{high} do not fit in {np.dtype(kinds[-1]).name}; this is a defect of qsdk")


_Described = tuple[str, dict[str, Any], dict[str, Array]]


def _accumulation(op: Accumulation) -> _Described:
    weight = {"weight": narrowest(op.weight)}
    facts: dict[str, Any] = {"zero_point": op.encoding.zero_point, "weight_bits": op.bits}
    if op.op_type == "MatMul":
        return "AccumulateMatMul", {**facts, "weight_first": op.weight_first}, weight
    return "AccumulateConv", {**facts, **_window(op.attributes, op.weight.ndim - 2)}, weight


def _window(attrs: Mapping[str, Any], rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {key: list(attrs.get(key, [1] * rank)) for key in ("strides", "dilations")}
    found["pads"] = list(attrs.get("pads", [0] * 2 * rank))
    return {**found, "group": attrs.get("group", 1), "auto_pad": attrs.get("auto_pad", "NOTSET")}


def _product(op: Product) -> _Described:
    name = "MatMulCodes" if op.op_type == "MatMul" else "MultiplyCodes"
    return name, {"zero_points": [op.left.encoding.zero_point, op.right.encoding.zero_point]}, {}


def _window_sum(op: WindowSum) -> _Described:
    facts: dict[str, Any] = {"zero_point": op.encoding.zero_point}
    if op.op_type == "AveragePool":
        return "WindowSum", {**facts, **{key: list(values) for key, values in op.attributes.items()}}, {}
    return "AxisSum", {**facts, "axes": list(op.axes), "keepdims": int(op.attributes["keepdims"])}, {}


def _requantization(op: Requantization) -> _Described:
    lo, hi = op.bounds
    facts = {"rounding": op.rounding, "zero_point": op.encoding.zero_point, "lo": lo, "hi": hi}
    facts["ties_possible"] = op.plan.ties
    terms = op.value.terms
    arrays = {f"mantissa_{i}": narrowest(m, (np.int32, np.int64)) for i, m in enumerate(op.plan.mantissas)}
    arrays["shift"] = narrowest(op.plan.shift, (np.uint8,))
    if len(terms) == 1 and not np.any(op.value.constant):
        return "Requantize", facts, {**arrays, "bias": narrowest(-terms[0].zero, (np.int32,))}
    return "Requantize", facts, {**arrays, "addend": np.asarray(op.plan.addend, np.int64)}


def _table(op: Table) -> _Described:
    if op.clips:
        return "ClampCodes", {"lo": int(op.table.min()), "hi": int(op.table.max())}, {}
    return "Table", {}, {"table": narrowest(op.table, (np.uint16,) if op.encoding.wide else (np.uint8,))}


_DESCRIBED: Mapping[type, Any] = {
    Accumulation: _accumulation,
    Product: _product,
    WindowSum: _window_sum,
    Requantization: _requantization,
    Table: _table,
    Join: lambda op: ("Concat", {"axis": op.axis}, {}),
}
