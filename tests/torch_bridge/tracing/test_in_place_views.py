"""Ops in place on views: what is written under one name and read under another is in the simulation and in the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import calibrated, seeded, sim_of, states

import qsdk
from qsdk import ModelError, calibrate

X = seeded(2, 3, 4, 4)
KEPT, DROPPING = nn.ReLU(inplace=True), nn.Dropout().eval()


def read_after(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The tensor itself, after something was done to it or to a view of it."""

    def run(z: Tensor) -> Tensor:
        change(z)
        return z

    return run


def halves(z: Tensor) -> None:
    first, second = z.chunk(2, 1)
    first.mul_(2.0)
    second.add_(first)


def parts(z: Tensor) -> None:
    first, second = z.split([1, 3], 1)
    first.mul_(2.0)
    second.sub_(1.0)


def twice(z: Tensor) -> None:
    part = z[:, :2]
    part.add_(1.0)
    part.mul_(2.0)


def one_longer_and_back(z: Tensor) -> None:
    y = z.unsqueeze(0)
    y.squeeze_(0)
    y.add_(1.0)


def view_before(z: Tensor) -> Tensor:
    part = z[:, :2]
    z.add_(1.0)
    return part * 2


def view_before_an_assignment(z: Tensor) -> Tensor:
    part = z[:, :2]
    z[:, 0] = 3.0
    return part * 2


def assigned_after_an_op_in_place(z: Tensor) -> Tensor:
    y = z.relu_()
    z[:, 0] = 3.0
    return y * 2


def both_names(z: Tensor) -> Tensor:
    return z + z[:, :2].add_(1.0).mean()


def assigned(z: Tensor) -> None:
    z[:, :2] = z[:, 2:] * 2


def added_to_a_slice(z: Tensor) -> None:
    z[:, :2] += 1


def masked(z: Tensor) -> None:
    z[z > 0.3] = 2.0


def assigned_to_a_view(z: Tensor) -> None:
    z[:, :2][:, 0] = 2.0


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda z: z[:, :2].add_(1.0),
    "add_keyword": lambda z: torch.add(input=z[:, 2:], other=1.0, out=z[:, :2]),
    "add_out": lambda z: torch.add(z[:, 2:], 1.0, out=z[:, :2]),
    "mul_out": lambda z: torch.mul(z, 2.0, out=z),
    "several_out": lambda z: torch.max(z[:, :2], 1, out=(z[:, 2], torch.zeros(2, 4, 4, dtype=torch.int64))),
    "zero_": lambda z: z[:, :2].zero_(),
    "fill_": lambda z: z[:, 0].fill_(0.5),
    "relu_": lambda z: z[:, :2].relu_(),
    "relu_function": lambda z: F.relu(z[..., :2], inplace=True),
    "relu_keyword": lambda z: F.relu(input=z[..., :2], inplace=True),
    "relu_module": lambda z: KEPT(z[..., :2]),
    "torch_relu_": lambda z: torch.relu_(z[:, 1]),
    "clamp_": lambda z: z[:, 1:3].clamp_(-0.1, 0.1),
    "lerp_": lambda z: z[:, :2].lerp_(z[:, 2:], 0.3),
    "view_mul_": lambda z: z.view(z.shape[0], -1).mul_(3.0),
    "flatten_add_": lambda z: z.flatten(1).add_(1.0),
    "transposed": lambda z: z[:, :2].transpose(1, 2)[:, 1:].add_(1.0),
    "copy_": lambda z: z[:, 0].copy_(z[:, 1]),
    "index_put_": lambda z: z[:, :2].index_put_((torch.tensor([0]), torch.tensor([1])), torch.ones(4, 4)),
    "masked_fill_": lambda z: z[:, :2].masked_fill_(z[:, :2] > 0.2, -1.0),
    "unbind": lambda z: z.unbind(1)[1].mul_(2.0),
    "detach": lambda z: z[:, :2].detach().add_(1.0),
    "transpose_": lambda z: z.transpose_(2, 3),
    "einsum": lambda z: torch.einsum("n c h w -> wnch", z)[1:].mul_(2.0),
    "einsum_of_lists": lambda z: torch.einsum(z, [..., 1, 0], [..., 0, 1]).mul_(2.0),
    "einsum_without_arrow": lambda z: torch.einsum("dcba", [z]).add_(1.0),
    # what drops nothing returns its argument itself
    "dropout": lambda z: F.dropout(z, 0.5, False).add_(1.0),
    "dropout_of_none": lambda z: F.dropout(input=z[:, :2], p=0.0).mul_(2.0),
    "torch_dropout": lambda z: torch.dropout(z, 0.5, train=False).mul_(2.0),
    "dropout_module": lambda z: DROPPING(z).sub_(1.0),
    **{change.__name__: change for change in (halves, parts, twice, one_longer_and_back)},
    **{change.__name__: change for change in (assigned, added_to_a_slice, masked, assigned_to_a_view)},
}
FORMS = {name: read_after(change) for name, change in CHANGES.items()}
FORMS |= {form.__name__: form for form in (view_before, view_before_an_assignment)}
FORMS |= {form.__name__: form for form in (assigned_after_an_op_in_place, both_names)}


class EveryForm(nn.Module):
    """A convolution of its own, a form and another convolution, for each form."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.ModuleDict({f"{name} ": nn.Conv2d(3, 4, 1) for name in FORMS})
        self.after = nn.ModuleDict({f"{name} ": nn.LazyConv2d(3, 1) for name in FORMS})
        self.kept = KEPT

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {name: self.after[f"{name} "](form(self.before[f"{name} "](x))) for name, form in FORMS.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor, Any]]:
    """Form -> what the module, its simulation and the file give."""
    path = tmp_path_factory.mktemp("views") / "model.onnx"
    torch.manual_seed(0)
    with torch.no_grad():
        model = EveryForm().eval()
        model(X)
        sim = calibrated(model, X)
        want, simulated = model(X), sim(X)
    qsdk.export(sim, path)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options)
    made = session.run(None, {"x": X.numpy()})
    named = {value.name: array for value, array in zip(session.get_outputs(), made, strict=True)}
    return {name: (want[name], simulated[name], named[name]) for name in FORMS}


@pytest.mark.parametrize("name", FORMS)
def test_writes_into_a_view_are_in_the_simulation_and_in_the_file(name: str, results: dict[str, Any]):
    want, simulated, made = results[name]
    assert (want - simulated).abs().max() < 0.1 * want.abs().max()
    np.testing.assert_allclose(made, simulated.numpy(), atol=1e-4)


@pytest.mark.slow
def test_views_without_writes_keep_their_sites():
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.conv(x).chunk(2, 1)
            gate.sigmoid_()  # the other half is read, and this one by its old name
            flat = (gate * value).flatten(1)
            flat += 1
            flat[:, :2] += 1
            return flat

    sim = sim_of(Gated().eval(), X)
    assert sim.runtime.written.views == frozenset()
    assert sim.runtime.written.write_back == {"sigmoid.0:output"}
    assert states(sim)["chunk.0:output"] == "tied"


class Keeping(nn.Module):
    """A Linear and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("kept", torch.zeros(2, 6, 4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))


class Cache(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:, :3] = self.fc(x)
        return self.kept * 2


class CacheView(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.kept[:, :3].add_(self.fc(x))
        return self.kept * 2


class Shrinking(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data.mul_(0.5)
        return self.fc(x)


class Counting(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x)


class Counted(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x) * self.calls


class ReadFirst(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        y = self.kept[:, :3] * self.fc(x)
        self.kept.copy_(torch.cat([y, y], 1))
        return self.kept * 2


@pytest.mark.parametrize(
    ("model", "name"),
    [(ReadFirst, "kept"), (Cache, "kept"), (CacheView, "kept"), (Shrinking, "fc.weight"), (Counted, "calls")],
)
def test_a_state_that_a_file_cannot_keep_is_refused(model: type[nn.Module], name: str):
    match = rf"{name} is written by the forward pass \({model.__name__}.forward, line \d\) .* return it changed"
    with pytest.raises(ModelError, match=match):
        sim_of(model().eval(), seeded(2, 3, 4))


@pytest.mark.slow
def test_a_buffer_that_is_written_and_never_read_is_not_a_state():
    assert states(sim_of(Counting().eval(), seeded(2, 3, 4)))["fc:output"] == "quantized"


def test_a_buffer_that_each_pass_writes_over_as_a_whole_is_what_that_pass_computes(tmp_path: Path):
    class Anew(Keeping):
        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.where(x.max() > 2, x + 1, x - 1)  # as LongRoPE chooses its frequencies
            self.kept.copy_(torch.cat([chosen, x], 1))
            return self.fc(self.kept) * 2

    small, large = seeded(2, 3, 4).clamp(max=1), seeded(2, 3, 4).clamp(max=1) + 3
    sim = sim_of(Anew().eval(), small)
    calibrate(sim, [small, large], progress=False)
    assert sim.runtime.written.made_anew == {"self:kept"}
    path = str(tmp_path / "model.onnx")
    qsdk.export(sim, path)
    session = ort.InferenceSession(path)
    for x in (small, large, small):
        got = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        np.testing.assert_allclose(got, sim(x).numpy(), atol=1e-5)


def test_a_model_that_writes_over_its_input_leaves_the_callers_as_it_is(tmp_path: Path):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            x[:, 0] = 0.0
            x[:, 1].add_(1.0)
            ids += 1
            return self.fc(x) * ids

    data = seeded(2, 3, 4), torch.ones(2, 3, 1, dtype=torch.int64)
    given = tuple(x.clone() for x in data)
    sim = sim_of(Writes().eval(), given, qsdk.w8a8().override("x", activation="float32"))
    qsdk.calibrate(sim, [given], progress=False)
    qsdk.seq_mse(sim, [given], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [given], progress=False).summary["passed"]
    first, again = sim(*given), sim(*given)
    assert torch.equal(first, again)
    assert all(torch.equal(x, y) for x, y in zip(data, given, strict=True))


class Hidden(nn.Module):
    """Writes into a view where no mode sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        part = z[:, :2]
        with torch._C.DisableTorchFunction():
            part.add_(1.0)
        return z


class HiddenBesideAnother(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        z[:, 2] = 0.0
        return z


@pytest.mark.parametrize(
    ("model", "place"),
    [(Hidden, "what fc:output gives"), (HiddenBesideAnother, r"HiddenBesideAnother.forward, line 3")],
)
def test_a_write_that_cannot_be_followed_is_refused(model: type[nn.Module], place: str):
    with pytest.raises(ModelError, match=rf"written in place \({place}.* cannot be followed.* torch.cat"):
        sim_of(model().eval(), seeded(2, 4))


class Drawing(Hidden):
    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(x)
        z[:, :2] += torch.rand(2)
        return z


def test_random_numbers_are_no_lost_write():
    assert states(sim_of(Drawing().eval(), seeded(2, 4)))["fc:output"] == "quantized"
