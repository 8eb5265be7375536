"""A pair of values that are on its grid already is left out of sessions, and nothing else is."""

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from onnx_backend.runtime.session import RepeatedSession, drop_repeated_pairs, simulation_session

GRID = (np.float32(0.037), np.uint8(131))


def pair(name: str, x: str, y: str, grid=GRID, stored=None):
    """A pair from x to y, and the stored numbers."""
    stored.extend(numpy_helper.from_array(np.array(v), f"{name}/{i}") for i, v in enumerate(grid))
    numbers = [f"{name}/0", f"{name}/1"]
    return [
        helper.make_node("QuantizeLinear", [x, *numbers], [f"{name}/codes"]),
        helper.make_node("DequantizeLinear", [f"{name}/codes", *numbers], [y]),
    ]


def model_of(nodes, stored, shape=(2, 4, 6, 6), outputs=("y",)):
    stored += [
        numpy_helper.from_array(np.array(v, np.int64), n)
        for n, v in {
            "flat": [2, -1],
            "twice": [1, 2, 1, 1],
            "from": [1],
            "to": [3],
            "at": [1],
            "places": [0, 2],
        }.items()
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        stored,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def pairs(model) -> int:
    return sum(node.op_type == "QuantizeLinear" for node in model.graph.node)


MOVES = {
    "Reshape": (["h", "flat"], {}),
    "Transpose": (["h"], {"perm": [0, 2, 3, 1]}),
    "Slice": (["h", "from", "to", "at"], {}),
    "Tile": (["h", "twice"], {}),
    "Gather": (["h", "places"], {"axis": 1}),
    "MaxPool": (["h"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    "Concat": (["h", "h"], {"axis": 1}),
    "DepthToSpace": (["h"], {"blocksize": 2}),
}


def compared(model, expected_pairs: int, x=None) -> None:
    """Require the number of pairs that stay, and the same bits."""
    short = onnx.ModelProto()
    short.CopyFrom(model)
    drop_repeated_pairs(short)
    assert pairs(short) == expected_pairs
    x = np.random.default_rng(0).normal(size=(2, 4, 6, 6)).astype(np.float32) * 3 if x is None else x
    whole, often = (opened(model).run(None, {"x": x}) for opened in (simulation_session, RepeatedSession))
    for one, other in zip(whole, often, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("op", sorted(MOVES))
def test_a_pair_behind_a_move_is_left_out(op):
    inputs, facts = MOVES[op]
    stored = []
    nodes = [*pair("a", "x", "h", stored=stored), helper.make_node(op, inputs, ["m"], **facts)]
    nodes += [*pair("b", "m", "q", stored=stored), helper.make_node("Neg", ["q"], ["y"])]
    compared(model_of(nodes, stored), 1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([np.uint8, np.int8, np.uint16, np.int16]),
    st.floats(2.0**-40, 2.0**40),
    st.integers(0, 2**31),
)
def test_the_values_are_the_same_on_any_grid(dtype, scale: float, seed: int):
    """All codes of a grid, and values between and beyond them, through two pairs."""
    rng = np.random.default_rng(seed)
    ends = np.iinfo(dtype)
    grid = (np.float32(scale), dtype(rng.integers(ends.min, ends.max + 1)))
    codes = rng.integers(ends.min - 99, ends.max + 99, (2, 4, 6, 6)) - float(grid[1])
    x = ((codes + rng.choice([0.0, 0.5, 0.25], codes.shape)) * scale).astype(np.float32)
    stored = []
    nodes = [*pair("a", "x", "h", grid, stored), helper.make_node("Identity", ["h"], ["m"])]
    nodes += [*pair("b", "m", "q", grid, stored), helper.make_node("Identity", ["q"], ["y"])]
    compared(model_of(nodes, stored), 1, x)


@pytest.mark.parametrize(
    "other", [(np.float32(0.038), np.uint8(131)), (np.float32(0.037), np.uint8(130)), (np.float32(0.037), np.int8(3))]
)
def test_a_pair_of_another_grid_stays(other):
    stored = []
    nodes = [*pair("a", "x", "h", stored=stored), helper.make_node("Transpose", ["h"], ["m"])]
    nodes += [*pair("b", "m", "q", other, stored), helper.make_node("Neg", ["q"], ["y"])]
    compared(model_of(nodes, stored), 2)


def test_a_pair_behind_arithmetic_or_a_part_of_another_grid_stays():
    stored = []
    nodes = [*pair("a", "x", "h", stored=stored), helper.make_node("Neg", ["h"], ["n"])]
    nodes += [helper.make_node("Concat", ["h", "n"], ["m"], axis=1), *pair("b", "m", "y", stored=stored)]
    compared(model_of(nodes, stored), 2)


def test_windows_beyond_the_edge_keep_their_pair():
    stored = []
    facts = {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1, "pads": [0, 0, 1, 1]}
    nodes = [*pair("a", "x", "h", stored=stored), helper.make_node("MaxPool", ["h"], ["m"], **facts)]
    nodes += [*pair("b", "m", "y", stored=stored)]
    compared(model_of(nodes, stored), 2)


def test_a_pair_whose_values_are_an_output_stays():
    stored = []
    nodes = [*pair("a", "x", "h", stored=stored), helper.make_node("Flatten", ["h"], ["m"])]
    nodes += pair("b", "m", "y", stored=stored)
    compared(model_of(nodes, stored), 2)


def test_pairs_of_float16_stay():
    """65,535 codes are more than float16 tells apart: what a second pair makes of them differs."""
    stored, grid = [], (np.float16(0.001), np.uint16(32768))
    nodes = [helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16)]
    nodes += [*pair("a", "half", "h", grid, stored), helper.make_node("Identity", ["h"], ["m"])]
    nodes += [*pair("b", "m", "q", grid, stored), helper.make_node("Cast", ["q"], ["y"], to=TensorProto.FLOAT)]
    model = model_of(nodes, stored)
    drop_repeated_pairs(model)
    assert pairs(model) == 2
