"""Edges where one more or less is another answer: windows, ties, pairs, floors, samples."""

import numpy as np
import pytest
from integer_models import Net
from onnx import TensorProto, helper
from qdq_models import make_model

from onnx_backend.integer.convert import convert
from onnx_backend.integer.reference.run import run_reference
from onnx_backend.proto.external_data import data_facts
from onnx_backend.runtimes.validate import validate
from qsdk import int8, int16
from qsdk.core.numerics.fixed_point import tie_in_range, ties_possible
from qsdk.core.numerics.spec import PerTensor, Spec
from qsdk.core.ranges.ranges import SMALLEST_SCALE, Range, encoding_from_range


@pytest.mark.parametrize("zero", [0, 255])
def test_what_is_far_beyond_the_grid_saturates(zero):
    net = Net()
    x = net.qdq(net.input([1, 16]), 0.1, 128)
    w = net.op("DequantizeLinear", net.const(np.full((16, 1), 127, np.int8)), net.const(np.float32(0.1)))
    net.output(net.qdq(net.op("MatMul", x, w), 0.01, zero), [1, 1])
    result = convert(net.model())
    for sign, code in ((1, 255), (-1, 0)):
        found = run_reference(result.model, {"x": np.full((1, 16), sign * 12.0, np.float32)})["y"]
        assert np.rint(found / np.float32(0.01)).item() + zero == code


def test_a_tie_at_the_end_of_the_range_is_found():
    assert ties_possible(2, 1, 2).item()  # 2 * 1 / 4 is a half
    assert not ties_possible(1, 1, 2).item()
    for lo, hi, found in ((2, 2, True), (1, 2, True), (2, 3, True), (0, 1, False), (3, 5, False), (-2, -2, True)):
        assert tie_in_range(lo, hi, 1, 2) is found, (lo, hi)
    assert tie_in_range(1, 1, 1, 2, 1)
    assert not tie_in_range(0, 0, 1, 2, 1)


def blocks_of_two_sizes(first, second):
    stored = {"s": np.full((2, 2), 0.1, np.float32), "z": np.zeros((2, 2), np.uint8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], "the_q", axis=1, block_size=first),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], "the_dq", axis=1, block_size=second),
    ]
    return make_model(nodes, {"x": (2, 5)}, {"y": (2, 5)}, stored, 21)


def test_a_pair_has_one_block_size():
    found = [(row["node"], row["rule"]) for row in validate(blocks_of_two_sizes(3, 4)).rows]
    assert ("the_dq", "pair") in found
    assert ("the_dq", "pair") not in [(row["node"], row["rule"]) for row in validate(blocks_of_two_sizes(3, 3)).rows]


@pytest.mark.parametrize(
    ("kind", "value", "held"),
    [
        *[("INT8", 127, True), ("INT8", 128, False), ("INT8", -128, True), ("INT8", -129, False)],
        *[("UINT8", 255, True), ("UINT8", 256, False), ("UINT8", -1, False)],
        *[("UINT16", -1, False), ("INT16", -32768, True), ("INT16", -32769, False)],
        *[("INT16", 32767, True), ("INT16", 32768, False), ("UINT16", 65535, True), ("UINT16", 65536, False)],
    ],
)
def test_a_stored_tensor_holds_what_its_type_holds(kind, value, held):
    dtype = getattr(TensorProto, kind)
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["y"], "the_dq")]
    model = make_model(nodes, {}, {"y": (1,)}, {"s": np.float32(0.1)}, 21)
    model.graph.initializer.append(TensorProto(name="w", data_type=dtype, dims=[1], int32_data=[value]))
    assert ("stored" in [row["rule"] for row in validate(model).rows]) is not held


@pytest.mark.parametrize(("dtype", "finer"), [(int8, 1.0), (int16, 2.0**-8)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_smallest_step_is_finer_on_a_finer_grid(dtype, finer, symmetric):
    zeros = Range(np.zeros(1, np.float32), np.zeros(1, np.float32))
    encoding = encoding_from_range(zeros, Spec(dtype, PerTensor(), symmetric=symmetric))
    assert encoding.scale.item() == SMALLEST_SCALE * np.float32(finer)


@pytest.mark.slow
def test_the_sample_of_a_large_file_sees_both_ends_and_pages_between(tmp_path):
    path, size = tmp_path / "data", (20 << 20) + 17
    content = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    path.write_bytes(content.tobytes())
    before, pages = data_facts(path), -(-size // 4096)
    sampled = [(pages - 1) * index // 4095 for index in (0, 1, 2047, 4094, 4095)]
    for place in (*(page * 4096 for page in sampled), size - 1):
        content[place] ^= 1
        path.write_bytes(content.tobytes())
        assert data_facts(path)["sample_sha256"] != before["sample_sha256"], place
        content[place] ^= 1
    unseen = next(page for page in range(pages) if page not in {(pages - 1) * i // 4095 for i in range(4096)})
    content[unseen * 4096] ^= 1
    path.write_bytes(content.tobytes())
    assert data_facts(path)["sample_sha256"] == before["sample_sha256"]
