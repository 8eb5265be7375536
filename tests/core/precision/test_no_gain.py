"""Where bits buy nothing, `mixed_precision` and `autoquant` say so."""

import pytest
import torch
from torch import nn

import qsdk

DATA = [torch.randn(16, 12, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(12, 64), nn.Linear(64, 4)

    def forward(self, x):
        return self.small(self.large(x).relu())


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Embedded().eval()


@pytest.fixture
def closeness(model):
    with torch.no_grad():
        exact = model(DATA[0])
    return lambda sim: -float((sim(DATA[0]) - exact).abs().max())


def calibrated(model, config):
    sim = qsdk.quantize(model, DATA[0], config)
    qsdk.calibrate(sim, DATA, progress=False)
    return sim


def searched(sim, metric, max_drop):
    return qsdk.mixed_precision(sim, DATA, metric, max_drop=max_drop, progress=False).summary


@pytest.mark.slow
def test_a_width_that_the_file_rounds_up_is_named(model, closeness):
    config = qsdk.w4a8().override("large", weight="int3")
    found = searched(calibrated(model, config), closeness, 100.0)["no_gain"]
    assert found == ["int3 (weights: 1) is stored in int4: no byte less than int4, which is more exact"]
    assert "no_gain" not in searched(calibrated(model, qsdk.w4a8()), closeness, 100.0)
    path = qsdk.autoquant(model, DATA[0], DATA, closeness, max_drop=100.0, config=config, progress=False)
    assert path.summary["no_gain"] == found


def test_float_weights_that_outweigh_the_rest_are_named_with_their_reason(model, closeness):
    config = qsdk.w4a8().skip("large")
    (found,) = searched(calibrated(model, config), closeness, 100.0)["no_gain"]
    bytes_of_floats, rest = 4 * (12 * 64 + 64), 64 * 4 // 2 + 4 * 4
    assert found.startswith(f"{bytes_of_floats / (bytes_of_floats + rest):.0%} of the stored bytes are in float")
    assert "large:weight (3,072 bytes: " in found


@pytest.mark.slow
def test_raising_everything_beside_frozen_weights_is_called_next_to_nothing(model, closeness):
    sim = calibrated(model, qsdk.w4a8())
    qsdk.gptq(sim, DATA, progress=False)
    report = qsdk.mixed_precision(sim, DATA, closeness, max_drop=0.0, progress=False)
    assert not report.summary["met"]
    assert len(report.summary["left"]) == 2
    assert "these bits buy next to nothing" in report.summary["no_gain"][0]
    assert {row["weight_bits"] for row in report.rows} == {4.0}  # frozen weights count


def test_bits_that_buy_something_are_not_called_useless(model, closeness):
    summary = searched(calibrated(model, qsdk.w4a8()), closeness, 0.0)
    assert summary["raised"]
    assert "no_gain" not in summary
