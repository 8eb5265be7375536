"""Freezing encodings, and loading them from files: the same at both doors."""

import json
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from islands import BATCHES, DOORS, batches, everything, outputs, sim_at
from torch import nn

import qsdk
from qsdk import CalibrationError, ConfigError, FileFormatError, calibrate, export, float16, load_encodings, quantize
from qsdk.core.encodings import qsdk_format
from qsdk.core.encodings.qsdk_format import StoredEncodings
from qsdk.core.sims.load_encodings import with_loaded
from qsdk.core.sims.state import owns_encoding

both = pytest.mark.parametrize("door", DOORS)
WEIGHTS = ["conv1:weight", "conv2:weight", "fc1:weight", "fc2:weight"]
ACTIVATIONS = [
    *["x:input", "conv1:output", "relu1:output", "conv2:output", "pool:output", "relu3:output", "fc2:output"],
]


def frozen(sim) -> list[str]:
    """The sites with a frozen encoding of their own."""
    return sorted(site for site, encoding in sim.snapshot().own.items() if encoding.frozen)


def elsewhere(door):
    """Data that gives other encodings."""
    return [batch * 3 + 1 for batch in batches(door)]


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_encodings_of_any_number_of_channels_come_back(outputs, tmp_path):
    sim = quantize(torch.nn.Linear(4, outputs), torch.ones(2, 4))
    calibrate(sim, [torch.linspace(-1, 1, 8).reshape(2, 4)], progress=False)
    qsdk.save_encodings(sim, tmp_path / "all.encodings.json")
    again = quantize(torch.nn.Linear(4, outputs), torch.ones(2, 4))
    load_encodings(again, tmp_path / "all.encodings.json")
    wanted = sim.encodings["self:weight"]
    assert wanted.scale.shape == (outputs,)
    np.testing.assert_array_equal(again.encodings["self:weight"].scale, wanted.scale)
    np.testing.assert_array_equal(again.encodings["self:weight"].zero_point, wanted.zero_point)


# freezing


@both
@pytest.mark.parametrize(
    ("match", "wanted"),
    [
        ("*", [*WEIGHTS, *ACTIVATIONS]),
        ("weights", WEIGHTS),
        ("activations", ACTIVATIONS),
        ("fc1", ["fc1:weight"]),
        ("fc?", ["fc1:weight", "fc2:weight", "fc2:output"]),
        ("fc?:weight", ["fc1:weight", "fc2:weight"]),
        ("fc2:output", ["fc2:output"]),
        ("x", ["x:input"]),
        ("flat", ["pool:output"]),  # shares the encoding
        ("cat.0:output", ["relu1:output"]),
    ],
)
def test_freeze_and_unfreeze_take_patterns_sites_and_kinds(door, match, wanted):
    sim = sim_at(door)
    before = sim.encodings
    assert sim.freeze(match) == len(wanted)
    assert frozen(sim) == sorted(wanted)
    calibrate(sim, elsewhere(door), progress=False)
    kept = {site for site in [*WEIGHTS, *ACTIVATIONS] if sim.encodings[site] == before[site]}
    assert kept == {*wanted, *WEIGHTS}  # weights did not change
    assert sim.unfreeze(match) == len(wanted)
    assert frozen(sim) == []
    calibrate(sim, elsewhere(door), progress=False)
    assert all(sim.encodings[site] != before[site] for site in ACTIVATIONS if "relu" in site)


@both
@pytest.mark.parametrize("verb", ["freeze", "unfreeze"])
@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("convv", r"freeze\('convv'\) matches no owner in the model; the nearest are: conv"),
        ("bn1", r"matches only sites that stay float, such as bn1:output \(inside BatchNormalization\+Relu\)"),
        ("fc1:bias", r"the scale of fc1:bias is that of pool:output times that of fc1:weight; name these"),
    ],
)
def test_a_match_without_an_encoding_says_why(door, verb, match, message):
    sim = sim_at(door)
    before = everything(sim)
    with pytest.raises(ConfigError, match=message):
        getattr(sim, verb)(match)
    assert everything(sim) == before


@pytest.mark.spread(1)
@both
def test_what_has_no_encoding_yet_cannot_be_frozen(door):
    sim = sim_at(door, data=False)
    message = r"freeze\('fc2'\): these sites have no encoding yet: fc2:weight, fc2:output; call qsdk.calibrate first"
    with pytest.raises(CalibrationError, match=message):
        sim.freeze("fc2")
    assert sim.unfreeze("fc2") == 2


@both
def test_shared_and_derived_encodings_say_that_they_are_frozen(door):
    sim = sim_at(door)
    sim.freeze("relu1")
    assert {site for site, e in sim.encodings.items() if e.frozen} == {"relu1:output", "relu2:output", "cat.0:output"}
    sim.freeze("conv2")
    assert sim.encodings["conv2:bias"].frozen
    assert not sim.encodings["conv1:bias"].frozen


def test_frozen_is_neither_searched_nor_trained():
    sim = sim_at("torch", "w4a8")
    sim.freeze("fc1")
    before, weight = sim.encodings, sim.model.fc1.weight.detach().clone()
    for verb in (qsdk.seq_mse, qsdk.adaround):
        notes = {row["site"]: row["note"] for row in verb(sim, batches("torch"), progress=False).rows}
        assert notes["fc1:weight"] == "its encoding is frozen"
        assert torch.equal(sim.model.fc1.weight, weight)
    sim.freeze("*")
    with sim.training(learn_scales=True) as model:
        assert not any("log2" in name for name, _ in model.named_parameters())
    assert sim.encodings["fc1:weight"] == before["fc1:weight"]


# loading


def saved(sim, tmp_path, form):
    """A file with the sim's encodings."""
    if form == "json":
        qsdk.save_encodings(sim, tmp_path / "e.json")
        return tmp_path / "e.json"
    export(sim, tmp_path / "m.onnx")
    return tmp_path / ("m.onnx" if form == "onnx" else "m.encodings.json")


@pytest.mark.spread(3)
@both
@pytest.mark.parametrize("form", ["json", "onnx", "companion"])
def test_encodings_come_back_into_a_fresh_sim(door, form, tmp_path):
    sim = sim_at(door, "w4a8")
    for match, dtype in (("bn*", float16), ("fc1:weight", "int8"), ("relu3", "uint16")):
        sim.set_precision(match, dtype)
    sim.freeze("fc2")
    path = saved(sim, tmp_path, form)
    fresh = sim_at(door, sim.config, data=False)
    report = load_encodings(fresh, path)
    assert fresh.encodings == sim.encodings
    assert frozen(fresh) == frozen(sim) == ["fc2:output", "fc2:weight"]
    assert np.array_equal(outputs(fresh), outputs(sim))
    assert {row["state"] for row in report.rows} == {"loaded"}
    assert {row["site"] for row in report.rows} >= {"relu1:output", "fc1:bias", "cat.0:output"}
    assert report.summary["loaded"] == len(report.rows)


@pytest.mark.spread(6)
@both
@pytest.mark.parametrize(
    ("freeze", "wanted"),
    [
        (False, []),
        (True, [*WEIGHTS, *ACTIVATIONS]),
        ("weights", WEIGHTS),
        ("activations", ACTIVATIONS),
        ("fc?:weight", ["fc1:weight", "fc2:weight"]),
        ("x:input", ["x:input"]),
    ],
)
def test_freeze_says_what_of_the_loaded_is_frozen(door, freeze, wanted, tmp_path):
    path = saved(sim_at(door), tmp_path, "json")
    sim = sim_at(door, data=False)
    load_encodings(sim, path, freeze=freeze)
    assert frozen(sim) == sorted(wanted)


@pytest.mark.spread(1)
@both
def test_encodings_loaded_as_frozen_are_not_calibrated_again(door, tmp_path):
    sim = sim_at(door)
    path = saved(sim, tmp_path, "json")
    fresh = sim_at(door, data=False)
    load_encodings(fresh, path, freeze=True)
    calibrate(fresh, elsewhere(door), progress=False)
    assert fresh.encodings == sim.encodings
    assert np.array_equal(outputs(fresh), outputs(sim))
    load_encodings(fresh, path)  # the same again is no conflict


@both
def test_strict_loading_lists_every_unknown_name_and_otherwise_quantizers_stay(door, tmp_path):
    sim = sim_at(door)
    stored = sim.encodings
    other = qsdk.Encoding(stored["fc1:weight"].dtype, np.float32([1]), np.int32([0]))
    for site in ("conv1:weight", "x:input", "relu1:output"):
        del stored[site]
    stored |= {"conv9:weight": other, "bn1:output": other, "zzz": other}
    stored["fc2:weight"] = replace(stored["fc2:weight"], scale=stored["fc2:weight"].scale[:3], zero_point=0)
    stored["fc1:weight"] = replace(stored["fc1:weight"], axis=1)
    path = tmp_path / "e.json"
    path.write_text(qsdk_format.dumps(stored, {}, {"pool:output": float16}))
    fresh = sim_at(door)
    fresh.freeze("conv2")
    calibrate(fresh, elsewhere(door), progress=False)
    before = everything(fresh)
    with pytest.raises(FileFormatError) as caught:
        load_encodings(fresh, path)
    message = str(caught.value)
    assert everything(fresh) == before
    for part in (
        f"{path} does not fit the sim:",
        "3 not in the file: conv1:weight, x:input, relu1:output",
        "3 unexpected: conv9:weight (the nearest here: conv2:weight, conv1:weight)",
        "bn1:output (float32 in the plan: inside BatchNormalization+Relu; relu1:output has",
        "zzz (nothing here is like it)",
        "fc2:weight (a scale of shape (3,) does not fit the 5 channels (axis 0) of (5, 12))",
        "fc1:weight (int8 per channel (axis 1) in the file, int8 per channel (axis 0) in the plan)",
        "pool:output (float16 in the file, uint8 per tensor in the plan)",
        "pass strict=False to load what fits and leave the rest as it is",
    ):
        assert part in message, message
    report = load_encodings(fresh, path, strict=False)
    left = {row["site"] for row in report.rows if row["state"] != "loaded"}
    assert left == {"conv1:weight", "x:input", "relu1:output", "conv9:weight", "bn1:output", "zzz"} | {
        *["fc2:weight", "fc1:weight", "pool:output"]
    }
    assert all(fresh.ready().values())
    assert fresh.encodings["conv1:output"] == stored["conv1:output"]
    for site in ("x:input", "relu1:output", "pool:output"):
        assert fresh.encodings[site] == before[2][site]
    assert frozen(fresh) == ["conv2:output", "conv2:weight"]


@both
def test_a_conflict_with_a_frozen_encoding_is_listed(door, tmp_path):
    path = saved(sim_at(door), tmp_path, "json")
    sim = sim_at(door)
    calibrate(sim, elsewhere(door), progress=False)
    sim.freeze("relu3")
    before = sim.encodings["relu3:output"]
    with pytest.raises(
        FileFormatError, match=r"relu3:output \(frozen in the sim with another.*call sim.unfreeze first"
    ):
        load_encodings(sim, path)
    load_encodings(sim, path, strict=False)
    assert sim.encodings["relu3:output"] == before
    sim.unfreeze("relu3")
    load_encodings(sim, path)
    assert sim.encodings["relu3:output"] != before


@both
def test_tied_and_derived_entries_are_held_against_what_they_follow_from(door, tmp_path):
    sim = sim_at(door)
    stored = sim.encodings
    stored["cat.0:output"] = replace(stored["cat.0:output"], scale=stored["cat.0:output"].scale * 2)
    stored["fc1:bias"] = replace(stored["fc1:bias"], scale=stored["fc1:bias"].scale * 2)
    path = tmp_path / "e.json"
    path.write_text(qsdk_format.dumps(stored, {}))
    with pytest.raises(FileFormatError, match="2 different") as caught:
        load_encodings(sim, path)
    assert "cat.0:output (it follows from relu1:output here, whose entries say otherwise)" in str(caught.value)
    assert "fc1:bias (it follows from pool:output and fc1:weight here" in str(caught.value)


@both
def test_float16_sites_are_held_against_the_plan(door, tmp_path):
    sim = sim_at(door)
    sim.set_precision("bn1", float16)
    path = saved(sim, tmp_path, "json")
    entries = json.loads(path.read_text())["encodings"]
    assert {**entries["relu1:output"], "tensor": ""} == {"dtype": "float16", "tensor": "", "kind": "activation"}
    with pytest.raises(FileFormatError, match=r"relu1:output \(float16 in the file, uint8 per tensor in the plan\)"):
        load_encodings(sim_at(door), path)
    for casts, detail in (
        ({}, "1 not in the file: relu1:output"),
        ({"relu1:output": qsdk.bfloat16}, "1 different: relu1:output (bfloat16 in the file, float16 in the plan)"),
    ):
        path.write_text(qsdk_format.dumps(sim.encodings, {}, casts))
        with pytest.raises(FileFormatError) as caught:
            load_encodings(sim, path)
        assert detail in str(caught.value)
    text = qsdk_format.dumps({**sim.encodings, "relu1:output": sim.encodings["x:input"]}, {})
    path.write_text(text)
    with pytest.raises(FileFormatError, match=r"relu1:output \(uint8 per tensor in the file, float16 in the plan\)"):
        load_encodings(sim, path)
    path.write_text(qsdk_format.dumps(sim.encodings, {}).replace('"version": 3', '"version": 1'))
    load_encodings(sim, path)  # could not say it


@pytest.mark.spread(1)
@both
def test_only_part_of_a_file_can_be_loaded_and_frozen(door, tmp_path):
    """The set-and-freeze of parameters: a file with weights only."""
    sim = sim_at(door)
    path = tmp_path / "weights.json"
    path.write_text(qsdk_format.dumps({site: sim.encodings[site] for site in WEIGHTS}, {}))
    fresh = sim_at(door, data=False)
    with pytest.raises(FileFormatError, match=r"7 not in the file: x:input"):
        load_encodings(fresh, path, freeze="weights")
    load_encodings(fresh, path, freeze="weights", strict=False)
    assert frozen(fresh) == WEIGHTS
    calibrate(fresh, batches(door), progress=False)
    assert fresh.encodings == sim.encodings


def test_bad_files_and_options_are_named(tmp_path):
    sim = sim_at("onnx")
    path = saved(sim, tmp_path, "json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "cut.json").write_text(path.read_text()[:200])
    for name, message in (
        ("none.json", r"there is no file .*none.json; give an encodings file"),
        ("none.onnx", r"there is no file .*none.onnx"),
        ("bytes.json", r"bytes.json is no text; give an encodings file or an .onnx model"),
        ("cut.json", r"cut.json is truncated or no JSON"),
    ):
        with pytest.raises(FileFormatError, match=message):
            load_encodings(sim, tmp_path / name)
    with pytest.raises(ConfigError, match=r"freeze\('nobody'\) matches no owner"):
        load_encodings(sim, path, freeze="nobody")
    with pytest.raises(ConfigError, match=r'freeze=3 is unknown; choose False, True, "weights", "activations"'):
        load_encodings(sim, path, freeze=3)
    with pytest.raises(CalibrationError, match="these sites have no encoding"):
        qsdk.save_encodings(sim_at("onnx", data=False), tmp_path / "e.json")


def test_a_model_in_memory_and_a_file_of_another_door_load_too(tmp_path):
    sim = sim_at("torch")
    path = saved(sim, tmp_path, "onnx")
    other = sim_at("onnx", data=False)
    load_encodings(other, onnx.load(path))
    assert other.encodings == sim.encodings
    np.testing.assert_allclose(outputs(other), outputs(sim), atol=float(sim.encodings["fc2:output"].scale[0]))


def test_frozen_flags_survive_an_export_and_its_opening(tmp_path):
    sim = sim_at("onnx")
    sim.freeze("weights")
    path = saved(sim, tmp_path, "onnx")
    back = quantize(path, None, None)
    assert frozen(back) == WEIGHTS
    calibrate(back, [batch * 3 for batch in BATCHES], progress=False)
    assert all(back.encodings[site] == sim.encodings[site] for site in WEIGHTS)
    assert back.encodings["x:input"] != sim.encodings["x:input"]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_loaded_or_left_is_told_for_every_name(data):
    """For any part of a file: own sites load, the rest is listed, and strict is the same as nothing to list."""
    sim = sim_at("onnx")
    state, stored = sim.snapshot(), sim.encodings
    kept = data.draw(st.sets(st.sampled_from(sorted(stored))))
    extra = data.draw(st.sets(st.sampled_from(["nobody:weight", "bn1:output", "conv1:weights"])))
    wrong = data.draw(st.sets(st.sampled_from(sorted(stored)), max_size=2)) & kept
    given_encodings = {site: stored[site] for site in stored if site in kept}
    given_encodings |= {site: replace(stored[site], scale=stored[site].scale * 2) for site in wrong}
    given_encodings |= dict.fromkeys(extra, stored["x:input"])
    file = StoredEncodings(given_encodings, {})
    after, report = with_loaded(state, file, "f", freeze=False, strict=False)
    told = {row["site"]: row["state"] for row in report.rows}
    own = {site for site, decision in state.plan.decisions.items() if owns_encoding(decision)}
    assert set(after.own) == set(state.own) == own
    for site in own:
        assert told[site] == ("loaded" if site in kept else "missing")
        assert after.own[site] == given_encodings.get(site, stored[site])
    assert {site for site, what in told.items() if what == "unexpected"} == extra
    fits = all(what == "loaded" for what in told.values())
    if not fits:
        with pytest.raises(FileFormatError) as caught:
            with_loaded(state, file, "f", freeze=False, strict=True)
        assert all(site in str(caught.value) for site, what in told.items() if what != "loaded")
    else:
        assert with_loaded(state, file, "f", freeze=False, strict=True)[0] == after


def test_a_file_for_other_dtypes_is_refused_site_by_site(tmp_path):
    path = saved(sim_at("onnx", "w4a8"), tmp_path, "json")
    with pytest.raises(
        FileFormatError, match=r"4 different: conv1:weight \(int4 per channel \(axis 0\) in the file, int8"
    ):
        load_encodings(sim_at("onnx"), path)
    sim = sim_at("onnx")
    sim.replan(qsdk.w4a8())
    load_encodings(sim, path)


def test_a_site_in_float16_that_is_not_here_is_unexpected(tmp_path):
    x = torch.randn(2, 3, 8, 8)
    layers = [nn.Conv2d(3, 3, 3), nn.Sigmoid(), nn.Sigmoid()]
    longer, shorter = (
        qsdk.quantize(nn.Sequential(*layers[:count]), x, config)
        for count, config in ((3, qsdk.w8a8().skip("2", dtype="float16")), (2, qsdk.w8a8()))
    )
    for sim in (longer, shorter):
        qsdk.calibrate(sim, [x], progress=False)
    qsdk.save_encodings(longer, tmp_path / "encodings.json")
    report = qsdk.load_encodings(shorter, tmp_path / "encodings.json", strict=False)
    assert [row["site"] for row in report.rows if row["state"] == "unexpected"] == ["2:output"]
