from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, save
from qdq_models import convnet, make_model, mlp, run, simulated_mlp, weights

import qsdk
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.validation import rules as validation_rules
from qsdk import CalibrationError, ConfigError, DataError, FileFormatError, quantize, uint8, w4a8, w8a8, w8a16
from qsdk.core.ranges.ranges import encoding_from_range, range_of

node = helper.make_node
RNG = np.random.default_rng(11)
BATCHES = [RNG.normal(size=(8, 6)).astype(np.float32) for _ in range(3)]
IMAGES = [RNG.normal(size=(4, 3, 8, 8)).astype(np.float32) for _ in range(2)]


def calibrated(config=None, model=None, data=BATCHES):
    sim = quantize(model or mlp(), None, config or w8a8())
    sim.calibrate(data, progress=False)
    return sim


def float_values(model, x, names):
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    exposed.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return dict(zip(names, run(exposed, {"x": x})[len(model.graph.output) :], strict=True))


def test_ranges_are_those_of_all_batches_together():
    sim = calibrated()
    everything = np.concatenate(BATCHES)
    values = {"x:input": everything, "relu:output": float_values(mlp(), everything, ["r"])["r"]}
    for site, value in values.items():
        wanted = encoding_from_range(range_of(value, sim.plan.decisions[site].spec), sim.plan.decisions[site].spec)
        np.testing.assert_allclose(sim.encodings[site].scale, wanted.scale, rtol=1e-6)
        assert sim.encodings[site].zero_point == wanted.zero_point


def test_weights_and_biases_follow_their_definitions():
    sim = calibrated()
    stored = initializers(mlp().graph)
    weight = numpy_helper.to_array(stored["w1"])
    spec = sim.plan.decisions["mm1:weight"].spec
    assert sim.encodings["mm1:weight"] == encoding_from_range(range_of(weight, spec), spec)
    product = sim.encodings["x:input"].scale * sim.encodings["mm1:weight"].scale
    np.testing.assert_array_equal(sim.encodings["add1:bias"].scale, product)
    assert sim.encodings["add1:bias"].dtype.name == "int32"


def test_it_simulates_what_numpy_computes():
    sim = calibrated()
    x = BATCHES[0]
    wanted = simulated_mlp(sim.encodings, sim.stored_values(), x)["add2:output"]
    assert np.abs(sim.run(x)[0] - wanted).max() <= 1.01 * sim.encodings["add2:output"].scale[0]
    for given_x in (x, (x,), {"x": x}, x.astype(np.float64), x.tolist() and [x]):
        np.testing.assert_array_equal(sim.run(given_x)[0], sim.run(x)[0])
    np.testing.assert_array_equal(sim(x)[0], sim.run(x)[0])
    np.testing.assert_array_equal(sim.capture(x)["add2:output"], sim.run(x)[0])


def test_outputs_come_in_graph_order():
    sim = calibrated(model=convnet(), data=IMAGES)
    y, p = sim.run(IMAGES[0])
    assert (y.shape, p.shape) == ((4, 5), (4, 5))
    assert np.abs(p.sum(axis=1) - 1).max() < 0.05
    assert float(p.min()) >= 0


def test_coverage_and_explain_speak_of_every_site():
    sim = calibrated(model=convnet(), data=IMAGES)
    sites = {row["site"] for row in sim.coverage().rows}
    assert set(read_graph(convnet()).sites) <= sites
    assert "Conv+Relu" in sim.explain("relu:output")
    with pytest.raises(ConfigError, match="there is no site nowhere"):
        sim.explain("nowhere:output")


def test_a_grouped_transposed_convolution_matches_its_export():
    sim = calibrated(model=convnet(), data=IMAGES)
    assert "deconv:weight" in sim.encodings
    report = qsdk.check_parity(sim, sim.qdq_model(), IMAGES, progress=False)
    assert report.summary["passed"], report


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_names_site_and_batch_and_changes_nothing(bad):
    sim = calibrated()
    before = sim.encodings
    spoiled = [BATCHES[0], BATCHES[1].copy()]
    spoiled[1][2, 3] = bad
    with pytest.raises(DataError, match="NaN or inf at the site x:input in batch 1"):
        sim.calibrate(spoiled, progress=False)
    assert sim.encodings == before


def test_a_failure_in_the_middle_changes_nothing():
    sim = quantize(mlp(), None, w8a8())

    def failing():
        yield BATCHES[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="disk"):
        sim.calibrate(failing(), progress=False)
    with pytest.raises(CalibrationError, match="these sites have no encoding: mm1:weight"):
        sim.encodings
    with pytest.raises(CalibrationError, match="have no encoding"):
        sim.run(BATCHES[0])
    assert not any(sim.ready().values())
    assert sim.encodings_where_ready() == {}


def test_a_bad_weight_is_named():
    model = mlp()
    values = numpy_helper.to_array(model.graph.initializer[0]).copy()
    values[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(values, "w1"))
    with pytest.raises(DataError, match="stored tensor at mm1:weight"):
        calibrated(model=model)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "holds no batch"),
        (BATCHES[0], "wrap it in a list"),
        ({"x": BATCHES[0]}, "wrap it in a list"),
        ([(BATCHES[0], BATCHES[0])], "batch 0 has 2 elements, the model takes 1"),
        ([{"y": BATCHES[0]}], "batch 0: the model does not take y; its inputs are x"),
        ([{}], "batch 0: the model also needs x"),
        ([BATCHES[0][:, :5]], "batch 0: the input .x. takes float32"),
        ([BATCHES[0], BATCHES[0].astype(np.int64)], "batch 1: the input .x. takes float32 .n, 6., got int64"),
    ],
)
def test_data_the_model_does_not_take_is_explained(data, message):
    sim = calibrated()
    before = sim.encodings
    with pytest.raises(DataError, match=message):
        sim.calibrate(data, progress=False)
    assert sim.encodings == before


def test_a_moving_average_weighs_batches_by_a_tenth():
    sim = calibrated()
    sim.calibrate(BATCHES, method="moving_average", progress=False)
    low, high = BATCHES[0].min(), BATCHES[0].max()
    for batch in BATCHES[1:]:
        low, high = low + 0.1 * (batch.min() - low), high + 0.1 * (batch.max() - high)
    np.testing.assert_allclose(sim.encodings["x:input"].scale, [(high - low) / 255], rtol=1e-5)


def test_an_encoding_can_be_set_and_is_simulated():
    sim = calibrated()
    coarse = qsdk.Encoding(uint8, np.float32([0.5]), np.int32([0]))
    sim.set_encoding("relu:output", coarse)
    np.testing.assert_array_equal(np.unique(sim.capture(BATCHES[0])["relu:output"]) % 0.5, 0)
    with pytest.raises(ConfigError, match="has no encoding of its own"):
        sim.set_encoding("add1:bias", coarse)


@pytest.mark.spread(1)
@pytest.mark.parametrize("config", [w8a8(), w4a8(), w8a16(block_size=2), w8a8().skip("gemm", dtype="float16")])
def test_an_exported_file_opens_again(tmp_path, config):
    sim = calibrated(config, convnet(), IMAGES)
    save(sim.qdq_model(), tmp_path / "m.onnx")
    back = quantize(tmp_path / "m.onnx")
    assert back.encodings == sim.encodings
    for left, right in zip(back.run(IMAGES[0]), sim.run(IMAGES[0]), strict=True):
        np.testing.assert_array_equal(left, right)
    again = back.qdq_model()
    assert qsdk.check_parity(back, again, IMAGES, progress=False).summary["passed"]
    for left, right in zip(run(again, {"x": IMAGES[0]}), run(sim.qdq_model(), {"x": IMAGES[0]}), strict=True):
        np.testing.assert_array_equal(left, right)
    kinds = {row["site"]: row["kind"] for row in sim.coverage().rows if row["dtype"] != "float32"}
    assert {row["site"]: row["kind"] for row in back.coverage().rows if row["site"] in kinds} == kinds


@pytest.mark.parametrize("config", [None, w8a8()])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_file_is_read_and_validated_once(quantized, config, tmp_path, monkeypatch):
    path, calls = tmp_path / "m.onnx", []
    save(calibrated().qdq_model() if quantized else mlp(), path)
    read_bytes, rules = Path.read_bytes, validation_rules.versions
    monkeypatch.setattr(Path, "read_bytes", lambda self: (calls.append(self.name), read_bytes(self))[1])
    monkeypatch.setattr(validation_rules, "versions", lambda model: (calls.append("validated"), rules(model))[1])
    quantize(path, None, config)
    assert calls == ["m.onnx", "validated"] if quantized else ["m.onnx"]


def test_an_opened_file_can_be_calibrated_again():
    sim = calibrated()
    back = quantize(sim.qdq_model())
    back.calibrate([batch * 2 for batch in BATCHES], progress=False)
    np.testing.assert_allclose(back.encodings["x:input"].scale, 2 * sim.encodings["x:input"].scale, rtol=1e-5)
    product = back.encodings["x:input"].scale * back.encodings["mm1:weight"].scale
    np.testing.assert_array_equal(back.encodings["add1:bias"].scale, product)


def test_what_cannot_be_quantized_says_why(tmp_path):
    with pytest.raises(FileFormatError, match="there is no file"):
        quantize(tmp_path / "missing.onnx", None, w8a8())
    with pytest.raises(ConfigError, match="matches no owner"):
        quantize(mlp(), None, w8a8().skip("nothing"))


def test_the_source_model_is_not_changed():
    model = convnet()
    before = model.SerializeToString()
    calibrated(model=model, data=IMAGES).qdq_model()
    assert model.SerializeToString() == before


def test_an_empty_batch_says_nothing_about_ranges():
    sim = calibrated(data=[*BATCHES, np.zeros((0, 6), np.float32)])
    assert sim.encodings == calibrated().encodings
    with pytest.raises(CalibrationError, match="no batch reached x:input"):
        calibrated(data=[np.zeros((0, 6), np.float32)])


def test_a_constant_behind_no_operand_role_stays_as_it_is():
    nodes = [node("Pad", ["x", "pads", "value"], ["p"], "pad"), node("MatMul", ["p", "w"], ["y"], "mm")]
    stored = weights(w=(6, 2)) | {"pads": np.array([0, 1, 0, 1]), "value": np.float32(0)}
    sim = calibrated(model=make_model(nodes, {"x": ["n", 4]}, {"y": ["n", 2]}, stored), data=[RNG.normal(size=(3, 4))])
    assert {row["site"] for row in sim.coverage().rows} >= {"x:input", "pad:output", "mm:output", "mm:weight"}
