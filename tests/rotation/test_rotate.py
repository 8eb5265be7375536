"""The verb `rotate`: the float model stays the same at both doors, whatever is rotated, refused or raised."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from rotated_models import exact, float_file, in_float, model_and_input, off
from torch import nn

import qsdk
from qsdk import ConfigError, FileFormatError, ModelError
from qsdk.verbs.doors.choose import door_of
from qsdk.verbs.rotate import SampledRows

STREAM, HEADS = "residual stream", "attention values"
#: model -> how many norms are folded into their layers; None where the residual stream cannot be rotated
FOLDED = {"llama": 5, "tied llama": 5, "gpt2": 5, "bert": None, "qwen3": 5, "gemma": 5, "vit": 5}
QUICK = ("llama", "tied llama", "gpt2")
MODELS = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FOLDED]


def kinds(report) -> list[str]:
    return [row["kind"] for row in report.rows if not row["reason"]]


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_float_model_stays_the_same_at_both_doors(name, tmp_path):
    model, x = model_and_input(name)
    wanted = exact(model, x)
    sim = qsdk.quantize(model, (x,), qsdk.w8a8())
    file_sim = qsdk.quantize(float_file(sim, tmp_path / "float.onnx"), None, qsdk.w8a8())
    early = file_sim.snapshot()
    before = {key: value.clone() for key, value in sim.model.state_dict().items()}
    for one in (sim, file_sim):
        report = qsdk.rotate(one, progress=False)
        stream = next(row for row in report.rows if row["kind"] == STREAM)
        assert kinds(report).count(HEADS) == 2
        if FOLDED[name] is None:
            assert "is not uniform" in stream["reason"]
        else:
            assert stream["reason"] == ""
            assert stream["norms"] == FOLDED[name]
            assert stream["size"] == 24
    if name == "tied llama":
        with pytest.raises(ModelError, match="before a rotation gave layers copies"):
            file_sim.restore(early)
    changed = [key for key, value in sim.model.state_dict().items() if not torch.equal(value, before[key])]
    assert len(changed) > 3
    assert off(exact(sim.unwrap(), x), wanted) < 1e-5
    assert off(in_float(file_sim, x), wanted) < 1e-5


@pytest.fixture(scope="module")
def calibrated():
    """A Llama with a massive channel, as trained ones have, its calibrated sim at W8A8, and an input."""
    model, x = model_and_input("llama")
    with torch.no_grad():
        model.model.model.embed_tokens.weight[:, 5] *= 60
    sim = qsdk.quantize(model, (x,), qsdk.w8a8())
    qsdk.calibrate(sim, [(x,)], progress=False)
    return model, sim, x


@pytest.mark.slow
def test_outliers_are_gone_and_ranges_are_found_again(calibrated):
    model, sim, x = calibrated[0], copy.deepcopy(calibrated[1]), calibrated[2]
    wanted, site = exact(model, x), "model.model.layers.0/add.1:output"
    before, error = sim.encodings[site], off(sim(x).double().numpy(), wanted)
    with pytest.raises(ConfigError, match="give data to calibrate it again"):
        qsdk.rotate(sim)
    report = qsdk.rotate(sim, [(x,)], progress=False)
    assert report.summary["calibrated_again"] == "min_max"
    assert sim.encodings[site].scale < before.scale / 2
    assert off(sim(x).double().numpy(), wanted) < error
    assert off(exact(sim.unwrap(), x), wanted) < 1e-5


def test_a_learned_rotation_makes_less_noise_and_changes_nothing_else(calibrated):
    model, sim, x = calibrated[0], copy.deepcopy(calibrated[1]), calibrated[2]
    report = qsdk.rotate(sim, [(x,)], method="learned", progress=False)
    stream = next(row for row in report.rows if row["kind"] == STREAM)
    assert stream["noise_after"] < 0.95 * stream["noise_before"]
    assert off(exact(sim.unwrap(), x), exact(model, x)) < 1e-5


def test_a_failing_rotation_leaves_the_sim_bit_identical(calibrated):
    sim, x = copy.deepcopy(calibrated[1]), calibrated[2]
    held = {name: value.copy() for name, value in door_of(sim).stored_values().items()}
    encodings, wanted = sim.encodings, sim(x)
    with pytest.raises(qsdk.DataError):
        qsdk.rotate(sim, [(torch.zeros(2, 6, 3),)], progress=False)
    assert all(np.array_equal(held[name], value) for name, value in door_of(sim).stored_values().items())
    assert sim.encodings == encodings
    assert torch.equal(sim(x), wanted)


def test_a_frozen_encoding_keeps_its_stream_as_it_is(calibrated):
    sim, x = copy.deepcopy(calibrated[1]), calibrated[2]
    sim.freeze("*lm_head")
    report = qsdk.rotate(sim, [(x,)], progress=False)
    stream = next(row for row in report.rows if row["kind"] == STREAM)
    assert stream["reason"] == "the encoding of model.lm_head:weight is frozen"
    assert kinds(report) == [HEADS, HEADS]


@pytest.fixture(scope="module")
def tied():
    model, x = model_and_input("tied llama")
    sim = qsdk.quantize(model, (x,), qsdk.w8a8())
    qsdk.calibrate(sim, [(x,)], progress=False)
    return model, sim, x


@pytest.mark.slow
def test_a_tied_table_gets_a_copy_that_is_exported_saved_and_not_forgotten(tied, tmp_path):
    model, sim, x = tied[0], copy.deepcopy(tied[1]), tied[2]
    wanted, early = exact(model, x), sim.snapshot(weights=True)
    report = qsdk.rotate(sim, [(x,)], progress=False)
    assert report.summary["untied"] == "model.lm_head.weight"
    table, head = sim.model.model.model.embed_tokens.weight, sim.model.model.lm_head.weight
    assert not torch.equal(table, head)
    assert sim.model.model.config.tie_word_embeddings is False
    assert model.model.lm_head.weight is model.model.model.embed_tokens.weight
    with pytest.raises(ModelError, match="before a rotation gave layers copies"):
        sim.restore(early)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [(x,)], progress=False).summary["passed"]
    qsdk.save(sim, tmp_path / "sim.zip")
    with pytest.raises(FileFormatError, match="names parameters that the module lacks"):
        qsdk.load(tmp_path / "sim.zip", nn.Linear(2, 2))
    loaded = qsdk.load(tmp_path / "sim.zip", model)
    assert torch.equal(loaded(x), sim(x))
    with door_of(loaded).as_given() as changed:
        assert changed
        assert off(exact(loaded.unwrap(), x), wanted) < 1e-12  # the user's own values, also of the copy


@pytest.mark.slow
def test_a_rule_for_a_tied_weight_counts_for_the_copy():
    model, x = model_and_input("tied llama")
    config = qsdk.w4a8(block_size=4).override("*lm_head:weight", weight="int8")
    sim = qsdk.quantize(model, (x,), replace(config, only_linear=True))
    assert sim.plan.decisions["model.lm_head:weight"].state == "float"  # the embedding's table, which it is still
    qsdk.rotate(sim, progress=False)
    dtypes = {row["site"]: row["dtype"] for row in sim.coverage().rows}
    assert dtypes["model.lm_head:weight"] == "int8"
    assert dtypes["model.model.layers.0.mlp.up_proj:weight"] == "int4"


def test_what_fails_behind_the_copy_ties_again(tied):
    sim, x = copy.deepcopy(tied[1]), tied[2]
    module, wanted, sites = sim.model, sim(x), list(sim.plan.decisions)
    with pytest.raises(qsdk.DataError):
        qsdk.rotate(sim, [(torch.zeros(2, 6, 3),)], progress=False)
    assert sim.model is module
    assert module.model.lm_head.weight is module.model.model.embed_tokens.weight
    assert list(sim.plan.decisions) == sites
    assert torch.equal(sim(x), wanted)


class Hidden(nn.Module):
    """A pre-norm network whose residual stream leaves the model, or is multiplied by a vector."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(8, 12), nn.Linear(12, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.arange(12.0))

    def forward(self, x):
        x = self.first(x)
        x = x + self.second(self.norm(x))
        if self.how == "scaled":
            x = x * self.scale
        return (self.head(self.norm(x)), x) if self.how == "leaves" else self.head(self.norm(x))


@pytest.mark.parametrize(
    ("how", "reason"),
    [("leaves", "leaves the model"), ("scaled", "its channels are multiplied by different numbers"), ("plain", "")],
)
def test_a_stream_that_cannot_be_rotated_says_why(how, reason):
    torch.manual_seed(0)
    model, x = Hidden(how).eval(), torch.randn(4, 8)
    with torch.no_grad():
        model.norm.weight += 0.3 * torch.randn(12)
        model.norm.bias += 0.3 * torch.randn(12)
    wanted = model(x)
    sim = qsdk.quantize(model, (x,), qsdk.w8a8())
    report = qsdk.rotate(sim, method="random", seed=4, progress=False)
    assert reason in report.rows[0]["reason"]
    assert bool(report.rows[0]["reason"]) is bool(reason)
    after = sim.unwrap()(x)
    if reason:
        assert torch.equal(torch.cat([y.flatten() for y in after]), torch.cat([y.flatten() for y in wanted]))
        return
    torch.testing.assert_close(after, wanted, rtol=0, atol=1e-5)
    assert (model.norm.bias != sim.unwrap().norm.bias).all()


def test_what_is_asked_for_wrongly():
    sim = qsdk.quantize(nn.Linear(4, 2), torch.randn(2, 4), qsdk.w8a8())
    with pytest.raises(ConfigError, match="method='fourier'; choose hadamard, random, learned"):
        qsdk.rotate(sim, method="fourier")
    with pytest.raises(ConfigError, match="measures the noise of quantization on data: give data"):
        qsdk.rotate(sim, method="learned")
    with pytest.raises(ConfigError, match="expected a sim"):
        qsdk.rotate(nn.Linear(4, 2))
    assert list(qsdk.rotate(sim).rows) == []  # nothing to rotate is no error


def test_a_sample_of_rows_holds_the_largest_and_as_many_others_however_much_comes():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3000, 4)).astype(np.float32)
    sample = SampledRows(0)
    for part in np.split(rows, 3):
        sample.add(part)
    found = sample.rows()
    assert len(found) == 512
    largest = rows[np.argsort(-np.abs(rows).max(axis=1))[:256]]
    assert {row.tobytes() for row in largest} == {row.tobytes() for row in found[:256]}
    assert {row.tobytes() for row in found} <= {row.tobytes() for row in rows}
