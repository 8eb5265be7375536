"""The networks of `deployed.py`: 22 of 11 kinds, with random weights, each with the batch it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """One network: its kind, how to make it, and its inputs at a batch size and seed."""

    kind: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, ...]]


class First(nn.Module):
    """A model of transformers as a function of its tensors that gives its first result."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Tensor:
        """Gives the first tensor of the result."""
        return self.model(**dict(zip(self.names, tensors, strict=True)), return_dict=False)[0]


class Recurrent(nn.Module):
    """A recurrent layer and a Linear on every step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.head = getattr(nn, kind)(80, 256, batch_first=True), nn.Linear(256, 40)

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, T, 40]."""
        return self.head(self.layer(x)[0])


class Recommender(nn.Module):
    """Tables of categories and a tower of Linear layers over them and the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20000, 32) for _ in range(8))
        self.tower = nn.Sequential(nn.Linear(8 * 32 + 13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU())
        self.head = nn.Linear(256, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """Gives a probability for each row."""
        found = [table(ids[:, k]) for k, table in enumerate(self.tables)]
        return torch.sigmoid(self.head(self.tower(torch.cat([numbers, *found], 1))))


class UNet(nn.Module):
    """Two levels down, two up, with skips."""

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            parts = [nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
            return nn.Sequential(*parts, nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())

        self.a, self.b, self.c = block(3, 24), block(24, 48), block(48, 96)
        self.up_b, self.up_a = nn.ConvTranspose2d(96, 48, 2, 2), nn.ConvTranspose2d(48, 24, 2, 2)
        self.d, self.e, self.last = block(96, 48), block(48, 24), nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Gives a map of four classes."""
        a = self.a(x)
        b = self.b(nn.functional.max_pool2d(a, 2))
        c = self.c(nn.functional.max_pool2d(b, 2))
        d = self.d(torch.cat([self.up_b(c), b], 1))
        return self.last(self.e(torch.cat([self.up_a(d), a], 1)))


class Squeezed(nn.Module):
    """An inverted residual with squeeze-and-excitation and HardSwish, as in MobileNetV3."""

    def __init__(self, channels: int, inner: int, kernel: int) -> None:
        super().__init__()
        first = [nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.Hardswish()]
        deep = [nn.Conv2d(inner, inner, kernel, padding=kernel // 2, groups=inner, bias=False), nn.BatchNorm2d(inner)]
        self.wide, few = nn.Sequential(*first, *deep, nn.Hardswish()), max(8, inner // 4)
        gate = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(inner, few, 1), nn.ReLU(), nn.Conv2d(few, inner, 1)]
        self.gate = nn.Sequential(*gate, nn.Hardsigmoid())
        self.narrow = nn.Sequential(nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Gives a tensor of the size of x."""
        wide = self.wide(x)
        return x + self.narrow(wide * self.gate(wide))


class Mixer(nn.Module):
    """A block of an MLP-Mixer."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Gives a tensor of the size of x."""
        x = x + self.tokens(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.two(x))


class Tokens(nn.Module):
    """An image as tokens of width channels."""

    def __init__(self, width: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, tokens, width]."""
        return self.patches(x).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    """The mean of all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """Gives [N, width]."""
        return x.mean(1)


def settled(model: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    """Return the model in eval mode, its BatchNorms with the mean statistics of random batches."""
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None  # the mean of all batches
    if norms:
        model.train()
        with torch.no_grad():
            for _ in range(8):
                model(*(torch.randn_like(t) if t.is_floating_point() else t for t in example))
    return model.eval()


def image(size: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    return lambda n, seed: (torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(seed)),)


def normal(*shape: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    return lambda n, seed: (torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed)),)


def words(length: int, below: int) -> Callable[[int, int], tuple[Tensor, ...]]:
    return lambda n, seed: (torch.randint(0, below, (n, length), generator=torch.Generator().manual_seed(seed)),)


def foreign(model: str, names: tuple[str, ...] = ("pixel_values",), **options: Any) -> Callable[[], nn.Module]:
    """Return what makes a model of transformers with these options and random weights."""

    def make() -> nn.Module:
        cls = getattr(transformers, model)
        config = cls.config_class(**options)
        config._attn_implementation = "eager"
        return First(cls(config), *names)

    return make


def stack(*layers: Callable[[], list[nn.Module]], times: int = 1) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[part for _ in range(times) for make in layers for part in make()])


def convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), activation()]
    for _ in range(5):
        parts += [nn.Conv2d(32, 32, 3, padding=1), activation()]
    return nn.Sequential(*parts)


def mobile_v3() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    for a, b, kernel in ((16, 24, 3), (24, 40, 5), (40, 96, 5)):
        parts += [Squeezed(a, 4 * a, kernel), Squeezed(a, 4 * a, kernel), nn.Conv2d(a, b, 1, 2), nn.BatchNorm2d(b)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 512), nn.Hardswish(), nn.Linear(512, 100)]
    return nn.Sequential(*parts, *head)


def whisper_encoder() -> nn.Module:
    return First(transformers.WhisperModel(transformers.WhisperConfig(**_WHISPER)).get_encoder(), "input_features")


def temporal() -> nn.Module:
    parts: list[nn.Module] = []
    for k in range(4):
        conv = nn.Conv1d(40 if k == 0 else 128, 128, 3, padding=2**k, dilation=2**k, bias=False)
        parts += [conv, nn.BatchNorm1d(128), nn.ReLU()]
    return nn.Sequential(*parts, nn.Conv1d(128, 30, 1))


def head_of_linears() -> nn.Module:
    parts: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 64)):
        parts += [nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, 10))


_BERT = {"vocab_size": 30522, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
_SWIN = {"image_size": 112, "embed_dim": 48, "depths": [2, 2, 2], "num_heads": [3, 6, 12]}
_DISTIL = {"vocab_size": 30522, "dim": 256, "hidden_dim": 1024, "n_heads": 8, "n_layers": 3}
_VIT = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
_GPT = {"vocab_size": 8000, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 128, "use_cache": False}
_LLAMA = {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}
_LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
_RESNET = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
_SPEECH = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
_WHISPER = {
    "d_model": 256,
    "max_source_positions": 150,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_attention_heads": 4,
}

NETWORKS: dict[str, Network] = {
    "six Linear 512": Network("linear", stack(lambda: [nn.Linear(512, 512), nn.ReLU()], times=6), normal(512)),
    "three Linear with GELU": Network("linear", stack(lambda: [nn.Linear(768, 768), nn.GELU()], times=3), normal(768)),
    "recommender": Network(
        "recommender",
        Recommender,
        lambda n, seed: (torch.randn(16 * n, 13), *words(8, 20000)(16 * n, seed)),
    ),
    "six Conv with ReLU": Network("cnn", lambda: convolutions(nn.ReLU), image(56)),
    "six Conv with LeakyReLU": Network("cnn", lambda: convolutions(lambda: nn.LeakyReLU(0.1)), image(56)),
    "head of Linear": Network("cnn", head_of_linears, image(64)),
    "ResNet-18": Network("cnn", foreign("ResNetForImageClassification", depths=[2, 2, 2, 2], **_RESNET), image(128)),
    "RegNet": Network("cnn", foreign("RegNetForImageClassification", hidden_sizes=[32, 64, 128, 256]), image(96)),
    "MobileNetV2": Network("mobile", foreign("MobileNetV2ForImageClassification"), image(128)),
    "MobileNetV3-like": Network("mobile", mobile_v3, image(128)),
    "EfficientNet-B0": Network(
        "mobile", foreign("EfficientNetForImageClassification", image_size=96, initializer_range=0.2), image(96)
    ),
    "ConvNeXt-atto": Network(
        "convnext",
        foreign("ConvNextForImageClassification", hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2]),
        image(96),
    ),
    "UNet": Network("segmentation", UNet, image(64)),
    "SegFormer": Network("segmentation", foreign("SegformerForSemanticSegmentation", depths=[1, 1, 1, 1]), image(96)),
    "YOLOS": Network(
        "detector", foreign("YolosForObjectDetection", image_size=[96, 96], num_detection_tokens=20, **_VIT), image(96)
    ),
    "ViT-small": Network("vit", foreign("ViTForImageClassification", image_size=112, **_VIT), image(112)),
    "Swin": Network(
        "vit",
        foreign("SwinForImageClassification", image_size=112, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12]),
        image(112),
    ),
    "MLP-Mixer": Network(
        "mixer",
        lambda: nn.Sequential(Tokens(256, 16), *(Mixer(49, 256) for _ in range(4)), nn.LayerNorm(256), Mean()),
        image(112),
    ),
    "BERT": Network("text", foreign("BertModel", ("input_ids",), num_hidden_layers=6, **_BERT), words(64, 30522)),
    "DistilBERT": Network("text", foreign("DistilBertModel", ("input_ids",), **_DISTIL), words(32, 30522)),
    "GPT-2": Network("decoder", foreign("GPT2LMHeadModel", ("input_ids",), **_GPT), words(64, 8000)),
    "Llama": Network("decoder", foreign("LlamaForCausalLM", ("input_ids",), **_LLAMA), words(64, 8000)),
    "wav2vec 2": Network("audio", foreign("Wav2Vec2Model", ("input_values",), **_SPEECH), normal(8000)),
    "Whisper encoder": Network("audio", whisper_encoder, normal(80, 300)),
    "LSTM": Network("recurrent", lambda: Recurrent("LSTM"), normal(32, 80)),
    "GRU": Network("recurrent", lambda: Recurrent("GRU"), normal(32, 80)),
    "temporal convolutions": Network("audio", temporal, normal(40, 200)),
}
