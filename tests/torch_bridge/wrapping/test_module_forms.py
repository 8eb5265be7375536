"""Ordinary ways to write a module: one weight in two directions, parameters called like ops, norms without a module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, seeded, sim_of

from qsdk import QuantSim, calibrate, check_parity, export, to_integer, w4a8, w8a8
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor
from torch_bridge.sites import calls as calls_module
from torch_bridge.sites.calls import Frame

X = seeded(4, 8)
Compute = Callable[[Any, Tensor], Tensor]


class Form(nn.Module):
    """A module of parameters (and a Linear before them) whose forward is given."""

    def __init__(self, compute: Compute, **tensors: Tensor) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.compute, self.first = compute, nn.Linear(8, 8)
        for name, value in tensors.items():
            setattr(self, name, nn.Parameter(value.clone()))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.first(x))


def file_of(sim: QuantSim, folder: Path) -> Path:
    """Where the sim is exported; the file must compute what the sim does."""
    path = folder / "model.onnx"
    export(sim, path)
    summary = check_parity(sim, path, [X], progress=False).to_dict()["summary"]
    assert summary["passed"]
    assert summary["weights_max_lsb"] == 0
    assert summary["activations_max_lsb"] <= 1
    return path


# one weight, read in two directions

W, SQUARE, A, B = seeded(16, 8, seed=2, scale=0.3), seeded(8, 8, seed=3, scale=0.3), seeded(8), seeded(16, seed=4)

DIRECTIONS: dict[str, nn.Module] = {
    "w, then w.t()": Form(lambda m, x: F.linear(F.relu(F.linear(x, m.w)), m.w.t()), w=W),
    "w, then w.t(), biases": Form(lambda m, x: F.linear(F.relu(F.linear(x, m.w, m.b)), m.w.t(), m.a), w=W, a=A, b=B),
    "the wider one has a bias": Form(lambda m, x: F.linear(F.relu(F.linear(x, m.w.t())), m.w, m.b), w=W.t(), b=A),
    "linear, then matmul": Form(lambda m, x: F.relu(F.linear(x, m.w, m.b)) @ m.w, w=W, b=B),
    "matmul, then linear": Form(lambda m, x: F.linear(F.relu(x @ m.w), m.w, m.a), w=SQUARE, a=A),
    "square": Form(lambda m, x: F.linear(F.relu(F.linear(x, m.w, m.a)), m.w.T, m.b), w=SQUARE, a=A, b=A),
}


class Autoencoder(nn.Module):
    """A convolution and the transposed one with its weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.down, self.shift = nn.Conv1d(1, 3, 3), nn.Parameter(seeded(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(F.relu(self.down(x[:, None])), self.down.weight, self.shift)[:, 0]


DIRECTIONS["convolution, then its transpose"] = Autoencoder().eval()


@pytest.mark.slow
@pytest.mark.parametrize("model", DIRECTIONS.values(), ids=DIRECTIONS)
def test_a_weight_that_two_layers_read_along_different_axes_has_one_scale(model: nn.Module, tmp_path: Path):
    sim = calibrated(model, X)
    name = "down:weight" if isinstance(model, Autoencoder) else "self:w"
    spec = sim.plan.decisions[name].spec
    assert spec is not None
    assert spec.granularity == PerTensor()
    path = file_of(sim, tmp_path)
    to_integer(path, tmp_path / "integer.onnx", shapes={"x": [4, 8]})


@pytest.mark.slow
def test_blocks_and_layers_that_agree_keep_their_scales(tmp_path: Path):
    both = Form(lambda m, x: F.linear(F.relu(F.linear(x, m.w, m.a)), m.w, m.b), w=SQUARE, a=A, b=A)
    spec = calibrated(both, X).plan.decisions["self:w"].spec
    assert spec is not None
    assert spec.granularity == PerChannel(0)
    blocks = calibrated(DIRECTIONS["square"], X, w4a8(block_size=4))
    spec = blocks.plan.decisions["self:w"].spec
    assert spec is not None
    assert spec.granularity == PerBlock(1, 4)
    file_of(blocks, tmp_path)


# parameters that are called what torch calls the results of ops

NAMES: dict[str, nn.Module] = {
    "t * (u @ u.t())": Form(lambda m, x: m.t * (x @ x.t()), t=torch.tensor(2.6)),
    "(u @ u.t()) / t": Form(lambda m, x: (x @ x.t()) / m.t, t=torch.tensor(2.6)),
    "t.exp() * (u @ u.t())": Form(lambda m, x: m.t.exp() * (x @ x.t()), t=torch.tensor(0.6)),
    "relu": Form(lambda m, x: F.relu(x) * m.relu, relu=A),
    "linear of another shape": Form(lambda m, x: F.linear(x, m.linear) + x, linear=SQUARE),
    "matmul, and what gives way": Form(
        lambda m, x: (x @ m.matmul) * m.matmul_inside + m.t.t() @ m.matmul,
        matmul=SQUARE,
        matmul_inside=A,
        t=seeded(8, 1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", NAMES.values(), ids=NAMES)
def test_a_parameter_called_like_an_op_keeps_its_name_and_value(model: nn.Module, tmp_path: Path):
    sim = calibrated(model, X)
    file_of(sim, tmp_path)
    with torch.no_grad():
        assert torch.allclose(sim(X), model(X), atol=0.05 * float(model(X).abs().max()))


# F.batch_norm

MEAN, VARIANCE = seeded(8, seed=7), seeded(8, seed=8).abs() + 0.5

NORMS: dict[str, nn.Module] = {
    "own tensors": Form(lambda m, x: F.batch_norm(x, m.mean, m.v, m.g, m.b), mean=MEAN, v=VARIANCE, g=A, b=A),
    "no gain": Form(lambda m, x: F.batch_norm(x, m.mean, m.v), mean=MEAN, v=VARIANCE),
    "torch.batch_norm": Form(
        lambda m, x: torch.batch_norm(x, m.g, None, m.mean, m.v, False, 0.1, 1e-3, False), mean=MEAN, v=VARIANCE, g=A
    ),
    "of the batch": Form(lambda m, x: F.batch_norm(x, None, None, m.g, m.b, training=True), g=A, b=A),
    "of the batch, beside statistics": Form(
        lambda m, x: F.batch_norm(x, m.mean.detach().clone(), m.v.detach().clone(), m.g, m.b, training=True),
        mean=MEAN,
        v=VARIANCE,
        g=A,
        b=A,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", NORMS.values(), ids=NORMS)
def test_a_batch_norm_without_a_module(model: nn.Module, tmp_path: Path):
    sim = calibrated(model, X, w8a8())
    assert sim.plan.decisions["batch_norm.0:output"].quantized
    floats = [row for row in sim.coverage().rows if row["state"] == "float"]
    assert all(row["reason"] for row in floats)
    file_of(sim, tmp_path)
    with torch.no_grad():
        assert torch.allclose(sim(X), model(X), atol=0.05 * float(model(X).abs().max()))


# what only a trace does


class Masked(nn.Module):
    """Adds a mask unless it is all ones, as models do that look at it outside of a trace only; [N, 8] to [N, 8]."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm, self.calls = nn.Linear(8, 8), nn.LayerNorm(8), calls

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for _ in range(self.calls):
            scores = self.layer(x)
            if torch.compiler.is_compiling() or not bool(mask.all()):
                scores = scores + (1.0 - mask) * -4.0
            x = self.norm(x + scores)
        return x


ONES, SOME = torch.ones(8), (torch.arange(8) < 5).float()


@pytest.mark.spread(1)
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_are_named_by_their_place_where_a_run_leaves_some_out(calls: int, tmp_path: Path):
    sim = sim_of(Masked(calls).eval(), (X, ONES))
    assert sim.coverage().summary["not_exercised"] > 0
    calibrate(sim, [(X, SOME), (X, ONES)], progress=False)
    made: dict[str, Tensor] = {}
    with sim.runtime.observing_sites(made.__setitem__):
        sim(X, ONES)
    assert [site for site in made if site.startswith("add")] == [f"add.{2 * n + 1}:output" for n in range(calls)]
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [(X, SOME)], progress=False).to_dict()["summary"]["passed"]


def test_a_call_at_an_unknown_place_takes_the_number_of_no_other(monkeypatch: pytest.MonkeyPatch):
    numbers = calls_module.NumbersByLine({"add": ["one", "other", "one"]})
    frame, made = Frame("", "", leaf=False), []
    for where in ("other", "one", "unknown", "one", "one", "unknown"):
        monkeypatch.setattr(calls_module, "source_line", lambda where=where: where)
        made.append(numbers.name("add.0", frame, op=True))
    assert made[:4] == ["add.1", "add.0", "add.3", "add.2"]
    assert not {"add.0", "add.1", "add.2"} & set(made[4:])


class Registered(nn.Module):
    """A base class that lists its subclasses under the name that each must give."""

    made: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name: str) -> None:
        super().__init_subclass__()
        cls.made[name] = cls


class Doubled(Registered, name="doubled"):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 2


def test_a_class_that_wants_arguments_of_its_subclasses_is_wrapped_and_sees_none(tmp_path: Path):
    file_of(calibrated(Doubled().eval(), X), tmp_path)
    assert Registered.made == {"doubled": Doubled}
