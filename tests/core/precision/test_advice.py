"""Advice names the sites that one scale serves badly, with a remedy that helps."""

import numpy as np
import pytest

from qsdk import Encoding, uint8
from qsdk.core.numerics.spec import PerTensor, Spec
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.precision.advice import SiteSample, decibels, noise_to_signal
from qsdk.core.precision.advice import advise as advise_with_noise
from qsdk.core.ranges.ranges import encoding_from_range, range_of


def advise(plan, encodings, samples, noise=None):
    return advise_with_noise(plan, encodings, samples, noise or {})


SPEC = Spec(uint8, PerTensor(), symmetric=False)


def decision(site: str, op_type: str = "Conv", tied_to: str | None = None) -> Decision:
    return Decision(site, op_type, "activation", SPEC, op_type, tied_to=tied_to)


def sample_of(values) -> SiteSample:
    sample = SiteSample()
    sample.add(np.asarray(values, np.float32))
    return sample


def encoding_of(*arrays) -> Encoding:
    return encoding_from_range(range_of(np.concatenate([np.ravel(a) for a in arrays]), SPEC), SPEC)


def detector():
    generator = np.random.default_rng(0)
    boxes, scores = generator.uniform(0, 640, (1, 4, 500)), generator.beta(0.2, 2.0, (1, 8, 500))
    plan = Plan(
        {
            "boxes:output": decision("boxes:output", "Mul"),
            "scores:output": decision("scores:output", "Sigmoid", "boxes:output"),
            "cat:output": decision("cat:output", "Concat", "boxes:output"),
        }
    )
    shared = encoding_of(boxes, scores)
    samples = {"boxes:output": sample_of(boxes), "scores:output": sample_of(scores)}
    return plan, dict.fromkeys(plan.decisions, shared), samples


def test_scores_that_share_a_scale_with_boxes_are_named_and_untying_is_the_remedy():
    report = advise(*detector())
    (row,) = report.rows
    assert row["site"] == "scores:output"
    assert "shares a scale with" in row["finding"]
    assert "of boxes:output" in row["finding"]
    assert row["remedy"] == "config.override('cat', tie=False)"
    assert row["sqnr_db"] < 3 < 20 < row["sqnr_db_then"]


def test_an_outlier_channel_is_named_and_more_bits_are_the_remedy():
    values = np.random.default_rng(1).normal(size=(2, 16, 64))
    values[:, 5] *= 200.0
    plan = Plan({"ffn:output": decision("ffn:output")})
    encodings = {"ffn:output": encoding_of(values)}
    (row,) = advise(plan, encodings, {"ffn:output": sample_of(values)}).rows
    assert row["finding"].startswith("channel 5 of axis 1 is ")
    assert row["sqnr_db"] > 30  # which the power of the outlier makes look fine
    assert row["remedy"] == "config.override('ffn', activation=\"uint16\")"


def test_values_beyond_one_scale_are_left_to_float16():
    values = np.concatenate([np.full(10_000, 1e-4), [6e4]])
    plan = Plan({"mask:output": decision("mask:output")})
    sample = sample_of(values)
    sample.values = np.full(100, 1e-4, np.float32)
    (row,) = advise(plan, {"mask:output": encoding_of(values)}, {"mask:output": sample}).rows
    assert row["remedy"] == "config.override('mask', activation=\"float16\")"
    assert row["sqnr_db_then"] > 40


def test_sites_that_are_served_well_are_not_named():
    values = np.random.default_rng(2).uniform(-1, 1, (4, 8, 8))
    plan = Plan({"conv:output": decision("conv:output")})
    assert advise(plan, {"conv:output": encoding_of(values)}, {"conv:output": sample_of(values)}).rows == []


def test_noise_is_relative_to_the_signal():
    encoding = Encoding(uint8, np.array([1.0]), np.array([0]))
    assert noise_to_signal(np.array([0.5, 10.0], np.float32), encoding) == pytest.approx(0.25 / 100.25)
    assert noise_to_signal(np.zeros(3, np.float32), encoding) == 0.0
    assert decibels(0.0) == 200.0
    assert decibels(0.01) == pytest.approx(20.0)


def test_a_sample_is_bounded_and_keeps_the_extremes():
    sample = SiteSample()
    for number in range(5):
        values = np.random.default_rng(number).normal(size=(4, 3, 64, 64)).astype(np.float32)
        values[0, 1, 0, 0] = 10.0 + number
        sample.add(values)
    assert sample.values.size <= 32_768
    assert sample.high == 14.0
    assert sample.elements == 4 * 3 * 64 * 64
    np.testing.assert_array_equal(sample.channels[1].argmax(), 1)


def test_values_that_are_not_finite_are_left_out():
    sample = sample_of([1.0, np.inf, -np.inf, np.nan, 2.0])
    assert (sample.low, sample.high) == (1.0, 2.0)
    np.testing.assert_array_equal(sample.values, [1.0, 2.0])


def test_what_hurts_the_outputs_most_comes_first():
    values = {
        name: np.append(np.random.default_rng(seed).uniform(-1, 1, 30_000), 300) for seed, name in enumerate("ab")
    }
    sites = {name: f"{name}:output" for name in values}
    plan = Plan({site: decision(site) for site in sites.values()})
    encodings = {sites[name]: encoding_of(x) for name, x in values.items()}
    samples = {sites[name]: sample_of(x) for name, x in values.items()}
    for first, second in (("a", "b"), ("b", "a")):
        report = advise(plan, encodings, samples, {sites[first]: 3.0, sites[second]: 1.0, "other": 4.0})
        assert [(row["site"], row["share"]) for row in report.rows] == [(sites[first], 0.375), (sites[second], 0.125)]
