"""A module deep inside another one is called by several callers: every call has sites of its own."""

from pathlib import Path

import pytest
from edges import road
from torch import Tensor, nn
from torch_models import seeded


class Embedding(nn.Module):
    """A layer and a functional op on its result."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 2.0


class Block(nn.Module):
    """Calls the embedding that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = Embedding()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.emb(time)


class Reaching(nn.Module):
    """Calls its blocks, and once more what is in the first of them, as DiT does with its time embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        early = self.blocks[0].emb(time * 10)
        for block in self.blocks:
            x = block(x, time)
        return x * early + self.blocks[0].emb(time * 100)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
def test_every_call_has_sites_of_its_own(tmp_path: Path):
    example, other = [(seeded(n, 4), seeded(n, 4)) for n in (2, 3)]
    sim = road(Reaching().eval(), example, [other], tmp_path).sim
    calls = ("blocks.0.emb", "blocks.0.emb@1", "blocks.0.emb@2")  # in time steps of 10, 1 and 100
    first, inside, last = (sim.encodings[f"{call}/mul.0:output"].scale.item() for call in calls)
    assert first > 5 * inside
    assert last > 5 * first
