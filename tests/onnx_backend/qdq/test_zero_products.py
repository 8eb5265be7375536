"""The first product of a recurrent cell is with zeros: files have the bias in its place."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from qdq_models import LEVELS, make_model, run, weights
from torch import nn

import qsdk
from onnx_backend.qdq.zero_products import drop_zero_products


class Steps(nn.Module):
    """A cell over the steps of [N, T, 12], from a state of zeros."""

    def __init__(self, cell: nn.Module, fill: float = 0.0) -> None:
        super().__init__()
        self.cell, self.fill = cell, fill

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives the last state."""
        state = x.new_full((x.shape[0], 16), self.fill)
        memory = state
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(step, (state, memory))
            else:
                state = self.cell(step, state)
        return state


CELLS = {
    "lstm": lambda bias: nn.LSTMCell(12, 16, bias=bias),
    "gru": lambda bias: nn.GRUCell(12, 16, bias=bias),
    "rnn": lambda bias: nn.RNNCell(12, 16, bias=bias),
}


def exported(model: nn.Module, path: str, config: qsdk.QuantConfig, steps: int = 3) -> tuple[qsdk.QuantSim, np.ndarray]:
    batches = [torch.randn(4, steps, 12) for _ in range(3)]
    sim = qsdk.quantize(model, batches[0], config)
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, path)
    return sim, batches[0].numpy()


def products(path: str) -> int:
    return sum(node.op_type in ("Gemm", "MatMul") for node in onnx.load(path).graph.node)


@pytest.mark.spread(2)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", sorted(CELLS))
def test_the_first_product_of_a_cell_is_its_bias(kind, bias, tmp_path):
    torch.manual_seed(0)
    path = str(tmp_path / "m.onnx")
    sim, x = exported(Steps(CELLS[kind](bias)).eval(), path, qsdk.w8a8().for_dialect("onnxruntime", placement="all"))
    assert products(path) == 5  # two for each of three steps, without that of zeros
    with torch.no_grad():
        expected = sim(torch.from_numpy(x)).numpy()
    step = max(float(encoding.scale.max()) for encoding in sim.encodings.values())
    np.testing.assert_allclose(qsdk.quantize(path).run(x)[0], expected, atol=1e-6)
    found = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    np.testing.assert_allclose(found, expected, atol=2 * step)
    assert qsdk.check_parity(sim, path, [torch.from_numpy(x)], progress=False).summary["passed"]
    integer = str(tmp_path / "i.onnx")
    qsdk.to_integer(path, integer, data=[x], progress=False)


@pytest.mark.slow
def test_a_product_of_ones_stays(tmp_path):
    path = str(tmp_path / "m.onnx")
    exported(Steps(nn.GRUCell(12, 16), fill=1.0).eval(), path, qsdk.w8a8())
    assert products(path) == 6


def test_the_only_reader_of_a_weight_stays(tmp_path):
    path = str(tmp_path / "m.onnx")
    exported(Steps(nn.GRUCell(12, 16)).eval(), path, qsdk.w8a8(), steps=1)
    assert products(path) == 2
    assert "cell:weight_hh" in qsdk.quantize(path).encodings


@pytest.mark.parametrize(("options", "dropped"), [({}, True), ({"beta": 0.5}, False), ({"transA": 1}, False)], ids=str)
def test_a_gemm_that_scales_its_bias_or_reads_columns_stays(options, dropped):
    node, stored = onnx.helper.make_node, weights(b=(4,)) | {"s": np.full((), 0.1, np.float32)}
    stored |= {"w": np.arange(16, dtype=np.int8).reshape(4, 4), "shape": np.array([4, 4], np.int64)}
    nodes = [
        node("ConstantOfShape", ["shape"], ["zeros"]),
        node("DequantizeLinear", ["w", "s"], ["wd"]),
        node("Gemm", ["zeros", "wd", "b"], ["first"], **options),
        node("Gemm", ["x", "wd", "b"], ["second"]),
        node("Add", ["first", "second"], ["y"]),
    ]
    model = make_model(nodes, {"x": [4, 4]}, {"y": [4, 4]}, stored)
    x = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    wanted = run(model, {"x": x}, LEVELS[0])[0]
    drop_zero_products(model)
    assert [n.op_type for n in model.graph.node].count("Gemm") == (1 if dropped else 2)
    np.testing.assert_array_equal(run(model, {"x": x}, LEVELS[0])[0], wanted)
