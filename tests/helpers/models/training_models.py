"""Networks and loops for the tests of training. At module level, so that they can be pickled."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsdk import QuantSim


class Residual(nn.Module):
    """Two convolutions with BatchNorms, ReLUs and an addition, then Linear: [N, 3, 6, 6] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = x + F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Layer(nn.Module):
    """A transformer layer, norms first: [N, T, 8] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A list of one layer between two Linears: [N, 5, 4] to [N, 3]. The range of its last addition is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Linear(4, 8), nn.ModuleList(Layer() for _ in range(1)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1).unflatten(1, (-1, 8)).mean(1))


def loss_of(out: Tensor) -> Tensor:
    """Something that every output has a part in, and that batches have in common: a mean over examples."""
    return (out - torch.linspace(-1, 1, out.shape[-1])).square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Path -> gradient of every parameter."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert not (lost := [name for name, gradient in found.items() if gradient is None]), lost
    return {name: gradient.detach().clone() for name, gradient in found.items() if gradient is not None}


def steps(
    sim: QuantSim,
    batches: Iterable[Tensor],
    *,
    wrap: Callable[[nn.Module], Any] = lambda model: model,
    lr: float = 0.05,
    scale_lr: float = 2.0,
) -> list[dict[str, Any]]:
    """Train with learned scales, one step for each batch; gives output and gradients of each."""
    found = []
    with sim.training(learn_scales=True) as model:
        wrapped = wrap(model)
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=lr, scale_lr=scale_lr), momentum=0.9)
        for x in batches:
            out = wrapped(x)
            optimizer.zero_grad(set_to_none=True)
            loss_of(out).backward()
            found.append({"out": out.detach().clone(), **gradients(model)})
            optimizer.step()
    return found


def same_gradients(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    """Assert that two passes agree; tolerance in parts of the largest gradient of a weight, or of a scale."""
    assert one.keys() == other.keys()
    for scales in (True, False):
        names = [name for name in one if name.endswith(("_log2", "_shift")) is scales]
        largest = max((float(one[name].abs().max()) for name in names), default=0.0)
        for name in names:
            assert float((one[name] - other[name]).abs().max()) <= tolerance * largest, name
