"""Rules on valid models that ONNX Runtime 1.31 (CPU) cannot load or run; the tests check the installed version."""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto, TensorProto

from onnx_backend.proto.nodes import attributes
from onnx_backend.proto.opsets import LARGEST_OPSET, opset_of
from onnx_backend.validation.finding import Finding, warning
from onnx_backend.validation.scope import Scope, type_name
from onnx_backend.validation.type_rules import FLOAT6

LARGEST_IR = 13
_T = TensorProto


def versions(model: ModelProto) -> Iterator[Finding]:
    """Yield a warning if IR version or opset is beyond the runtime's."""
    if model.ir_version > LARGEST_IR:
        problem = f"IR version {model.ir_version} is beyond the runtime's {LARGEST_IR}"
        yield warning("", "runtime", problem, f"stamp IR {LARGEST_IR} or lower (10 goes with opset 21)")
    if opset_of(model) > LARGEST_OPSET:
        problem = f"opset {opset_of(model)} is beyond the runtime's {LARGEST_OPSET}"
        yield warning("", "runtime", problem, "export at opset 21, or 25 for 2-bit types")


def kernels(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield a warning for types and forms of QuantizeLinear and DequantizeLinear without a kernel."""
    name, x, scale = scope.name(node), scope.type(node.input[0]), scope.type(scope.input(node, 1))
    quantizes = node.op_type == "QuantizeLinear"
    code = scope.made_type(node) if quantizes else x
    lacking = [t for t in (code, scale) if t in (_T.FLOAT4E2M1, *FLOAT6, _T.BFLOAT16, _T.FLOAT8E8M0)]
    if quantizes and x in (_T.INT32, _T.BFLOAT16):
        lacking.append(x)
    if lacking:
        problem = f"the runtime has no kernel for {node.op_type} with {type_name(lacking[0])}"
        yield warning(name, "kernel", problem, "choose another dtype to run it there")
    elif quantizes and x and scale and x != scale and scope.opset >= 23:
        problem = f"the runtime cannot quantize {type_name(x)} with a scale of {type_name(scale)}"
        yield warning(name, "kernel", problem, f"store the scale as {type_name(x)}")
    shape = scope.shape(scope.input(node, 1))
    if shape == (1,) and attributes(node).get("block_size", 0) > 0:
        problem = "the runtime refuses block_size where there is one scale for the whole of a vector"
        yield warning(name, "kernel", problem, "drop block_size and store the scale as a scalar")
