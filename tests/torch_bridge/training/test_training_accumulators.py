"""Training for accumulators of few bits: what is read inside the block is what files hold after it."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn

import qsdk
from qsdk import ConfigError, w8a8

BITS = 13
MOST = (2 ** (BITS - 1) - 1) // 255


def network():
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8 * 16, 4))


def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 3, 6, 6, generator=generator) for _ in range(4)]


@functools.cache
def _calibrated():
    sim = qsdk.quantize(network().eval(), data()[0], w8a8())
    qsdk.calibrate(sim, data(), progress=False)
    return sim


def calibrated():
    return copy.deepcopy(_calibrated())


def steps(sim, model, count=6):
    optimizer = torch.optim.Adam(sim.parameter_groups(lr=3e-3))
    for at in range(count):
        loss = (model(data()[at % 4]) - data()[at % 4].flatten(1)[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sums(sim, tile=None):
    """The largest sum of codes of one sign of each weight: of an output, or of some inputs of a linear layer."""
    result = {}
    for site, weight in sim.stored_floats([s for s in sim.encodings if s.endswith(":weight")]).items():
        codes = sim.encodings[site].quantize(weight).astype(np.int64)
        codes = np.moveaxis(codes, 1, -1).reshape(len(codes), -1)
        width = tile or codes.shape[1]
        parts = [codes[:, start : start + width] for start in range(0, codes.shape[1], width)]
        result[site] = max((sign * part).clip(0).sum(1).max() for part in parts for sign in (1, -1))
    return result


@pytest.mark.parametrize("options", [{}, {"learn_scales": True}, {"learn_scales": True, "freeze_bn_after": 3}])
def test_trained_weights_fit_and_are_what_the_block_has_read(options, tmp_path):
    sim = calibrated()
    before = sim.stored_floats(["0:weight"])["0:weight"].copy()
    assert min(sums(sim).values()) > MOST
    with sim.training(accumulator_bits=BITS, **options) as model:
        steps(sim, model)
        model.eval()
        with torch.no_grad():
            inside = model(data()[0])
        model.train()
    assert max(sums(sim).values()) <= MOST
    assert min(sums(sim).values()) > MOST / 2  # the room is used
    np.testing.assert_allclose(sim(data()[0]), inside, atol=2e-5 if "freeze_bn_after" in options else 0)
    assert not np.array_equal(sim.stored_floats(["0:weight"])["0:weight"], before)
    report = qsdk.analysis.accumulators(sim)
    assert {row["site"]: row["bound"] // 255 for row in report.rows} == sums(sim)
    assert report.summary["bits"] == BITS
    # another calibration leaves the codes
    qsdk.calibrate(sim, data(), progress=False)
    assert max(sums(sim).values()) <= MOST
    if not options:
        qsdk.export(sim, tmp_path / "model.onnx")
        assert qsdk.check_parity(sim, tmp_path / "model.onnx", data()).summary["weights_max_lsb"] == 0


def test_training_helps():
    def loss(sim):
        return float(torch.stack([(sim(x) - x.flatten(1)[:, :4]).square().mean() for x in data()]).mean())

    losses = []
    for count in (0, 40):
        sim = calibrated()
        with sim.training(learn_scales=True, accumulator_bits=BITS) as model:
            steps(sim, model, count)
        losses.append(loss(sim))
    assert losses[1] < 0.9 * losses[0]


def test_tiles_leave_more_room():
    sim = calibrated()
    with sim.training(accumulator_bits=BITS, accumulator_tile=8) as model:
        steps(sim, model, 1)
    assert max(sums(sim, 8).values()) <= MOST < max(sums(sim).values())


def test_training_goes_on_from_gptq():
    sim = calibrated()
    qsdk.gptq(sim, data(), accumulator_bits=BITS, progress=False)
    rounded = sim.stored_floats(["0:weight"])["0:weight"].copy()
    with sim.training(accumulator_bits=BITS) as model:
        np.testing.assert_array_equal(sim.stored_floats(["0:weight"])["0:weight"], rounded)
        steps(sim, model, 40)
    assert max(sums(sim).values()) <= MOST
    assert not np.array_equal(sim.stored_floats(["0:weight"])["0:weight"], rounded)


def test_a_copy_made_inside_fits_and_one_after_an_error_is_free():
    sim = calibrated()
    with sim.training(accumulator_bits=BITS) as model:
        steps(sim, model, 1)
        kept = copy.deepcopy(sim)

    def failing(sim):
        with sim.training(accumulator_bits=BITS):
            raise ZeroDivisionError

    assert max(sums(kept).values()) <= MOST
    other = calibrated()
    with pytest.raises(ZeroDivisionError):
        failing(other)
    assert all(quantizer.limit is None for quantizer in [*kept.quantizers.values(), *other.quantizers.values()])


def test_what_cannot_be_met_is_named_before_anything_changes():
    sim = calibrated()
    before = sim.encodings
    for options, message in (
        ({"accumulator_bits": 8}, "0:weight: beside an input of 256 levels no weight but 0 fits"),
        ({"accumulator_bits": 1}, "accumulator_bits=1 is no number of bits"),
        ({"accumulator_tile": 8}, "of no use without accumulator_bits"),
    ):
        with pytest.raises(ConfigError, match=message), sim.training(**options):
            pass
    assert sim.encodings == before
    sim.freeze("3:weight", values=True)
    before = sim.encodings
    with (
        pytest.raises(ConfigError, match=r"3:weight \(\d+ bits\).*and are frozen; sim.unfreeze\('3:weight'\)"),
        sim.training(accumulator_bits=BITS),
    ):
        pass
    assert sim.encodings == before
