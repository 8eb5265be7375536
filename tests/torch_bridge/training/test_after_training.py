"""A trained model is exported as trained: encodings, parity site by site, integer-only conversion, save and load."""

import functools
import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w4a8": qsdk.w4a8(),
    "w4a4": qsdk.QuantConfig(weight=qsdk.int4, activation=qsdk.uint4),
}


class Block(nn.Module):
    """Attention and an MLP, each beside a shortcut and behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Rows of an image as tokens."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Linear(28, 16), nn.Parameter(torch.zeros(28, 16))
        self.blocks, self.head = nn.Sequential(Block(16, 2), Block(16, 2)), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.embed(images[:, 0]) + self.position)
        return self.head(x.mean(1))


def small() -> nn.Sequential:
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 8, 3, stride=2), nn.ReLU()]
    named = {str(i): layer for i, layer in enumerate([*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()])}
    return nn.Sequential(OrderedDict(named, head=nn.Linear(8, 10))).eval()


def network_of(name: str) -> nn.Module:
    return {"small": small, "transformer": lambda: Transformer().eval()}.get(name, load_pretrained)()


@functools.cache
def data() -> tuple[Tensor, Tensor]:
    found = load()
    return torch.from_numpy(found.calibration_images), torch.from_numpy(found.calibration_labels)


@functools.cache
def trained(name: str) -> Any:
    """A network after some steps of everything that can be learned; its loss has fallen."""
    torch.manual_seed(0)
    images, labels = data()
    network, config = network_of(name), {"transformer": "w8a8", "small": "w4a4"}.get(name, name)
    sim = qsdk.quantize(network, images[:8], CONFIGS[config])
    qsdk.calibrate(sim, [images[:32]], progress=False)
    schedules = [qsdk.train.freeze_ranges(7, "weights")]
    with sim.training(learn_scales=True, learn_zero_points=True, schedules=schedules) as model:
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=1e-3, scale_lr=5e-3))
        for step in range(10):
            part = slice(16 * step, 16 * step + 16)
            loss = F.cross_entropy(model(images[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return sim


NAMES = ["small", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("w8a8", "w4a8", "w4a4", "transformer"))]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Network -> the file that was written of it."""

    @functools.cache
    def write(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "model.onnx"
        qsdk.export(trained(name), path)
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_exported_model_is_the_trained_one(name: str, exported: Callable[[str], Path]):
    sim, path, x = trained(name), exported(name), data()[0][500:508]
    parity = qsdk.check_parity(sim, path, [x], progress=False).summary
    assert parity["passed"], parity
    assert parity["weights_max_lsb"] == 0
    assert parity["activations_max_lsb"] <= 1
    # the encodings of the model, and of the file beside it, are what was trained
    read = qsdk.quantize(str(path), None, None).encodings
    assert sim.encodings.keys() <= read.keys()
    assert all(read[site] == encoding for site, encoding in sim.encodings.items())
    fresh = qsdk.quantize(sim.unwrap(), x, sim.config)
    qsdk.load_encodings(fresh, path.with_suffix(".encodings.json"), freeze=True)
    assert fresh.encodings == sim.encodings
    assert torch.equal(fresh(x), sim(x))
    # frozen, they stay what they are whatever follows
    with fresh.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(fresh.parameter_groups(lr=1e-2))
        model(x * 3).square().sum().backward()
        optimizer.step()
    qsdk.calibrate(fresh, [x * 5], progress=False)
    owning = [site for site, quantizer in fresh.quantizers.items() if quantizer.owns_encoding]
    assert all(fresh.encodings[site] == sim.encodings[site] for site in owning)


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_model_becomes_integer_only(name: str, exported: Callable[[str], Path], tmp_path: Path):
    sim, path, out = trained(name), exported(name), tmp_path / "model.int.onnx"
    summary = qsdk.to_integer(path, out).summary
    assert (summary["float_tensors"], summary["reference_equal"]) == (0, True)
    assert summary["operations_max_lsb"] <= 1
    if name != "transformer":  # its many operations in a row add up
        assert summary["max_lsb"] <= 1
    certificate = json.loads((tmp_path / "model.int.onnx.certificate.json").read_text())
    assert certificate
    x = data()[0][500:532]
    session = ort.InferenceSession(out, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    steps = np.abs(found - sim(x).numpy()) / float(sim.encodings["head:output"].scale[0])
    assert np.median(steps) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_trained_sim_is_saved_and_loaded(name: str, tmp_path: Path):
    sim = trained(name)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    loaded = qsdk.load(tmp_path / "sim.qsdk", network_of(name))
    x = data()[0][500:516]
    assert loaded.encodings == sim.encodings
    assert torch.equal(loaded(x), sim(x))


def test_distillation_leaves_nothing_of_the_training_in_the_sim():
    sim = trained("small")
    assert not any(q.learned_names for q in sim.quantizers.values())
    assert {e.dtype.name for site, e in sim.encodings.items() if site.endswith(":weight")} == {"int4"}
    assert not [key for key in sim.model.state_dict() if "log2" in key or "shift" in key or "steps" in key]
