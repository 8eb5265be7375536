"""Paths through a model that differ from the example's: loops, branches, batches of 0 and 1, inputs it did not have."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import BatchNormNet, ConvNet, SharedActivation, Twice, calibrated, randomized, seeded
from training_models import gradients, loss_of, same_gradients

from qsdk import ModelError, QuantSim, w8a8


class Loop(nn.Module):
    """Calls a Linear and a ReLU `times` times: [N, 4] to [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act, self.head, self.times = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), 3

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.act(self.fc(x)) + x
        return self.head(x)


class Branch(nn.Module):
    """Leaves a branch out: [N, 4] to [N, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.taken = nn.Linear(4, 4), nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return x + torch.sigmoid(self.second(x)) if self.taken else x


def trained(sim: QuantSim, x: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """One step; gives the output and the gradients."""
    with sim.training(learn_scales=True, **options) as model:
        out = model(x)
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.01))
        loss_of(out).backward()
        found = {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in sim.model.parameters())
    return out.detach(), found


# reused modules and loops


@pytest.mark.spread(2)
@pytest.mark.parametrize("make", [Twice, SharedActivation, Loop])
def test_a_reused_module_collects_the_gradients_of_all_its_calls(make: type[nn.Module]):
    """As the model that has one module for each call, with the same values."""
    torch.manual_seed(0)
    sim = calibrated(make(), seeded(3, 4))
    with sim.training(learn_scales=True) as model:
        loss_of(model(seeded(3, 4, seed=1))).backward()
        whole = gradients(model)
        model.zero_grad()
        # the gradient of a sum is the sum of the gradients: of each example alone
        for x in seeded(3, 4, seed=1):
            (loss_of(model(x[None])) / 3).backward()
        same_gradients(whole, gradients(model), tolerance=1e-4)
    calls = [site for site in sim.quantizers if "@1" in site or site.startswith("b.act")]
    assert calls
    assert all(len(set(q.buffer_names)) == 2 for q in sim.quantizers.values())


@pytest.mark.spread(1)
@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_loop_that_runs_fewer_times_trains_the_sites_that_it_reaches(times: int):
    torch.manual_seed(0)
    sim = calibrated(Loop(), seeded(4, 4))
    before = sim.encodings
    sim.model.times = times
    _, found = trained(sim, seeded(4, 4, seed=1))
    assert {name for name, gradient in found.items() if gradient is None} == {
        name
        for name in found
        if any(f"add_{i}_" in name for i in range(times, 3))
        or any(f"act_{i}_" in name for i in range(max(times, 1), 3))
        or (times == 0 and (name.startswith(("fc.", "act."))))
    }
    unreached = [f"add.{i}:output" for i in range(times, 3)]
    assert all(sim.encodings[site] == before[site] for site in unreached)


def test_a_loop_that_runs_more_often_is_refused_by_name():
    sim = calibrated(Loop(), seeded(4, 4))
    sim.model.times = 5
    with pytest.raises(ModelError, match=r"site fc@3:output was not reached .* example that takes the same path"):
        trained(sim, seeded(4, 4))
    sim.model.times = 3
    assert sim(seeded(4, 4)).shape == (4, 2)


@pytest.mark.slow
def test_a_branch_that_is_left_out_has_no_gradients_and_keeps_its_scales():
    sim = calibrated(Branch(), seeded(4, 4))
    before = sim.encodings
    sim.model.taken = False
    _, found = trained(sim, seeded(4, 4))
    names = {name for name, gradient in found.items() if gradient is None}
    assert names >= {
        "second.weight",
        "second.bias",
        "second.qsdk_weight_scale_log2",
        "qsdk_sigmoid_0_output_scale_log2",
    }
    assert found["first.weight"] is not None
    assert sim.encodings["second:weight"] == before["second:weight"]
    assert sim.encodings["first:weight"] != before["first:weight"]


def test_a_branch_that_the_example_did_not_take_is_refused_by_name():
    model = Branch()
    model.taken = False
    sim = calibrated(model, seeded(4, 4))
    sim.model.taken = True
    with pytest.raises(ModelError, match=r"second:weight was not reached"):
        trained(sim, seeded(4, 4))


class Shifting(nn.Module):
    """Leaves out the second of three calls of a ReLU: [N, 4] to [N, 4]."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second, self.taken = nn.Linear(4, 4), nn.Linear(4, 4), True
        self.act = act or F.relu

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        if self.taken:
            x = self.act(self.second(x) * 5)
        return self.act(x - 1)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("act", "name"), [(None, "relu.1"), (nn.ReLU(), "act@1")])
def test_the_call_after_one_that_is_left_out_keeps_its_own_encoding(act: nn.Module | None, name: str):
    sim = calibrated(Shifting(act), seeded(4, 4))
    expected = sim(seeded(4, 4))
    sim.model.taken = False
    message = rf"{name} was called at Shifting.forward, line 4 with the example, and is called at .* line 5 now"
    with pytest.raises(ModelError, match=message):
        trained(sim, seeded(4, 4))
    sim.model.taken = True
    assert torch.equal(copy.deepcopy(sim)(seeded(4, 4)), expected)
    trained(sim, seeded(4, 4))


# batches of 0 and 1


class Recurrent(nn.Module):
    """An LSTM and its last output: [N, T, 4] to [N, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


SMALL: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "convolutions": (ConvNet, (3, 6, 6), {}),
    "folded": (lambda: randomized(BatchNormNet()), (2, 6, 6), {}),
    "not folded": (lambda: randomized(BatchNormNet()), (2, 6, 6), {"fold_batch_norm": False}),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (5, 8), {}),
    "recurrent": (Recurrent, (6, 4), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_batches_of_one_sample_and_of_none_run(name: str):
    make, shape, options = SMALL[name]
    torch.manual_seed(0)
    sim = calibrated(make(), seeded(4, *shape), w8a8(), **options)
    out = sim(seeded(4, *shape, seed=1))
    assert torch.equal(sim(seeded(4, *shape, seed=1)[:1]), out[:1])
    with sim.training(learn_scales=True) as model:
        model.eval()
        nothing = model(seeded(0, *shape))
        assert nothing.shape == (0, *out.shape[1:])
        nothing.sum().backward()
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    before = sim.encodings
    _, found = trained(sim, seeded(1, *shape, seed=1))
    assert all(g is None or torch.isfinite(g).all() for g in found.values())
    assert sim.encodings != before


@pytest.mark.slow
@pytest.mark.parametrize("freeze_after", [0, 10])
def test_trained_batch_norms_accept_a_batch_of_one_where_float_ones_do(freeze_after: int):
    sim = calibrated(randomized(BatchNormNet()), seeded(4, 2, 6, 6))
    trained(sim, seeded(1, 2, 6, 6), freeze_bn_after=freeze_after)
    flat = calibrated(randomized(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))), seeded(4, 4))
    if freeze_after:
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            trained(flat, seeded(1, 4), freeze_bn_after=freeze_after)
    else:
        trained(flat, seeded(1, 4), freeze_bn_after=freeze_after)
    assert torch.isfinite(flat(seeded(1, 4))).all()


# inputs that the example did not have


class WithLoss(nn.Module):
    """Gives its loss too, if it is given labels: [N, 4] to [N, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.loss = nn.Linear(4, 3), nn.CrossEntropyLoss()

    def forward(
        self, x: Tensor, bias: Tensor | None = None, labels: Tensor | None = None, target: Tensor | None = None
    ) -> dict[str, Tensor]:
        out = self.fc(x if bias is None else torch.sigmoid(x) + bias)
        found = {"out": torch.tanh(out)}
        if labels is not None:
            # as transformers do it: a module that is made on the spot, one of the model, and functions
            found["loss"] = nn.CrossEntropyLoss()(found["out"].view(-1, 3), labels.view(-1))
            found["loss"] = found["loss"] + self.loss(found["out"], labels) * 2
        if target is not None:
            found["loss"] = F.mse_loss(found["out"][..., :2].flatten(), target.flatten())
        return found


@pytest.mark.slow
def test_a_loss_of_labels_that_the_example_did_not_have_is_float():
    sim = calibrated(WithLoss(), seeded(5, 4))
    labels, target = torch.tensor([0, 2, 1, 1, 0]), seeded(5, 2)
    for given in ({"labels": labels}, {"target": target}):
        own = copy.deepcopy(sim)
        with own.training(learn_scales=True) as model:
            found = model(seeded(5, 4), **given)
            found["loss"].backward()
            inside = gradients(model)
            model.zero_grad()
            out = model(seeded(5, 4))["out"]
            assert torch.equal(out, found["out"])
            loss = 3 * F.cross_entropy(out, labels) if "labels" in given else F.mse_loss(out[:, :2], target)
            torch.testing.assert_close(loss, found["loss"], rtol=1e-6, atol=0.0)
            loss.backward()
            same_gradients(inside, gradients(model), tolerance=1e-4)


def test_an_input_that_the_quantized_part_reads_has_to_be_in_the_example():
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
            return torch.tanh(self.fc(x if shift is None else x * shift))

    sim = calibrated(Shifted(), seeded(5, 4))
    with pytest.raises(ModelError, match=r"fc:output depends on shift, which the example did not have"):
        sim(seeded(5, 4), shift=seeded(4))
    assert sim(seeded(5, 4)).shape == (5, 3)


class Rescaled(nn.Module):
    """Doubles its weight in place when it changes to train mode, and halves it when it changes back."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.doubled = nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        if self.training != self.doubled:
            with torch.no_grad():
                self.fc.weight.mul_(2.0 if self.training else 0.5)
            self.doubled = self.training
        return self.fc(x) * (1 if self.training else 2)


def test_a_weight_that_train_mode_rescales_is_refused_by_name_and_line():
    sim = calibrated(Rescaled(), seeded(5, 4))
    before = sim(seeded(5, 4))
    with (
        pytest.raises(ModelError, match=r"writes over fc.weight \(Rescaled.forward, line \d+\).*take the switch out"),
        sim.training(),
    ):
        raise AssertionError
    assert torch.equal(sim(seeded(5, 4)), before)
    assert not sim.model.training
