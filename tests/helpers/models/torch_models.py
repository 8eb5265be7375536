"""Small models for the tests of the PyTorch door. At module level, so that they can be pickled."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from qsdk import QuantConfig, QuantSim, calibrate, quantize, w8a8


def sim_of(model: nn.Module, example: Any, config: QuantConfig | None = None, **options: Any) -> QuantSim:
    """A sim that is not calibrated."""
    sim = quantize(model, example, config or w8a8(), **options)
    assert isinstance(sim, QuantSim)
    return sim


def calibrated(model: nn.Module, example: Any, config: QuantConfig | None = None, **options: Any) -> QuantSim:
    """A sim calibrated on its example."""
    sim = sim_of(model, example, config, **options)
    calibrate(sim, [example], progress=False)
    return sim


def seeded(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values that are the same in every test."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode, with BatchNorms that do something."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.weight, module.bias):
                if tensor is not None:
                    tensor.data.normal_(generator=generator)
            if module.running_var is not None:
                module.running_var.uniform_(0.3, 2.0, generator=generator)
    return model.eval()


def states(sim: QuantSim) -> dict[str, str]:
    """Site -> state of every row of the coverage."""
    return {row["site"]: row["state"] for row in sim.coverage().rows}


def same_encodings(left: QuantSim, right: QuantSim) -> bool:
    """Whether two sims have the same encodings (compared by value)."""
    return left.encodings_where_ready() == right.encodings_where_ready()


class ConvNet(nn.Module):
    """Conv-ReLU-Conv-Flatten-Linear: [N, 3, 6, 6] to [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(4, 5, 3)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(80, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.conv2(self.relu(self.conv1(x)))))


class BatchNormNet(nn.Module):
    """Conv-BN-ReLU twice, then Linear: [N, 2, 6, 6] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, groups=2)
        self.bn2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return self.fc(x.mean((2, 3)))


class Add(nn.Module):
    """`+` as a module."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


class Concat(nn.Module):
    """`cat` as a module."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.cat([left, right], 1)


class MatMul(nn.Module):
    """`@` as a module."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left, right)


class ModuleForm(nn.Module):
    """ReLU, addition, concatenation and matrix product as modules: [N, 6] to [N, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.relu, self.add, self.concat, self.matmul = nn.ReLU(), Add(), Concat(), MatMul()

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.relu(self.left(x)), self.right(x)
        both = self.concat(self.add(left, right), right)
        return self.matmul(both, both.transpose(0, 1))


class FunctionalForm(nn.Module):
    """The same as `ModuleForm`, written with functions and operators."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.left(x)), self.right(x)
        both = torch.cat([left + right, right], 1)
        return both @ both.transpose(0, 1)


class Block(nn.Module):
    """One ReLU module called twice around a Linear, and an addition; its own activation or one that it is given."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.act = nn.ReLU() if act is None else act
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(self.act(x))) + x


class Twice(nn.Module):
    """Calls one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x) * 2)


class SharedActivation(nn.Module):
    """Two blocks that were given the same activation object, as is common."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ReLU()
        self.a, self.b = Block(act), Block(act)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * 3)


class Borrowed(nn.Module):
    """A block that calls a module which the model owns elsewhere."""

    def __init__(self, lent: nn.Module) -> None:
        super().__init__()
        self.lent = [lent]

    def forward(self, x: Tensor) -> Tensor:
        return self.lent[0](x) * 2


class Lender(nn.Module):
    """Owns a ReLU that it calls itself and that two of its blocks call too."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.a, self.b = Borrowed(self.act), Borrowed(self.act)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.a(x)) - 1)


class TiedLanguageModel(nn.Module):
    """Embedding and head share one weight: tokens [N, T] to logits [N, T, 11]."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.fc = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.emb(tokens))))


class Encoder(nn.Module):
    """Two linear layers and a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(6, 8), nn.Linear(8, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc2(self.act(self.fc1(x)))) + x


class EncoderModel(nn.Module):
    """An encoder between functional ops, checkpointed if asked; `use_reentrant` says how."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(6, 3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x * x.abs()
        if self.use_reentrant is None or not self.training:
            x = self.encoder(x)
        else:
            x = checkpoint(self.encoder, x, use_reentrant=self.use_reentrant)
        return self.head(torch.sigmoid(x))


class CheckpointedTwice(nn.Module):
    """Checkpoints one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.block(self.block(x))
        x = checkpoint(self.block, x, use_reentrant=False)
        return checkpoint(self.block, x, use_reentrant=False)


class OwnTensors(nn.Module):
    """A container with a parameter, a table and a scalar of its own: [N, 5, 4] to [N, 5, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(seeded(1, 1, 4, seed=5))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("table", seeded(6, 4, seed=6))
        self.register_buffer("index", torch.arange(3))
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.table
        return (self.fc(x) * self.gain)[:, 1:]


class Pair(NamedTuple):
    """Two tensors."""

    left: Tensor
    right: Tensor


class Containers(nn.Module):
    """Inputs in a tuple, a list in a dict, a named tuple and a plain tensor."""

    def forward(self, pair: tuple[Tensor, Tensor], nested: dict[str, Any], named: Pair, scale: Tensor) -> Tensor:
        return (pair[0] + pair[1]) * nested["a"] + nested["b"][0] * scale - named.left / (named.right.abs() + 1)


class DictOut(nn.Module):
    """Gives a dict that holds a tensor, a tuple and an int."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> OrderedDict[str, Any]:
        hidden = self.fc(x)
        parts = hidden.relu(), hidden.sum(-1)
        return OrderedDict(hidden=hidden, parts=parts)


class Keywords(nn.Module):
    """Two float inputs and an integer one, the last two by keyword: tokens pick rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.Embedding(7, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, *, bias: Tensor, tokens: Tensor) -> Tensor:
        return self.fc(x + bias) + self.fc(self.emb(tokens))


class Dead(nn.Module):
    """Computes something that reaches no output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        _ = torch.sigmoid(x) * 3
        return self.fc(x)


class TracedOnly(nn.Module):
    """Adds its mask only under tracing, as some transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x * 1.5 if torch.compiler.is_exporting() else x


class EagerOnly(nn.Module):
    """Adds something that tracing skips."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        return x if torch.compiler.is_exporting() else torch.sigmoid(x)
