"""`qsdk.autoquant`: budgets that hold, a path that can be repeated, and a result never worse than the preset."""

import itertools
import os
import time

import numpy as np
import pytest
import torch
from fragile_net import FragileNet, fragile_net
from torch import nn

import qsdk
from qsdk.core.precision.search import LowerableWeight, choose_lowered
from qsdk.core.run_options import run_of
from qsdk.verbs.analysis import autoquant

IMAGES = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
BATCHES = list(IMAGES[:32].split(8))


@pytest.fixture(scope="module")
def model() -> FragileNet:
    return fragile_net(16)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("float") / "float.onnx"
    shapes = ({0: torch.export.Dim.AUTO},)
    torch.onnx.export(model, (IMAGES[:8],), path, dynamo=True, verbose=False, dynamic_shapes=shapes)
    return str(path)


class Residual(nn.Module):
    """A residual stream whose norm reads one channel a hundred times larger than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.up, self.down = (
            nn.Linear(8, 32),
            nn.RMSNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
        )
        self.last_norm, self.head = nn.RMSNorm(32), nn.Linear(32, 4)
        with torch.no_grad():
            self.enter.weight[5] *= 100
            self.down.weight[5] *= 100

    def forward(self, x):
        x = self.enter(x)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last_norm(x))


def outputs_of(sim) -> np.ndarray:
    return sim(IMAGES[32:]).numpy() if hasattr(sim, "model") else sim.run(IMAGES[32:].numpy())[0]


@pytest.fixture(scope="module")
def sqnr(model):
    with torch.no_grad():
        exact = model(IMAGES[32:]).numpy()

    def in_decibels(sim) -> float:
        error = float(np.square(outputs_of(sim) - exact).sum())
        return min(140.0, 10 * np.log10(float(np.square(exact).sum()) / error)) if error else 140.0

    return in_decibels


def run(model, metric, *, data=BATCHES, **options):
    return qsdk.autoquant(model, data[0], data, metric, progress=False, **options)


def steps(report) -> list[str]:
    return [row["step"] for row in report.rows]


def test_a_preset_within_the_budget_is_the_whole_path(model, sqnr, monkeypatch):
    seconds = iter([1.0, 1.0, 1e9])  # of float passes: the unit of passes is the mean of those at both ends
    monkeypatch.setattr(autoquant._Path, "float_pass", lambda _: next(seconds))
    report = run(model, sqnr, max_drop=125.0)
    assert 0 < report.summary["passes"] < 1e-6
    assert steps(report) == ["the preset, min_max"]
    assert report.summary["met"]
    assert report.summary["reference"] == 140.0
    assert sqnr(report.sim) == report.summary["metric"]
    assert report.full().endswith(report.code)
    assert "qsdk.quantize(model, example, config)" in str(report)


def test_a_step_that_changes_nothing_is_undone_and_not_in_the_lines(model):
    values = itertools.chain([1.0], itertools.repeat(0.0))  # the float model's, which is measured first
    report = run(model, lambda sim: next(values), max_drop=0.5)
    tried = [row for row in report.rows[1:] if row["step"] != "mixed_precision"]
    assert len(tried) > 2
    assert not any(row["kept"] for row in tried)
    assert report.code.count("qsdk.calibrate(") == 1


def test_verbs_that_the_metric_calls_get_none_of_its_options(model):
    seen = []

    def metric(sim) -> float:
        seen.append(run_of(qsdk.calibrate, {}).forward)
        return 1.0

    run(model, metric, max_drop=0.0, forward=lambda module, batch: module(batch))
    assert seen == [None, None]


def test_a_budget_of_more_than_the_metric_is_met_with_a_remark(model):
    report = run(model, lambda sim: 0.9, max_drop=5.0)
    assert report.summary["met"]
    assert report.summary["budget_remark"].startswith("max_drop=5 lets the metric, which is 0.9 in float, fall to 0")


@pytest.mark.slow
def test_a_stream_with_an_outlier_is_rotated_and_the_lines_repeat_it():
    torch.manual_seed(0)
    model, data = Residual().eval(), list(torch.randn(64, 8).split(16))
    with torch.no_grad():
        exact = model(data[-1])

    def closeness(sim) -> float:
        return -float((sim(data[-1]) - exact).abs().mean() / exact.abs().mean())

    report = run(model, closeness, data=data, max_drop=0.0)
    kept = [row["step"] for row in report.rows if row["kept"]]
    assert "rotate" in kept
    assert report.summary["metric"] > report.rows[0]["metric"]
    names = {"qsdk": qsdk, "model": model, "example": data[0], "data": data, "metric": closeness}
    exec(report.code, names)
    assert torch.equal(names["sim"](data[-1]), report.sim(data[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("side", ["module", "file"])
def test_narrow_weights_are_rounded_and_the_lines_repeat_it(model, exported, sqnr, side):
    given = model if side == "module" else exported
    data = BATCHES if side == "module" else [batch.numpy() for batch in BATCHES]
    report = run(given, sqnr, data=data, max_drop=106.0, config=qsdk.w4a8())
    assert report.summary["metric"] > report.rows[0]["metric"]
    assert {"seq_mse", "gptq"} <= set(steps(report))
    names = {"qsdk": qsdk, "model": given, "example": data[0], "data": data, "metric": sqnr, "config": qsdk.w4a8()}
    exec(
        report.code.replace("(sim, data", "(sim, data, progress=False").replace("progress=False, metric", "metric"),
        names,
    )
    assert np.array_equal(outputs_of(names["sim"]), outputs_of(report.sim))


@pytest.mark.slow
def test_the_result_is_never_worse_than_the_preset_and_says_what_was_missed(model, sqnr):
    report = run(model, sqnr, max_drop=0.0, config=qsdk.w4a8())
    kept = [row["metric"] for row in report.rows if row["kept"]]
    assert report.summary["metric"] == max(kept) >= report.rows[0]["metric"]
    assert not report.summary["met"]
    assert "below float" in report.summary["missed"][0]
    assert "mixed_precision" in steps(report)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["uint4", "uint16"])
def test_weights_are_not_rounded_better_where_activations_alone_miss_the_budget(model, sqnr, activation):
    config = qsdk.w4a8().override("*", activation=activation)
    report = run(model, sqnr, max_drop=110.0, config=config)  # 30 dB are wanted
    before_mixed = steps(report)[: steps(report).index("mixed_precision")] if activation == "uint4" else steps(report)
    assert ("gptq" in before_mixed) == (activation == "uint16")
    assert ("quantize activations alone" in before_mixed) == (activation == "uint4")
    assert report.summary["met"]
    if activation == "uint4":
        (row,) = [row for row in report.rows if row["step"] == "quantize activations alone"]
        assert row["drop"] > 110.0
        assert "gptq" in row["note"]
        plain = qsdk.quantize(model, BATCHES[0], qsdk.w8a8().override("*", activation="uint4", weight="float32"))
        qsdk.calibrate(plain, BATCHES, progress=False)
        assert row["metric"] == pytest.approx(sqnr(plain), abs=3.0)  # other ranges may have been kept


@pytest.mark.slow
def test_mixed_precision_meets_what_rounding_does_not(model, sqnr):
    report = run(model, sqnr, max_drop=92.0, config=qsdk.w4a8())
    assert report.summary["met"]
    assert "mixed_precision" in steps(report)
    assert sqnr(report.sim) >= 48.0
    ranking = report.summary["ranking"]
    assert {row["layer"] for row in ranking if row["kind"] == "weights"} == {"first", "fragile", "last"}
    assert ranking[0]["layer"] == "fragile"


@pytest.mark.slow  # the demo network: small ones are rounded again after mixed precision
def test_the_path_keeps_the_steps_that_its_lines_repeat():
    network, images = qsdk.demo.network(), torch.from_numpy(qsdk.demo.data().calibration_images)
    with torch.no_grad():
        exact = network(images[64:256])

    def closeness(sim) -> float:
        return -float((sim(images[64:256]) - exact).detach().square().mean())

    config = qsdk.w4a8().override("*", weight="int3")
    report = run(network, closeness, data=[images[:64]], max_drop=0.01, config=config)
    kept = [row["step"] for row in report.rows if row["kept"]]
    assert {"gptq", "mixed_precision"} <= set(steps(report))
    for step in ("seq_mse", "gptq", "adaround"):
        assert (step in kept) == (f"qsdk.{step}(" in report.code), report.full()


@pytest.mark.spread(1)
@pytest.mark.parametrize("side", ["module", "file"])
def test_the_file_fits_into_max_bytes(model, exported, sqnr, tmp_path, side):
    given = model if side == "module" else exported
    data = BATCHES if side == "module" else [batch.numpy() for batch in BATCHES]
    whole = run(given, sqnr, data=data, max_drop=125.0).summary["bytes"]
    report = run(given, sqnr, data=data, max_drop=125.0, max_bytes=whole - 100)
    qsdk.export(report.sim, tmp_path / "model.onnx", prefer="size")
    assert os.path.getsize(tmp_path / "model.onnx") == report.summary["bytes"] <= whole - 100
    first, fragile, last = [row["dtype"] for row in report.sim.coverage().rows if row["kind"] == "weight"]
    assert fragile == "int8"
    assert "int4" in (first, last)
    assert report.summary["ranking"][0]["kind"] == "weights"


def test_a_size_that_cannot_be_reached_is_an_error(model, sqnr):
    with pytest.raises(qsdk.ConfigError, match="with 4 bits in every weight"):
        run(model, sqnr, max_drop=1.0, max_bytes=100)


def test_max_bytes_also_bounds_what_is_raised(model, sqnr):
    size = run(model, sqnr, max_drop=125.0, config=qsdk.w4a8()).summary["bytes"]
    report = run(model, sqnr, max_drop=90.0, config=qsdk.w4a8(), max_bytes=size + 60)
    assert report.summary["bytes"] <= size + 60
    assert any("beyond max_bytes" in row["note"] for row in report.rows)


def test_time_is_a_budget_that_can_be_missed(model, sqnr):
    report = run(model, sqnr, max_drop=125.0, max_ms=1e-6)
    assert report.summary["ms"] > 1e-6
    assert report.summary["float_ms"] > 0
    assert report.code.startswith('config = qsdk.w8a8().for_dialect("onnxruntime")')
    assert not report.summary["met"]
    assert "ms" in report.summary["missed"][0]


@pytest.mark.slow
def test_one_seed_gives_one_path(model, sqnr):
    first, second = (run(model, sqnr, max_drop=102.0, config=qsdk.w4a8(), seed=3) for _ in range(2))
    assert [(row["step"], row["metric"]) for row in first.rows] == [(row["step"], row["metric"]) for row in second.rows]
    assert first.code == second.code


@pytest.mark.slow
def test_the_users_model_is_left_alone(model, sqnr):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(model, sqnr, data=[*BATCHES], max_drop=104.0, config=qsdk.w4a8())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
def test_passes_count_the_processors_time_and_not_waiting(model, sqnr):
    class Slow(list):
        """The second float pass is slow to read, and every pass after it."""

        passes = 0

        def __iter__(self):
            Slow.passes += 1
            for batch in super().__iter__():
                time.sleep(0.5 if Slow.passes > 2 else 0.0)
                yield batch

    report = run(model, sqnr, data=Slow(BATCHES), max_drop=1000.0)  # the preset alone
    assert Slow.passes == 4  # two float passes, calibration, and a float pass at the end
    assert report.summary["passes"] * 0.002 < 1.0  # 2 s of waiting would be 1000 float passes of 2 ms


@pytest.mark.slow
def test_data_that_can_be_read_once_is_kept(model, sqnr):
    report = qsdk.autoquant(model, BATCHES[0], iter(BATCHES), sqnr, max_drop=104.0, config=qsdk.w4a8(), progress=False)
    assert len(report.rows) > 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"max_drop": -1.0}, "no budget"), ({"max_drop": 1.0, "metric": 3}, "no function")],
)
def test_wrong_arguments_are_named(model, options, words):
    given = {"metric": lambda sim: 0.0, **options}
    with pytest.raises(qsdk.ConfigError, match=words):
        qsdk.autoquant(model, BATCHES[0], BATCHES, progress=False, **given)


def test_what_costs_least_per_byte_is_lowered_first():
    weights = [LowerableWeight("a", 10, 1.0), LowerableWeight("b", 100, 2.0), LowerableWeight("c", 100, 9.0)]
    assert choose_lowered(weights, 110) == ["a", "b"]
    assert choose_lowered(weights, 100) == ["b"]
    assert choose_lowered(weights, 111) == ["b", "c"]
    assert choose_lowered(weights, 210) == ["a", "b", "c"]
    assert choose_lowered(weights, 211) is None


@pytest.mark.spread(1)
@pytest.mark.parametrize("side", ["module", "file"])
def test_smaller_uses_what_is_left_of_the_budget_for_a_smaller_file(model, exported, sqnr, tmp_path, side):
    given = model if side == "module" else exported
    data = BATCHES if side == "module" else [batch.numpy() for batch in BATCHES]
    # the float file's own metric depends on the processor
    max_drop = run(given, sqnr, data=data, max_drop=100.0).summary["reference"] - 23.0
    plain = run(given, sqnr, data=data, max_drop=max_drop)
    report = run(given, sqnr, data=data, max_drop=max_drop, smaller=True)
    assert steps(report) == [*steps(plain), "int4 and back"]
    assert report.summary["met"]
    assert report.summary["bytes"] < plain.summary["bytes"]
    qsdk.export(report.sim, tmp_path / "model.onnx", prefer="size")
    assert os.path.getsize(tmp_path / "model.onnx") == report.summary["bytes"]
    kept = {row["site"]: row["dtype"] for row in report.sim.coverage().rows if row["kind"] == "weight"}
    assert sorted(kept.values()) == ["int4", "int4", "int8"]
    assert kept[next(site for site in kept if "fragile" in site or "conv2d_1" in site)] == "int8"
    names = {"qsdk": qsdk, "model": given, "example": data[0], "data": data, "metric": sqnr}
    exec(report.code, names)
    assert np.array_equal(outputs_of(names["sim"]), outputs_of(report.sim))


def test_smaller_leaves_a_result_as_it_is_where_the_metric_has_nothing_left(model, sqnr):
    plain = run(model, sqnr, max_drop=1e9, config=qsdk.w8a8())
    tight = run(model, sqnr, max_drop=140.0 - plain.summary["metric"], smaller=True)
    assert tight.rows[-1]["step"] == "int4 and back"
    assert (tight.rows[-1]["kept"], tight.summary["bytes"]) == (False, plain.summary["bytes"])
    assert np.array_equal(outputs_of(tight.sim), outputs_of(plain.sim))
