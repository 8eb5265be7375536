"""Random small networks: a seed gives a module and its example; every kind of layer and op that the doors carry."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from random_builder import BATCH, AnyInputs, Builder, DictResult, OneInput, RandomNetwork, TwoInputs
from torch import Tensor, nn
from torch_models import seeded

_LARGEST = 1600  # elements of two samples; the next step reads nothing larger
Grow = Callable[[Builder, int], object]


# --- images: [N, C, H, W] ------------------------------------------------------------------------------------------


def conv(b: Builder, x: int) -> object:
    channels = b.shape(x)[1]
    kernel = b.rng.choice([1, 3]) if min(b.shape(x)[2:]) >= 3 else 1
    depthwise = b.rng.random() < 0.3
    out = channels * b.rng.choice([1, 2]) if depthwise and channels <= 8 else b.rng.choice([4, 6, 8])
    groups = channels if depthwise and out % channels == 0 else 1
    options = {"stride": b.rng.choice([1, 1, 2]), "padding": b.rng.choice([0, kernel // 2])}
    options |= {"groups": groups, "bias": b.rng.random() < 0.6}
    index = b.layer("conv", nn.Conv2d(channels, out, kernel, **options), x)
    if b.rng.random() < 0.5:
        index = b.layer("bn", nn.BatchNorm2d(out), index)
    return activation(b, index) if b.rng.random() < 0.6 else index


def conv_transpose(b: Builder, x: int) -> object:
    channels = b.shape(x)[1]
    groups = 2 if channels % 2 == 0 and b.rng.random() < 0.3 else 1
    layer = nn.ConvTranspose2d(channels, 4, b.rng.choice([2, 3]), stride=2, groups=groups, bias=b.rng.random() < 0.5)
    index = b.layer("up", layer, x)
    return b.layer("bn", nn.BatchNorm2d(4), index) if b.rng.random() < 0.4 else index


def norm_2d(b: Builder, x: int) -> object:
    channels = b.shape(x)[1]
    kinds = [nn.BatchNorm2d(channels), nn.GroupNorm(1, channels), nn.InstanceNorm2d(channels, affine=True)]
    if channels % 2 == 0:
        kinds.append(nn.GroupNorm(2, channels))
    if min(b.shape(x)[2:]) < 2:
        kinds = kinds[:1]
    return b.layer("norm", b.rng.choice(kinds), x)


def pool(b: Builder, x: int) -> object:
    size = min(b.shape(x)[2:])
    choices: list[nn.Module] = [nn.AdaptiveAvgPool2d(1)]
    if size >= 2:
        choices += [nn.MaxPool2d(2), nn.AvgPool2d(2), nn.MaxPool2d(2, stride=1, padding=1), nn.AdaptiveMaxPool2d(1)]
    if size >= 3:
        choices += [nn.AvgPool2d(3, stride=1, padding=1), nn.AvgPool2d(3, padding=1, count_include_pad=False)]
    layer = b.rng.choice(choices)
    return b.layer("pool", layer, x) if b.rng.random() < 0.5 else b.op("F.pool", layer.forward, x)


def upsample(b: Builder, x: int) -> object:
    mode = b.rng.choice(["nearest", "bilinear"])
    if b.rng.random() < 0.5:
        return b.layer("upsample", nn.Upsample(scale_factor=2, mode=mode), x)
    return b.op("interpolate", lambda v: F.interpolate(v, scale_factor=2, mode=mode), x)


def pad(b: Builder, x: int) -> object:
    mode = b.rng.choice(["constant", "reflect", "replicate"]) if min(b.shape(x)[2:]) >= 2 else "constant"
    value = b.rng.choice([0.0, 0.5, -1.0]) if mode == "constant" else 0.0
    if mode == "constant":
        return b.op("pad", lambda v: F.pad(v, (1, 0, 1, 1), value=value), x)
    return b.op("pad", lambda v: F.pad(v, (1, 0, 1, 1), mode=mode), x)


def squeeze_excite(b: Builder, x: int) -> object:
    channels = b.shape(x)[1]
    index = b.op("mean", lambda v: v.mean((2, 3), keepdim=True), x)
    index = b.layer("squeeze", nn.Conv2d(channels, 2, 1), index)
    index = b.layer("excite", nn.Conv2d(2, channels, 1), activation(b, index))
    index = b.op("sigmoid", torch.sigmoid, index) if b.rng.random() < 0.5 else b.layer("gate", nn.Hardsigmoid(), index)
    return b.op("mul", lambda v, w: v * w, x, index)


def tokens(b: Builder, x: int) -> object:
    return b.op("tokens", lambda v: v.flatten(2).transpose(1, 2), x)


def channels_last(b: Builder, x: int) -> object:
    index = b.op("permute", lambda v: v.permute(0, 2, 3, 1), x)
    index = b.layer("norm", nn.LayerNorm(b.shape(x)[1]), index)
    if b.rng.random() < 0.5:
        index = b.layer("fc", nn.Linear(b.shape(x)[1], b.shape(x)[1]), index)
    return b.op("permute", lambda v: v.permute(0, 3, 1, 2), index)


def shuffle(b: Builder, x: int) -> object:
    if b.shape(x)[1] % 4:
        return conv(b, x)
    return b.op("pixel_shuffle", lambda v: F.pixel_shuffle(v, 2), x)


def pooled(b: Builder, x: int) -> object:
    return b.op("mean", lambda v: v.mean((2, 3)), x) if b.rng.random() < 0.6 else b.op("flatten", _flat, x)


# --- sequences: [N, T, D], and vectors: [N, D] ----------------------------------------------------------------------


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1)


def linear(b: Builder, x: int) -> object:
    wide = b.rng.choice([4, 6, 8])
    index = b.layer("fc", nn.Linear(b.shape(x)[-1], wide, bias=b.rng.random() < 0.7), x)
    if len(b.shape(x)) == 2 and b.rng.random() < 0.3:
        index = b.layer("bn", nn.BatchNorm1d(wide), index)
    return activation(b, index) if b.rng.random() < 0.5 else index


def norm_1d(b: Builder, x: int) -> object:
    width = b.shape(x)[-1]
    if width < 2:
        return linear(b, x)
    kinds = [nn.LayerNorm(width), nn.LayerNorm(width, bias=False), nn.RMSNorm(width)]
    return b.layer("norm", b.rng.choice(kinds), x)


def conv_1d(b: Builder, x: int) -> object:
    if b.shape(x)[2] < 3:
        return linear(b, x)
    index = b.layer("conv", nn.Conv1d(b.shape(x)[1], 4, 3, padding=1), x)
    return b.layer("bn", nn.BatchNorm1d(4), index) if b.rng.random() < 0.4 else index


def _fused_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # the exporter takes four dimensions only
    return F.scaled_dot_product_attention(q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)).squeeze(1)


def attend(b: Builder, x: int) -> object:
    width = b.shape(x)[-1]
    q, k, v = (b.layer(name, nn.Linear(width, 4), x) for name in ("query", "key", "value"))
    if b.rng.random() < 0.4:
        return b.op("attention", _fused_attention, q, k, v)
    scores = b.op("scores", lambda left, right: left @ right.transpose(1, 2) / 2.0, q, k)
    return b.op("matmul", torch.matmul, b.op("softmax", lambda s: s.softmax(-1), scores), v)


def swap(b: Builder, x: int) -> object:
    return b.op("transpose", lambda v: v.transpose(1, 2), x)


def flatten(b: Builder, x: int) -> object:
    return b.op("flatten", _flat, x) if b.rng.random() < 0.5 else b.op("mean", lambda v: v.mean(1), x)


def unflatten(b: Builder, x: int) -> object:
    width = b.shape(x)[1]
    half = 2 if width % 2 == 0 else 1
    return b.op("reshape", lambda v: v.reshape(v.shape[0], half, width // half), x)


def heads(b: Builder, x: int) -> object:
    """Split the last axis into two heads and bring it forward: [N, T, D] to [N, 2, T, D / 2]."""
    width = b.shape(x)[2]
    if width % 2:
        return linear(b, x)
    return b.op("heads", lambda v: v.view(v.shape[0], v.shape[1], 2, -1).transpose(1, 2), x)


# --- of any rank ----------------------------------------------------------------------------------------------------

MODULES: list[Callable[[], nn.Module]] = [
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.SiLU, nn.GELU, lambda: nn.GELU("tanh"), nn.Hardswish, nn.Sigmoid,
    nn.Tanh, nn.ELU, nn.Softplus, nn.Hardtanh, nn.Hardsigmoid, nn.Mish, nn.Identity, nn.Dropout, nn.CELU,
    lambda: nn.Softmax(-1), lambda: nn.LogSoftmax(-1), nn.Softsign,
]  # fmt: skip
FUNCTIONS: list[Callable[..., Tensor]] = [
    F.relu, F.relu6, F.leaky_relu, F.silu, F.gelu, F.hardswish, torch.sigmoid, torch.tanh, torch.relu, F.elu, F.mish,
    F.softplus, torch.abs, torch.neg,
]  # fmt: skip


def activation(b: Builder, x: int) -> int:
    if b.rng.random() < 0.6:
        used = [name for name in b.layers if name.startswith("act")]
        if used and b.rng.random() < 0.25:
            return b.call("again", b.rng.choice(used), x)
        return b.layer("act", b.rng.choice(MODULES)(), x)
    function = b.rng.choice(FUNCTIONS)
    return b.op(function.__name__, function, x)


def scalar(b: Builder, x: int) -> object:
    choices: dict[str, Callable[[Tensor], Tensor]] = {
        "x + 1": lambda v: v + 1.0,
        "x * 0.5": lambda v: v * 0.5,
        "2 - x": lambda v: 2.0 - v,
        "x / 3": lambda v: v / 3.0,
        "x ** 2": lambda v: v**2,
        "clamp": lambda v: v.clamp(-0.5, 1.5),
        "clamp(min)": lambda v: v.clamp(min=-0.25),
        "sqrt": lambda v: (v.abs() + 0.1).sqrt(),
        "exp": lambda v: torch.exp(-v.abs()),
        "where": lambda v: torch.where(v > 0, v, v * 0.1),
        "squeeze": lambda v: v.unsqueeze(1).squeeze(1),
        "contiguous": lambda v: v.contiguous().clone(),
    }
    title = b.rng.choice(list(choices))
    return b.op(title, choices[title], x)


def binary(b: Builder, x: int) -> object:
    other = b.like(x)
    choices: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": lambda v, w: v + w,
        "sub": lambda v, w: v - w,
        "mul": lambda v, w: v * w,
        "torch.add": torch.add,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "div": lambda v, w: v / (w.abs() + 1.0),
        "+=": lambda v, w: v.clone().add_(w),
    }
    title = b.rng.choice(["add", "add", *choices])
    return b.op(title, choices[title], x, other)


def cat(b: Builder, x: int) -> object:
    axis = b.rng.choice([1, len(b.shape(x)) - 1])
    reads = [x, b.like(x, free=axis)]
    if b.rng.random() < 0.2:
        reads.append(b.like(x, free=axis))
    return b.op("cat", lambda *v: torch.cat(v, axis), *reads)


def parts(b: Builder, x: int) -> object:
    axis = b.rng.choice([1, -1])
    size = b.shape(x)[axis]
    if size < 2:
        return scalar(b, x)
    kind = b.rng.choice(["chunk", "split", "slice", "narrow", "index"])
    if kind == "chunk":
        return b.ops("chunk", lambda v: v.chunk(2, axis), x)
    if kind == "split":
        return b.ops("split", lambda v: v.split([1, size - 1], axis), x)
    if kind == "narrow":
        return b.op("narrow", lambda v: v.narrow(axis, 1, size - 1), x)
    if kind == "index" and len(b.shape(x)) == 3:
        return b.op("x[:, 0]", lambda v: v[:, 0], x)
    return b.op("slice", lambda v: v[:, 1:] if axis == 1 else v[..., ::2], x)


class Own(nn.Module):
    """Adds or multiplies by a parameter of its own."""

    def __init__(self, width: int, multiply: bool) -> None:
        super().__init__()
        self.own, self.multiply = nn.Parameter(seeded(width, seed=width) * 0.5), multiply

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own if self.multiply else x + self.own


def own(b: Builder, x: int) -> object:
    return b.layer("own", Own(b.shape(x)[-1], b.rng.random() < 0.5), x)


def again(b: Builder, x: int) -> object:
    """Call a Linear or Conv2d for a second time, with what it made or with what fits."""
    fitting = [
        name
        for name, layer in b.layers.items()
        if (isinstance(layer, nn.Linear) and layer.in_features == b.shape(x)[-1])
        or (isinstance(layer, nn.Conv2d) and len(b.shape(x)) == 4 and layer.in_channels == b.shape(x)[1])
    ]
    fitting = [name for name in fitting if _fits(b, name, x)]
    return b.call("again", b.rng.choice(fitting), x) if fitting else scalar(b, x)


def _fits(b: Builder, name: str, x: int) -> bool:
    layer = b.layers[name]
    kernel = layer.kernel_size[0] if isinstance(layer, nn.Conv2d) else 1
    return isinstance(layer, nn.Linear) or min(b.shape(x)[2:]) >= int(kernel)


ANY: list[Grow] = [activation, activation, activation, scalar, binary, binary, cat, parts, own, again]
BY_RANK: dict[int, list[Grow]] = {
    4: [conv, conv, conv, conv, conv_transpose, norm_2d, pool, upsample, pad, squeeze_excite, tokens, channels_last,
        shuffle, pooled],
    3: [linear, linear, linear, norm_1d, conv_1d, attend, swap, flatten, heads],
    2: [linear, linear, linear, norm_1d, unflatten],
}  # fmt: skip


def random_network(seed: int) -> tuple[RandomNetwork, Any]:
    """A module in eval mode and an example that calls it."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    b = Builder(rng)
    starts = {4: (3, 8, 8), 3: (5, 6), 2: (8,)}
    shape = starts[rng.choice([4, 4, 4, 3, 3, 2])]
    kinds = [OneInput, OneInput, OneInput, TwoInputs, AnyInputs, DictResult]
    kind: type[RandomNetwork] = rng.choice(kinds)
    for i in range(2 if kind in (TwoInputs, AnyInputs) else 1):
        b.given(seeded(BATCH, *shape, seed=seed + i))
    if len(b.inputs) == 2:
        b.op("add", lambda v, w: v + w * 0.5, *b.inputs)
    linear(b, 0) if len(shape) < 3 else conv(b, 0)
    for _ in range(rng.randint(4, 12)):
        recent = [i for i in b.values if i >= len(b.values) - 4 and b.values[i][0].numel() <= _LARGEST // BATCH // 2]
        x = rng.choice(recent or list(b.values))
        rank = len(b.shape(x))
        rng.choice(rng.choice([ANY, BY_RANK[rank]]))(b, x)
    return _finished(b, kind)


def _finished(b: Builder, kind: type[RandomNetwork]) -> tuple[RandomNetwork, Any]:
    made = [i for step in b.steps for i in step.writes]
    outputs = [made[-1], *b.rng.sample(made[:-1], b.rng.choice([0, 0, 1, 2]))]
    steps, needed = [], set(outputs)
    for step in reversed(b.steps):  # what reaches no output stays, sometimes
        if needed & set(step.writes) or b.rng.random() < 0.1:
            steps.append(step)
            needed |= set(step.reads)
    used = {step.layer for step in steps}
    layers = {name: layer for name, layer in b.layers.items() if name in used}
    net = kind(layers, steps[::-1], tuple(b.inputs), list(dict.fromkeys(outputs))).eval()
    given = tuple(b.values[i] for i in b.inputs)
    example = given[0] if len(given) == 1 else given
    return net, {"x": given[0], "y": given[1]} if kind is TwoInputs and b.rng.random() < 0.5 else example
