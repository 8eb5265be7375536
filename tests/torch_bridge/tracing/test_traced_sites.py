"""The traced graph is the authority on sites: dead ones, ones the example does not exercise, and differences."""

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from edges import road
from torch import Tensor, nn
from torch_models import seeded, sim_of, states

import qsdk
from qsdk import ExportError, ModelError, calibrate


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
        return x[:, 1:] * x[:, :-1]


def test_a_site_that_only_the_trace_has_is_float_where_no_batch_takes_its_path(tmp_path):
    zero, one = (seeded(2, 4), torch.zeros(2, 4)), (seeded(2, 4), torch.ones(2, 4))
    sim = sim_of(OnlyTraced().eval(), zero)
    reached = copy.deepcopy(sim)
    assert set(sim.not_exercised) == {"mul.0:output", "sub.0:output"}
    assert states(sim)["sub.0:output"] == "not exercised"
    report = calibrate(sim, [zero], progress=False)  # the very example is enough
    notes = {row["site"]: row["note"] for row in report.rows if "note" in row}
    assert "only the trace has it, and no batch took this path" in notes["sub.0:output"]
    assert states(sim)["sub.0:output"] == states(sim)["getitem.0:output"] == "float"
    assert "holds values of a site that only the trace has" in notes["getitem.0:output"]
    assert all(sim.ready().values())
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [zero], progress=False).summary["passed"]
    calibrate(reached, [one], progress=False)
    assert all(reached.ready().values())
    assert reached.plan.decisions["sub.0:output"].quantized


def scaled(x: Tensor) -> Tensor:
    return x * (x + 3).clamp(0, 6) / 6


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch deprecates it; libraries have it for their activations
    hard_swish = torch.jit.script(scaled)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(hard_swish(self.fc(x)))


def test_ops_of_a_scripted_function_are_sites(tmp_path):
    x, model = seeded(4, 4), Scripted().eval()
    model.kept = hard_swish
    with pytest.raises(ModelError, match=r"cannot be copied: ScriptFunction cannot be pickled; pass in_place=True"):
        qsdk.quantize(model, x)
    sim = qsdk.quantize(model, x, in_place=True)
    assert not sim.not_exercised
    calibrate(sim, [x], progress=False)
    assert states(sim)["div.0:output"] == "quantized"
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]


class MovedScores(nn.Module):
    """Drops a mask of ones as transformers does, between views that the trace has more of."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.fc(x)
        scores = (x @ x.transpose(1, 2)).view(-1, 5)
        if torch.compiler.is_compiling() or not bool(mask.all()):
            scores = scores.view(-1, 5, 5) + torch.where(mask[:, None, :], 0.0, -1e4)
            scores = scores.view(-1, 5)
        scores = scores.softmax(-1).view(-1, 5, 5)
        scores = scores.view(-1, 25)
        scores = scores.view(-1, 5, 5)
        return scores @ x


def test_a_mask_of_ones_that_is_left_out_between_views_needs_no_other_data(tmp_path):
    given = batch(padded=False)
    sim = sim_of(MovedScores().eval(), given)
    assert sim.not_exercised
    calibrate(sim, [given], progress=False)
    assert torch.isfinite(sim(*given)).all()  # calls are numbered as in the trace, lines and all
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [given], progress=False).summary["passed"]


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
