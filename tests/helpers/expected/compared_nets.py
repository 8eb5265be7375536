"""Networks for comparisons, and edits that plant a fault into an ONNX model."""

import copy
from collections.abc import Callable

import numpy as np
import onnx
import torch
from onnx import ModelProto, numpy_helper
from torch import Tensor, nn

from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained


class Attention(nn.Module):
    """Attention of several heads, spelled out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).reshape(batch, length, self.heads, -1).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(self.act(self.up(self.norm2(x))))


class Shortcut(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.relu1, self.relu2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(x + self.norm2(self.conv2(y)))


def demo() -> tuple[nn.Module, Tensor]:
    """Return the demo's network and images."""
    return load_pretrained().eval(), torch.from_numpy(np.array(load().calibration_images[:6]))


def transformer() -> tuple[nn.Module, Tensor]:
    """Return two blocks of a transformer and an input."""
    torch.manual_seed(3)
    return nn.Sequential(Block(32), Block(32)).eval(), torch.randn(4, 12, 32)


def residual() -> tuple[nn.Module, Tensor]:
    """Return a residual network with batch norms that have seen data, and an input."""
    torch.manual_seed(4)
    stem, body = nn.Conv2d(3, 8, 3, stride=2), nn.Sequential(Shortcut(8), Shortcut(8))
    module = nn.Sequential(stem, nn.ReLU(), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    x = torch.randn(4, 3, 17, 17)
    with torch.no_grad():
        for _ in range(20):
            module(x + 0.1 * torch.randn_like(x))
    return module.eval(), x


def exported(module: nn.Module, x: Tensor) -> ModelProto:
    """Return a module as torch's exporter writes it."""
    program = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
    assert program is not None
    return program.model_proto


def with_stored(model: ModelProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> ModelProto:
    """Return a copy in which a stored tensor is changed; its type stays."""
    found = copy.deepcopy(model)
    tensor = next(tensor for tensor in found.graph.initializer if tensor.name == name)
    before = numpy_helper.to_array(tensor)
    after = np.asarray(change(before.copy())).astype(before.dtype)
    assert not np.array_equal(before, after)
    tensor.CopyFrom(numpy_helper.from_array(after, name))
    return found


def with_node(model: ModelProto, output: str, change: Callable[[onnx.NodeProto], None]) -> ModelProto:
    """Return a copy in which the node that makes a tensor is changed."""
    found = copy.deepcopy(model)
    change(next(node for node in found.graph.node if output in node.output))
    return found
