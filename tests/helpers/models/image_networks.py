"""Small networks of the kinds that run on phones and microcontrollers, by name, each with the shape of its input."""

import torch
import torch.nn.functional as F
from torch import nn


def unit(given: int, made: int, kernel: int = 3, stride: int = 1, groups: int = 1, act=nn.ReLU) -> nn.Module:
    """Return a convolution with a BatchNorm and an activation."""
    conv = nn.Conv2d(given, made, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(made), act())


def head(given: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 10)]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = unit(width, width), unit(width, width, act=nn.Identity)

    def forward(self, x):
        return F.relu(x + self.second(self.first(x)))


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    def __init__(self, given: int, made: int, stride: int, act=nn.ReLU6, squeeze: bool = False) -> None:
        super().__init__()
        inner = 4 * given
        self.body = nn.Sequential(
            unit(given, inner, 1, act=act),
            unit(inner, inner, 3, stride, inner, act),
            Squeeze(inner) if squeeze else nn.Identity(),
            unit(inner, made, 1, act=nn.Identity),
        )
        self.adds = given == made and stride == 1

    def forward(self, x):
        return x + self.body(x) if self.adds else self.body(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = unit(3, 8), unit(8, 16, 3, 2), unit(16, 32, 3, 2)
        self.up, self.d, self.e = nn.ConvTranspose2d(32, 16, 2, 2), unit(32, 16), unit(24, 8)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        y = self.d(torch.cat([self.up(self.c(b)), b], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.last(self.e(torch.cat([y, a], 1))))


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.a, self.b, self.head = unit(3, 8), unit(8, 8, 1), unit(8, 8, 5), nn.Linear(24 * 8 * 8, 10)

    def forward(self, x):
        x = F.avg_pool2d(self.stem(x), 2)
        y = torch.cat([self.a(x), self.b(x), F.max_pool2d(x, 3, 1, 1)], 1)
        return self.head(F.avg_pool2d(y, 3, 2, 1).flatten(1))


class Shuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = unit(3, 16, 3, 2), nn.Linear(16, 10)
        self.branch = nn.Sequential(unit(8, 8, 1), unit(8, 8, 3, 1, 8, nn.Identity), unit(8, 8, 1))

    def forward(self, x):
        left, right = self.stem(x).chunk(2, 1)
        x = torch.cat([left, self.branch(right)], 1)
        n, c, h, w = x.shape
        x = x.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(x.mean((2, 3)))


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.c, self.head = unit(3, 8, 3, 2, act=nn.SiLU), unit(8, 8, 1, act=nn.SiLU), nn.Conv2d(16, 6, 1)

    def forward(self, x):
        y = self.c(self.stem(x))
        z = torch.cat([y, F.max_pool2d(y, 5, 1, 2)], 1)
        z = F.interpolate(F.max_pool2d(z, 2), scale_factor=2, mode="nearest")
        found = self.head(z).flatten(2)
        return found[:, :4], torch.sigmoid(found[:, 4:])


def sound() -> nn.Module:
    first = [nn.Conv1d(1, 8, 9, 4, 4), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2)]
    second = [nn.Conv1d(8, 16, 3, padding=1, groups=2), nn.ReLU(), nn.AvgPool1d(2)]
    third = [nn.Conv1d(16, 16, 3, padding=2, dilation=2), nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(256, 6)]
    return nn.Sequential(*first, *second, *third)


def efficient() -> nn.Module:
    first = [unit(3, 8, 3, 2, act=nn.SiLU), Inverted(8, 8, 1, nn.SiLU), nn.ConstantPad2d((0, 1, 0, 1), 0.0)]
    return nn.Sequential(*first, nn.Conv2d(8, 16, 3, 2), nn.PReLU(), *head(16))


IMAGE = (3, 32, 32)
#: name -> what makes the network, and the shape of one sample
NETWORKS = {
    "residual": (lambda: nn.Sequential(unit(3, 16, 7, 2), nn.MaxPool2d(3, 2, 1), Residual(16), *head(16)), IMAGE),
    "mobilenet_v2": (
        lambda: nn.Sequential(unit(3, 8, 3, 2, act=nn.ReLU6), Inverted(8, 16, 2), Inverted(16, 16, 1), *head(16)),
        IMAGE,
    ),
    "mobilenet_v3": (
        lambda: nn.Sequential(unit(3, 8, 3, 2, act=nn.Hardswish), Inverted(8, 8, 1, nn.Hardswish, True), *head(8)),
        IMAGE,
    ),
    "perceptron": (
        lambda: nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4), nn.Softmax(-1)
        ),
        (16,),
    ),
    "sound": (sound, (1, 256)),
    "unet": (UNet, IMAGE),
    "inception": (Inception, IMAGE),
    "shuffle": (Shuffle, IMAGE),
    "efficient": (efficient, IMAGE),
    "detector": (Detector, IMAGE),
}


def network(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network in eval mode, with moved BatchNorm statistics, and a batch of 8."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    model, x = make(), torch.randn(8, *shape)
    with torch.no_grad():
        model.train()
        model(x)
    return model.eval(), x
