"""A table that is both embedding and output layer: its codes are stored once, and both kernels read them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.fuse import write_products
from onnx_backend.proto.nodes import set_metadata

ROWS, WIDTH, BLOCK = 24, 64, 32


def table_twice(bits: int, scale: npt.NDArray[Any], *, blocks: bool, shifted: bool, change: bool = False) -> ModelProto:
    """Return a look-up in a table, and a product with it behind a barrier, as a lowered decoder has them."""
    rng = np.random.default_rng(bits)
    kind = getattr(TensorProto, f"{'U' if shifted else ''}INT{bits}")
    least = 0 if shifted else -(1 << (bits - 1))
    codes = rng.integers(least, least + (1 << bits), (ROWS, WIDTH))
    other = codes.T.copy()
    other[0, 0] += (1 if other[0, 0] <= 0 else -1) * change
    zeros = rng.integers(0, 1 << bits, scale.shape)
    stored = [("table", codes), ("weight", other), ("table/zero", zeros), ("weight/zero", zeros.T)]
    tensors = [helper.make_tensor(name, kind, value.shape, value.reshape(-1)) for name, value in stored]
    tensors += [numpy_helper.from_array(scale, "table/scale"), numpy_helper.from_array(scale.T.copy(), "weight/scale")]
    pairs = []
    for axis, name in ((1, "table"), (0, "weight")):
        options = {"axis": axis if blocks else 1 - axis} | ({"block_size": BLOCK} if blocks else {})
        names = [name, f"{name}/scale", *([f"{name}/zero"] if shifted else [])]
        pairs.append(helper.make_node("DequantizeLinear", names, [f"{name}/float"], **options))
    barrier = helper.make_node("Sum", ["weight/float"], ["weight/apart"])
    set_metadata(barrier, copy_of="weight/float")
    rows = helper.make_node("Gather", ["table/float", "places"], ["rows"], axis=0)
    product = helper.make_node("MatMul", ["rows", "weight/apart"], ["logits"])
    places = helper.make_tensor_value_info("places", TensorProto.INT64, [1, "n"])
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("rows", "logits")]
    graph = helper.make_graph([*pairs, barrier, rows, product], "decoder", [places], results, tensors)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)


def results(model: ModelProto) -> list[npt.NDArray[Any]]:
    """Return what ONNX Runtime computes for all rows, without its optimizations."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"places": np.arange(-ROWS, ROWS, dtype=np.int64)[None] % ROWS})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shifted", [False, True], ids=["symmetric", "zero points"])
@pytest.mark.parametrize("grid", ["tensor", "row", "blocks"])
def test_both_kernels_read_one_table(bits: int, grid: str, shifted: bool):
    sizes = {"tensor": (), "row": (ROWS,), "blocks": (ROWS, WIDTH // BLOCK)}[grid]
    scale = np.asarray(np.random.default_rng(0).uniform(0.01, 0.02, sizes), np.float32)
    model = table_twice(bits, scale, blocks=grid == "blocks", shifted=shifted)
    rows, logits = results(model)
    editor = Editor(model, {})
    write_products(editor)
    assert [node.op_type for node in model.graph.node] == ["Reshape", "GatherBlockQuantized", "MatMulNBits"]
    assert not {"table", "weight"} & {tensor.name for tensor in model.graph.initializer}
    found_rows, found_logits = results(model)
    np.testing.assert_array_equal(found_rows, rows)
    np.testing.assert_allclose(found_logits, logits, atol=1e-4 * np.abs(logits).max())
    assert editor.forms["table"].startswith(f"GatherBlockQuantized, {bits} bits")


def test_a_table_with_other_codes_keeps_its_look_up():
    model = table_twice(8, np.float32(0.01).reshape(()), blocks=False, shifted=False, change=True)
    rows, _ = results(model)
    write_products(Editor(model, {}))
    assert [node.op_type for node in model.graph.node] == ["DequantizeLinear", "Gather", "MatMulNBits"]
    np.testing.assert_array_equal(results(model)[0], rows)
