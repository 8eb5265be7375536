"""`adaround` and `gptq` on whole sims of both doors: mixed precision, every kind of layer."""

import pytest
import torch
from bias_models import data_of
from islands import DOORS
from rounded_sims import network_error, sim_at

from qsdk import ConfigError, adaround, gptq

both = pytest.mark.parametrize("door", DOORS)
each = pytest.mark.parametrize("verb", [adaround, gptq], ids=["adaround", "gptq"])


@pytest.mark.slow
@both
@each
def test_mixed_sims_get_better_on_data_not_seen(door, verb):
    sim = sim_at(door)
    before = network_error(sim, door)
    report = verb(sim, data_of(door), progress=False)
    rows = {row["site"].partition(":")[0]: row for row in report.rows}
    assert "float16" in rows.pop("mixed")["note"]
    assert set(rows) == {"conv", "depthwise", "transposed", "bare", "last"}
    assert all(row["error_after"] <= row["error_before"] and not row["note"] for row in rows.values())
    assert report.summary["passes"] > 0
    assert network_error(sim, door) < 0.5 * before


@pytest.mark.slow
@each
def test_both_doors_find_nearly_the_same(verb):
    errors = []
    for door in DOORS:
        sim = sim_at(door)
        verb(sim, data_of(door), progress=False)
        errors.append(network_error(sim, door))
    assert errors[0] == pytest.approx(errors[1], rel=0.25)


@pytest.mark.slow
@each
def test_the_same_call_gives_the_same_sim(verb):
    sims = [sim_at("torch") for _ in range(2)]
    for sim in sims:
        verb(sim, data_of("torch"), progress=False)
    one, other = (dict(sim.model.state_dict()) for sim in sims)
    assert sims[0].encodings == sims[1].encodings
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize("door", ["onnx", pytest.param("torch", marks=pytest.mark.nightly)])
def test_options_reach_the_solvers(door):
    def after(verb, **options):
        sim = sim_at(door)
        report = verb(sim, data_of(door), progress=False, **options)
        return sum(row["error_after"] or 0 for row in report.rows)

    assert after(adaround, method="relaxed", iterations=100) != after(adaround, starts=1)
    behind = after(adaround, method="relaxed", iterations=100, activation=True)
    assert behind != after(adaround, method="relaxed", iterations=100)
    assert after(gptq, scales="fixed") > after(gptq)
    sim = sim_at(door)
    before = sim.encodings
    with pytest.raises(ConfigError, match="unknown scales 'free' of gptq"):
        gptq(sim, data_of(door), scales="free", progress=False)
    with pytest.raises(ConfigError, match="choose method='relaxed' with activation=True"):
        adaround(sim, data_of(door), activation=True, progress=False)
    with pytest.raises(ConfigError, match="unknown method 'slow' of adaround"):
        adaround(sim, data_of(door), method="slow", progress=False)
    assert sim.encodings == before
