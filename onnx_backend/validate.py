"""What the usual checkers miss about quantized models: every finding names its node and says what to do."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from onnx_backend.model import LARGEST_OPSET, array, attributes, constant_tensor, opset_of, producers
from onnx_backend.skeleton import checkable, declares_outputs
from qsdk.core.errors import FileFormatError
from qsdk.core.report import Report

LARGEST_IR = 13  # what the installed runtime accepts
_MAX_CHECKED_BYTES = 2**31 - 1
_NEVER = 10**6
_T = TensorProto
#: quantized type -> first opset whose QuantizeLinear (and DequantizeLinear) has it
_SINCE: Mapping[int, int] = {
    **dict.fromkeys((_T.UINT8, _T.INT8), 10),
    **dict.fromkeys((_T.FLOAT8E4M3FN, _T.FLOAT8E4M3FNUZ, _T.FLOAT8E5M2, _T.FLOAT8E5M2FNUZ), 19),
    **dict.fromkeys((_T.UINT16, _T.INT16, _T.UINT4, _T.INT4), 21),
    _T.FLOAT4E2M1: 23,
    **dict.fromkeys((_T.UINT2, _T.INT2), 25),
    **dict.fromkeys((27, 28), 28),  # float6, which older onnx does not name
}
_FLOATS = (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.FLOAT8E8M0)


@dataclass(frozen=True)
class Finding:
    """One row of a validation report.

    Attributes:
        node: the node's name (a path through functions and branches), else its first output's; "" for the model.
        rule: output_dtype, dtype, opset, shape, scale, zero_point, pair, runtime or checker.
        severity: error or warning.
        problem: what is wrong.
        remedy: what to do.
    """

    node: str
    rule: str
    severity: Literal["error", "warning"]
    problem: str
    remedy: str


@dataclass(frozen=True)
class _Scope:
    """What is known where a node stands."""

    opset: int
    path: str
    stored: Mapping[str, TensorProto]
    types: Mapping[str, int]
    shapes: Mapping[str, tuple[int | None, ...]]
    makers: Mapping[str, NodeProto]

    def name(self, node: NodeProto) -> str:
        return self.path + (node.name or node.output[0])

    def input(self, node: NodeProto, position: int) -> str:
        return node.input[position] if len(node.input) > position else ""

    def type(self, tensor: str) -> int:
        """The TensorProto type, 0 where unknown."""
        if tensor in self.stored:
            return int(self.stored[tensor].data_type)
        maker = self.makers.get(tensor)
        if maker is not None and maker.op_type == "QuantizeLinear":
            # said by the node itself: a declared type may be what is wrong
            zero_point = self.type(self.input(maker, 2)) if self.input(maker, 2) else 0
            return zero_point or int(attributes(maker).get("output_dtype", 0)) or int(_T.UINT8)
        return self.types.get(tensor, 0)

    def shape(self, tensor: str) -> tuple[int | None, ...] | None:
        return tuple(self.stored[tensor].dims) if tensor in self.stored else self.shapes.get(tensor)


def validate(model: ModelProto) -> Report:
    """Check a model's quantization, functions and branches included.

    Returns:
        Rows `node`, `rule`, `severity` (error or warning), `problem`, `remedy`; summary `errors`, `warnings`.
    """
    found = list(_findings(model))
    errors = sum(finding.severity == "error" for finding in found)
    return Report("Validation", [asdict(f) for f in found], {"errors": errors, "warnings": len(found) - errors})


def require_valid(model: ModelProto, where: str) -> None:
    """Refuse a model that cannot be loaded as it is.

    Raises:
        FileFormatError: it has errors, or the runtime is too old for it; the message names `where` and the node.
    """
    for finding in _findings(model):
        if finding.severity == "error" or finding.rule == "runtime":
            at = f", node {finding.node!r}" if finding.node else ""
            raise FileFormatError(f"{where}{at}: {finding.problem}; {finding.remedy}")


def _findings(model: ModelProto) -> Iterator[Finding]:
    found = list(_runtime_limits(model))
    opset = opset_of(model)
    for scope, nodes in _scopes(model, opset):
        for node in nodes:
            if node.domain in ("", "ai.onnx"):
                for check in _CHECKS.get(node.op_type, ()):
                    found.extend(check(node, scope))
    yield from found
    if not any(finding.severity == "error" for finding in found):
        yield from _checker(model)


def _runtime_limits(model: ModelProto) -> Iterator[Finding]:
    if model.ir_version > LARGEST_IR:
        yield Finding(
            "",
            "runtime",
            "warning",
            f"IR version {model.ir_version} is beyond the runtime's {LARGEST_IR}",
            f"stamp IR {LARGEST_IR} or lower (10 goes with opset 21)",
        )
    if opset_of(model) > LARGEST_OPSET:
        problem = f"opset {opset_of(model)} is beyond the runtime's {LARGEST_OPSET}"
        yield Finding("", "runtime", "warning", problem, "export at opset 21, or 25 for 2-bit types")


def _checker(model: ModelProto) -> Iterator[Finding]:
    """What onnx's own checker says, asked last because it repeats, without a name, what is found here."""
    if model.ByteSize() > _MAX_CHECKED_BYTES:
        return
    standard = all(entry.domain in ("", "ai.onnx") for entry in model.opset_import)
    try:
        onnx.checker.check_model(model if declares_outputs(model) else checkable(model), full_check=standard)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError) as error:
        problem = " ".join(str(error).split())
        yield Finding("", "checker", "error", problem, "export the model again, or correct it where the checker says")


def _scopes(model: ModelProto, opset: int) -> Iterator[tuple[_Scope, Iterable[NodeProto]]]:
    yield from _graph_scopes(_inferred(model).graph, opset, "", _Scope(opset, "", {}, {}, {}, {}))
    for function in model.functions:
        own = max((e.version for e in function.opset_import if e.domain in ("", "ai.onnx")), default=opset)
        types, shapes = _declared(function.value_info)
        path = f"{function.name}/"
        yield _Scope(own, path, _constants(function.node), types, shapes, producers(function.node)), function.node


def _inferred(model: ModelProto) -> ModelProto:
    if model.ByteSize() > _MAX_CHECKED_BYTES:
        return model
    try:
        return onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, RuntimeError):
        return model  # what is contradictory is found below, with names


def _graph_scopes(
    graph: GraphProto, opset: int, path: str, outer: _Scope
) -> Iterator[tuple[_Scope, Iterable[NodeProto]]]:
    types, shapes = _declared((*graph.value_info, *graph.input, *graph.output))
    stored = {tensor.name: tensor for tensor in graph.initializer}
    scope = _Scope(
        opset,
        path,
        {**outer.stored, **stored, **_constants(graph.node)},
        {**outer.types, **types},
        {**outer.shapes, **shapes},
        {**outer.makers, **producers(graph.node)},
    )
    yield scope, graph.node
    for node in graph.node:
        for attribute in node.attribute:
            branches = [attribute.g, *attribute.graphs] if attribute.HasField("g") else list(attribute.graphs)
            for branch in branches:
                yield from _graph_scopes(branch, opset, f"{scope.name(node)}/{attribute.name}/", scope)


def _constants(nodes: Iterable[NodeProto]) -> dict[str, TensorProto]:
    held = ("value", "value_float", "value_floats", "value_int", "value_ints")
    constants = [n for n in nodes if n.op_type == "Constant" and any(a.name in held for a in n.attribute)]
    return {node.output[0]: constant_tensor(node) for node in constants}


def _declared(values: Iterable[Any]) -> tuple[dict[str, int], dict[str, tuple[int | None, ...]]]:
    types, shapes = {}, {}
    for value in values:
        tensor = value.type.tensor_type
        types[value.name] = int(tensor.elem_type)
        if tensor.HasField("shape"):
            dims = tensor.shape.dim
            shapes[value.name] = tuple(int(d.dim_value) if d.HasField("dim_value") else None for d in dims)
    return types, shapes


def _type_name(code: int) -> str:
    return str(_T.DataType.Name(code)) if code in _T.DataType.values() else f"type {code}"


def _output_dtype(node: NodeProto, scope: _Scope) -> Iterator[Finding]:
    wanted = int(attributes(node).get("output_dtype", 0))
    zero_point = scope.type(scope.input(node, 2)) if scope.input(node, 2) else 0
    if wanted and zero_point and wanted != zero_point:
        problem = f"output_dtype {_type_name(wanted)} contradicts the zero point, which is {_type_name(zero_point)}"
        yield Finding(scope.name(node), "output_dtype", "error", problem, "drop one of the two, or make them agree")


def _types(node: NodeProto, scope: _Scope) -> Iterator[Finding]:
    name, options = scope.name(node), attributes(node)
    if node.op_type == "QuantizeLinear":
        code = scope.type(node.output[0])
    else:
        code = scope.type(node.input[0])
        zero_point = scope.type(scope.input(node, 2)) if scope.input(node, 2) else 0
        if code and zero_point and code != zero_point:
            problem = f"it reads {_type_name(code)} with a zero point of {_type_name(zero_point)}"
            yield Finding(name, "dtype", "error", problem, "give the zero point the type of the data")
        if code == _T.INT32:
            code = 0  # a bias
    since = _SINCE.get(code, _NEVER) if code else 0
    if since > scope.opset:
        legal = f"it exists from opset {since} on" if since < _NEVER else "it is no quantized type"
        problem = f"{_type_name(code)} at opset {scope.opset}: {legal}"
        remedy = f"export at opset {since}" if since < _NEVER else "choose an integer or float8 type"
        yield Finding(name, "dtype", "error", problem, remedy)
    elif code in (_T.FLOAT4E2M1, 27, 28):
        problem = f"the runtime has no kernel for {_type_name(code)}"
        yield Finding(name, "runtime", "warning", problem, "choose another dtype to run it there")
    for option, first in (("output_dtype", 21 if node.op_type == "QuantizeLinear" else 23), ("block_size", 21)):
        if options.get(option, 0) and scope.opset < first:
            problem = f"{option} at opset {scope.opset}: it exists from opset {first} on"
            yield Finding(name, "opset", "error", problem, f"export at opset {max(first, 21)}")


def _shapes(node: NodeProto, scope: _Scope) -> Iterator[Finding]:
    name, options = scope.name(node), attributes(node)
    scale, x = scope.shape(node.input[1]), scope.shape(node.input[0])
    zero_point = scope.shape(scope.input(node, 2)) if scope.input(node, 2) else None
    if scale is None:
        return
    if zero_point is not None and zero_point != scale:
        problem = f"the zero point's shape {zero_point} is not the scale's {scale}"
        yield Finding(name, "shape", "error", problem, "give one zero point per scale, of the same shape")
    if x is None or scale == () or (scale == (1,) and not options.get("block_size", 0)):
        return
    problem = _shape_problem(x, scale, int(options.get("axis", 1)), int(options.get("block_size", 0)))
    if problem:
        yield Finding(name, "shape", "error", problem, "give one scale per tensor, per index of axis, or per block")


def _shape_problem(x: tuple[int | None, ...], scale: tuple[int | None, ...], axis: int, block: int) -> str:
    if not -len(x) <= axis < len(x):
        return f"axis {axis} does not exist in a tensor of shape {x}"
    axis %= len(x)
    if not block:
        if len(scale) != 1:
            return f"a scale of shape {scale} needs block_size"
        return "" if _agree(scale[0], x[axis]) else f"{scale[0]} scales for {x[axis]} channels on axis {axis} of {x}"
    if len(scale) != len(x):
        return f"a scale of shape {scale} has not the rank of {x}, which blocks need"
    wanted = list(x)
    length = x[axis]
    wanted[axis] = None if length is None else -(-length // block)
    if all(_agree(left, right) for left, right in zip(scale, wanted, strict=True)):
        return ""
    return f"a scale of shape {scale} does not fit blocks of {block} along axis {axis} of {x}; it is {tuple(wanted)}"


def _agree(left: int | None, right: int | None) -> bool:
    return left is None or right is None or left == right


def _scales(node: NodeProto, scope: _Scope) -> Iterator[Finding]:
    name, stored = scope.name(node), scope.stored.get(node.input[1])
    if stored is not None and stored.data_type in _FLOATS:
        values = array(stored).astype(np.float64)
        if not (np.isfinite(values).all() and (values > 0).all()):
            bad = values[~(np.isfinite(values) & (values > 0))].reshape(-1)[0]
            problem = f"the scale {stored.name!r} holds {bad}; scales are positive and finite"
            yield Finding(name, "scale", "error", problem, "calibrate again")
    elif stored is not None:
        problem = f"the scale {stored.name!r} is {_type_name(stored.data_type)}, not a float"
        yield Finding(name, "scale", "error", problem, "store scales as float32")
    zero_point = scope.stored.get(scope.input(node, 2))
    if node.op_type != "DequantizeLinear" or zero_point is None or scope.type(node.input[0]) != _T.INT32:
        return
    if array(zero_point).any():
        problem = "an int32 tensor has a zero point other than 0"
        yield Finding(name, "zero_point", "warning", problem, "drop the zero point")


def _pairs(node: NodeProto, scope: _Scope) -> Iterator[Finding]:
    quantize = scope.makers.get(node.input[0])
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return
    name, other = scope.name(node), scope.name(quantize)
    for position, what in ((1, "scale"), (2, "zero point")):
        names = [scope.input(n, position) for n in (quantize, node)]
        values = [array(scope.stored[n]) if n in scope.stored else None if n else np.zeros(()) for n in names]
        left, right = values
        if left is None or right is None or names[0] == names[1]:
            continue
        fits = left.shape == right.shape or left.size == 1 or right.size == 1 or not (left.any() or right.any())
        if not (fits and (left.astype(float) == right.astype(float)).all()):
            problem = f"its {what} is not that of {other!r}, whose output it reads"
            yield Finding(name, "pair", "error", problem, f"give both nodes the same {what}")
    left_options, right_options = attributes(quantize), attributes(node)
    scale = scope.shape(node.input[1])
    for option, default in (("axis", 1), ("block_size", 0)):
        values_differ = left_options.get(option, default) != right_options.get(option, default)
        if values_differ and scale is not None and int(np.prod([n or 2 for n in scale])) > 1:
            problem = f"its {option} is not that of {other!r}, whose output it reads"
            yield Finding(name, "pair", "error", problem, f"give both nodes the same {option}")


_Check = Callable[[NodeProto, _Scope], Iterator[Finding]]
_CHECKS: Mapping[str, tuple[_Check, ...]] = {
    "QuantizeLinear": (_output_dtype, _types, _shapes, _scales),
    "DequantizeLinear": (_types, _shapes, _scales, _pairs),
}
