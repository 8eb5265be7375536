"""Transformers as `.tflite` files: norms in 16 bits, embeddings, merged batches, and what is refused."""

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from token_networks import token_network
from torch import nn

import qsdk
from onnx_backend.litert.program import from_bytes
from qsdk.verbs.doors.parts import parts_of


def exported(model, x, path, config=None):
    sim = qsdk.quantize(model, x, config or qsdk.w8a8().for_dialect("litert"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, path, format="tflite", check=False)
    return sim


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("text", "vit", "encoder")]


@pytest.mark.parametrize("name", SLOW)
def test_a_transformer_is_integers_from_edge_to_edge_as_predicted(name, tmp_path):
    """The encoder has sites of steps times batch, whose rows belong to the samples in turn."""
    model, x = token_network(name)
    sim, path = exported(model, x, tmp_path / "model.tflite"), tmp_path / "model.tflite"
    summary = qsdk.check_parity(sim, path, [x[:2]], progress=False).summary
    assert summary["passed"], summary
    assert (summary["differing_from_prediction"], summary["activations_max_lsb"]) == (0, 1)
    assert {tensor.dtype for tensor in from_bytes(path.read_bytes(), "it").tensors} <= {"int8", "int16", "int32"}


def rows(n: int) -> torch.Tensor:
    """Return rows of every variance and mean, and those on which a norm in few bits goes wrong."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(30, n, generator=generator) * torch.logspace(-3.5, 0, 30)[:, None]
    x += torch.linspace(-0.5, 0.5, 30)[:, None]
    special = torch.zeros(9, n)
    special[1:3] = torch.tensor([[0.7], [1.0]])  # all alike: the variance is 0
    special[3, 0], special[4, 0], special[5, 0] = 1, -3, 0.02  # one value alone
    special[6], special[6, 1] = -0.5, -0.48
    special[7, : n // 2], special[7, n // 2 :] = 3, -3  # the largest variance
    special[8], special[8, -1] = -3, 3
    return torch.cat([x, special])


@pytest.mark.spread(4)
@pytest.mark.parametrize("n", [3, 64, pytest.param(768, marks=pytest.mark.slow)])
@pytest.mark.parametrize("epsilon", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize(("kind", "size"), [(nn.LayerNorm, 1.0), (nn.LayerNorm, 0.01), (nn.RMSNorm, 1.0)])
def test_a_norm_is_within_a_step_for_rows_of_any_variance(n, epsilon, kind, size, tmp_path):
    torch.manual_seed(0)
    model, x = kind(n, eps=epsilon).eval(), rows(n) * size
    for parameter, mean in zip(model.parameters(), (1.0, 0.0), strict=False):
        nn.init.normal_(parameter, mean, 0.5)
    sim = exported(model, x, tmp_path / "model.tflite")
    report = qsdk.check_parity(sim, tmp_path / "model.tflite", [x], progress=False)
    assert report.summary["passed"], report


def test_a_bias_behind_a_product_of_three_axes_is_part_of_the_layer(tmp_path):
    exported(nn.Sequential(nn.Linear(6, 5), nn.ReLU()), torch.randn(4, 7, 6), tmp_path / "model.tflite")
    program = from_bytes((tmp_path / "model.tflite").read_bytes(), "it")
    assert [op.type for op in program.ops] == ["FULLY_CONNECTED"]


def test_one_number_behind_a_product_is_no_bias_and_named(tmp_path):
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 17]>
        g (float[2, 3] x) => (float[2, 2] y)
        <float s = {0.02}, uint8 o = {128}, int8[3, 2] w = {1, 2, 3, 4, 5, 6}, int8 n = {0}, float c = {0.5}> {
            a = QuantizeLinear(x, s, o) b = DequantizeLinear(a, s, o) v = DequantizeLinear(w, s, n)
            p = MatMul(b, v) t = Add(p, c) q = QuantizeLinear(t, s, o) y = DequantizeLinear(q, s, o)
        }""")
    with pytest.raises(qsdk.ExportError, match=r"Add .*it reads 'p', which is not quantized"):
        qsdk.export(qsdk.quantize(model, None), tmp_path / "model.tflite", format="tflite")


def test_a_result_of_stored_tensors_alone_is_compared_as_it_is_stored(tmp_path):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.linspace(-2, 2, 6).reshape(1, 1, 6))

        def forward(self, x):
            return torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1)

    x, path = torch.randn(4, 3, 6), tmp_path / "model.tflite"
    sim = exported(Model(), x, path)
    assert qsdk.check_parity(sim, path, [x], progress=False).summary["passed"]
    program, data = from_bytes(path.read_bytes(), "it"), bytearray(path.read_bytes())
    data[data.index(program.tensors[program.facts["sites"]["expand.0:output"]["tensor"]].value.tobytes())] ^= 64
    path.write_bytes(data)
    report = qsdk.check_parity(sim, path, [x], progress=False)
    assert next(row for row in report.rows if row["site"] == "expand.0:output")["max_lsb"] == 64
    assert not report.summary["passed"]


class Masked(nn.Module):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 8), steps

    def forward(self, x):
        x, hidden = self.linear(x), torch.arange(5) >= self.steps
        return F.scaled_dot_product_attention(x, x, x, attn_mask=~hidden.expand(1, 1, 5, 5))


def test_a_mask_that_hides_nothing_is_left_out_and_another_one_refused(tmp_path):
    x, path = torch.randn(2, 2, 5, 8), tmp_path / "model.tflite"
    sim = exported(Masked(5), x, path)
    assert qsdk.check_parity(sim, path, [x], progress=False).summary["passed"]
    with pytest.raises(qsdk.ExportError, match="is stored and not quantized"):
        exported(Masked(3), x, path)


def test_a_product_that_no_grid_is_stated_for_keeps_its_codes(tmp_path):
    class Quick(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.702 * x)

    x, path = torch.randn(4, 8), tmp_path / "model.tflite"
    sim = exported(Quick(), x, path)
    assert qsdk.check_parity(sim, path, [x], progress=False).summary["passed"]


def test_norms_of_16_bits_and_computed_indices_are_refused_by_name(tmp_path):
    wide = qsdk.w8a16(symmetric_activations=True).override("*", activation="int16")
    with pytest.raises(qsdk.ExportError, match="LayerNormalization of 16 bits"):
        exported(nn.LayerNorm(8), torch.randn(4, 8), tmp_path / "model.tflite", wide)

    class Next(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)

        def forward(self, tokens):
            return self.words(tokens + 1)

    with pytest.raises(qsdk.ExportError, match=r"indices .* are computed, and must be stored or an input"):
        exported(Next(), torch.randint(0, 8, (2, 3)), tmp_path / "model.tflite")


def test_a_batch_is_cut_where_all_its_arrays_have_whole_parts():
    x, y = np.arange(6), np.arange(6) * 10
    assert [[*map(list, part)] for part in parts_of([(x, y)], [(3,), (3,)])] == [
        [[0, 1, 2], [0, 10, 20]],
        [[3, 4, 5], [30, 40, 50]],
    ]
    (cut, *_) = parts_of([{"a": x, "b": [y, "as it is"]}], [(2,)])
    assert (cut["a"].tolist(), cut["b"][0].tolist(), cut["b"][1]) == ([0, 1], [0, 10], "as it is")
    for batch, sizes in (((x, y[:4]), [(2,)]), (x, [(4,)]), (x, [(2,), (3,)]), (x, [()]), (x, [])):
        assert [one is batch for one in parts_of([batch], sizes)] == [True]
