"""One op in the surroundings that it has in networks: behind another op, on one grid with it, sharing its constants."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from placed_ops import SHAPES, Op

from onnx_backend.parity.teacher import RunOn
from onnx_backend.runtimes.registry import open_in, runtime_named
from qsdk import ModelError, QsdkError

Front = Literal["", "Add", "Reshape", "Transpose", "Conv"]
Grids = Literal["own", "same", "shared"]
#: what is in front -> the grids: own scales, one scale stored twice, or one stored tensor for all pairs
PLACES: tuple[tuple[Front, Grids], ...] = (
    *(("", grids) for grids in ("own", "same", "shared")),
    *((front, "own") for front in ("Add", "Transpose", "Conv")),
    ("Add", "shared"),
)
GRID = (0.03, 117)  # scale and zero point of 8 bits


@dataclass(frozen=True)
class Placed:
    """An op at a rank, behind a front, with grids."""

    op: Op
    rank: int
    front: Front
    grids: Grids
    runtime: str

    def __str__(self) -> str:
        return f"{self.op.name} at rank {self.rank}, behind {self.front or 'an input'}, grids {self.grids}"

    def model(self, last: tuple[float, int] = GRID) -> ModelProto:
        """The probe; its result has this scale and zero point."""
        build = _Builder(self)
        source = build.pair("x", "x")
        if self.front:
            grid = (2 * GRID[0], GRID[1]) if self.front == "Add" else GRID  # in which the front's result is exact
            source = build.pair(build.in_front(source), "d", grid)
        stored, nodes = self.op.stored()
        build.stored += stored
        build.nodes += [*nodes, *self.op.nodes(source, "r")]
        result = build.pair("r", "r", last)
        outputs = [result]
        if self.grids == "shared":  # a second reader of the operands and of the grid
            build.nodes += self.op.nodes(source, "again")
            outputs.append(build.pair("again", "again", last))
        return build.model(SHAPES[self.rank], outputs)

    def values(self) -> np.ndarray:
        """Values of the whole grid of the input."""
        scale, zero = GRID
        codes = np.random.default_rng(0).integers(0, 256, SHAPES[self.rank])
        return ((codes - zero) * np.float32(scale)).astype(np.float32)

    def off(self) -> float:
        """How many steps the runtime is off; infinite where it does not run.

        Raises:
            QsdkError: ONNX Runtime does not run it either.
        """
        feeds, last = {"x": self.values()}, last_grid(self)
        model = self.model(last)
        wanted = RunOn().open(model).run(feeds)
        try:
            found = open_in(self.runtime, model).run(feeds)
        except ModelError:
            return float("inf")
        if any(np.shape(a) != np.shape(b) for a, b in zip(found, wanted, strict=True)):
            return float("inf")
        return max(float(np.abs(a.astype(np.float64) - b).max()) / last[0] for a, b in zip(found, wanted, strict=True))


class _Builder:
    """A probe while it is written."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.nodes, self.stored = placed, list[NodeProto](), list[TensorProto]()
        self.explicit = runtime_named(placed.runtime).explicit

    def pair(self, tensor: str, name: str, grid: tuple[float, int] = GRID) -> str:
        """Quantize and dequantize a tensor; return the result's name."""
        shared = self.placed.grids == "shared"
        key = "all" if shared else name
        scale, zero = GRID if self.placed.grids != "own" else grid
        names = {f"{key}_scale": np.float32(scale), f"{key}_zero": np.uint8(zero)}
        known = {tensor.name for tensor in self.stored}
        self.stored += [numpy_helper.from_array(np.asarray(v), n) for n, v in names.items() if n not in known]
        options = {} if self.explicit else {"output_dtype": TensorProto.UINT8}
        self.nodes.append(helper.make_node("QuantizeLinear", [tensor, *names], [f"{name}_q"], f"{name}_Q", **options))
        self.nodes.append(helper.make_node("DequantizeLinear", [f"{name}_q", *names], [f"{name}_d"], f"{name}_DQ"))
        return f"{name}_d"

    def in_front(self, source: str) -> str:
        """The op in front, whose result is exact; it keeps the shape, or a second one restores it."""
        shape, front = SHAPES[self.placed.rank], self.placed.front
        if front == "Add":
            self.nodes.append(helper.make_node("Add", [source, source], ["front"]))
        elif front == "Reshape":
            self._store("front_shape", np.array([*shape[:-2], shape[-1], shape[-2]], np.int64))
            self._store("back_shape", np.array(shape, np.int64))
            self.nodes.append(helper.make_node("Reshape", [source, "front_shape"], ["turned"]))
            self.nodes.append(helper.make_node("Reshape", [self.pair("turned", "x2"), "back_shape"], ["front"]))
        elif front == "Transpose":
            perm = [*range(1, len(shape)), 0]
            back = [len(shape) - 1, *range(len(shape) - 1)]
            self.nodes.append(helper.make_node("Transpose", [source], ["turned"], perm=perm))
            self.nodes.append(helper.make_node("Transpose", [self.pair("turned", "x2")], ["front"], perm=back))
        else:
            channels = shape[1]
            codes = np.eye(channels, dtype=np.int8).reshape(channels, channels, *[1] * (len(shape) - 2))
            self._store("front_q", 64 * codes)
            self._store("front_s", np.full(channels, 1 / 64, np.float32))
            self._store("front_z", np.zeros(channels, np.int8))
            names = ["front_q", "front_s", "front_z"]
            self.nodes.append(helper.make_node("DequantizeLinear", names, ["front_weight"], axis=0))
            self.nodes.append(helper.make_node("Conv", [source, "front_weight"], ["front"]))
        return "front"

    def _store(self, name: str, value: np.ndarray) -> None:
        self.stored.append(numpy_helper.from_array(value, name))

    def model(self, shape: tuple[int, ...], outputs: list[str]) -> ModelProto:
        values = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "placed", values, ends, self.stored)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        runtime_named(self.placed.runtime).finish(model)
        return onnx.shape_inference.infer_shapes(model)


def _unrounded(model: ModelProto) -> ModelProto:
    """The model with the op's own result, in floats, as its only output."""
    found = ModelProto()
    found.CopyFrom(model)
    del found.graph.output[:]
    found.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, None))
    kept = [node for node in found.graph.node if node.name not in ("r_Q", "r_DQ")]
    del found.graph.node[:]
    found.graph.node.extend(kept)
    return found


def _grid_of(values: np.ndarray) -> tuple[float, int]:
    """Scale and zero point of 8 bits for values, as min-max calibration finds them."""
    finite = values[np.isfinite(values)] if values.size else np.zeros(1)
    low, high = min(float(finite.min(initial=0)), 0.0), max(float(finite.max(initial=0)), 0.0)
    scale = max((high - low) / 255, 1e-3)
    return scale, round(-low / scale)


def last_grid(placed: Placed) -> tuple[float, int]:
    """The grid of a probe's result: one of its values where it has its own."""
    if placed.grids != "own":
        return GRID
    return _grid_of(RunOn().open(_unrounded(placed.model())).run({"x": placed.values()})[0])


def is_placed(placed: Placed) -> bool:
    """Whether there is such a probe: no convolution has rank 2, and what computes has a grid of its own."""
    return not (placed.front == "Conv" and placed.rank == 2) and (placed.grids != "same" or placed.op.moves)


def wrong_in(runtime: str, op: Op, rank: int) -> dict[tuple[str, str], float]:
    """Place -> steps off, where an op is refused or more than a step off."""
    found = {}
    for front, grids in PLACES:
        placed = Placed(op, rank, front, grids, runtime)
        if is_placed(placed):
            try:
                off = placed.off()
            except QsdkError:
                return {}
            if off > 1.01:
                found[front, grids] = round(off, 1)
    return found
