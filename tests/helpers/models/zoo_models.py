"""Small models of every kind of network, hand-written or of torch.nn, with random weights that no exporter shares."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import randomized, seeded


class Cnn(nn.Module):
    """Convolutions with BatchNorm, pooling and a classifier: [N, 3, 16, 16] to [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 12, 3, stride=2), nn.BatchNorm2d(12)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(12 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.pool(F.relu(self.bn2(self.conv2(x))))
        return self.fc(torch.flatten(x, 1))


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.shortcut(x)
        return self.relu(out)


class Residual(nn.Module):
    """A small ResNet: [N, 3, 16, 16] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.layers = nn.Sequential(ResidualBlock(6, 6, 1), ResidualBlock(6, 10, 2))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layers(self.stem(x))).flatten(1))


class Mobile(nn.Module):
    """Depthwise-separable blocks with Hardswish and squeeze-and-excite, as in MobileNetV3: [N, 3, 16, 16] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6())
        self.depthwise = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16), nn.ReLU6()
        )
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.depthwise(self.expand(x))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        x = x + self.project(y * gate)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Down, up by a transposed convolution and by resizing, with skips by concatenation: [N, 2, 16, 16] both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.middle, self.up = nn.Conv2d(8, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, 2)
        self.merge1, self.merge2 = nn.Conv2d(16, 6, 3, padding=1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(F.max_pool2d(one, 2)))
        three = F.relu(self.middle(F.max_pool2d(two, 2)))
        up = F.relu(self.merge1(torch.cat([self.up(three), two], 1)))
        up = F.interpolate(up, scale_factor=2.0, mode="nearest")
        return torch.sigmoid(self.merge2(torch.cat([up, one], 1)))


class VitBlock(nn.Module):
    """Pre-norm attention by nn.MultiheadAttention, and an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    """A vision transformer: [N, 3, 16, 16] to [N, 6]."""

    def __init__(self, width: int = 16, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.zeros(1, 17, width))
        self.blocks = nn.ModuleList(VitBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class BertLayer(nn.Module):
    """Post-norm self-attention written out, with an additive mask, and an MLP with GELU."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.wide, self.narrow, self.norm2 = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + mask
        attended = F.softmax(scores, dim=-1) @ v
        x = self.norm1(x + self.dense(attended.transpose(1, 2).reshape(x.shape)))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))


class Bert(nn.Module):
    """Embeddings, layers and a pooler: tokens and mask int64 [N, T] to [N, 3]."""

    def __init__(self, width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, width), nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.words(tokens) + self.positions(places))
        bias = (1.0 - mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(torch.tanh(self.pooler(x[:, 0])))


class GptBlock(nn.Module):
    """Pre-norm causal attention by F.scaled_dot_product_attention from one packed Linear."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """A GPT-2-like decoder: tokens int64 [N, T] to logits [N, T, 40]."""

    def __init__(self, width: int = 16, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(40, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 40, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class RmsNorm(nn.Module):
    """Root mean square normalisation, written out as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary embeddings, grouped-query attention and SwiGLU, without biases."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.size = width // heads
        self.norm1, self.norm2 = RmsNorm(width), RmsNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n * self.size, bias=False) for n in (heads, shared, shared))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = (
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(width, 2 * width, bias=False),
            nn.Linear(2 * width, width, bias=False),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.size).transpose(1, 2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = self.split(self.q(y)), self.split(self.k(y)), self.split(self.v(y))
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A Llama-like decoder: tokens int64 [N, T] to logits [N, T, 40]."""

    def __init__(self, width: int = 16, heads: int = 4, shared: int = 2, blocks: int = 2, length: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(40, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, shared) for _ in range(blocks))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, 40, bias=False)
        size = width // heads
        angles = torch.arange(length)[:, None] / 100.0 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class Audio(nn.Module):
    """One-dimensional convolutions with BatchNorm and dilation, as in keyword spotting: [N, 1, 64] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(1, 8, 9, 4, 4, bias=False), nn.BatchNorm1d(8), nn.ReLU())
        self.gate, self.filter = nn.Conv1d(8, 8, 3, padding=2, dilation=2), nn.Conv1d(8, 8, 3, padding=2, dilation=2)
        self.mix, self.head = nn.Conv1d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        x = x + self.mix(torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x)))
        return self.head(x.mean(-1))


class Recurrent(nn.Module):
    """A recurrent layer between linear ones: [N, T, 5] to [N, 3]."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(5, 6)
        self.layer = kind(6, 7, batch_first=True, **options)  # type: ignore[call-arg]
        self.after = nn.Linear(14 if options.get("bidirectional") else 7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.layer(F.relu(self.before(x)))[0][:, -1])


class Encoder(nn.Module):
    """Two nn.TransformerEncoderLayer with a padding mask: [N, T, 8] and bool [N, T] to [N, T, 8]."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


class Outputs(nn.Module):
    """Several outputs, one of them between a convolution and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = self.conv1(x)
        second = F.relu(self.conv2(F.relu(first)))
        return first, second, self.fc(second.mean((2, 3)))


def distinct(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode, every parameter random, since an exporter merges equal tensors and drops zero biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        fan = parameter[0].numel() if parameter.ndim > 1 else 4
        # noisy gains stay near 1
        centre = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
        spread = 0.1 if centre else 1.0 / math.sqrt(fan)
        parameter.data.normal_(centre, spread, generator=generator)
    return randomized(model, seed)


def tokens(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def bert_inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    mask = torch.ones(3, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    return tokens(50, 3, 8, seed=seed), mask


def encoder_inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    return seeded(3, 6, 8, seed=seed), padding


# name -> the model, and its inputs for a seed
ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, ...]]]] = {
    "cnn": (Cnn, lambda seed: (seeded(3, 3, 16, 16, seed=seed),)),
    "residual": (Residual, lambda seed: (seeded(3, 3, 16, 16, seed=seed),)),
    "mobile": (Mobile, lambda seed: (seeded(3, 3, 16, 16, seed=seed),)),
    "unet": (UNet, lambda seed: (seeded(3, 2, 16, 16, seed=seed),)),
    "vit": (Vit, lambda seed: (seeded(3, 3, 16, 16, seed=seed),)),
    "bert": (Bert, bert_inputs),
    "gpt": (Gpt, lambda seed: (tokens(40, 3, 8, seed=seed),)),
    "llama": (Llama, lambda seed: (tokens(40, 3, 8, seed=seed),)),
    "audio": (Audio, lambda seed: (seeded(3, 1, 64, seed=seed),)),
    "lstm": (lambda: Recurrent(nn.LSTM, num_layers=2), lambda seed: (seeded(3, 6, 5, seed=seed),)),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), lambda seed: (seeded(3, 6, 5, seed=seed),)),
    "encoder": (Encoder, encoder_inputs),
    "outputs": (Outputs, lambda seed: (seeded(3, 2, 9, 9, seed=seed),)),
}
