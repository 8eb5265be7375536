"""The networks of the post-training tables: calibration data, test data and scores of each."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from ptq_measure import decibels, outputs
from ptq_networks import accuracy, calibration, trained
from torch import Tensor, nn

import qsdk
from qsdk.demo.model import load_pretrained

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo
import zoo_text

Scores = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A network.

    Attributes:
        title: of its tables.
        model: in eval mode.
        batches: to calibrate on.
        score: what a model or a sim is worth on data that was not calibrated on.
        configs: name -> config, one table each.
        tuned: whether `tune_blocks` is in the tables.
        options: of `qsdk.quantize`.
    """

    title: str
    model: nn.Module
    batches: list[Any]
    score: Callable[[Callable[..., Any]], Scores]
    configs: dict[str, qsdk.QuantConfig]
    tuned: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def w3a8() -> qsdk.QuantConfig:
    """Weights of 3 bits."""
    return qsdk.w4a8().override("*", weight="int3")


LOW = {"W4A8": qsdk.w4a8(), "W3A8": w3a8()}
NORMS_APART = {"W3A8, BatchNorms in float16": w3a8().skip("*", dtype="float16", op_type="BatchNormalization")}
PER_TENSOR = {"W8A16, weights per tensor": qsdk.w8a16().override("*", per_channel=False)}


def demo() -> Case:
    configs = {**LOW, **NORMS_APART}
    return Case("Demo network", load_pretrained(), calibration(), lambda m: {"accuracy %": accuracy(m)}, configs)


def resnet14() -> Case:
    model = trained("resnet14")
    return Case("ResNet-14, Fashion-MNIST", model, calibration(), lambda m: {"accuracy %": accuracy(m)}, LOW)


def mobile() -> Case:
    model = trained("mobile")
    return Case("Inverted residuals, Fashion-MNIST", model, calibration(), lambda m: {"accuracy %": accuracy(m)}, LOW)


def mobilenet_v2() -> Case:
    case = _imagenet("MobileNetV2, ImageNet", zoo.mobilenet_v2(), *zoo.imagenet_images())
    return replace(case, configs={**LOW, **PER_TENSOR})


def efficientnet_lite0() -> Case:
    return _imagenet("EfficientNet-Lite0, ImageNet", zoo.efficientnet_lite0(), *zoo.imagenet_images(lite=True))


def _imagenet(title: str, model: nn.Module, images: Tensor, labels: Tensor) -> Case:
    """Calibrated on ten images, five views each; tested on the ten others."""
    generator = torch.Generator().manual_seed(0)
    views = [_view(image, generator) for _ in range(5) for image in images[::2]]
    test, expected = images[1::2], labels[1::2]
    exact = outputs(model, [test])

    def score(quantized: Callable[..., Any]) -> Scores:
        found = outputs(quantized, [test])
        return {"of 10 right": float((found.argmax(1) == expected).sum()), "SQNR dB": decibels(exact, found)}

    return Case(title, model, list(torch.stack(views).split(10)), score, LOW, tuned=False)


def _view(image: Tensor, generator: torch.Generator) -> Tensor:
    """A part of an image at its size, mirrored by chance."""
    size = image.shape[-1]
    part = int(torch.randint(size * 3 // 4, size + 1, (), generator=generator))
    top, left = (int(torch.randint(0, size - part + 1, (), generator=generator)) for _ in range(2))
    view = image[None, :, top : top + part, left : left + part]
    view = nn.functional.interpolate(view, (size, size), mode="bilinear", antialias=True)[0]
    return view.flip(2) if torch.rand((), generator=generator) < 0.5 else view


def mini_lm() -> Case:
    model = zoo_text.mini_lm()
    batches = zoo_text.sentences(zoo_text.reviews(232)[0], length=64, size=8)
    given, test = batches[:4], batches[4:]
    exact = outputs(model, test)

    def score(quantized: Callable[..., Any]) -> Scores:
        found = outputs(quantized, test)
        return {"cosine": zoo_text.cosine(exact, found), "SQNR dB": decibels(exact, found)}

    by_channel = qsdk.w8a8().override("*", per_channel_activations=True)
    configs = {"W8A8": qsdk.w8a8(), "W8A8, sums per channel": by_channel, "W4A16": qsdk.w4a16()}
    return Case("MiniLM, sentences", model, given, score, configs, tuned=False)


def stories() -> Case:
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    given, test = zoo_text.told(model, 16, 129), zoo_text.told(model, 32, 129, seed=1)

    def score(quantized: Callable[..., Any]) -> Scores:
        logits = outputs(quantized, list(test[:, :-1].split(8)))
        return {"perplexity": zoo_text.perplexity(logits, test)}

    configs = {"W4 block 32": qsdk.weight_only("int4", block_size=32), "W8A8": qsdk.w8a8()}
    return Case("stories15M, its own stories", model, list(given[:, :-1].split(4)), score, configs, tuned=False)


CASES: Sequence[Callable[[], Case]] = (
    demo,
    resnet14,
    mobile,
    mobilenet_v2,
    efficientnet_lite0,
    mini_lm,
    stories,
)
