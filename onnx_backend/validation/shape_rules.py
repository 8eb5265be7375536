"""Rules on shapes: one scale per tensor, per index of an axis, or per block."""

from collections.abc import Iterator

from onnx import NodeProto

from onnx_backend.proto.nodes import attributes
from onnx_backend.validation.finding import Finding, error, warning
from onnx_backend.validation.scope import Scope, Shape

_REMEDY = "give one scale per tensor, per index of axis, or per block"


def shapes(node: NodeProto, scope: Scope) -> Iterator[Finding]:
    """Yield errors if the shapes of scale and zero point do not fit each other, x, axis and block_size."""
    name, options = scope.name(node), attributes(node)
    scale, x = scope.shape(scope.input(node, 1)), scope.shape(node.input[0])
    axis, block = int(options.get("axis", 1)), int(options.get("block_size", 0))
    if scale is None:
        return
    zero_point = scope.shape(scope.input(node, 2)) if scope.input(node, 2) else None
    if zero_point is not None and not _same(zero_point, scale):
        problem = f"the zero point's shape {zero_point} is not the scale's {scale}"
        remedy = "give one zero point per scale, of the same shape"
        yield (warning if {zero_point, scale} == {(), (1,)} else error)(name, "shape", problem, remedy)
    problem = _without_x(scale, block) or (_against(x, scale, axis, block) if x is not None else "")
    if problem:
        yield error(name, "shape", problem, _REMEDY)


def _without_x(scale: Shape, block: int) -> str:
    """Return a problem of the scale's shape for any x, or ""."""
    if 0 in scale:
        return f"the scale of shape {scale} is empty"
    if block < 0:
        return f"block_size {block} is negative"
    if not block and len(scale) > 1:
        return f"a scale of shape {scale} needs block_size"
    return f"block_size {block} with one scale of shape ()" if block and not scale else ""


def _against(x: Shape, scale: Shape, axis: int, block: int) -> str:
    if scale == () or (scale == (1,) and not block):
        return ""  # per tensor
    if not -len(x) <= axis < len(x):
        return f"axis {axis} does not exist in a tensor of shape {x}"
    axis %= len(x)
    if not block:
        return "" if _agree(scale[0], x[axis]) else f"{scale[0]} scales for {x[axis]} channels on axis {axis} of {x}"
    if len(scale) != len(x):
        return f"a scale of shape {scale} has not the rank of {x}, which blocks need"
    length, count = x[axis], scale[axis]
    wanted = tuple(_blocks(length, block) if i == axis else n for i, n in enumerate(x))
    if _same(scale, wanted):
        return ""
    text = f"a scale of shape {scale} does not fit blocks of {block} along axis {axis} of {x}; it would be {wanted}"
    legal = _legal_blocks(length, count) if length is not None and count is not None else ""
    return f"{text}{legal}"


def _blocks(length: int | None, block: int) -> int | None:
    return None if length is None else -(-length // block)


def _legal_blocks(length: int, count: int) -> str:
    """Return the block sizes that give this count of blocks: ceil(D/S) to ceil(D/(S-1)) - 1, by the spec."""
    smallest = -(-length // count)
    largest = length if count == 1 else -(-length // (count - 1)) - 1
    if smallest > largest:
        return f", and no block size cuts {length} into {count}"
    return f", or block_size {smallest}" + (f" to {largest}" if largest > smallest else "")


def _same(left: Shape, right: Shape) -> bool:
    return len(left) == len(right) and all(_agree(a, b) for a, b in zip(left, right, strict=True))


def _agree(left: int | None, right: int | None) -> bool:
    return left is None or right is None or left == right
