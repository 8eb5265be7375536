"""Parameters of modules that qsdk has never seen: the graph says what each one is, and nobody declares them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, seeded

from qsdk import QuantSim, check_parity, export, w4a8, w8a8

X = seeded(4, 8)
POSITIVE = seeded(8, seed=5).abs() + 0.5
ROW = seeded(8, seed=6)
Form = tuple[Callable[[Any, Tensor], Tensor], dict[str, Tensor]]


class Own(nn.Module):
    """A class of nobody's library that computes with tensors of its own."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.compute, tensors = form
        for name, value in tensors.items():
            setattr(self, name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def network(form: Form) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Own(form), nn.Linear(8, 4)).eval()


def root_mean_square(own: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + own.g)


def response(own: Any, x: Tensor) -> Tensor:
    return own.g * (x * (x.norm(dim=-1, keepdim=True) / (x.norm() + 1e-6))) + own.b + x


ARITHMETIC: dict[str, Form] = {
    "x * g": (lambda own, x: x * own.g, {"g": ROW}),
    "g * x": (lambda own, x: own.g * x, {"g": ROW}),
    "x + g": (lambda own, x: x + own.g, {"g": ROW}),
    "x - g": (lambda own, x: x - own.g, {"g": ROW}),
    "g - x": (lambda own, x: own.g - x, {"g": ROW}),
    "x / g": (lambda own, x: x / own.g, {"g": POSITIVE}),
    "g / x": (lambda own, x: own.g / (x.abs() + 1), {"g": ROW}),
    "layer scale of a residual": (lambda own, x: x + x.relu() * own.g, {"g": torch.full((8,), 1e-2)}),
    "x * g + b": (lambda own, x: x * own.g + own.b, {"g": ROW, "b": POSITIVE}),
    "addcmul": (lambda own, x: torch.addcmul(own.b, x, own.g), {"g": ROW, "b": POSITIVE}),
    "twice": (lambda own, x: x * own.g + x.relu() * own.g, {"g": ROW}),
    "of each other": (lambda own, x: x * (own.g * own.b), {"g": ROW, "b": POSITIVE}),
    "maximum": (lambda own, x: torch.maximum(x, own.g), {"g": -POSITIVE}),
    "where": (lambda own, x: torch.where(x > 0, x, x * own.g), {"g": ROW}),
    "RMSNorm with 1 + g": (root_mean_square, {"g": 0.1 * ROW}),
    "response normalization": (response, {"g": ROW, "b": POSITIVE}),
}

FLOAT: dict[str, tuple[Form, str]] = {
    "temperature": ((lambda own, x: x / own.t, {"t": torch.tensor(2.0)}), "a scalar constant"),
    "exp": ((lambda own, x: x * own.t.exp(), {"t": ROW}), "a parameter of Exp that has no integer form of its own"),
    "exponent": ((lambda own, x: (x.abs() + 1) ** own.t, {"t": POSITIVE}), "a parameter of Pow"),
    "softmax": ((lambda own, x: x * own.t.softmax(0), {"t": ROW}), "a parameter of Softmax"),
    "slice": ((lambda own, x: x + own.t[: x.shape[1]], {"t": seeded(16)}), "Slice hands it on to a site"),
}


def exported(sim: QuantSim, folder: Path) -> dict[str, Any]:
    """The summary of the parity of what the sim exports."""
    export(sim, folder / "model.onnx")
    summary: dict[str, Any] = check_parity(sim, folder / "model.onnx", [X], progress=False).to_dict()["summary"]
    return summary


@pytest.mark.slow
@pytest.mark.parametrize("form", ARITHMETIC.values(), ids=ARITHMETIC)
def test_an_operand_of_arithmetic_is_quantized_without_a_declaration(form: Form, tmp_path: Path):
    sim = calibrated(network(form), X)
    rows = {row["site"]: row for row in sim.coverage().rows}
    for name in form[1]:
        assert rows[f"1:{name}"]["state"] == "quantized"
        assert rows[f"1:{name}"]["kind"] == "weight"
    summary = exported(sim, tmp_path)
    assert summary["passed"]
    assert summary["weights_max_lsb"] == 0
    assert summary["activations_max_lsb"] <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("form", "reason"), FLOAT.values(), ids=FLOAT)
def test_a_parameter_that_no_integer_op_reads_stays_float_with_a_reason(form: Form, reason: str, tmp_path: Path):
    sim = calibrated(network(form), X)
    row = next(row for row in sim.coverage().rows if row["site"] == "1:t")
    assert row["state"] == "float"
    assert reason in row["reason"]
    assert exported(sim, tmp_path)["passed"]


@pytest.mark.slow
def test_unknown_modules_are_simulated_trained_and_matched_by_rules():
    form = ARITHMETIC["x * g"]
    sim = calibrated(network(form), X, w4a8())
    gain = sim.plan.decisions["1:g"].spec
    assert gain is not None
    assert gain.dtype.name == "int8"  # four bits are for the weights of linear ops
    with sim.training() as _:
        loss = F.mse_loss(sim.model(X), torch.zeros(4, 4))
        loss.backward()
    trained = sim.model.get_submodule("1").g
    assert trained.grad is not None
    assert bool((trained.grad != 0).any())
    named = calibrated(network(form), X, w8a8().override("1:g", weight="int4"))
    assert named.plan.decisions["1:g"].spec is not None
    assert named.plan.decisions["1:g"].spec.dtype.name == "int4"
    before = sim(X)
    with torch.no_grad():
        trained.add_(1.0)
    assert not torch.equal(sim(X), before)


@pytest.mark.slow
def test_declared_layers_decide_which_parameters_are_quantized():
    form = ARITHMETIC["x * g + b"]
    declared = calibrated(network(form), X, w8a8().layer("Own", "g"))
    assert declared.plan.decisions["1:g"].quantized
    assert "1:b" not in declared.plan.decisions
    skipped = calibrated(network(form), X, w8a8().skip("1"))
    assert not skipped.plan.decisions["1:g"].quantized


def test_a_model_that_is_one_unknown_module_is_quantized():
    sim = calibrated(Own(ARITHMETIC["x * g + b"]), X)
    assert sim.plan.decisions["self:g"].quantized
    assert set(sim.plan.decisions) == {"self:g", "self:b", "x:input", "mul.0:output", "add.0:output"}


class Positions(nn.Module):
    """Adds the first rows of a table: all of them here."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(seeded(1, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x[None] + self.table[:, : x.shape[0]]


class FakeQuantGrid(nn.Module):
    """Keeps the places of its last input's size as a plain attribute, as detectors do."""

    size: int | None = None
    places = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.size != x.shape[1]:
            self.places, self.size = torch.arange(x.shape[1], dtype=torch.float32) + 0.5, x.shape[1]
        return x - self.places.unsqueeze(0)


@pytest.mark.slow
@pytest.mark.parametrize("own", [Positions(), FakeQuantGrid()], ids=["slice", "grid"])
def test_parts_of_parameters_and_plain_attributes_are_simulated_as_exported(own: nn.Module, tmp_path: Path):
    sim = calibrated(nn.Sequential(nn.Linear(8, 8), own, nn.Linear(8, 4)).eval(), X)
    summary = exported(sim, tmp_path)
    assert summary["passed"]
    assert summary["weights_max_lsb"] == 0
    with sim.training() as model:
        model(X).sum().backward()
