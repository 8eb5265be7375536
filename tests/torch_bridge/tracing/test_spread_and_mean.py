"""`std_mean` and `var_mean` have the sites of `std`, `var` and `mean`: a trace may be written with either."""

from pathlib import Path

import pytest
import torch
from edges import road
from torch import Tensor, nn
from torch_models import seeded


class Standardizing(nn.Module):
    """Takes mean and spread with one function, and with two where it is traced, as kornia's HardNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            spread, mean = torch.std(x, (-2, -1), keepdim=True), torch.mean(x, (-2, -1), keepdim=True)
        else:
            spread, mean = torch.std_mean(x, dim=(-2, -1), keepdim=True)
        x = self.fc((x - mean) / (spread + 1e-6))
        variance, middle = torch.var_mean(x, -1, False, True)
        return (
            self.fc((x - middle) / (variance + 0.1))
            + torch.var_mean(x, True)[1]
            + torch.std_mean(x, None, correction=0)[1]
        )


@pytest.mark.usefixtures("exact_products")
def test_both_spellings_have_the_same_sites(tmp_path: Path):
    model, example = Standardizing().eval(), seeded(2, 5, 6)
    sim = road(model, example, [seeded(3, 5, 6)], tmp_path).sim
    owners = {site.partition(":")[0] for site in sim.encodings}
    assert {"std.0", "mean.0", "var.0", "mean.1", "mean.2", "mean.3"} <= owners
    assert not any(owner.startswith(("std_mean", "var_mean")) for owner in owners)
    with torch.no_grad():
        assert (sim(example) - model(example)).abs().max() < 0.2
