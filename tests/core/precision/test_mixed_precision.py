"""Mixed precision by search, at both doors: the budget holds, and a search that fails leaves the sim as it was."""

import itertools
import math

import numpy as np
import pytest
import torch
from fragile_net import FragileNet, fragile_net
from torch import nn

import qsdk
from qsdk import int4, int8, uint8, uint16

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> FragileNet:
    return fragile_net(8)


@pytest.fixture(scope="module")
def exported(model: FragileNet, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("float") / "float.onnx"
    torch.onnx.export(model, (IMAGES,), path, dynamo=True, verbose=False)
    return str(path)


@pytest.fixture(scope="module", params=["torch", "onnx"])
def calibrated(request, model: FragileNet, exported: str):
    made = qsdk.quantize(*((model, IMAGES) if request.param == "torch" else (exported, None)), qsdk.w4a8())
    qsdk.calibrate(made, data_for(made), progress=False)
    return made


@pytest.fixture
def sim(calibrated):
    before = calibrated.snapshot()
    yield calibrated
    calibrated.restore(before)


def outputs_of(sim) -> np.ndarray:
    if hasattr(sim, "model"):
        return sim(IMAGES).numpy()
    return sim.run(IMAGES.numpy())[0]


def data_for(sim) -> list:
    return [IMAGES] if hasattr(sim, "model") else [IMAGES.numpy()]


def sqnr_metric(model):
    exact = model(IMAGES).detach().numpy()

    def metric(sim) -> float:
        noise = float(np.square(outputs_of(sim) - exact).sum())
        return min(60.0, -10 * math.log10(max(noise / float(np.square(exact).sum()), 1e-12)))

    return metric


def state_of(sim) -> tuple:
    return sim.config, dict(sim.plan.decisions), sim.encodings


def dtypes(sim) -> dict[str, str]:
    return {site: encoding.dtype.name for site, encoding in sim.encodings.items() if ":bias" not in site}


@pytest.mark.slow
def test_the_budget_holds_and_few_sites_are_raised(sim, model):
    metric = sqnr_metric(model)
    before = dtypes(sim)
    report = qsdk.mixed_precision(sim, data_for(sim), metric, max_drop=36.0, progress=False)
    assert report.summary["met"]
    assert metric(sim) >= report.summary["reference"] - 36.0
    assert 0 < sum(before[site] != dtype for site, dtype in dtypes(sim).items()) < len(before)
    (chosen,) = [row for row in report.rows if row["chosen"]]
    assert chosen["metric"] == metric(sim)
    assert len(report.summary["raised"]) == chosen["raised"]


@pytest.mark.slow
def test_any_loss_allowed_keeps_the_lowest_bits_everywhere(sim, model):
    before = state_of(sim)
    report = qsdk.mixed_precision(sim, data_for(sim), sqnr_metric(model), max_drop=math.inf, progress=False)
    assert state_of(sim) == before
    assert (report.summary["raised"], report.summary["met"]) == ([], True)


def test_the_pareto_list_is_monotone(sim, model):
    report = qsdk.mixed_precision(sim, data_for(sim), sqnr_metric(model), max_drop=30.0, progress=False)
    front = [row for row in report.rows if row["pareto"]]
    costs = [row["weight_bits"] + row["activation_bits"] for row in front]
    assert costs == sorted(costs)
    assert all(cheap["metric"] < dear["metric"] for cheap, dear in itertools.pairwise(front))


@pytest.mark.slow
def test_only_the_fragile_layer_is_raised_where_only_it_fails(model):
    sim = qsdk.quantize(model, IMAGES, qsdk.w8a16().override("fragile", weight=int4))
    qsdk.calibrate(sim, [IMAGES], progress=False)
    metric = sqnr_metric(model)
    assert metric(sim) < 26
    qsdk.mixed_precision(sim, [IMAGES], metric, max_drop=34.0, progress=False)
    assert sim.encodings["fragile:weight"].dtype == int8
    assert (
        sim.encodings["first/relu.0:output" if "first/relu.0:output" in sim.encodings else "relu.0:output"].dtype
        == uint16
    )


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_a_metric_that_raises_leaves_the_sim_as_it_was(sim, model, fails_at: int):
    before, out, calls = state_of(sim), outputs_of(sim), []

    def metric(current) -> float:
        calls.append(1)
        if len(calls) == fails_at:
            raise KeyboardInterrupt
        return -float(len(calls))

    with pytest.raises(KeyboardInterrupt):
        qsdk.mixed_precision(sim, data_for(sim), metric, max_drop=0.1, progress=False)
    assert state_of(sim) == before
    np.testing.assert_array_equal(outputs_of(sim), out)


def test_frozen_sites_keep_their_precision(sim, model):
    sim.freeze("weights")
    kept = {site: e for site, e in sim.encodings.items() if site.endswith(":weight")}
    qsdk.mixed_precision(sim, data_for(sim), sqnr_metric(model), max_drop=0.0, progress=False)
    assert {site: sim.encodings[site] for site in kept} == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_drop": -1.0}, "max_drop=-1.0 is no budget"),
        ({"max_drop": float("nan")}, "max_drop=nan is no budget"),
        ({"max_drop": 1.0, "levels": ({"weight": "int99"},)}, "int99"),
    ],
)
def test_options_that_mean_nothing_are_refused(sim, options, message: str):
    before = state_of(sim)
    with pytest.raises(qsdk.ConfigError, match=message):
        qsdk.mixed_precision(sim, data_for(sim), lambda s: 1.0, progress=False, **options)
    assert state_of(sim) == before


@pytest.mark.parametrize(
    ("value", "max_drop", "said"),
    [(0.9, 5.0, True), (0.9, 0.9, True), (0.9, 0.1, False), (0.9, math.inf, False), (-2.0, 5.0, False)],
)
def test_a_budget_that_lets_the_metric_fall_to_0_is_met_with_a_remark(sim, value: float, max_drop: float, said: bool):
    found = qsdk.mixed_precision(sim, data_for(sim), lambda s: value, max_drop=max_drop, progress=False)
    assert ("lets the metric, which is 0.9 in float, fall to 0 or below" in str(found)) == said
    assert ("0.009 is one percent" in found.summary.get("budget_remark", "")) == said


def test_a_metric_that_is_nan_is_refused(sim):
    before = state_of(sim)
    with pytest.raises(qsdk.ConfigError, match="the metric is NaN"):
        qsdk.mixed_precision(sim, data_for(sim), lambda s: math.nan, max_drop=1.0, progress=False)
    assert state_of(sim) == before


def test_a_sim_that_is_not_calibrated_is_refused_before_the_data_is_read(model):
    sim = qsdk.quantize(model, IMAGES, qsdk.w8a8())
    with pytest.raises(qsdk.CalibrationError, match="call qsdk\\.calibrate"):
        qsdk.mixed_precision(sim, iter(()), lambda s: 1.0, max_drop=1.0, progress=False)


def test_an_adopted_file_has_no_config_to_search(sim, tmp_path):
    qsdk.export(sim, tmp_path / "m.onnx")
    adopted = qsdk.quantize(tmp_path / "m.onnx", None, None)
    with pytest.raises(qsdk.ConfigError, match="no config to change"):
        qsdk.mixed_precision(adopted, [IMAGES.numpy()], lambda s: 1.0, max_drop=1.0, progress=False)


@pytest.mark.spread(1)
def test_the_chosen_sim_exports_and_is_at_parity(sim, model, tmp_path):
    levels = ({"weight": "int8", "activation": "uint16"}, {"weight": "float16", "activation": "float16"})
    qsdk.mixed_precision(sim, data_for(sim), sqnr_metric(model), max_drop=36.0, levels=levels, progress=False)
    qsdk.export(sim, tmp_path / "m.onnx")
    assert qsdk.check_parity(sim, tmp_path / "m.onnx", data_for(sim), progress=False).summary["passed"]


class Halves(nn.Module):
    """Large and small values in one Concat that goes on inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small, self.after = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.after(torch.cat([self.large(x) * 500.0, self.small(x)], 1))


@pytest.mark.slow
def test_advice_names_the_small_half_and_its_remedy_helps():
    torch.manual_seed(1)
    model = Halves().eval()
    config = qsdk.w8a8()
    sim = qsdk.quantize(model, IMAGES, config)
    qsdk.calibrate(sim, [IMAGES], progress=False)
    report = qsdk.analysis.advise(sim, [IMAGES], progress=False)
    (row,) = [row for row in report.rows if row["site"] == "small:output"]
    untied = qsdk.quantize(model, IMAGES, eval(row["remedy"], {"config": config}))
    qsdk.calibrate(untied, [IMAGES], progress=False)
    assert (sim.encodings["small:output"].dtype, untied.encodings["small:output"].dtype) == (uint8, uint8)
    assert untied.encodings["small:output"].scale[0] < 0.1 * sim.encodings["small:output"].scale[0]
    assert not [r for r in qsdk.analysis.advise(untied, [IMAGES], progress=False).rows if r["site"] == "small:output"]


def raised_weights(sim) -> set[str]:
    return {site for site, name in dtypes(sim).items() if site.endswith(":weight") and name != "int4"}


@pytest.mark.spread(1)
def test_sites_are_raised_only_as_far_as_the_time_allows(sim, model):
    """Each weight that is raised takes 1 ms, an activation none."""
    metric, before = sqnr_metric(model), sim.snapshot()
    options = {"max_drop": 20.0, "progress": False, "runtime": lambda current: 5.0 + len(raised_weights(current))}
    free = qsdk.mixed_precision(sim, data_for(sim), metric, **options)
    assert "ms" not in {*free.summary, *free.rows[0]}
    assert len(raised_weights(sim)) > 1
    sim.restore(before)
    report = qsdk.mixed_precision(sim, data_for(sim), metric, max_ms=6.0, **options)
    assert not report.summary["met"]
    assert len(raised_weights(sim)) == 1
    assert [report.summary[name] for name in ("ms", "ms_before", "max_ms")] == [6.0, 5.0, 6.0]
    (chosen,) = [row for row in report.rows if row["chosen"]]
    assert (chosen["ms"], chosen["metric"]) == (6.0, metric(sim))
    assert None in {row["ms"] for row in report.rows}, "not every trial is measured"


@pytest.mark.parametrize(("float_ms", "gains"), [(4.0, False), (5.2, False), (9.0, True)])
def test_a_network_that_gains_no_time_from_integers_is_told_so_with_the_numbers(float_ms, gains, sim, model):
    before = sim.encodings

    def runtime(current):
        return 5.0 if current.encodings else float_ms

    report = qsdk.mixed_precision(
        *(sim, data_for(sim), sqnr_metric(model)), max_drop=200.0, max_ms=9.0, runtime=runtime, progress=False
    )
    assert sim.encodings == before
    assert report.summary["float_ms"] == float_ms
    said = [text for text in report.summary.get("no_gain", []) if "integers gain no time" in text]
    assert bool(said) != gains
    assert gains or f"a run takes 5 ms, {5 / float_ms:.3g} times the {float_ms:g} ms in float" in said[0]


@pytest.mark.spread(1)
def test_time_is_measured_in_a_runtime(sim, model):
    metric, before = sqnr_metric(model), sim.snapshot()
    report = qsdk.mixed_precision(sim, data_for(sim), metric, max_drop=20.0, max_ms=1e-6, progress=False)
    assert not report.summary["met"]
    assert 0 < report.summary["ms"] <= 1.05 * report.summary["ms_before"]
    sim.restore(before)
    report = qsdk.mixed_precision(sim, data_for(sim), metric, max_drop=20.0, max_ms=1e6, progress=False)
    assert report.summary["met"]
    assert report.summary["ms"] != report.summary["ms_before"]
    with pytest.raises(qsdk.ConfigError, match="the time of an emulation says nothing"):
        qsdk.mixed_precision(sim, data_for(sim), metric, max_drop=20.0, max_ms=5.0, runtime="qnn", progress=False)


@pytest.mark.slow
def test_outputs_without_floats_are_ranked_by_the_sites_own_noise(model):
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x).argmax(1)

    sim = qsdk.quantize(Classes().eval(), IMAGES, qsdk.w4a8())
    qsdk.calibrate(sim, [IMAGES], progress=False)
    wide = {"inner.fragile:weight"}

    def fragile_is_wide(given):
        return float(
            wide <= {site for site, found in given.encodings.items() if found.dtype != int4} or not given.encodings
        )

    report = qsdk.mixed_precision(sim, [IMAGES], fragile_is_wide, max_drop=0.5, progress=False)
    assert report.summary["met"]
    (raised,) = report.summary["raised"]
    assert raised.startswith("inner.fragile:weight")
    assert "(200.0 dB" not in raised  # as a site without noise has
