"""The networks of `pt2e.py`: real classes with random weights, at their smallest, and what is fed to them."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

HELPERS = Path(__file__).parents[1] / "tests" / "helpers"
sys.path += [str(HELPERS / name) for name in ("models", "generation", "small_models")]

import architectures as tiny  # noqa: E402
import detector  # noqa: E402
import zoo_models  # noqa: E402
from torch_models import randomized  # noqa: E402

#: of `architectures.py`: torch.nn's own, and classes of transformers
TORCH = ("nn.LSTM", "nn.GRU", "nn.TransformerEncoder", "nn.TransformerDecoder")
CONVOLUTIONS = ("resnet", "convnext", "mobilenet_v2")
ENCODERS = ("bert", "distilbert", "roberta", "t5-encoder", "whisper-encoder", "wav2vec2")
DECODERS = ("llama", "gpt2", "qwen3", "gemma", "mistral")
VISION = ("vit", "clip-vision", "segformer", "mobilevit", "swin")
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Network:
    """How to make a module in eval mode, and the tensors that it takes: of a seed and a number of rows.

    ExecuTorch 1.5.1 runs a GRU, also a float one, with as many rows as the example has alone: `fewer` is False.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]
    fewer: bool = True


class Positional(nn.Module):
    """A model that takes its tensors by position and gives one."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: Tensor) -> Tensor:
        """Return the first output."""
        found = self.model(**dict(zip(self.names, given, strict=True)))
        return found if isinstance(found, Tensor) else found[0]


def images(size: int, channels: int = 3) -> Callable[[int, int], Batch]:
    """Return batches of smooth pictures."""

    def batch(seed: int, rows: int) -> Batch:
        noise = torch.randn(rows, channels, size // 2, size // 2, generator=torch.Generator().manual_seed(seed))
        return (nn.functional.interpolate(noise, scale_factor=2.0, mode="bilinear"),)

    return batch


def of_tests(name: str) -> Network:
    """Return a network of the tests' architectures."""
    inputs = tiny.ARCHITECTURES[name].inputs

    def make() -> nn.Module:
        return Positional(tiny.model_of(name), list(inputs(0, 2, 12))).eval()

    return Network(make, lambda seed, rows: tuple(inputs(seed, rows, 12).values()), name != "nn.GRU")


def networks() -> Iterator[tuple[str, Network]]:
    """Yield the networks by name."""
    small = {"cnn": zoo_models.Cnn, "residual": zoo_models.Residual, "mobilenet_v3": zoo_models.Mobile}
    for name, kind in small.items():
        yield name, Network(lambda kind=kind: randomized(kind()), images(16))
    yield "unet", Network(lambda: zoo_models.UNet().eval(), images(16, 2))
    for name in (*TORCH, *CONVOLUTIONS[:2], *ENCODERS, *DECODERS, *VISION):
        yield name, of_tests(name)
    yield "yolo", Network(detector.trained_like, images(64))
    yield CONVOLUTIONS[2], of_tests(CONVOLUTIONS[2])
