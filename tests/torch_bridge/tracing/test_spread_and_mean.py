"""`std_mean` and `var_mean` have the sites of `std`, `var` and `mean`, and a mean may be scattered."""

from pathlib import Path

import pytest
import torch
from edges import road
from torch import Tensor, nn
from torch_models import seeded

from torch_bridge.workarounds.export_forms import export_form


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


class Pooled(nn.Module):
    """Means of the rows that go to one place, once into a tensor of their own and once in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        index, start = places[:, None].expand(-1, 6), self.fc(x)[:4] * 2
        start.scatter_reduce_(0, index, self.fc(x), "mean")
        return start + torch.zeros(4, 6).scatter_reduce(0, index, x, reduce="mean", include_self=False)


@pytest.mark.usefixtures("exact_products")
def test_a_mean_that_is_scattered_is_one_in_the_file(tmp_path: Path):
    """torch's exporter writes the last value of each place."""
    given = seeded(9, 6), torch.tensor([0, 0, 1, 1, 1, 3, 3, 0, 0])
    sim = road(Pooled().eval(), given, [given], tmp_path).sim
    assert {"scatter_reduce.0:output", "scatter_reduce.1:output"} <= set(sim.encodings)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_the_form_of_a_scattered_mean_is_that_of_torch(dtype: torch.dtype, include_self: bool):
    x, values = (torch.randint(-9, 9, shape).to(dtype) for shape in ((4, 5), (8, 7)))
    index = torch.randint(0, 3, (6, 5))
    arguments, options = (x, -2, index, values, "mean"), {"include_self": include_self}
    form = export_form(torch.scatter_reduce, arguments, options)
    assert form is not torch.scatter_reduce
    torch.testing.assert_close(form(*arguments, **options), torch.scatter_reduce(*arguments, **options))
