"""A network with one layer that few bits ruin."""

import torch
from torch import nn


class FragileNet(nn.Module):
    """One of its layers, `fragile`, holds two weights far apart, which four bits cannot serve."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.fragile, self.last = nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 3), nn.Conv2d(width, 4, 1)
        with torch.no_grad():
            self.fragile.weight[:, 0, 0, 0] = 4.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.fragile(self.first(x).relu()).relu())


def fragile_net(width: int) -> FragileNet:
    """The network with the weights of a seed."""
    torch.manual_seed(0)
    return FragileNet(width).eval()
