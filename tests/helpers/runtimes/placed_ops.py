"""Ops at several ranks and axes, for probes that place them behind others: what stands between "d" and "r"."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

SHAPES = {2: (6, 8), 3: (2, 6, 8), 4: (2, 4, 6, 8), 5: (2, 2, 4, 6, 8)}
UNARY = "Relu Sigmoid Tanh LeakyRelu HardSwish Gelu Identity Abs Neg Exp Elu HardSigmoid Softplus Erf Sin"
UNARY += " Cos Mish"
BINARY = ("Add", "Mul", "Sub", "Div", "Max", "Min", "Pow")
REDUCED = ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceL2")


@dataclass(frozen=True)
class Op:
    """An op that reads "d" and gives "r".

    Attributes:
        name: says its axes and its operand too.
        type: of the node.
        operands: name -> stored value of its further inputs, in order; "" leaves one out.
        attributes: of the node.
        layer: a stored int8 weight of this shape, with scales along the axis `channel`.
        moves: it moves elements, so that its result may have the grid of what it reads.
    """

    name: str
    type: str
    operands: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    layer: tuple[int, ...] = ()
    channel: int = 0
    moves: bool = False

    def nodes(self, source: str, result: str) -> list[NodeProto]:
        """The op from one tensor to another; its operands are shared by all that are made of it."""
        if self.type == "MatMul of itself":
            rank = len(self.operands["rank"])
            perm = [*range(rank - 2), rank - 1, rank - 2]
            turned = helper.make_node("Transpose", [source], [f"{result}_turned"], perm=perm)
            return [turned, helper.make_node("MatMul", [source, f"{result}_turned"], [result])]
        more = ["weight"] if self.layer else [name if not name.startswith("_") else "" for name in self.operands]
        if self.type in BINARY and not self.operands:
            more = [source]
        results = [result, f"{result}_rest"] if self.type == "Split" else [result]
        return [helper.make_node(self.type, [source, *more], results, f"{result}_op", **self.attributes)]

    def stored(self) -> tuple[list[TensorProto], list[NodeProto]]:
        """The tensors that it reads, and the nodes that dequantize them."""
        if not self.layer:
            plain = {k: v for k, v in self.operands.items() if k != "rank" and not k.startswith("_")}
            return [numpy_helper.from_array(np.asarray(value), name) for name, value in plain.items()], []
        rng = np.random.default_rng(1)
        codes = rng.integers(-100, 101, self.layer).astype(np.int8)
        scales = (rng.random(self.layer[self.channel]) * 0.01 + 0.002).astype(np.float32)
        values = {"weight_q": codes, "weight_s": scales, "weight_z": np.zeros(len(scales), np.int8)}
        node = helper.make_node("DequantizeLinear", list(values), ["weight"], axis=self.channel)
        return [numpy_helper.from_array(value, name) for name, value in values.items()], [node]


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def ops_of(rank: int) -> list[Op]:
    """All ops at a rank."""
    return [*_elementwise(rank), *_along_axes(rank), *_moves(rank), *_layers(rank), *_pools(rank)]


def _elementwise(rank: int) -> Iterator[Op]:
    yield from (Op(name, name) for name in UNARY.split())
    yield Op("Clip", "Clip", {"low": np.float32(-0.5), "high": np.float32(1.5)})
    shape = SHAPES[rank]
    for name in BINARY:
        if name not in ("Div", "Pow"):
            yield Op(f"{name} itself", name)
        yield Op(f"{name} a number", name, {"number": np.float32(2)})
        if name != "Pow":
            row = np.linspace(0.5, 3, shape[-1], dtype=np.float32)
            yield Op(f"{name} a row", name, {"row": row})
            column = np.linspace(0.5, 3, shape[-2], dtype=np.float32)[:, None]
            yield Op(f"{name} a column", name, {"column": column})
    yield Op("PRelu", "PRelu", {"slope": np.float32([0.25])})


def _along_axes(rank: int) -> Iterator[Op]:
    for axis in range(rank):
        for kind in REDUCED:
            for keep in (0, 1):
                yield Op(f"{kind} of {axis}, keepdims={keep}", kind, {"axes": ints(axis)}, {"keepdims": keep})
        for kind in ("Softmax", "LogSoftmax", "LpNormalization"):
            yield Op(f"{kind} of {axis}", kind, {}, {"axis": axis})
        yield Op(f"CumSum of {axis - rank}", "CumSum", {"axis": np.int64(axis - rank)})
        yield Op(f"LayerNormalization from {axis}", "LayerNormalization", _gain(SHAPES[rank][axis:]), {"axis": axis})
    for kind in ("ReduceMean", "ReduceMax", "ReduceSum"):
        for axes in [(0, 1), (rank - 2, rank - 1), tuple(range(rank))]:
            yield Op(f"{kind} of {axes}", kind, {"axes": ints(*axes)}, {"keepdims": 1})
    if rank > 2:
        channels = SHAPES[rank][1]
        norm = {"gain": np.linspace(0.5, 2, channels, dtype=np.float32), "bias": np.zeros(channels, np.float32)}
        yield Op("InstanceNormalization", "InstanceNormalization", norm)
        mean = {"mean": np.zeros(channels, np.float32), "variance": np.full(channels, 1.5, np.float32)}
        yield Op("BatchNormalization", "BatchNormalization", norm | mean)


def _gain(shape: tuple[int, ...]) -> dict[str, Any]:
    return {"gain": np.full(shape, 1.25, np.float32), "bias": np.full(shape, 0.1, np.float32)}


def _moves(rank: int) -> Iterator[Op]:
    shape = SHAPES[rank]
    perms = {tuple(reversed(range(rank))), (*range(1, rank), 0), (*range(rank - 2), rank - 1, rank - 2)}
    if rank > 2:
        perms |= {(0, *range(2, rank), 1), (1, 0, *range(2, rank))}
    for perm in sorted(perms):
        yield Op(f"Transpose by {perm}", "Transpose", {}, {"perm": list(perm)}, moves=True)
    yield Op("Reshape to a row", "Reshape", {"shape": ints(1, -1)}, moves=True)
    yield Op("Reshape to halves", "Reshape", {"shape": ints(*shape[:-1], 2, shape[-1] // 2)}, moves=True)
    yield Op("Unsqueeze", "Unsqueeze", {"axes": ints(1)}, moves=True)
    yield Op("Expand", "Expand", {"shape": ints(2, *shape)}, moves=True)
    for axis in range(rank):
        yield Op(f"Flatten at {axis}", "Flatten", {}, {"axis": axis}, moves=True)
        yield Op(f"Concat along {axis}", "Concat", {}, {"axis": axis}, moves=True)
        yield Op(f"Gather along {axis}", "Gather", {"at": ints(1, 0)}, {"axis": axis}, moves=True)
        yield Op(f"Gather one along {axis}", "Gather", {"at": np.int64(1)}, {"axis": axis}, moves=True)
        sizes = ints(1, shape[axis] - 1)
        yield Op(f"Split along {axis}", "Split", {"split": sizes}, {"axis": axis}, moves=True)
        where = {"starts": ints(0), "ends": ints(2**31 - 1), "axes": ints(axis)}
        yield Op(f"Slice along {axis}", "Slice", {**where, "starts": ints(1)}, moves=True)
        yield Op(f"Slice every second along {axis}", "Slice", {**where, "steps": ints(2)}, moves=True)
        backwards = {"starts": ints(-1), "ends": ints(-(2**31)), "axes": ints(axis), "steps": ints(-1)}
        yield Op(f"Slice backwards along {axis}", "Slice", backwards, moves=True)
        repeats = ints(*(2 if at == axis else 1 for at in range(rank)))
        yield Op(f"Tile along {axis}", "Tile", {"repeats": repeats}, moves=True)
        pads = ints(*(1 if at == axis else 0 for at in range(2 * rank)))
        for mode in ("constant", "edge", "reflect"):
            yield Op(f"Pad along {axis}, {mode}", "Pad", {"pads": pads}, {"mode": mode}, moves=True)
    if rank == 4:
        for mode in ("DCR", "CRD"):
            yield Op(f"DepthToSpace {mode}", "DepthToSpace", {}, {"blocksize": 2, "mode": mode}, moves=True)
        yield Op("SpaceToDepth", "SpaceToDepth", {}, {"blocksize": 2}, moves=True)
    if rank > 2:
        scales = np.array([1, 1, *[2] * (rank - 2)], np.float32)
        for mode in ("nearest", "linear"):
            for how in ("half_pixel", "asymmetric", "align_corners"):
                options = {"mode": mode, "coordinate_transformation_mode": how}
                yield Op(f"Resize {mode}, {how}", "Resize", {"_roi": 0, "scales": scales}, options)


def _layers(rank: int) -> Iterator[Op]:
    shape = SHAPES[rank]
    yield Op("MatMul by a weight", "MatMul", layer=(shape[-1], 5), channel=1)
    yield Op("MatMul of itself", "MatMul of itself", {"rank": shape})
    if rank == 2:
        yield Op("Gemm", "Gemm", layer=(8, 5), channel=1)
        yield Op("Gemm, turned", "Gemm", {}, {"transB": 1}, (5, 8), 0)
        return
    kernel, channels = [3] * (rank - 2), shape[1]
    same = {"pads": [1] * (2 * rank - 4)}
    yield Op("Conv", "Conv", {}, same, (6, channels, *kernel), 0)
    yield Op("Conv by 1", "Conv", {}, {}, (6, channels, *[1] * (rank - 2)), 0)
    yield Op("Conv, strides", "Conv", {}, same | {"strides": [2] * (rank - 2)}, (6, channels, *kernel), 0)
    yield Op(
        "Conv, dilated",
        "Conv",
        {},
        {"dilations": [2] * (rank - 2), "pads": [2] * (2 * rank - 4)},
        (6, channels, *kernel),
    )
    one_sided = {"pads": [0] * (rank - 2) + [1] * (rank - 2)}
    yield Op("Conv, padded at the end", "Conv", {}, one_sided, (6, channels, *kernel), 0)
    yield Op("Conv, a channel each", "Conv", {}, same | {"group": channels}, (channels, 1, *kernel), 0)
    yield Op("Conv, two groups", "Conv", {}, same | {"group": 2}, (6, channels // 2, *kernel), 0)
    yield Op("ConvTranspose", "ConvTranspose", {}, {"strides": [2] * (rank - 2)}, (channels, 6, *kernel), 1)


def _pools(rank: int) -> Iterator[Op]:
    if rank == 2:
        return
    yield Op("GlobalAveragePool", "GlobalAveragePool")
    yield Op("GlobalMaxPool", "GlobalMaxPool", moves=True)
    window = {"kernel_shape": [3] * (rank - 2), "strides": [2] * (rank - 2)}
    padded = window | {"pads": [1] * (2 * rank - 4)}
    for kind in ("MaxPool", "AveragePool"):
        yield Op(f"{kind} without padding", kind, {}, window, moves=kind == "MaxPool")
        yield Op(f"{kind} with padding", kind, {}, padded, moves=kind == "MaxPool")
        yield Op(f"{kind}, ceil_mode", kind, {}, window | {"ceil_mode": 1}, moves=kind == "MaxPool")
    yield Op("AveragePool that counts its padding", "AveragePool", {}, padded | {"count_include_pad": 1})
