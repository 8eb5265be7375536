"""Trains the demo's network on Fashion-MNIST and writes `checkpoint.npz`; about five minutes on two cores.

    python scripts/train_demo.py --data DIR

DIR holds the four idx .gz files (see make_demo_data.py). The last epoch's weights are kept: the test set is
only looked at to print the accuracy, never to choose.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from make_demo_data import DEMO, read_split
from torch import Tensor

from qsdk.demo.data import normalize
from qsdk.demo.model import ResidualNet

BATCH = 128
PEAK_RATE = 0.1
SHIFT = 2


def load_split(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    images, labels = read_split(folder, split)
    return torch.from_numpy(normalize(images)), torch.from_numpy(labels.astype(np.int64))


def augment(images: Tensor) -> Tensor:
    """Returns a batch, each image mirrored by chance, the whole batch moved by up to `SHIFT` pixels."""
    mirrored = torch.rand(len(images), 1, 1, 1) < 0.5
    images = torch.where(mirrored, images.flip(3), images)
    size = images.shape[-1]
    # The normalised value of a black pixel, which is the background of every image.
    padded = F.pad(images, [SHIFT] * 4, value=float(images.amin()))
    top, left = (int(v) for v in torch.randint(0, 2 * SHIFT + 1, (2,)))
    return padded[:, :, top : top + size, left : left + size]


def accuracy(model: ResidualNet, images: Tensor, labels: Tensor) -> float:
    model.eval()
    with torch.inference_mode():
        right = sum(
            int((model(x).argmax(1) == y).sum()) for x, y in zip(images.split(500), labels.split(500), strict=True)
        )
    model.train()
    return right / len(labels)


def train(model: ResidualNet, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Trains in place: SGD with Nesterov momentum, one cycle of the learning rate (Smith 2018)."""
    steps = len(images) // BATCH
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=epochs * steps)
    model.train()
    for epoch in range(epochs):
        order = torch.randperm(len(images))
        total = 0.0
        for step in range(steps):
            picked = order[step * BATCH : (step + 1) * BATCH]
            loss = F.cross_entropy(model(augment(images[picked])), labels[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch + 1}/{epochs}: loss {total / steps:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the four idx .gz files")
    parser.add_argument("--out", type=Path, default=DEMO / "checkpoint.npz")
    parser.add_argument("--epochs", type=int, default=18)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    # Three times as fast on a CPU.
    model = ResidualNet().to(memory_format=torch.channels_last)
    train(model, *load_split(options.data, "train"), options.epochs)
    print(f"test accuracy {accuracy(model, *load_split(options.data, 't10k')):.4f}")
    np.savez_compressed(options.out, **{key: np.ascontiguousarray(value) for key, value in model.state_dict().items()})
    print(f"{options.out.name}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
