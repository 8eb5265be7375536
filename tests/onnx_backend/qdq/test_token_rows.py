"""Tokens as rows between layers: fewer Reshapes, the same numbers, for every size of the batch, and back as pairs."""

from collections import Counter

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from fast_files import exported, require_same_sim
from torch import nn

import qsdk
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.fast_forms import with_pairs, write_fast_forms
from onnx_backend.qdq.forms import FORM_KEY

CONFIGS = {"all": qsdk.w8a8(), "kernels": qsdk.w8a8().for_dialect("onnxruntime")}


class Block(nn.Module):
    """An attention and a feed-forward part, each with a norm in front and a sum behind."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.joined, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def attend(self, x):
        """Mix tokens by their likeness."""
        heads = [part.reshape(*part.shape[:2], self.heads, -1).transpose(1, 2) for part in self.joined(x).chunk(3, -1)]
        query, key, value = heads
        mixed = torch.softmax(query @ key.transpose(2, 3) * 0.5, -1) @ value
        return self.mixed(mixed.transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        """Give as many tokens."""
        x = x + self.attend(self.norms[0](x))
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class Placed(nn.Module):
    """Adds a number to each place, and one that is the same in each, between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.places, self.gains = nn.Parameter(torch.randn(1, 5, 8)), nn.Parameter(torch.rand(5, 1) + 0.5)

    def forward(self, x):
        """Give as many tokens."""
        return self.last(torch.relu(self.first(x)) * self.gains + self.places)


class Windows(nn.Module):
    """Layers of windows of four places beside layers of all, as a Swin has them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        """Give as many tokens."""
        windows = torch.relu(self.layers[0](x.reshape(-1, 4, 8)))
        x = x + self.layers[1](windows).reshape(-1, 12, 8)
        return x + self.layers[3](torch.relu(self.layers[2](x)))


class Positions(nn.Module):
    """Adds an image's own numbers of places between two layers, as a ViT does."""

    def __init__(self, places, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.places = nn.Parameter(torch.randn(1, places, width))

    def forward(self, x):
        """Give as many tokens."""
        first, middle, last = self.layers
        return last(torch.relu(middle(torch.relu(first(x)) + self.places)))


class Beside(nn.Module):
    """Adds tokens of another input, of which there may be one row for all."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        """Give as many tokens."""
        return self.last(torch.relu(self.first(x)) + y)


def ran_as(model, feeds):
    """The outputs of a model in an ordinary session."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (feed.numpy() for feed in feeds), strict=True)))


def without_rows(path):
    """The file as it is written with tokens between all layers."""
    model = with_pairs(onnx.load(path))
    write_fast_forms(model, rows=False)
    return model


def reshapes(model):
    return Counter(node.op_type for node in model.graph.node)["Reshape"]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("model", "shape", "most"),
    [
        (nn.Sequential(Block(), Block()), (3, 5, 8), (28, 16)),  # 4 of scales; for each block 3 heads, 1 of all, 1 of 3
        (Placed(), (3, 5, 8), (4, 4)),
        (Windows(), (2, 12, 8), (10, 4)),
    ],
    ids=["block", "placed", "windows"],
)
def test_tokens_are_rows_between_layers_and_nothing_else_changes(model, shape, most, config, tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(shape)]
    sim, path, _, wanted, got = exported(model, batches, config, tmp_path)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)
    written, before = onnx.load(path), without_rows(path)
    assert (reshapes(before), reshapes(written)) == most
    for size in (1, 4):
        feeds = [torch.randn(size, *shape[1:])]
        np.testing.assert_array_equal(ran_as(written, feeds)[0], ran_as(before, feeds)[0])


def test_tokens_of_another_input_are_added_as_tokens(tmp_path):
    torch.manual_seed(0)
    x, y = torch.randn(3, 5, 8), torch.randn(1, 5, 8)
    sim = qsdk.quantize(Beside(), (x, y), CONFIGS["kernels"])
    qsdk.calibrate(sim, [(x, y)], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    written = onnx.load(tmp_path / "model.onnx")
    before = without_rows(tmp_path / "model.onnx")
    assert reshapes(written) == reshapes(before)
    for size in (1, 4):
        feeds = [torch.randn(size, 5, 8), y]
        np.testing.assert_array_equal(
            ran_as(written, feeds)[0], ran_as(without_rows(tmp_path / "model.onnx"), feeds)[0]
        )


def test_a_file_with_tokens_between_its_layers_is_read_too(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(3, 5, 8)]
    sim, path, *_ = exported(Block(), batches, CONFIGS["kernels"], tmp_path)
    older = without_rows(path)
    assert with_pairs(older).SerializeToString(deterministic=True) != older.SerializeToString(deterministic=True)
    onnx.save(older, path)
    assert qsdk.check_parity(sim, path, batches, progress=False).summary["passed"]


def test_a_layer_of_rows_that_was_changed_is_refused(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(3, 5, 8)]
    sim, path, *_ = exported(Block(), batches, CONFIGS["kernels"], tmp_path)
    model = onnx.load(path)
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm" and FORM_KEY in metadata(node))
    gemm.attribute.append(onnx.helper.make_attribute("alpha", 2.0))
    onnx.save(model, path)
    with pytest.raises(qsdk.FileFormatError, match=r"stands_for.*export"):
        qsdk.check_parity(sim, path, batches, progress=False)


def test_sums_of_rows_need_no_copy_in_front_of_a_norm(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(3, 5, 8)]
    sim, path, ran, wanted, got = exported(nn.Sequential(Block(), Block()), batches, CONFIGS["kernels"], tmp_path)
    assert not {"Sum", "SkipLayerNormalization"} & set(ran)
    assert any(node.op_type == "Sum" for node in without_rows(path).graph.node)
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())
    require_same_sim(sim, path, batches, tmp_path)


@pytest.mark.parametrize(
    "sizes", [(5, 8), (80, 64)], ids=["few", "many"]
)  # of many, a graph without weights has inputs
@pytest.mark.parametrize("places", ["codes", "floats"])
def test_stored_tokens_of_one_image_are_added_as_they_are(places, sizes, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(1, *sizes)
    config = CONFIGS["all"] if places == "codes" else CONFIGS["all"].skip("self")
    sim = qsdk.quantize(Positions(*sizes), x, config)
    qsdk.calibrate(sim, [x], progress=False)
    path = tmp_path / "model.onnx"
    qsdk.export(sim, path, shapes={"x": tuple(x.shape)})
    written, before = onnx.load(path), without_rows(path)
    assert reshapes(written) <= reshapes(before) - (places == "codes")
    np.testing.assert_array_equal(ran_as(written, [x])[0], ran_as(before, [x])[0])
    assert qsdk.check_parity(sim, path, [x], progress=False).summary["passed"]
