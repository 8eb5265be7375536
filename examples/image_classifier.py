"""A classifier of your own pictures, in integers: trained, quantized, measured, exported.

    pip install ".[images]"    # in a copy of the repository
    python examples/image_classifier.py                                   # on pictures of clothes that come with qsdk
    python examples/image_classifier.py --pictures photos --size 64 --epochs 30

`photos` holds a folder for each class: `photos/cat/1.jpg`, `photos/dog/7.png`. A fifth of the pictures is kept back to
measure on. Put your own network in place of `network`, or load your checkpoint into it and give `--epochs 0`.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import qsdk

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def write_demo_pictures(folder: Path, count: int) -> None:
    """Write pictures of clothes, in a folder for each class."""
    data = qsdk.demo.data()
    for number in range(count):
        place = folder / data.class_names[data.test_labels[number]].replace("/", " or ")
        place.mkdir(parents=True, exist_ok=True)
        pixels = (data.test_images[number, 0] * 0.353 + 0.286) * 255
        Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8)).save(place / f"{number:05}.png")


def read_pictures(folder: Path, size: int) -> tuple[Tensor, Tensor, list[str]]:
    """Return pictures [N, 3, size, size] from -1 to 1, the number of each one's class, and the names of the classes."""
    paths = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in SUFFIXES)
    names = sorted({path.parent.name for path in paths})
    if len(names) < 2:
        raise SystemExit(f"{folder} has pictures of {len(names)} classes; it needs a folder of pictures for each class")
    pixels = [np.asarray(Image.open(path).convert("RGB").resize((size, size)), np.float32) for path in paths]
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous() / 127.5 - 1
    return images, torch.tensor([names.index(path.parent.name) for path in paths]), names


def network(classes: int) -> nn.Module:
    """Return a small convolutional network for pictures of any size."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> None:
    """Train in float, as you do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(images)).split(32):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def main(given: argparse.Namespace) -> dict[str, float]:
    """Train, quantize, repair, export; gives the accuracies."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if given.pictures is None:
            write_demo_pictures(Path(folder), given.demo_pictures)
        images, labels, names = read_pictures(Path(given.pictures or folder), given.size)
    order = torch.randperm(len(images))
    images, labels = images[order], labels[order]
    kept = len(images) // 5
    if kept < 1:
        raise SystemExit(f"{len(images)} pictures are too few: a fifth of them is kept back to measure on")
    test, answers, images, labels = images[:kept], labels[:kept], images[kept:], labels[kept:]

    def accuracy(model: nn.Module | qsdk.QuantSim) -> float:
        with torch.no_grad():
            return float((model(test).argmax(1) == answers).float().mean())

    model = network(len(names))
    train(model, images, labels, given.epochs)
    found = {"float": accuracy(model)}

    batches = list(images[:256].split(64))  # a few hundred typical pictures, without labels
    sim = qsdk.quantize(model, batches[0], given.config)
    qsdk.calibrate(sim, batches, progress=False)
    found["calibrated"] = accuracy(sim)
    if found["calibrated"] < found["float"] - 0.01:
        qsdk.seq_mse(sim, batches, progress=False)
        qsdk.adaround(sim, batches, progress=False)
        found["repaired"] = accuracy(sim)

    qsdk.export(sim, given.out)
    parity = qsdk.check_parity(sim, given.out, batches[:1], progress=False)
    if not parity.summary["passed"]:
        raise SystemExit(str(parity))
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="train, quantize and export a classifier of pictures")
    parser.add_argument("--pictures", help="a folder with a folder for each class; without it, pictures of clothes")
    parser.add_argument("--size", type=int, default=28, help="width and height that pictures are brought to (28)")
    parser.add_argument("--epochs", type=int, default=10, help="of training in float (10)")
    parser.add_argument("--config", default="w8a8", help="w8a8, w4a8, w8a16 or w4a16 (w8a8)")
    parser.add_argument("--out", default="classifier.onnx", help="the file to write (classifier.onnx)")
    parser.add_argument("--demo-pictures", type=int, default=2000, help="how many pictures of clothes (2000)")
    return parser.parse_args(words)


if __name__ == "__main__":
    for step, value in main(arguments()).items():
        print(f"{step}: {value:.3f}")
