"""Write operations with the quantized kernels of ONNX Runtime: QLinear* and QGemm, requantized in float32.

Every writer returns True if its kernel computes the operation; else the standard form is written. The kernels
compute `rint(float32(accumulator) * multiplier) + zero point` (float32 throughout), so they differ from the exact
fixed point on a few elements in a million, by one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from onnx_backend.integer.ir.builder import Builder
from onnx_backend.integer.ir.operations import (
    Accumulation,
    CodesOperand,
    Join,
    Product,
    Requantization,
    Softmax,
    Table,
    WindowSum,
)
from onnx_backend.integer.ir.values import ActivationEncoding, Array, Function, Term
from onnx_backend.proto.nodes import attributes
from onnx_backend.workarounds.onnxruntime_table import SOFTMAX_CLOSE, softmax_error, softmax_steps
from qsdk.core.ranges.ranges import of_whole_steps

_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)
_RANK = 4
_NO_NAME = (None, "NOTSET", b"NOTSET")  # pads are given as numbers
#: Input channels of a convolution that copies its windows in pieces of so few bytes that blocks are faster.
_FEW = 4
#: A nearest neighbour is repeated at most so often.
_MOST_COPIES = 4


def in_blocks(b: Builder, maker: Accumulation) -> Accumulation:
    """Return a convolution of stride 2 over few channels as one of stride 1 over blocks of 2 x 2; others as they are.

    The weights that a kernel of whole blocks has beside the given ones are 0, so the sums are the same.
    """
    sizes, attrs, weight = b.code_shapes.get(maker.codes), maker.attributes, maker.weight
    if weight.ndim != _RANK or weight.shape[1] > _FEW or not sizes or None in sizes[2:]:
        return maker
    plain = attrs.get("group", 1) == 1 and list(attrs.get("dilations", [1, 1])) == [1, 1]
    if not plain or list(attrs.get("strides", [1, 1])) != [2, 2] or attrs.get("auto_pad") not in _NO_NAME:
        return maker
    pads = list(attrs.get("pads", [0] * 4))
    axes = [_axis(int(sizes[i + 2] or 0), weight.shape[i + 2], pads[i], pads[i + 2]) for i in range(2)]
    if any(axis is None for axis in axes) or weight.shape[2:] == (1, 1):
        return maker
    (height, width) = (axis for axis in axes if axis is not None)
    blocks = {
        "kernel_shape": [height[0], width[0]],
        "strides": [1, 1],
        "pads": [height[1], width[1], height[2], width[2]],
    }
    codes = b.node("SpaceToDepth", [maker.codes], blocksize=2)
    spread = _spread(weight, (pads[0], pads[1]), (height[0], width[0]))
    return replace(maker, codes=codes, weight=spread, attributes={**attrs, **blocks})


def _axis(size: int, kernel: int, before: int, after: int) -> tuple[int, int, int] | None:
    """Return kernel and pads over blocks of 2; None where the size is odd or a pad would be negative."""
    outputs = (size + before + after - kernel) // 2 + 1
    first, last = -before // 2, (kernel - 1 - before) // 2
    blocks = last - first + 1
    rest = outputs - 1 + blocks + first - size // 2
    return None if size % 2 or first > 0 or rest < 0 else (blocks, -first, rest)


def _spread(weight: Array, pads: tuple[int, int], blocks: tuple[int, int]) -> Array:
    """Return the weights of a kernel over blocks: the channels of a block are those of its four places, row by row."""
    outputs, channels, *kernel = weight.shape
    found = np.zeros((outputs, 2, 2, channels, *blocks), weight.dtype)
    firsts = [-pad // 2 for pad in pads]
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            places = (row - pads[0], column - pads[1])
            (i, y), (j, x) = ((place // 2 - first, place % 2) for place, first in zip(places, firsts, strict=True))
            found[:, y, x, :, i, j] = weight[:, :, row, column]
    return found.reshape(outputs, 4 * channels, *blocks)


def repeat(b: Builder, node: NodeProto) -> bool:
    """Write a Resize that repeats every position as Concats of whole rows of channels; False for any other node."""
    given = b.code_shapes.get(node.input[0]) if node.op_type == "Resize" and len(node.input) == _RANK else None
    stored = [tensor for tensor in b.initializers if given is not None and tensor.name == node.input[3]]
    if given is None or len(given) != _RANK or not stored or None in given:
        return False
    batch, channels, height, width = (int(size or 0) for size in given)
    sizes = numpy_helper.to_array(stored[0]).tolist()
    if min(batch, channels, height, width) < 1 or sizes[:2] != [batch, channels]:
        return False
    (down, rest_down), (across, rest_across) = divmod(sizes[2], height), divmod(sizes[3], width)
    modes = [attributes(node).get(key) for key in ("mode", "coordinate_transformation_mode", "nearest_mode")]
    repeats = [str(mode) for mode in modes] == ["nearest", "asymmetric", "floor"]
    if not repeats or rest_down or rest_across or not 0 < max(down, across) <= _MOST_COPIES or not down * across:
        return False
    b.label = node.output[0]
    last = b.node("Transpose", [node.input[0]], perm=list(_LAST))
    wide = b.node("Concat", [last] * across, axis=3)
    rows = b.node("Reshape", [wide, b.constant([batch * height, 1, across * width * channels], np.int64)])
    all_rows = b.node("Concat", [rows] * down, axis=1)
    shape = b.constant([batch, down * height, across * width, channels], np.int64)
    b.write("Transpose", [b.node("Reshape", [all_rows, shape])], node.output[0], perm=list(_FIRST))
    return True


def turned(b: Builder, codes: str, axis: int, rank: int | None) -> tuple[str, Sequence[int]]:
    """Write a Transpose that puts the channels of pictures last; return its result and the way back, none for others.

    The kernel of a Softmax would do the same by itself, where no other Transpose can meet it.
    """
    if rank != _RANK or axis not in (1, 1 - _RANK):
        return codes, ()
    return b.node("Transpose", [codes], perm=list(_LAST)), _FIRST


CONTRIB = "com.microsoft"
_INT32, _UINT8 = (1 << 31) - 1, (1 << 8) - 1
#: The largest sum of two weights of one sign for which `255 * w0 + 255 * w1` stays in int16.
_PAIR = 128


@dataclass(frozen=True)
class KernelChoice:
    """The kernels that may be written.

    Attributes:
        signed: weights as int8 always. The kernels for uint8 x int8 are the fastest, but on x86 processors without
            VNNI they add pairs of products in 16 bits that saturate. Else int8 is written only where no pair can.
    """

    signed: bool


def layer(b: Builder, op: Requantization, maker: Accumulation, kernels: KernelChoice) -> bool:
    """Write a layer and its requantization as one kernel; False if none fits."""
    if maker.weight_first:
        return False
    maker, term = _positive(maker, op.value.terms[0])
    scale, bias = _layer_scale(term, maker), _layer_bias(op, term, maker)
    if scale is None or bias is None or int(np.ptp(maker.weight)) > _UINT8:
        return False
    if maker.op_type == "Conv":
        maker = in_blocks(b, maker)
        tensors = [*_activation(b, maker.codes, maker.encoding), *_weight(b, maker, scale, kernels.signed)]
        tensors += _target(b, op.encoding)
        tensors += [b.constant(bias, np.int32)] if np.any(bias) else []
        _bounded(b, op, "QLinearConv", tensors, **maker.attributes)
        return True
    if not np.any(bias):
        tensors = [*_activation(b, maker.codes, maker.encoding), *_weight(b, maker, scale, kernels.signed)]
        _bounded(b, op, "QLinearMatMul", [*tensors, *_target(b, op.encoding)])
        return True
    if maker.weight.ndim == 2 and maker.rank is not None and maker.rank >= 2:
        _gemm(b, op, maker, scale, bias, kernels)
        return True
    return False


def _gemm(
    b: Builder, op: Requantization, maker: Accumulation, scale: Array, bias: Array, kernels: KernelChoice
) -> None:
    """Write a MatMul with a bias as QGemm, which takes matrices only."""
    depth, width = maker.weight.shape
    codes = maker.codes
    if maker.rank != 2:
        codes = b.node("Reshape", [codes, b.constant([-1, depth], np.int64)])
    tensors = [*_activation(b, codes, maker.encoding), *_weight(b, maker, scale, kernels.signed)]
    tensors += [b.constant(bias, np.int32), *_target(b, op.encoding)]
    if maker.rank == 2:
        _bounded(b, op, "QGemm", tensors, domain=CONTRIB)
        return
    flat = b.node("QGemm", tensors, domain=CONTRIB)
    sizes = b.code_shapes.get(maker.codes, (None, None))
    if sum(size is None for size in sizes[:-1]) < 2 and 0 not in sizes:
        shape = b.constant64([*(-1 if size is None else size for size in sizes[:-1]), width])
    else:
        leading = b.node("Slice", [b.node("Shape", [maker.codes]), *(b.constant64([v]) for v in (0, -1))])
        shape = b.node("Concat", [leading, b.constant64([width])], axis=0)
    _bounded(b, op, "Reshape", [flat, shape])


def product(b: Builder, op: Requantization, maker: Product) -> bool:
    """Write a product of two activations and its requantization as one kernel; False if none fits."""
    term = op.value.terms[0]
    exact = maker.left.encoding.scale * maker.right.encoding.scale
    if np.any(op.value.constant) or np.any(term.zero) or term.scale.size != 1 or term.scale.item() <= 0:
        return False
    # a constant that was multiplied in is the left operand's
    left = _scaled(b, maker.left, float(term.scale.item() / exact))
    tensors = [*left, *_activation(b, maker.right.codes, maker.right.encoding), *_target(b, op.encoding)]
    if maker.op_type == "MatMul":
        _bounded(b, op, "QLinearMatMul", tensors)
    else:
        _bounded(b, op, "QLinearMul", tensors, domain=CONTRIB)
    return True


def addition(b: Builder, op: Requantization) -> bool:
    """Write the sum of two activations as QLinearAdd, a difference with a negative scale; False if it is none."""
    terms = op.value.terms
    plain = all(term.codes and term.scale.size == 1 and term.zero.size == 1 and term.hi.max() <= 255 for term in terms)
    if len(terms) != 2 or not plain or np.any(op.value.constant):
        return False
    tensors = []
    for term in terms:
        tensors += [term.name, b.constant(np.float32(term.scale.item())), b.constant(np.uint8(term.zero.item()))]
    _bounded(b, op, "QLinearAdd", [*tensors, *_target(b, op.encoding)], domain=CONTRIB)
    return True


def softmax(b: Builder, op: Requantization, whole: Softmax) -> bool:
    """Write a Softmax of codes as its kernel; False where that is further from the real value than `SOFTMAX_CLOSE`.

    The kernel multiplies the share of an exponential in the sum by the whole part of `1 / scale`: the scale written is
    one for which that is the nearest whole number.
    """
    (scale,) = of_whole_steps(np.array([op.encoding.scale]))
    error = softmax_error(softmax_steps(scale), op.encoding.scale, op.encoding.hi)
    error += min(softmax_steps(scale), op.encoding.hi) * (whole.length + 8) * 2.0**-24
    if error > SOFTMAX_CLOSE or whole.length < 2:  # for one element, whose share is 1, the kernel computes 0
        return False
    codes, back = turned(b, whole.codes, whole.axis, whole.rank)
    tensors = [*_activation(b, codes, whole.encoding), b.constant(scale)]
    tensors.append(b.constant(np.uint8(op.encoding.zero_point)))
    axis = -1 if back else whole.axis
    _bounded(b, op, "QLinearSoftmax", tensors, back=back, domain=CONTRIB, axis=axis, opset=13)
    op.row["error_bound"] = float(error)
    return True


def pool(b: Builder, op: Requantization, maker: WindowSum) -> bool:
    """Write an average over windows or over all positions as its kernel; False if it is neither."""
    term = op.value.terms[0]
    if np.any(op.value.constant) or np.any(term.zero) or term.scale.size != 1:
        return False
    scale = float(term.scale.item())
    tensors = [maker.codes, "", b.constant(np.uint8(maker.encoding.zero_point)), *_target(b, op.encoding)]
    if maker.op_type == "ReduceSum":
        if maker.rank < 3 or maker.axes != tuple(range(2, maker.rank)):
            return False
        tensors[1] = b.constant(np.float32(scale * maker.count))
        if maker.attributes["keepdims"]:
            _bounded(b, op, "QLinearGlobalAveragePool", tensors, domain=CONTRIB, channels_last=0)
        else:
            pooled = b.node("QLinearGlobalAveragePool", tensors, domain=CONTRIB, channels_last=0)
            _bounded(b, op, "Squeeze", [pooled, b.constant(list(maker.axes), np.int64)])
        return True
    window = dict(maker.attributes)
    if any(window["pads"]) or any(d != 1 for d in window.pop("dilations")):
        return False
    tensors[1] = b.constant(np.float32(scale * np.prod(window["kernel_shape"])))
    _bounded(b, op, "QLinearAveragePool", tensors, domain=CONTRIB, channels_last=0, **window)
    return True


def function(b: Builder, op: Table) -> bool:
    """Write a table as the kernel of the one op it computes; False if there is none."""
    if op.plain is not None:
        tensors = [*_target(b, op.encoding), *_activation(b, op.codes, op.plain)]
        op.row["form"] = "QLinearConcat"
        b.write("QLinearConcat", tensors, op.result, domain=CONTRIB, axis=0)
        return True
    if op.function is not None and op.function.op_type in ("HardSwish", "Silu"):
        return _gated(b, op, op.function)
    if op.function is None or op.function.op_type not in ("Sigmoid", "LeakyRelu") or op.function.encoding.wide:
        return False
    tensors = [*_activation(b, op.codes, op.function.encoding), *_target(b, op.encoding)]
    attributes: Mapping[str, float] = {}
    if op.function.op_type == "LeakyRelu":
        attributes = {"alpha": float(op.function.attributes.get("alpha", 0.01))}
    op.row["form"] = f"QLinear{op.function.op_type}"
    b.write(f"QLinear{op.function.op_type}", tensors, op.result, domain=CONTRIB, **attributes)
    return True


def _gated(b: Builder, op: Table, made_by: Function) -> bool:
    """Write `x * gate(x)` in kernels, faster than a table; False where 8 bits for the gate are not enough.

    The rounding of the gate must not move any code of the result by more than one step; the row counts these.
    """
    encoding = made_by.encoding
    if encoding.wide:
        return False
    values, x = encoding.values().astype(np.float64), _activation(b, op.codes, encoding)
    if made_by.op_type == "Silu":
        gate = line = ActivationEncoding(1.0 / 256.0, 0, int(TensorProto.UINT8))
        codes, form = gate.quantize(1.0 / (1.0 + np.exp(-values))), ["QLinearSigmoid"]
    else:  # x / 6 + 1 / 2 within 0..1 is x in another encoding, cut at its ends
        gate, line = (ActivationEncoding(s / 254.0, z, int(TensorProto.UINT8)) for s, z in ((1.0, 1), (6.0, 128)))
        codes, form = line.quantize(values).clip(1), ["QLinearConcat", "Clip"]
    off = np.abs(op.encoding.quantize(values * gate.values()[codes]) - op.table)
    if off.max() > 1:
        return False
    if made_by.op_type == "Silu":
        name = b.node("QLinearSigmoid", [*x, *_target(b, line)], domain=CONTRIB)
    else:
        name = b.node("QLinearConcat", [*_target(b, line), *x], domain=CONTRIB, axis=0)
        name = b.node("Clip", [name, b.constant(1, np.uint8), b.constant(255, np.uint8)])
    differing = int(np.count_nonzero(off))
    op.row.update(form=", ".join([*form, "QLinearMul"]), error_bound=float(off.max()), codes_differing=differing)
    b.write("QLinearMul", [*x, *_activation(b, name, gate), *_target(b, op.encoding)], op.result, domain=CONTRIB)
    return True


def join(b: Builder, op: Join, tables: Mapping[str, Table]) -> bool:
    """Write a Concat and the tables that only bring its parts to one encoding as one kernel; False without such."""
    if not tables:
        return False
    tensors = _target(b, op.encoding)
    for part in op.parts:
        table = tables.get(part)
        if table is not None and table.plain is not None:
            tensors += _activation(b, table.codes, table.plain)
        else:
            tensors += _activation(b, part, op.encoding)
    b.write("QLinearConcat", tensors, op.result, domain=CONTRIB, axis=op.axis)
    return True


def _activation(b: Builder, codes: str, encoding: ActivationEncoding) -> list[str]:
    return [codes, *_target(b, encoding)]


def _target(b: Builder, encoding: ActivationEncoding) -> list[str]:
    return [b.constant(np.float32(encoding.scale)), b.constant(np.uint8(encoding.zero_point))]


def _scaled(b: Builder, operand: CodesOperand, factor: float) -> list[str]:
    scale = np.float32(operand.encoding.scale * factor)
    return [operand.codes, b.constant(scale), b.constant(np.uint8(operand.encoding.zero_point))]


def _channels(maker: Accumulation) -> int:
    return int(maker.weight.shape[0 if maker.op_type == "Conv" else -1])


def _positive(maker: Accumulation, term: Term) -> tuple[Accumulation, Term]:
    """Return a layer whose multipliers are positive: weights of channels with a negative one change their sign.

    A multiplier is negative, or 0, where a PRelu's slope is multiplied in.
    """
    if np.all(term.scale > 0) or term.scale.size not in (1, _channels(maker)):
        return maker, term
    sign = np.sign(term.scale).astype(np.int64)
    term = replace(term, scale=np.where(sign, np.abs(term.scale), 1.0), zero=term.zero * sign)
    if maker.op_type == "Conv" and sign.size > 1:
        sign = sign.reshape(-1, *(1 for _ in maker.weight.shape[1:]))
    weight = maker.weight * (sign if sign.size > 1 else sign.item())
    return replace(maker, weight=weight, zero=-int(weight.min(initial=0))), term


def _layer_scale(term: Term, maker: Accumulation) -> Array | None:
    """Return the weight's scale, shape () or (channels,), with all factors of the sum; None if one is not positive."""
    channels = _channels(maker)
    scale = term.scale / maker.encoding.scale
    if scale.size not in (1, channels) or np.any(scale <= 0):
        return None
    return scale.reshape(-1 if scale.size == channels and scale.ndim else ())


def _layer_bias(op: Requantization, term: Term, maker: Accumulation) -> Array | None:
    """Return the int32 bias, shape (channels,); None if it is not one value per channel or leaves int32."""
    channels = _channels(maker)
    bias = np.rint(op.value.constant / term.scale) - term.zero
    if bias.size not in (1, channels) or np.any(np.abs(bias) > _INT32):
        return None
    return np.broadcast_to(bias.reshape(-1), (channels,)).astype(np.int64)


def _weight(b: Builder, op: Accumulation, scale: Array, signed: bool) -> list[str]:
    """Return the names of a weight, its scale and its zero point."""
    low, high = int(op.weight.min(initial=0)), int(op.weight.max(initial=0))
    small = low >= -128 and high <= 127
    as_signed = small and (signed or _pairs_fit(op))
    zero = 0 if as_signed else 128 if small else op.zero
    kind: Any = np.int8 if as_signed else np.uint8
    stored, points = (op.weight + zero).astype(kind), np.full(scale.shape, zero, kind)
    return [b.constant(stored, stem=op.stem), b.constant(scale, np.float32), b.constant(points)]


def _pairs_fit(op: Accumulation) -> bool:
    """Return True if no two weights of an output channel can overflow a 16-bit sum of two products, in any order."""
    channels = (
        op.weight.reshape(len(op.weight), -1) if op.op_type == "Conv" else op.weight.reshape(-1, op.weight.shape[-1]).T
    )
    if channels.shape[1] < 2:
        return True
    top = np.partition(channels, -2)[:, -2:].clip(0).sum(1).max()
    bottom = np.partition(-channels, -2)[:, -2:].clip(0).sum(1).max()
    return bool(max(top, bottom) <= _PAIR)


def _bounded(
    b: Builder,
    op: Requantization,
    op_type: str,
    inputs: list[str],
    *,
    back: Sequence[int] = (),
    domain: str = "",
    **attrs: Any,
) -> None:
    """Write the kernel, and behind it a Transpose `back` and a Clip where a bound is tighter than the grid's."""
    op.row.update(form=op_type, rounding="half_even")
    lo, hi = op.bounds
    if (lo, hi) == (0, 255):
        if back:
            b.write("Transpose", [b.node(op_type, inputs, domain=domain, **attrs)], op.result, perm=list(back))
        else:
            b.write(op_type, inputs, op.result, domain=domain, **attrs)
        return
    free = b.node(op_type, inputs, domain=domain, **attrs)
    free = b.node("Transpose", [free], perm=list(back)) if back else free
    b.write("Clip", [free, b.constant(lo, np.uint8), b.constant(hi, np.uint8)], op.result)
