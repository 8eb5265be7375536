"""The traced graph is the authority on sites: dead ones, ones the example does not exercise, and differences."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edges import road
from torch import Tensor, nn
from torch_models import seeded, sim_of, states

import qsdk
from qsdk.core.errors import CalibrationError, ExportError, ModelError
from qsdk.verbs.quantize import calibrate


class Masked(nn.Module):
    """Scores with a mask that is left out in eager mode where it hides nothing, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.fc(x)
        scores = x @ x.transpose(1, 2)
        if torch.compiler.is_compiling() or not bool(mask.all()):
            scores = scores + torch.where(mask[:, None, :], 0.0, -1e4)
        return self.head(scores.softmax(-1) @ x)


def batch(*, padded: bool, rows: int = 2, length: int = 5) -> tuple[Tensor, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.bool)
    if padded:
        mask[:, length - 2 :] = False
    return seeded(rows, length, 4), mask


SHAPES: Any = ({0: "batch", 1: "sequence"}, {0: "batch", 1: "sequence"})


@pytest.mark.slow
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("padded", [False, True])
def test_a_padded_and_an_all_ones_mask_both_work(tmp_path: Path, padded: bool):
    both = [batch(padded=True, rows=3, length=7), batch(padded=False, rows=1, length=4)]
    came = road(Masked().eval(), batch(padded=padded), both, tmp_path, dynamic_shapes=SHAPES)
    assert (came.sim.not_exercised == ()) == padded
    # calibrated with the other kind alone
    calibrate(came.sim, [batch(padded=not padded)], progress=False)
    assert bool(came.sim(*batch(padded=padded)).isfinite().all())


class OnlyTraced(nn.Module):
    """A branch that calibration reaches, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, negative: Tensor) -> Tensor:
        x = self.fc(x)
        if torch.compiler.is_compiling() or bool(negative.any()):
            x = x - negative * 3
        return x


@pytest.mark.slow
def test_a_site_that_no_batch_exercises_is_named_with_the_remedy():
    zero, one = torch.zeros(2, 4), torch.ones(2, 4)
    sim = sim_of(OnlyTraced().eval(), (seeded(2, 4), zero))
    assert set(sim.not_exercised) == {"mul.0:output", "sub.0:output"}
    assert states(sim)["sub.0:output"] == "not exercised"
    with pytest.raises(CalibrationError, match=r"mul\.0:output"):
        calibrate(sim, [(seeded(2, 4), zero)], progress=False)
    assert not any(sim.ready().values())
    calibrate(sim, [(seeded(2, 4), one)], progress=False)
    assert all(sim.ready().values())


def test_a_trace_that_leaves_something_out_names_it():
    class EagerOnly(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if torch.compiler.is_compiling() else x.sigmoid() + 1

    with pytest.raises(ModelError, match=r"the eager model reaches sigmoid\.0:output but the traced one does not"):
        sim_of(EagerOnly(), seeded(2, 4))


def test_a_trace_with_other_outputs_names_the_first():
    class Other(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = x.sigmoid()
            return {"a": x} if torch.compiler.is_compiling() else {"a": x, "b": x}

    match = r"on the example the model gives b: float32 \[2, 4\] and its trace nothing more"
    with pytest.raises(ExportError, match=match):
        sim_of(Other(), seeded(2, 4))


class MadeOfNumbers(nn.Module):
    """Makes tensors of numbers in its forward, in all ways that torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * torch.sqrt(torch.FloatTensor([0.5]).to(x.device)) + torch.Tensor([0.25]).exp()
        y = y * torch.from_numpy(np.float32([2.0, 3.0, 4.0, 5.0])).sqrt()
        return y + torch.FloatTensor(4).fill_(0.5).tanh() + x.new_tensor([1.0]).exp()


def test_tensors_that_a_forward_makes_of_numbers_are_traced_as_constants(tmp_path):
    torch.manual_seed(0)
    model, x = MadeOfNumbers().eval(), torch.randn(8, 4)
    sim = qsdk.quantize(model, x)
    assert not [row["site"] for row in sim.coverage().rows if "lift" in row["site"] and "/" in row["site"]]
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]
    torch.testing.assert_close(sim(x), model(x), rtol=0.05, atol=0.2)
