"""`squeeze(axis)` takes an axis away where it is one long and does nothing else: in the file as in the module."""

from collections.abc import Callable
from pathlib import Path

import pytest
from edges import road
from torch import Tensor, nn
from torch_models import seeded, sim_of

from qsdk import ExportError


class Squeezing(nn.Module):
    """A squeeze between two layers."""

    def __init__(self, squeeze: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.squeeze = nn.Linear(4, 4), squeeze

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.squeeze(self.fc(x)))


def squeezed(x: Tensor) -> Tensor:
    x = x.squeeze(1) + 1  # five long
    return x.squeeze_((1, -1)).unsqueeze(1).squeeze((1, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
def test_squeeze_removes_only_axes_that_are_one_long(tmp_path: Path):
    road(Squeezing(squeezed).eval(), seeded(2, 5, 4), [seeded(3, 5, 4)], tmp_path)


def test_a_batch_that_is_squeezed_fixes_its_length():
    squeezing = Squeezing(lambda x: x.squeeze(0)).eval()
    assert "takes axis 0 away where it is one long alone" in str(sim_of(squeezing, seeded(2, 5, 4)).coverage())
    with pytest.raises(ExportError, match=r"squeeze\(0\) takes axis 0 away where it is one long alone, and that axis"):
        sim_of(squeezing, seeded(2, 5, 4), dynamic_shapes=({0: "batch"},))
