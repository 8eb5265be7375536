"""Layer verbs on top of each other: each looks at the float model, whatever biases took up before."""

import numpy as np
import pytest
import torch
from bias_models import data_of, layers, narrow_sim
from islands import DOORS
from rounded_sims import network_error, sim_at
from stored_values import stored_bytes

from qsdk import (
    adaround,
    calibrate,
    correct_bias,
    equalize,
    gptq,
    load,
    quantize,
    save,
    seq_mse,
    smooth_quant,
    tune_blocks,
    w4a8,
)
from qsdk.core.sims.biases import float_biases

both = pytest.mark.parametrize("door", DOORS)
INT2 = w4a8().override("*", weight="int2")


def after(sim, door, *verbs):
    for verb in verbs:
        verb(sim, data_of(door), progress=False)
    return network_error(sim, door)


@pytest.mark.slow
@both
@pytest.mark.parametrize("rounding", [adaround, gptq])
def test_a_verb_on_top_of_another_does_not_shift_biases_twice(door, rounding):
    sim = sim_at(door, INT2)
    state = sim.snapshot(weights=True)
    alone = {verb: after(sim, door, verb) for verb in (seq_mse, correct_bias, rounding) if not sim.restore(state)}
    for verbs in ((seq_mse, seq_mse), (seq_mse, rounding), (correct_bias, rounding), (rounding, correct_bias)):
        sim.restore(state)
        assert after(sim, door, *verbs) < 1.5 * max(alone[rounding], alone[seq_mse])


@pytest.mark.slow
@both
def test_what_a_correction_did_before_makes_no_difference(door):
    sim = sim_at(door, INT2)
    state = sim.snapshot(weights=True)
    after(sim, door, seq_mse)
    alone = stored_bytes(sim), sim.encodings
    sim.restore(state)
    after(sim, door, correct_bias, seq_mse)
    assert (stored_bytes(sim), sim.encodings) == alone


@pytest.mark.slow
@both
def test_a_file_keeps_what_rounded_layers_have_taken_up(door, tmp_path):
    sim = sim_at(door, INT2)
    after(sim, door, adaround)
    save(sim, tmp_path / "sim.qsdk")
    again = load(tmp_path / "sim.qsdk", layers() if door == "torch" else None)
    for each in (sim, again):
        after(each, door, correct_bias)
    assert stored_bytes(sim) == stored_bytes(again)


def test_the_float_models_bias_makes_up_for_a_weight_that_is_rounded_for_good():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(6, 4), torch.rand(32, 6)
    sim, batches = quantize(torch.nn.Sequential(layer, torch.nn.ReLU()), x, w4a8()), [x] * 8
    for verb in (calibrate, correct_bias, adaround):
        verb(sim, batches, progress=False)
    lost = (layer.weight.detach().numpy() - sim.stored_floats(["0:weight"])["0:weight"]) @ x.mean(0).numpy()
    assert np.abs(lost).max() > 1e-4
    np.testing.assert_allclose(float_biases(sim)["0:bias"], layer.bias.detach().numpy() + lost, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@both
def test_a_failure_brings_shifted_biases_back(door):
    sim = narrow_sim(door)
    after(sim, door, correct_bias)
    before, encodings = stored_bytes(sim), sim.encodings

    def broken():
        yield from data_of(door)
        raise KeyboardInterrupt

    for verb in (seq_mse, adaround, correct_bias, calibrate, smooth_quant):
        with pytest.raises(KeyboardInterrupt):
            verb(sim, broken(), progress=False)
        assert stored_bytes(sim) == before
        assert sim.encodings == encodings


@pytest.mark.slow
@both
def test_new_ranges_of_weights_take_shifts_back(door):
    sim = narrow_sim(door)
    original = stored_bytes(sim)
    after(sim, door, correct_bias)
    corrected = stored_bytes(sim)
    calibrate(sim, data_of(door), method="mse", weight_method="percentile", percentile=97, progress=False)
    assert stored_bytes(sim) == corrected  # no weight has another range
    calibrate(sim, data_of(door), weight_method="mse", progress=False)
    assert stored_bytes(sim) == original


@pytest.mark.spread(1)
@pytest.mark.parametrize(("door", "scaling"), [("torch", smooth_quant), ("onnx", smooth_quant), ("onnx", equalize)])
def test_scaled_channels_start_from_the_float_model(door, scaling):
    plain, corrected = narrow_sim(door), narrow_sim(door)
    after(corrected, door, correct_bias)
    for sim in (plain, corrected):
        after(sim, door, scaling, correct_bias)
    for site, values in plain.stored_floats([s for s in plain.plan.decisions if s.endswith(":bias")]).items():
        np.testing.assert_array_equal(corrected.stored_floats([site])[site], values)


@pytest.mark.slow
def test_blocks_are_tuned_towards_the_float_model():
    sim = sim_at("torch", INT2)
    state = sim.snapshot(weights=True)
    errors = []
    for first in ((), (correct_bias,)):
        sim.restore(state)
        after(sim, "torch", *first)
        torch.manual_seed(0)
        report = tune_blocks(sim, data_of("torch"), iterations=30, learn="rounding", progress=False)
        errors.append(network_error(sim, "torch"))
        assert report.summary["blocks"] > 0
    assert errors[1] < 1.2 * errors[0]
