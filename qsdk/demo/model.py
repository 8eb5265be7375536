"""A small residual network for 28 x 28 grey images, with its trained weights."""

from importlib import resources

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the image size (at stride 1), followed by its batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    )


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, added as in He et al. 2016 (arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.first = conv_bn(inputs, outputs, 3, stride=stride)
        self.act = nn.ReLU()
        self.second = conv_bn(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else conv_bn(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; the last ReLU is a function on purpose, as in many real models."""
        y = self.second(self.act(self.first(x)))
        return F.relu(y + self.shortcut(x))


class SeparableBlock(nn.Module):
    """A depthwise and a pointwise convolution beside a shortcut that is added without a ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = conv_bn(channels, channels, 3, groups=channels)
        self.act = nn.ReLU6()
        self.pointwise = conv_bn(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, of the shape of `x`."""
        y: Tensor = self.pointwise(self.act(self.depthwise(x)))
        return x + y


class ForkBlock(nn.Module):
    """A narrow (1 x 1) and a wide (3 x 3) branch, concatenated along the channels."""

    def __init__(self, inputs: int, branch: int) -> None:
        super().__init__()
        self.narrow = conv_bn(inputs, branch, 1)
        self.wide = conv_bn(inputs, branch, 3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return `2 * branch` channels at the size of `x`."""
        return torch.cat([self.act(self.narrow(x)), self.act(self.wide(x))], dim=1)


class ResidualNet(nn.Module):
    """Ten logits for images of shape [N, 1, 28, 28]; about 0.12 M parameters, 10 M multiplications an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_bn(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.widen = nn.Sequential(*conv_bn(16, 32, 3), nn.ReLU())
        self.layer1 = ResidualBlock(32, 32)
        self.layer2 = ResidualBlock(32, 64, stride=2)
        self.separable = SeparableBlock(64)
        self.fork = ForkBlock(64, 48)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(96, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [N, 10] for normalised `images` [N, 1, 28, 28]."""
        x = self.layer1(self.widen(self.stem(images)))
        x = self.fork(self.separable(self.layer2(x)))
        logits: Tensor = self.head(torch.flatten(self.pool(x), 1))
        return logits


def load_pretrained() -> ResidualNet:
    """Return the network in eval mode with the weights that `scripts/train_demo.py` wrote.

    The checkpoint holds plain arrays by state_dict key, so that reading it never unpickles anything.
    """
    model = ResidualNet()
    with (
        resources.files("qsdk.demo").joinpath("checkpoint.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        model.load_state_dict({key: torch.from_numpy(arrays[key]) for key in arrays.files})
    return model.eval()
