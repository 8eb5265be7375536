"""Rules on a QuantizeLinear and the DequantizeLinear that reads it, and on results that nobody reads."""

import math
from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from onnx_backend.proto.external_data import array
from onnx_backend.proto.nodes import attributes
from onnx_backend.validation.finding import Finding, error, warning
from onnx_backend.validation.scope import Scope, is_quantizer


def pairs(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield an error if a DequantizeLinear has not the scale, zero point, axis and block size of its QuantizeLinear."""
    quantize = scope.makers.get(node.input[0])
    if quantize is None or quantize.op_type != "QuantizeLinear" or not is_quantizer(quantize):
        return
    name, other = scope.name(node), scope.name(quantize)
    for position, what in ((1, "scale"), (2, "zero point")):
        if not _same_values(scope.input(quantize, position), scope.input(node, position), scope):
            problem = f"its {what} is not that of {other!r}, whose output it reads"
            yield error(name, "pair", problem, f"give both nodes the same {what}")
    left, right = attributes(quantize), attributes(node)
    scale = scope.shape(scope.input(node, 1))
    if scale is None or math.prod(2 if n is None else n for n in scale) <= 1:
        return  # per tensor, where axis means nothing
    for option, default in (("axis", 1), ("block_size", 0)):
        if not _same_option(option, left.get(option, default), right.get(option, default), scope.shape(node.input[0])):
            problem = f"its {option} is not that of {other!r}, whose output it reads"
            yield error(name, "pair", problem, f"give both nodes the same {option}")


def _same_option(option: str, left: int, right: int, shape: tuple[int | None, ...] | None) -> bool:
    if option == "axis" and shape is not None and len(shape):
        return left % len(shape) == right % len(shape)
    return left == right


def _same_values(left: str, right: str, scope: Scope) -> bool:
    """Return True if two parameters hold the same; an absent one is 0, and computed ones pass."""
    if left == right:
        return True
    if any(name and name not in scope.stored for name in (left, right)):
        return True
    first, second = (array(scope.stored[name]).astype(np.float32) if name else np.zeros(()) for name in (left, right))
    if not (first.any() or second.any()):
        return True
    fits = first.shape == second.shape or first.size == 1 or second.size == 1
    return fits and bool((first == second).all())


def unused(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield a warning if nothing reads the result; codes may also leave the model, or be read by integer ops."""
    if node.output[0] not in scope.read:
        yield warning(scope.name(node), "unused", f"nothing reads its output {node.output[0]!r}", "remove the node")
