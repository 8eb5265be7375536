"""What `sensitivity` estimates from: errors carried forward, and gradients also where a model forbids them."""

import numpy as np
import pytest
import torch
from torch import nn

import qsdk
from qsdk.algorithms.noise_probe import NoiseProbe, UnclearError
from qsdk.verbs.analysis import noise
from qsdk.verbs.doors.choose import door_of


def calibrated(model, batches, config):
    sim = qsdk.quantize(model, batches[0], config)
    qsdk.calibrate(sim, batches, progress=False)
    return sim


def by_row(report):
    return {(row["layer"], row["kind"]): row for row in report.rows}


def test_the_variance_of_an_estimate_is_that_of_its_random_signs():
    torch.manual_seed(0)
    x, weight = torch.randn(1, 6, 4, 4), torch.randn(3, 6 * 16)
    found, expected = [], []
    for seed in range(400):
        probe = NoiseProbe(lambda _, values: (values * 2).round() / 2, {}, seed)
        y = probe.visit("x:input", x.clone().requires_grad_()).reshape(1, -1) @ weight.T
        probe.measure([y], [1.0])
        found.append(probe.noise["x:input"])
        expected.append(probe.variance["x:input"])
    assert np.var(found) == pytest.approx(np.mean(expected), rel=0.35)


def weight_probe(seed=0):
    weights = {"a:weight": 0, "b:weight": 0}
    return NoiseProbe(lambda _, values: values + 0.1 if values.ndim == 2 else None, weights, seed, frozenset(weights))


def test_errors_of_the_channels_of_a_weight_add_up_in_each_example():
    torch.manual_seed(0)
    x, a, b = torch.rand(32, 6), torch.randn(5, 6), torch.ones(4, 5)
    found = []
    for seed in range(50):
        probe = weight_probe(seed)
        with probe.watch(len(x), carries=True):
            read = probe.visit("a:weight", a)
            hidden = probe.visit("a:output", (x @ read.T)[..., None])
            y = hidden[..., 0] @ b.T
        probe.measure([y], [1.0])
        found.append(probe.noise["a:weight"])
    true = float(((x @ torch.full((6, 5), 0.1)) @ b.T).square().sum())
    assert np.mean(found) == pytest.approx(true, rel=0.15)  # one channel at a time: a fifth of it
    assert np.std(found) / true == pytest.approx((2 / 32) ** 0.5, rel=0.5)


@pytest.mark.parametrize("fault", ["two at once", "read before", "nowhere"])
def test_errors_of_weights_that_cannot_be_told_apart_are_refused(fault):
    x, a = torch.rand(32, 5), torch.randn(5, 5)
    probe = weight_probe()

    def run():
        read = probe.visit("a:weight", a)
        if fault == "two at once":
            probe.visit("b:output", (x @ read @ probe.visit("b:weight", a))[..., None])
        if fault == "read before":
            y = probe.visit("a:output", (x @ read)[..., None])
            probe.visit("b:output", y[..., 0] @ read)

    with pytest.raises(UnclearError, match="arrive"), probe.watch(len(x), carries=True):
        run()


class ReadsBothFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(12, 12) / 3), nn.Parameter(torch.randn(5, 12) / 3)

    def forward(self, x):
        a, b = self.a, self.b
        return nn.functional.linear(nn.functional.linear(x, a).relu(), b)


def test_a_model_whose_weights_cannot_be_told_apart_is_estimated_all_the_same():
    torch.manual_seed(0)
    batches = [torch.randn(32, 12) for _ in range(2)]
    sim = calibrated(ReadsBothFirst().eval(), batches, qsdk.w4a8())
    report = qsdk.sensitivity(sim, batches, progress=False)
    exact = by_row(qsdk.sensitivity(sim, batches, exact=True, progress=False))
    assert report.summary["method"] == "estimated"
    for key, row in by_row(report).items():
        assert row["sqnr_db"] == pytest.approx(exact[key]["sqnr_db"], abs=2.0), key


class Rounds(nn.Module):
    """What the first two layers make is used without gradients: rounded, and detached."""

    def __init__(self):
        super().__init__()
        self.rounded, self.apart, self.last = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.last(torch.round(self.rounded(x) * 4) + self.apart(x).detach())


@pytest.mark.parametrize("little", [True, False])
def test_a_layer_that_no_gradient_tells_of_is_measured_on_the_rows_of_the_estimate(monkeypatch, little):
    if not little:
        monkeypatch.setattr(noise, "_LITTLE", 0)
    torch.manual_seed(0)
    batches = [torch.randn(40, 12) for _ in range(5)]
    sim = calibrated(Rounds().eval(), batches, qsdk.w4a8())
    report = qsdk.sensitivity(sim, batches, progress=False)
    assert report.summary["method"].startswith("estimated; ")
    assert report.summary["method"].endswith(f"rows measured on {80 if little else 32} samples")
    exact = by_row(qsdk.sensitivity(sim, batches, exact=True, progress=False))
    for layer in ("rounded", "apart"):
        found = by_row(report)[layer, "weights"]["sqnr_db"]
        assert found == pytest.approx(exact[layer, "weights"]["sqnr_db"], abs=1.0), layer


class KeepsTable(nn.Module):
    """Keeps what it computes without gradients, as a rotary embedding does."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 5)
        self.register_buffer("table", torch.zeros(12), persistent=False)

    def forward(self, x):
        with torch.no_grad():
            self.table = torch.cos(self.first(x[:1]))[0]
        return self.last(self.first(x) * self.table)


def test_gradients_where_the_model_forbids_them_leave_nothing_in_it():
    torch.manual_seed(0)
    batches = [torch.randn(16, 12) for _ in range(2)]
    sim = calibrated(KeepsTable().eval(), batches, qsdk.w8a8())
    report = qsdk.sensitivity(sim, batches, progress=False)
    assert report.summary["method"] == "estimated"

    def tapped(_, x):
        return x if x.requires_grad else x.detach().requires_grad_()

    (y,) = door_of(sim).visited_outputs(batches[0], tapped, "batch 0", everywhere=True)
    assert y.requires_grad
    assert not any(tensor.requires_grad for tensor in sim.model.buffers())
