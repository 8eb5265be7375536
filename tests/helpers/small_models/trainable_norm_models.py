"""Networks whose BatchNorms are trained, and steps of their training."""

import copy
import functools

import torch
from torch import Tensor, nn
from torch_models import BatchNormNet, calibrated, randomized, seeded

from qsdk import QuantConfig, QuantSim, w8a8


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(x, right[name]) for name, x in left.items())


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return randomized(BatchNormNet())


@functools.cache
def _prepared(config: QuantConfig, seed: int) -> QuantSim:
    return calibrated(net(seed), seeded(8, 2, 6, 6), config)


def fresh(config: QuantConfig | None = None, seed: int = 0) -> QuantSim:
    """A calibrated sim of the network."""
    return copy.deepcopy(_prepared(config or w8a8(), seed))


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(x) - 0.3).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()
