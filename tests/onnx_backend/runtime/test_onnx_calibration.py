"""Calibration at the ONNX door: what is observed inside the graph, and what it leaves alone."""

import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from qdq_models import convnet, make_model, mlp, run, weights

from onnx_backend.calibration import observe as observing
from onnx_backend.calibration.observe import statistics_graph
from onnx_backend.proto.nodes import is_mark
from qsdk import CalibrationError, ConfigError, DataError, OnnxSim, quantize, w4a8, w8a8
from qsdk.core.ranges.estimators import METHODS, estimator, range_from_histogram, range_of_stored
from qsdk.core.ranges.histogram import SAMPLES, histogram_of
from qsdk.core.ranges.ranges import encoding_from_range, range_of
from qsdk.core.ranges.statistics import observed_sites

node = helper.make_node
RNG = np.random.default_rng(23)
BATCHES = [RNG.standard_t(3, size=(64, 6)).astype(np.float32) for _ in range(3)]
IMAGES = [RNG.normal(size=(4, 3, 8, 8)).astype(np.float32) for _ in range(2)]
ALL_METHODS = sorted(set(METHODS.values()))


def sim_of(model=None, config=None) -> OnnxSim:
    return quantize(model or mlp(), None, config or w8a8())


def calibrated(model=None, data=BATCHES, config=None, **options) -> OnnxSim:
    sim = sim_of(model, config)
    sim.calibrate(data, progress=False, **options)
    return sim


def values_at(model, names, x):
    """The values of tensors of a float model."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return run(exposed, {"x": x})[len(model.graph.output) :]


@pytest.mark.parametrize("method", ["percentile", "mse", "tf_enhanced", "entropy"])
def test_encodings_are_those_of_the_histogram_of_all_batches(method: str):
    sim = calibrated(method=method, percentile=99.0)
    for site, name in {"x:input": "x", "relu:output": "r"}.items():
        spec = sim.plan.decisions[site].spec
        parts = [batch if name == "x" else values_at(mlp(), [name], batch)[0] for batch in BATCHES]
        counted = [histogram_of(part.reshape(1, -1)) for part in parts]
        together = counted[0].merge(counted[1]).merge(counted[2])
        wanted = encoding_from_range(range_from_histogram(together, spec, estimator(method, 99.0)), spec)
        assert sim.encodings[site] == wanted, site


@pytest.mark.parametrize("weight_method", ALL_METHODS)
@pytest.mark.parametrize("config", [w8a8(), w4a8(), w4a8(block_size=2)], ids=["w8", "w4", "w4 blocks"])
def test_weights_have_a_method_of_their_own(weight_method: str, config):
    sim = calibrated(config=config, weight_method=weight_method)
    spec = sim.plan.decisions["mm1:weight"].spec
    weight = onnx.numpy_helper.to_array(next(t for t in mlp().graph.initializer if t.name == "w1"))
    wanted = encoding_from_range(range_of_stored(weight, spec, estimator(weight_method)), spec)
    np.testing.assert_array_equal(sim.encodings["mm1:weight"].scale, wanted.scale)
    assert sim.encodings["x:input"] == calibrated(config=config).encodings["x:input"]


@pytest.mark.parametrize(("alias", "name"), sorted(METHODS.items()))
def test_aliases(alias: str, name: str):
    left, right = calibrated(method=alias, weight_method=alias), calibrated(method=name, weight_method=name)
    assert left.encodings == right.encodings


@pytest.mark.spread(1)
@pytest.mark.parametrize("method", sorted(set(ALL_METHODS) - {"moving_average"}))
def test_any_order_of_batches_gives_the_same_encodings(method: str):
    images = [image * scale for image, scale in zip(IMAGES, (1, 9), strict=True)]
    for model, data in ((mlp(), BATCHES), (convnet(), images)):
        forward, backward = calibrated(model, data, method=method), calibrated(model, data[::-1], method=method)
        assert forward.encodings == backward.encodings


@pytest.mark.parametrize("method", ["min_max", "tf_enhanced"])
def test_members_of_a_tie_share_what_all_have_seen(method: str):
    """Concat of a branch around 0 and one around 100: the encoding serves both."""
    nodes = [
        node("Neg", ["x"], ["a"], "near"),
        node("Add", ["x", "hundred"], ["b"], "far"),
        node("Concat", ["a", "b"], ["c"], "concat", axis=1),
        node("MatMul", ["c", "w"], ["y"], "mm"),
    ]
    stored = {"hundred": np.full(6, 100, np.float32)} | weights(w=(12, 2))
    sim = calibrated(make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 2]}, stored), method=method)
    shared = {sim.encodings[f"{site}:output"].scale.tobytes() for site in ("near", "far", "concat")}
    assert len(shared) == 1
    assert sim.encodings["concat:output"].high > 90


def sigmoid_model():
    nodes = [node("MatMul", ["x", "w"], ["m"], "mm"), node("Sigmoid", ["m"], ["y"], "gate")]
    return make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 2]}, weights(w=(6, 2)))


@pytest.mark.parametrize("method", ALL_METHODS)
def test_calibration_leaves_a_fixed_range(method: str):
    sim = calibrated(sigmoid_model(), method=method)
    for data in (BATCHES, [batch * 1e-4 for batch in BATCHES]):
        sim.calibrate(data, method=method, progress=False)
        assert sim.encodings["gate:output"].scale.tolist() == [np.nextafter(np.float32(1 / 255), np.float32(0))]
        assert sim.encodings["gate:output"].zero_point.tolist() == [0]


@pytest.mark.parametrize("method", ALL_METHODS)
def test_calibration_leaves_frozen_encodings(method: str):
    sim = calibrated()
    before = sim.encodings
    sim.freeze("mm1")
    sim.freeze("relu")
    sim.calibrate([batch * 10 for batch in BATCHES], method=method, weight_method=method, progress=False)
    for site in ("mm1:weight", "relu:output"):
        assert sim.encodings[site] == before[site]
        assert sim.encodings[site].frozen
    assert sim.encodings["x:input"].scale > 2 * before["x:input"].scale


@pytest.mark.parametrize("method", ALL_METHODS)
def test_an_error_in_the_middle_of_calibration_changes_nothing(method: str):
    sim = calibrated()
    before = sim.encodings
    spoiled = BATCHES[1].copy()
    spoiled[2, 3] = np.nan
    with pytest.raises(DataError, match="NaN or inf at the site x:input in batch 1"):
        sim.calibrate([BATCHES[0], spoiled], method=method, progress=False)

    def failing():
        yield BATCHES[0] * 5
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="disk"):
        sim.calibrate(failing(), method=method, progress=False)
    assert sim.encodings == before


def test_nan_that_an_op_makes_is_named_where_it_is_made():
    """The extremes of the runtime do not see a NaN in the middle of a tensor."""
    nodes = [node("Log", ["x"], ["l"], "log"), node("Relu", ["l"], ["y"], "relu")]
    model = make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 6]}, {})
    fine = np.full((4, 6), 2, np.float32)
    bad = fine.copy()
    bad[2, 1] = -1
    with pytest.raises(DataError, match="NaN or inf at the site log:output in batch 1"):
        calibrated(model, [fine, bad])


def test_only_what_may_make_nan_is_checked_for_it():
    sim = sim_of(convnet())
    _, watched = statistics_graph(sim._marked, observed_sites(sim.plan.decisions.values()), sampled=False)
    assert [item.site for item in watched if item.check] == ["x:input"]


def test_what_is_made_of_a_tensor_that_was_not_checked_is_checked():
    nodes = [node("Exp", ["x"], ["e"], "exp"), node("Relu", ["e"], ["r"], "relu"), node("Neg", ["r"], ["y"], "neg")]
    config = w8a8().skip("exp").skip("relu")
    sim = quantize(make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 6]}, {}), None, config)
    _, watched = statistics_graph(sim._marked, observed_sites(sim.plan.decisions.values()), sampled=False)
    assert [item.site for item in watched if item.check] == ["x:input", "neg:output"]


def test_a_positive_op_is_reduced_once():
    sim = sim_of(convnet())
    model, watched = statistics_graph(sim._marked, observed_sites(sim.plan.decisions.values()), sampled=False)
    relus = [item for item in watched if item.site.startswith("relu")]
    assert relus
    assert not any(item.low for item in relus)
    assert not any(is_mark(item) for item in model.graph.node)


@pytest.mark.parametrize("low", [0.0, -1.0, 2.0])
def test_a_clip_is_positive_only_if_its_lower_bound_is(low: float):
    nodes = [node("Clip", ["x", "low", "high"], ["y"], "clip")]
    stored = {"low": np.float32(low), "high": np.float32(4)}
    sim = calibrated(make_model(nodes, {"x": ["n", 6]}, {"y": ["n", 6]}, stored))
    seen = np.concatenate(BATCHES).clip(low, 4)
    spec = sim.plan.decisions["clip:output"].spec
    assert sim.encodings["clip:output"] == encoding_from_range(range_of(seen, spec), spec)


def large_model():
    nodes = [node("Tanh", ["x"], ["t"], "tanh"), node("Add", ["t", "x"], ["y"], "add")]
    return make_model(nodes, {"x": ["n", 64]}, {"y": ["n", 64]}, {})


def test_large_tensors_are_sampled_evenly_and_keep_their_extremes():
    batch = RNG.normal(size=(4096, 64)).astype(np.float32)
    batch[1234, 5] = 50
    assert batch.size > 4 * SAMPLES
    sim = sim_of(large_model())
    wanted = observed_sites(sim.plan.decisions.values())
    statistics = observing.observe(sim._marked, wanted, [batch], estimator("mse"), progress=False)
    histogram = statistics.histograms["x:input"]
    assert histogram.high == 50
    assert histogram.counts.sum() == pytest.approx(batch.size, rel=1e-3)
    exact = histogram_of(batch.reshape(1, -1))
    assert np.abs(np.cumsum(histogram.counts) - np.cumsum(exact.counts)).max() < 0.02 * batch.size
    spec = sim.plan.decisions["x:input"].spec
    found, full = (
        encoding_from_range(range_from_histogram(counted, spec, estimator("mse")), spec)
        for counted in (histogram, exact)
    )
    assert found.scale == pytest.approx(full.scale, rel=0.05)


@pytest.mark.spread(1)
@pytest.mark.parametrize("method", ["min_max", "tf_enhanced"])
def test_memory_does_not_grow_with_the_data(method: str):
    batch = RNG.normal(size=(2048, 64)).astype(np.float32)
    peaks = []
    for count in (2, 40):
        sim = sim_of(large_model())
        tracemalloc.start()
        sim.calibrate((batch for _ in range(count)), method=method, progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] + 100_000
    assert peaks[1] < 10 * 2**20  # of 20 MiB of data


def test_the_sessions_with_and_without_samples_are_kept(monkeypatch):
    opened = []
    real = observing.RepeatedSession
    monkeypatch.setattr(observing, "RepeatedSession", lambda *model, **on: opened.append(1) or real(*model, **on))
    sim = sim_of()
    for method in ("min_max", "moving_average", "min_max"):
        sim.calibrate(BATCHES, method=method, progress=False)
    assert len(opened) == 1
    for method in ("mse", "entropy", "min_max"):
        sim.calibrate(BATCHES, method=method, progress=False)
    assert len(opened) == 2
    name = next(iter(sim.stored_names().values()))
    sim.change_stored({name: sim.stored_by_name(name)})
    sim.calibrate(BATCHES, progress=False)
    assert len(opened) == 3  # weights may have changed


@pytest.mark.slow
def test_an_empty_batch_says_nothing_at_positive_ops_either():
    empty = np.zeros((0, 3, 8, 8), np.float32)
    for method in ("min_max", "mse"):
        with_it, without = (calibrated(convnet(), data, method=method) for data in ([*IMAGES, empty], IMAGES))
        assert with_it.encodings == without.encodings
    with pytest.raises(CalibrationError, match="no batch reached x:input"):
        calibrated(convnet(), [empty])


def test_a_site_without_data_keeps_the_encoding_it_has():
    sim = calibrated()
    before = sim.encodings["x:input"]
    sim.calibrate([np.zeros((0, 6), np.float32)], progress=False)
    assert sim.encodings["x:input"] == before


def test_wrong_options_are_explained():
    sim = sim_of()
    for option in ("method", "weight_method"):
        with pytest.raises(ConfigError, match="unknown calibration method 'magic'; choose one of min_max"):
            sim.calibrate(BATCHES, progress=False, **{option: "magic"})
    with pytest.raises(ConfigError, match=r"percentile=5 is outside 50..100"):
        sim.calibrate(BATCHES, method="percentile", percentile=5, progress=False)
    assert not any(sim.ready().values())
