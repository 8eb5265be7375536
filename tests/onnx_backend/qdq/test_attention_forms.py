"""Attention in the forms that ONNX Runtime computes fast: masked scores, scores times a number, and shares of codes."""

import numpy as np
import onnx
import pytest
import torch
from fast_files import exported, require_same_sim
from torch import nn

import qsdk
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.fast_forms import FORM_KEY

PLAIN = [("all", qsdk.w8a8()), ("kernels", qsdk.w8a8().for_dialect("onnxruntime"))]
CONFIGS = pytest.mark.parametrize("config", [config for _, config in PLAIN], ids=[name for name, _ in PLAIN])
TOKENS, WIDTH = 8, 32


class Attention(nn.Module):
    """Self-attention of one head, with a mask or none, whose scores are multiplied or divided by a number."""

    def __init__(self, mask: torch.Tensor | None = None, factor: float = 0.2, *, divides: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.factor, self.divides = factor, divides
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        scores = scores / (1 / self.factor) if self.divides else scores * self.factor
        if self.mask is not None:
            scores = scores.masked_fill(self.mask, -torch.inf) if self.mask.dtype == torch.bool else scores + self.mask
        return torch.softmax(scores, -1) @ x


def later(value: float) -> torch.Tensor:
    """A mask that adds a value to the scores of later tokens."""
    return torch.full((TOKENS, TOKENS), value).triu(1)


def forms_in(path, op):
    """The nodes of an op in a file that stand for others."""
    return [n for n in onnx.load(path).graph.node if n.op_type == op and FORM_KEY in metadata(n)]


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize(
    "mask",
    [later(-100.0), later(-torch.inf), later(1.0).bool()],
    ids=["-100", "-inf", "bool"],
)
def test_shares_of_masked_scores_are_no_denormal_numbers(mask, config, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, TOKENS, WIDTH)]
    sim, path, _, wanted, got = exported(Attention(mask), batches, config, tmp_path)
    assert len(forms_in(path, "Softmax")) == 1
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    model = onnx.load(path)
    (softmax,) = (n for n in model.graph.node if n.op_type == "Softmax")
    model.graph.output.append(onnx.helper.make_tensor_value_info(softmax.output[0], 1, None))
    shares = onnx.reference.ReferenceEvaluator(model).run([softmax.output[0]], {"x": batches[0].numpy()})[0]
    assert shares.min() > np.finfo(np.float32).tiny
    assert shares[..., later(1.0).bool().numpy()].max() < 1e-25


@pytest.mark.parametrize("mask", [None, later(-10.0), later(0.0), later(0.0).bool()], ids=["none", "-10", "0", "bool"])
def test_scores_that_no_mask_hides_are_read_as_they_are(mask, tmp_path):
    torch.manual_seed(0)
    _, path, *_ = exported(Attention(mask), [torch.randn(2, TOKENS, WIDTH)], qsdk.w8a8(), tmp_path)
    assert not forms_in(path, "Softmax")


def test_a_row_whose_scores_are_all_hidden_stays_what_it_was(tmp_path):
    torch.manual_seed(0)
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min)
    batches = [torch.randn(2, TOKENS, WIDTH)]
    _, path, _, wanted, got = exported(Attention(mask), batches, qsdk.w8a8(), tmp_path)
    assert len(forms_in(path, "Softmax")) == 1
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("divides", [False, True], ids=["times", "over"])
def test_scores_times_a_number_have_the_codes_that_they_had(divides, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, TOKENS, WIDTH)]
    sim, path, ran, wanted, got = exported(Attention(divides=divides), batches, qsdk.w8a8(), tmp_path)
    assert not {"Mul", "Div", "QLinearMul"} & set(ran)
    assert ran.count("QLinearMatMul") == 2
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


@pytest.mark.parametrize("factor", [-0.2, 0.2], ids=str)
def test_scores_with_other_codes_behind_a_product_keep_it(factor, tmp_path):
    """Of a negative number, or where the range behind it is another than its product."""
    torch.manual_seed(0)
    batches = [torch.randn(2, TOKENS, WIDTH)]
    config = qsdk.w8a8() if factor < 0 else qsdk.w8a8().override("mul.0", fixed_range=(-1.0, 1.0))
    sim, path, *_ = exported(Attention(factor=factor), batches, config, tmp_path)
    assert [n for n in onnx.load(path).graph.node if n.op_type == "Mul"]
    require_same_sim(sim, path, batches, tmp_path)


@pytest.mark.parametrize("op", [torch.relu, lambda x: x + 2.0, lambda x: x.clamp(0, 1)], ids=["Relu", "Add", "Clip"])
def test_a_float_op_in_front_of_a_product_stays_as_it_is(op, tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.head(op(self.layer(x)) * 0.5)

    torch.manual_seed(0)
    batches, config = [torch.randn(2, TOKENS, WIDTH)], qsdk.w8a8().for_dialect("onnxruntime")
    sim, path, _, wanted, got = exported(Scaled(), batches, config, tmp_path)
    assert not forms_in(path, "DequantizeLinear")
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    require_same_sim(sim, path, batches, tmp_path)


def test_shares_of_codes_are_computed_in_floats(tmp_path):
    """The runtime's kernel on codes takes about twice the time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Softmax(-1), nn.Linear(WIDTH, WIDTH))
    batches = [torch.randn(8, WIDTH)]
    sim, path, ran, *_ = exported(model, batches, qsdk.w8a8(), tmp_path)
    assert "Softmax" in ran
    assert "QLinearSoftmax" not in ran
    require_same_sim(sim, path, batches, tmp_path)


class Biased(nn.Module):
    """Adds rows of a table that are the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(20, WIDTH))
        self.register_buffer("rows", torch.arange(TOKENS) * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        return torch.tanh(self.linear(x) + self.table[self.rows])


@CONFIGS
def test_a_look_up_of_the_same_rows_is_computed_when_a_session_is_opened(config, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, TOKENS, WIDTH)]
    sim, path, ran, wanted, got = exported(Biased(), batches, config, tmp_path)
    assert not {"Gather", "GatherND"} & set(ran)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


class Placed(nn.Module):
    """Adds a class's place and those of patches, made larger, as a ViT for other images does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.places = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, 1 + 4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        image = self.places[:, 1:].transpose(1, 2).reshape(1, WIDTH, 2, 2)
        patches = nn.functional.interpolate(image, size=(2, 4), mode="bicubic").flatten(2).transpose(1, 2)
        return torch.tanh(self.linear(x) + torch.cat([self.places[:, :1], patches], 1))


def test_places_that_are_made_larger_in_every_run_are_computed_when_a_session_is_opened(tmp_path):
    torch.manual_seed(0)
    batches, config = [torch.randn(2, 9, WIDTH)], qsdk.w8a8().for_dialect("onnxruntime")
    sim, path, ran, wanted, got = exported(Placed(), batches, config, tmp_path)
    assert not {"Resize", "Slice"} & set(ran)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


class Turned(nn.Module):
    """Turns an image along both axes, and adds numbers of places relative to each other, as windows of a Swin do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(200, WIDTH))
        self.register_buffer("places", torch.arange(36 * 36).reshape(36, 36) % 200)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives a tensor of the size of x."""
        turned = torch.roll(self.linear(x), (-1, -2), (1, 2))
        return torch.tanh(turned + self.table[self.places.view(-1)].view(36, 36, -1)[:3])


@CONFIGS
def test_known_sizes_and_stored_indices_are_not_computed_in_every_run(config, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(2, 3, 36, WIDTH)]
    sim, path, ran, wanted, got = exported(Turned(), batches, config, tmp_path)
    assert not {"Gather", "GatherND", "Mod", "Shape"} & set(ran)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
