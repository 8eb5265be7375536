"""Wrong uses of the verbs: each ends in an error of qsdk that says what to give instead, and changes nothing."""

import pytest
import torch
from qdq_models import convnet
from torch import nn

import qsdk
from qsdk import Report

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def sim():
    made = qsdk.quantize(nn.Linear(6, 2), X)
    qsdk.calibrate(made, [X], progress=False)
    return made


VERBS = {
    "calibrate": lambda given: qsdk.calibrate(given, [X]),
    "export": lambda given: qsdk.export(given, "model.onnx"),
    "check_parity": lambda given: qsdk.check_parity(given, "model.onnx", [X]),
    "seq_mse": lambda given: qsdk.seq_mse(given, [X]),
    "adaround": lambda given: qsdk.adaround(given, [X]),
    "gptq": lambda given: qsdk.gptq(given, [X]),
    "correct_bias": lambda given: qsdk.correct_bias(given, [X]),
    "reestimate_batch_norm": lambda given: qsdk.reestimate_batch_norm(given, [X]),
    "equalize": lambda given: qsdk.equalize(given, [X]),
    "smooth_quant": lambda given: qsdk.smooth_quant(given, [X]),
    "rotate": lambda given: qsdk.rotate(given, [X]),
    "awq": lambda given: qsdk.awq(given, [X]),
    "tune_blocks": lambda given: qsdk.tune_blocks(given, [X]),
    "tune_ranges": lambda given: qsdk.train.tune_ranges(given, [X]),
    "mixed_precision": lambda given: qsdk.mixed_precision(given, [X], lambda s: 1.0, max_drop=0.1),
    "advise": lambda given: qsdk.analysis.advise(given, [X]),
    "distill_loss": lambda given: qsdk.distill_loss(given, given, X, temperature=2.0),
    "save": lambda given: qsdk.save(given, "sim.qsdk"),
    "save_encodings": lambda given: qsdk.save_encodings(given, "model.encodings.json"),
    "load_encodings": lambda given: qsdk.load_encodings(given, "model.encodings.json"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(6, 2), r"expected a sim, got Linear; sim = qsdk\.quantize\(model, example, config\) makes a sim"),
        ("model.onnx", r"expected a sim, got the path 'model\.onnx'; sim = qsdk\.quantize\(path, None, config\) makes"),
        ([X], "expected a sim, got list; the sim that qsdk.quantize gives comes first"),
    ],
    ids=["module", "path", "data"],
)
def test_what_is_no_sim(verb: str, given, message: str):
    if verb == "save_encodings" and isinstance(given, str):  # it takes files as well
        message = "there is no file model.onnx; check the path"
    with pytest.raises((qsdk.ConfigError, qsdk.FileFormatError), match=message):
        VERBS[verb](given)


@pytest.mark.parametrize("read", [qsdk.validate, lambda m: qsdk.to_integer(m, "out.onnx")], ids=["validate", "integer"])
def test_a_sim_in_the_place_of_a_file(sim, read):
    with pytest.raises(qsdk.ConfigError, match=r"expected an ONNX model, got a QuantSim; write it first.*qsdk\.export"):
        read(sim)
    with pytest.raises(qsdk.ConfigError, match="expected an ONNX model, got a int; give the path of an ONNX file"):
        read(3)


def test_a_training_block_inside_of_another(sim):
    with sim.training() as model:
        with pytest.raises(qsdk.ConfigError, match="is in a training block already; leave that before you enter"):
            sim.training().__enter__()
        assert model.training
    assert not sim.model.training
    with sim.training():
        pass


@pytest.mark.parametrize(
    ("metric", "max_drop", "message"),
    [
        (None, 0.1, "metric=None is no function; give one of the sim"),
        (lambda s: 1.0, "1%", "max_drop='1%' is no budget; give a number from 0, in the metric's own unit: 0.01"),
        (lambda s: 1.0, None, "max_drop=None is no budget"),
        (lambda s: "good", 0.1, "the metric is 'good', which is no number; return one"),
        (lambda s: None, 0.1, "the metric is 'None', which is no number; return one"),
    ],
)
def test_metrics_and_budgets(sim, metric, max_drop, message: str):
    with pytest.raises(qsdk.ConfigError, match=message):
        qsdk.mixed_precision(sim, [X], metric, max_drop=max_drop, progress=False)


def test_a_report_shows_itself_as_its_table():
    report = Report("Sizes", [{"file": "a<b.onnx", "bytes": 10}], {"total": 10})
    assert repr(report) == str(report)
    assert len(repr(report).splitlines()) == 5
    assert "<td>a&lt;b.onnx</td><td>10</td>" in report._repr_html_()
    assert "total: 10" in report._repr_html_()


def test_no_config_is_w8a8_and_a_quantized_file_has_its_own(sim, tmp_path):
    assert sim.config == qsdk.w8a8()
    opened = qsdk.quantize(convnet())
    assert opened.config == qsdk.w8a8()
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.quantize(tmp_path / "model.onnx").config is None


def test_what_is_for_a_file_is_refused_beside_a_module_and_what_is_for_a_folder_beside_a_file(sim, tmp_path):
    with pytest.raises(qsdk.ConfigError, match=r"inputs.*a module is traced with its example, which holds them"):
        qsdk.quantize(nn.Linear(6, 2), X, inputs={"rate": 3})
    qsdk.save(sim, tmp_path / "sim.qsdk")
    with pytest.raises(qsdk.ConfigError, match=r"^example: for the folder of a checkpoint"):
        qsdk.load(tmp_path / "sim.qsdk", nn.Linear(6, 2), example=X)
    with pytest.raises(qsdk.ConfigError, match=r"^device_map: for the folder of a checkpoint"):
        qsdk.load(tmp_path / "sim.qsdk", nn.Linear(6, 2), device_map="cpu")


def test_a_misspelt_keyword_of_a_rule_is_answered_with_the_nearest_one():
    with pytest.raises(qsdk.ConfigError, match=r"override\(\) has no weights=; did you mean weight=\?"):
        qsdk.w8a8().override("*", weights="int4")
    with pytest.raises(qsdk.ConfigError, match=r"skip\(\) has no dtyp=; did you mean dtype=\?"):
        qsdk.w8a8().skip("*", dtyp="float16")
    with pytest.raises(qsdk.ConfigError, match=r"has no foo=; it takes op_type, shape, .*, optional"):
        qsdk.w8a8().override("*", foo=1)


def test_an_op_type_that_the_model_lacks_is_refused_by_name():
    with pytest.raises(qsdk.ConfigError, match=r"op_type=FooBar .* matches no op of that type; there are: Gemm, Input"):
        qsdk.quantize(nn.Linear(6, 2), X, qsdk.w8a8().override(op_type="FooBar", weight="int4"))


def test_floats_of_another_dtype_are_answered_with_how_to_convert_them(sim):
    remedy = r"its floats are float16 and the model computes in float32: convert them, as in x\.to\(torch\.float32\)"
    with pytest.raises(qsdk.DataError, match=remedy):
        sim(X.half())
    with pytest.raises(qsdk.DataError, match=remedy):
        qsdk.calibrate(sim, [X.half()], progress=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # torch's own, where the dtype is right
        sim(X[:, :3])


def test_the_quantizers_that_other_tools_keep_on_modules_are_named_by_their_sites(sim):
    with pytest.raises(qsdk.ModelError, match=r"no param_quantizers; .* sim\.encodings\['self:weight'\] reads one"):
        sim.model.param_quantizers["weight"]
    with pytest.raises(qsdk.ModelError, match=r"config\.override\('self:output', activation='uint16'\)"):
        sim.model.output_quantizers[0]
    assert not hasattr(sim.model, "weight_quantizers")
    own = nn.Sequential(nn.Linear(6, 2))
    own.add_module("output_quantizers", nn.ReLU())
    assert isinstance(qsdk.quantize(own, X).model.output_quantizers, nn.ReLU)


def test_mixed_precision_without_a_budget_or_a_metric_says_what_to_give(sim):
    with pytest.raises(qsdk.ConfigError, match="metric=None is no function"):
        qsdk.mixed_precision(sim, [X], None)
    with pytest.raises(qsdk.ConfigError, match="max_drop=None is no budget"):
        qsdk.mixed_precision(sim, [X], lambda sim: 1.0)


def test_parameter_groups_are_refused_outside_of_training(sim):
    for options in ({}, {"scale_lr": 0.1}):
        with pytest.raises(qsdk.ConfigError, match="inside of the training block alone"):
            sim.parameter_groups(lr=1e-3, **options)
