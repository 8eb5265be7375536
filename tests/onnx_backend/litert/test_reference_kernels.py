"""Predictions of LiteRT's kernels: one op on random grids and codes, bit for bit against the installed interpreter."""

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType

from onnx_backend.litert.program import Grid, Op, Program, Tensor, from_bytes, to_bytes
from onnx_backend.litert.reference import run

SEEDS = range(4)
#: bits of activations -> the multiplier of the scales of 8 bits
FINER = {"int8": 1.0, "int16": 1 / 128}


class OneOp:
    """A program of one op, with random grids; an int16 grid has a zero point of 0."""

    def __init__(self, seed: int, dtype: str = "int8") -> None:
        self.random, self.dtype, self.program = np.random.default_rng(seed), dtype, Program()

    def grid(self, low: float = 0.01, high: float = 0.1, *, around: int = 128) -> Grid:
        zero = int(self.random.integers(-around, around)) if self.dtype == "int8" else 0
        return Grid.of(self.dtype, float(self.random.uniform(low, high)) * FINER[self.dtype], zero)

    def given(self, *shape: int, grid: Grid | None = None) -> int:
        number = self.program.add(Tensor(f"x{len(self.program.tensors)}", shape, self.dtype, grid or self.grid()))
        self.program.inputs.append(number)
        return number

    def ints(self, *values) -> int:
        held = np.array(values, np.int32)
        return self.program.add(Tensor("ints", held.shape, "int32", None, held))

    def weight(self, x: int, *shape: int, axis: int = 0, bits: int = 8) -> tuple[int, int]:
        """Add a weight with a scale for each index of an axis, and its bias."""
        count, dtype = shape[axis], "int4" if bits == 4 else "int8"
        scales = self.random.uniform(0.001, 0.02, count).astype(np.float32) * (1 << (8 - bits))
        codes = self.random.integers(-(1 << (bits - 1)), 1 << (bits - 1), shape).astype(np.int8)
        zeros = np.zeros(count, np.int64)
        weight = self.program.add(Tensor("w", shape, dtype, Grid(dtype, scales, zeros, axis), codes))
        step = self.program.tensors[x].grid.scale[0]
        wide = "int32" if self.dtype == "int8" else "int64"
        held = self.random.integers(-20000, 20000, count).astype(wide)
        grid = Grid(wide, (np.float64(step) * scales).astype(np.float32), zeros)
        return weight, self.program.add(Tensor("b", (count,), wide, grid, held))

    def differing(self, op: str, inputs, shape, grid: Grid, codes=None, **options) -> int:
        """Run the op in LiteRT and by the prediction, on random codes or these; return how many codes differ."""
        made = self.program.add(Tensor("y", tuple(shape), self.dtype, grid))
        self.program.ops.append(Op(op, tuple(inputs), (made,), options))
        self.program.outputs = [made]
        low, high = grid.bounds
        feeds = codes or [
            self.random.integers(low, high + 1, self.program.tensors[n].shape).astype(self.dtype)
            for n in self.program.inputs
        ]
        data = to_bytes(self.program)
        interpreter = Interpreter(model_content=data, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
        interpreter.allocate_tensors()
        for detail, feed in zip(interpreter.get_input_details(), feeds, strict=True):
            interpreter.set_tensor(detail["index"], feed)
        interpreter.invoke()
        got = interpreter.get_tensor(made)
        predicted = run(from_bytes(data, "the file"), feeds)[made]
        assert len(np.unique(got)) > 4, "the codes say nothing"
        return int(np.sum(got.astype(np.int64) != predicted))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("dtype", "padding", "stride", "dilation", "groups"),
    [
        ("int8", 0, 1, 1, 1),
        ("int8", 0, 2, 1, 1),
        ("int8", 1, 1, 2, 1),
        ("int8", 0, 1, 1, 2),
        ("int16", 0, 2, 1, 1),
        ("int16", 1, 1, 2, 1),
    ],
)
def test_convolutions_are_predicted(seed, dtype, padding, stride, dilation, groups):
    one = OneOp(seed, dtype)
    x = one.given(2, 9, 8, 4)
    weight, bias = one.weight(x, 6, 3, 2, 4 // groups)
    height, width = (-(-9 // stride), -(-8 // stride)) if padding == 0 else (9 - 2 * dilation, 8 - dilation)
    options = {"padding": padding, "strideH": stride, "strideW": stride, "fusedActivationFunction": seed % 4}
    options |= {"dilationHFactor": dilation, "dilationWFactor": dilation}
    assert one.differing("CONV_2D", (x, weight, bias), (2, height, width, 6), one.grid(0.1, 0.5), **options) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
def test_depthwise_convolutions_are_predicted(seed, dtype):
    one = OneOp(seed, dtype)
    x = one.given(2, 9, 8, 4)
    weight, bias = one.weight(x, 1, 3, 3, 8, axis=3)
    options = {"padding": 0, "strideH": 2, "strideW": 2, "depthMultiplier": 2, "fusedActivationFunction": 0}
    options |= {"dilationHFactor": 1, "dilationWFactor": 1}
    assert one.differing("DEPTHWISE_CONV_2D", (x, weight, bias), (2, 5, 4, 8), one.grid(0.05, 0.2), **options) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize(("padding", "window", "sizes"), [(0, 3, (8, 6)), (1, 3, (9, 7)), (1, 2, (8, 6))])
def test_transposed_convolutions_are_predicted(seed, dtype, padding, window, sizes):
    one = OneOp(seed, dtype)
    x = one.given(2, 4, 3, 5)
    weight, bias = one.weight(x, 4, window, window, 5)
    options = {"padding": padding, "strideH": 2, "strideW": 2, "fusedActivationFunction": 0}
    wanted = one.ints(2, *sizes, 4)
    assert one.differing("TRANSPOSE_CONV", (wanted, weight, x, bias), (2, *sizes, 4), one.grid(), **options) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("dtype", "bits"), [("int8", 8), ("int8", 4), ("int16", 8)])
def test_fully_connected_layers_are_predicted(seed, dtype, bits):
    one = OneOp(seed, dtype)
    x = one.given(64, 32)
    weight, bias = one.weight(x, 24, 32, bits=bits)
    assert one.differing("FULLY_CONNECTED", (x, weight, bias), (64, 24), one.grid(0.1, 0.3)) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("flip", [False, True])
def test_products_of_activations_are_predicted(seed, dtype, flip):
    one = OneOp(seed, dtype)
    x = one.given(2, 3, 8, 16, grid=one.grid(around=9))
    y = one.given(2, 3, *((12, 16) if flip else (16, 12)), grid=one.grid(around=9))
    options = {"adjX": False, "adjY": flip}
    assert one.differing("BATCH_MATMUL", (x, y), (2, 3, 8, 12), one.grid(0.1, 0.4, around=90), **options) == 0


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_squares_are_predicted(seed):
    """In 16 bits a multiplier has 15 bits, so that the last bit of the product of the scales counts."""
    one = OneOp(seed, "int16")
    x = one.given(200, 1, 32)
    grid = Grid.of("int16", one.program.tensors[x].grid.step ** 2 * 32 * 32767 / 4, 0)  # as a norm has it
    assert one.differing("BATCH_MATMUL", (x, x), (200, 1, 1), grid, adjX=False, adjY=True) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int8", "int16"])
@pytest.mark.parametrize("op", ["ADD", "SUB", "MUL"])
def test_sums_and_products_are_predicted(seed, dtype, op):
    one = OneOp(seed, dtype)
    x, y = one.given(2, 5, 6, 8), one.given(2, 5, 6, 1)
    own = one.grid(0.05, 0.3) if dtype == "int8" or op != "MUL" else Grid.of("int16", 0.002, 0)
    assert one.differing(op, (x, y), (2, 5, 6, 8), own, fusedActivationFunction=seed % 4) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "op", ["QUANTIZE", "RELU", "RELU6", "RELU_N1_TO_1", "LEAKY_RELU", "HARD_SWISH", "GELU", "ABS", "EXP"]
)
def test_functions_of_one_tensor_are_predicted(seed, op):
    one = OneOp(seed)
    x = one.given(4, 500)
    options = {"LEAKY_RELU": {"alpha": 0.1}, "GELU": {"approximate": seed % 2 == 1}}.get(op, {})
    assert one.differing(op, (x,), (4, 500), one.grid(0.02, 0.1, around=90), **options) == 0


@pytest.mark.parametrize("seed", range(40))
def test_inverse_roots_are_predicted_for_every_code(seed):
    one = OneOp(seed, "int16")
    scale = float(one.random.uniform(1e-6, 1e-2))
    x = one.given(1 << 15, grid=Grid.of("int16", scale, 0))
    largest = 1 / np.sqrt(scale * [1, 8, 32, 500][seed % 4])
    every = np.arange(1 << 15, dtype=np.int16)
    assert one.differing("RSQRT", (x,), (1 << 15,), Grid.of("int16", largest / 32767, 0), codes=[every]) == 0


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("op", "grid"), [("LOGISTIC", (1 / 256, -128)), ("TANH", (1 / 128, 0)), ("SOFTMAX", (1 / 256, -128))]
)
def test_functions_with_a_fixed_range_are_predicted(seed, op, grid):
    one = OneOp(seed)
    x = one.given(50, 20, grid=one.grid(0.002, 0.25))
    assert one.differing(op, (x,), (50, 20), Grid.of("int8", *grid), **({"beta": 1.0} if op == "SOFTMAX" else {})) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(("axes", "keep"), [((1, 2), True), ((1, 2), False), ((3,), True), ((1,), False)])
def test_means_are_predicted(seed, same, axes, keep):
    one = OneOp(seed)
    x = one.given(3, 7, 6, 40, grid=one.grid(around=20))
    shape = [1 if axis in axes else n for axis, n in enumerate((3, 7, 6, 40)) if keep or axis not in axes]
    grid = one.program.tensors[x].grid if same else one.grid(0.005, 0.02, around=20)
    assert one.differing("MEAN", (x, one.ints(*axes)), shape, grid, keepDims=keep) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("op", ["AVERAGE_POOL_2D", "MAX_POOL_2D"])
def test_pools_are_predicted(seed, padding, op):
    one = OneOp(seed)
    x = one.given(2, 9, 8, 8)
    options = {"padding": padding, "strideH": 2, "strideW": 2, "filterHeight": 3, "filterWidth": 3}
    shape = (2, 5, 4, 8) if padding == 0 else (2, 4, 3, 8)
    assert one.differing(op, (x,), shape, one.program.tensors[x].grid, **options) == 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("half", "corners"), [(True, False), (False, True), (False, False)])
def test_resized_images_are_predicted(seed, half, corners):
    one = OneOp(seed)
    x = one.given(2, 5, 7, 3)
    options = {"halfPixelCenters": half, "alignCorners": corners}
    grid = one.program.tensors[x].grid
    assert one.differing("RESIZE_BILINEAR", (x, one.ints(11, 13)), (2, 11, 13, 3), grid, **options) == 0
