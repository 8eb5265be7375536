"""Sims whose layers have a mean to correct, at both doors."""

import copy
import functools

import numpy as np
import torch
from qdq_models import make_model
from torch import Tensor, nn
from torch_models import randomized, seeded

from qsdk import calibrate, quantize, w8a8

#: ranges of weights that are too narrow, and a last output that shows what the layer before it gives
NARROW = w8a8().override("*", weight="int4").override("last*", activation="float32")


class Layers(nn.Module):
    """Every kind of layer with a bias: strided and padded, depthwise, transposed and grouped, over channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.transposed = nn.ConvTranspose2d(8, 6, 3, stride=2, groups=2)
        self.mixed, self.bare, self.last = nn.Linear(6, 12), nn.Linear(12, 12, bias=False), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.transposed(torch.relu(self.depthwise(x))))
        return self.last(torch.relu(self.bare(torch.relu(self.mixed(x.permute(0, 2, 3, 1))))))


def layers() -> nn.Module:
    torch.manual_seed(1)
    return randomized(Layers())


def onnx_layers():
    """The same as a float ONNX model, with a MatMul and an Add for the linear layers."""
    from onnx import helper

    node, stored = helper.make_node, {name: x.numpy() for name, x in layers().state_dict().items() if x.ndim}
    stored |= {f"{name}.w": stored.pop(f"{name}.weight").T.copy() for name in ("mixed", "bare", "last")}
    norm = [f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    nodes = [
        node("Conv", ["x", "conv.weight", "conv.bias"], ["c"], "conv", pads=[1] * 4, strides=[2, 2]),
        node("BatchNormalization", ["c", *norm], ["n"], "norm"),
        node("Relu", ["n"], ["r1"], "relu1"),
        node("Conv", ["r1", "depthwise.weight", "depthwise.bias"], ["d"], "depthwise", pads=[1] * 4, group=8),
        node("Relu", ["d"], ["r2"], "relu2"),
        node(
            "ConvTranspose",
            ["r2", "transposed.weight", "transposed.bias"],
            ["t"],
            "transposed",
            strides=[2] * 2,
            group=2,
        ),
        node("Relu", ["t"], ["r3"], "relu3"),
        node("Transpose", ["r3"], ["p"], "last_axis", perm=[0, 2, 3, 1]),
        node("MatMul", ["p", "mixed.w"], ["m1"], "mixed"),
        node("Add", ["m1", "mixed.bias"], ["a1"], "mixed_add"),
        node("Relu", ["a1"], ["r4"], "relu4"),
        node("MatMul", ["r4", "bare.w"], ["m2"], "bare"),
        node("Relu", ["m2"], ["r5"], "relu5"),
        node("MatMul", ["r5", "last.w"], ["m3"], "last"),
        node("Add", ["last.bias", "m3"], ["y"], "last_add"),
    ]
    return make_model(nodes, {"x": ["n", 3, 8, 8]}, {"y": ["n", None, None, 5]}, stored)


def images(count, seed):
    return (seeded(count, 3, 8, 8, seed=seed) + 0.3).numpy()


def narrow_sim(door):
    """Calibrated with ranges of weights that hold 97 % of them on either side."""
    if door == "torch":
        return copy.deepcopy(_traced())
    sim = quantize(onnx_layers(), None, NARROW)
    calibrate(sim, data_of(door), weight_method="percentile", percentile=97, progress=False)
    return sim


@functools.cache
def _traced():
    sim = quantize(layers(), torch.from_numpy(images(4, 0)), NARROW)
    calibrate(sim, data_of("torch"), weight_method="percentile", percentile=97, progress=False)
    return sim


def data_of(door, count=384, seed=1):
    parts = np.split(images(count, seed), 4)
    return [torch.from_numpy(part) for part in parts] if door == "torch" else parts
