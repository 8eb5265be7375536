"""`set_precision`, `replan`, `snapshot` and `restore`: the same at both doors."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from islands import DOORS, batches, dtypes, everything, outputs, sim_at
from torch import nn

import qsdk
from qsdk import ConfigError, DataError, ModelError, calibrate, float16, float32, int8, seq_mse, uint8, uint16, w8a8
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.ranges.estimators import estimator, range_of_stored
from qsdk.core.ranges.ranges import Range, encoding_from_range, range_of
from qsdk.core.sims.state import put_back_on_error

both = pytest.mark.parametrize("door", DOORS)


def changed(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    return {site: name for site, name in after.items() if before[site] != name}


@both
@pytest.mark.parametrize(
    ("match", "dtype", "wanted"),
    [
        (
            "fc1",
            "float16",
            {"fc1:weight": "float16", "fc1:bias": "float16", "relu3:output": "float16", "fc2:bias": "float32"},
        ),
        (
            "fc1",
            "float32",
            {"fc1:weight": "float32", "fc1:bias": "float32", "relu3:output": "float32", "fc2:bias": "float32"},
        ),
        ("fc1", "int4", {"fc1:weight": "int4"}),
        ("fc1", "uint16", {"relu3:output": "uint16", "fc2:bias": "float32"}),
        ("fc1", "uint4", {"relu3:output": "uint4"}),
        ("fc2", "float8e4m3fn", {"fc2:weight": "float8e4m3fn", "fc2:bias": "float32", "fc2:output": "float8e4m3fn"}),
        ("fc1:weight", "int16", {"fc1:weight": "int16", "fc1:bias": "float32"}),
        ("relu3:output", "int8", {"relu3:output": "int8"}),
        ("fc?:weight", "int4", {"fc1:weight": "int4", "fc2:weight": "int4"}),
        ("x:input", "uint16", {"x:input": "uint16", "conv1:bias": "float32"}),
        ("fc1:bias", "float32", {"fc1:bias": "float32"}),
    ],
)
def test_a_dtype_goes_where_it_fits(door, match, dtype, wanted):
    sim = sim_at(door)
    before, encodings = dtypes(sim), sim.encodings
    report = sim.set_precision(match, dtype)
    assert changed(before, dtypes(sim)) == wanted
    assert {row["site"]: row["after"] for row in report.rows if row["before"] != row["after"]} == wanted
    assert sim.plan.decisions == make_plan(sim.graph, sim.config).decisions
    untouched = {site for site in sim.encodings if site not in wanted and sim.plan.decisions[site].bias_of is None}
    assert all(sim.encodings[site] == encodings[site] for site in untouched)
    assert np.isfinite(outputs(sim)).all()
    assert report.summary["uncalibrated"] == 0


@both
def test_a_site_inside_a_supergroup_means_what_the_supergroup_makes(door):
    sim = sim_at(door)
    before = dtypes(sim)
    sim.set_precision("bn1:output", "uint4")
    assert changed(before, dtypes(sim)) == {"relu1:output": "uint4"}
    with pytest.raises(ConfigError, match=r"weight=int4\) reaches nothing|is one activation"):
        sim.set_precision("bn1:output", weight="int4")


@both
def test_a_rule_may_be_given_twice(door):
    sim = sim_at(door)
    sim.set_precision("conv1", "uint16")
    before = everything(sim)[1:]
    report = sim.set_precision("conv1", "uint16")
    assert report.rows == []
    assert everything(sim)[1:] == before


@both
def test_keywords_say_which_kind_is_meant(door):
    sim = sim_at(door)
    sim.set_precision("fc1", weight=int8, activation="uint16", bias=float32)
    found = dtypes(sim)
    assert (found["fc1:weight"], found["relu3:output"], found["fc1:bias"]) == ("int8", "uint16", "float32")


@both
@pytest.mark.parametrize(
    ("match", "dtype", "keywords", "message"),
    [
        ("nothing", "int4", {}, r"matches no owner in the model; none is like it; there are"),
        ("fc1", None, {}, r"set_precision\('fc1'\) takes either a dtype or weight=, activation= and bias="),
        ("fc1", "int4", {"weight": "int4"}, r"takes either a dtype or weight="),
        (
            "fc1",
            "int16",
            {},
            r"int16 could be meant for weights, activations or biases; say weight=, activation= or bias=",
        ),
        ("fc1", "int32", {}, r"int32 could be meant for"),
        ("fc1", "float8e8m0", {}, r"float8e8m0 could be meant|type for scales"),
        ("fc1", "int77", {}, r"unknown dtype 'int77'"),
        (
            "relu1",
            "int4",
            {},
            r"weight=int4\)? reaches nothing: what matches has only activation.*owners that have one are.*conv1",
        ),
        ("fc1:weight", None, {"activation": "uint16"}, r"fc1:weight is one weight; give a dtype, or weight="),
        ("fc1", None, {"bias": "int8"}, r"a bias is int32 or float, not int8"),
        ("fc1:bias", "int8", {}, r"a bias is int32 or float, not int8"),
    ],
)
def test_an_error_says_what_to_do_and_changes_nothing(door, match, dtype, keywords, message):
    sim = sim_at(door)
    before, given_outputs = everything(sim), outputs(sim)
    with pytest.raises(ConfigError, match=message):
        sim.set_precision(match, dtype, **keywords)
    assert everything(sim) == before
    assert np.array_equal(outputs(sim), given_outputs)


@both
def test_a_folded_batch_norm_is_named_with_the_remedy(door):
    sim = sim_at(door, fold=True)
    message = (
        r"names bn1, bn2, a BatchNorm that was folded.*fold_batch_norm=False.*config.skip\('bn\*', dtype=float16\)"
    )
    with pytest.raises(ConfigError, match=message):
        sim.set_precision("bn*", float16)
    sim.set_precision("*1", float16)  # reaches others as well
    assert dtypes(sim)["conv1:weight"] == "float16"


@pytest.mark.spread(1)
@both
def test_an_unfolded_batch_norm_in_float16_by_rule_or_later_is_the_same(door):
    late = sim_at(door)
    late.set_precision("bn*", float16)
    early = sim_at(door, w8a8().skip("bn*", dtype=float16), fold=True)
    assert early.folded == ()
    assert dtypes(early) == dtypes(late)
    assert {site for site, name in dtypes(late).items() if name == "float16"} == {"relu1:output", "relu2:output"}
    calibrate(early, batches(door), progress=False)
    calibrate(late, batches(door), progress=False)
    assert early.encodings == late.encodings
    assert np.array_equal(outputs(early), outputs(late))


@both
def test_new_encodings_follow_from_values_and_old_ranges(door):
    sim = sim_at(door)
    sim.freeze("*")
    old = sim.encodings
    sim.set_precision("fc1", weight="int4", activation="uint16")
    weight, spec = dict(sim.stored_floats(["fc1:weight"]))["fc1:weight"], sim.plan.decisions["fc1:weight"].spec
    assert sim.encodings["fc1:weight"] == encoding_from_range(range_of(weight, spec), spec)
    covered = Range(old["relu3:output"].low, old["relu3:output"].high)
    assert sim.encodings["relu3:output"] == encoding_from_range(covered, sim.plan.decisions["relu3:output"].spec)
    assert sim.encodings["relu3:output"].dtype == uint16
    frozen = {site for site, encoding in sim.encodings.items() if encoding.frozen}
    assert frozen == set(sim.encodings) - {"fc1:weight", "relu3:output", "fc1:bias"}
    assert all(sim.encodings[site] == old[site] for site in frozen)


@pytest.mark.spread(1)
@both
def test_new_encodings_of_weights_are_found_by_the_method_of_the_calibration(door):
    sim = sim_at(door, data=False)
    calibrate(sim, batches(door), weight_method="percentile", percentile=90, progress=False)
    sim.set_precision("fc1", weight="int4")
    weight, spec = sim.stored_floats(["fc1:weight"])["fc1:weight"], sim.plan.decisions["fc1:weight"].spec
    found = sim.encodings["fc1:weight"]
    assert found == encoding_from_range(range_of_stored(weight, spec, estimator("percentile", 90)), spec)
    assert (found.scale < encoding_from_range(range_of(weight, spec), spec).scale).all()


@both
def test_a_bias_is_float_behind_16_bits_and_int32_again_behind_8(door):
    sim = sim_at(door)
    before = sim.encodings["fc2:bias"]
    sim.set_precision("relu3:output", uint16)
    assert sim.plan.decisions["fc2:bias"].spec is None
    assert "not an integer of 8 bits" in sim.explain("fc2:bias")
    sim.set_precision("relu3:output", uint8)
    assert sim.encodings["fc2:bias"].dtype.name == "int32"
    np.testing.assert_allclose(sim.encodings["fc2:bias"].scale, before.scale, rtol=0.01)


@both
def test_a_bias_has_room_in_the_new_grid(door):
    """A weight of zeros has a tiny scale, under which a bias would not fit int32."""
    sim = sim_at(door)
    _zero_weights_and_large_biases(sim, door, "fc1")
    calibrate(sim, batches(door), progress=False)
    sim.set_precision("fc1:weight", "int4")
    bias = dict(sim.stored_floats(["fc1:bias"]))["fc1:bias"]
    back = sim.encodings["fc1:bias"].fake_quantize(bias)
    assert np.abs(bias).max() > 100
    np.testing.assert_allclose(back, bias, rtol=1e-4)


@both
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_weight_makes_no_room_for_a_bias(door, frozen):
    sim = sim_at(door)
    before = sim.encodings["fc2:weight"].scale
    if frozen:
        sim.freeze("fc2:weight")
    sim.store_floats({"fc2:bias": np.full(5, 1e9, np.float32)})
    sim.set_precision("relu3:output", "uint4")
    assert np.array_equal(sim.encodings["fc2:weight"].scale, before) == frozen


def _zero_weights_and_large_biases(sim, door, owner):
    if door == "torch":
        getattr(sim.model, owner).weight.data.zero_()
        getattr(sim.model, owner).bias.data.mul_(1e4)
        return
    stored = {tensor.name: tensor for tensor in sim._marked.graph.initializer}
    stored[f"{owner}.weight"].raw_data = bytes(len(stored[f"{owner}.weight"].raw_data))
    bias = np.frombuffer(stored[f"{owner}.bias"].raw_data, np.float32) * np.float32(1e4)
    stored[f"{owner}.bias"].raw_data = bias.tobytes()


@both
def test_a_tie_is_cut_and_made_again(door):
    sim = sim_at(door)
    before = sim.encodings
    assert sim.plan.decisions["relu2:output"].tied_to == "relu1:output"
    sim.set_precision("relu1:output", float16)
    assert sim.plan.decisions["relu2:output"].tied_to is None
    for site in ("relu2:output", "cat.0:output"):
        assert sim.encodings[site] == before["relu1:output"]
    sim.set_precision("relu1:output", uint8)  # nothing says what range it has
    missing = [site for site, ready in sim.ready().items() if not ready]
    assert set(missing) == {"relu1:output", "relu2:output", "cat.0:output", "conv2:bias"}
    calibrate(sim, batches(door), progress=False)
    assert sim.encodings == before


@pytest.mark.spread(1)
@both
def test_parts_of_a_tie_that_differ_meet_in_one_range(door):
    sim = sim_at(door, w8a8().override("cat.*", tie=False))
    calibrate(sim, batches(door), progress=False)
    state = sim.snapshot()
    for k in (1, 2):  # either part may be the wider one
        wide = replace(state.own[f"relu{k}:output"], scale=state.own[f"relu{k}:output"].scale * 5)
        sim.restore(replace(state, own={**state.own, f"relu{k}:output": wide}))
        sim.replan(w8a8())
        assert sim.plan.decisions["relu2:output"].tied_to == "relu1:output"
        np.testing.assert_allclose(sim.encodings["relu1:output"].high, wide.high, rtol=1e-6)


@both
def test_a_fixed_range_needs_no_data(door):
    sim = sim_at(door)
    sim.set_precision("relu3:output", float16)
    sim.replan(sim.config.override("relu3:output", activation=uint8, fixed_range=(0.0, 2.55)))
    np.testing.assert_allclose(sim.encodings["relu3:output"].scale, 0.01, rtol=1e-6)


@pytest.mark.slow
@both
def test_before_calibration_it_is_the_config_that_changes(door):
    sim = sim_at(door, data=False)
    sim.set_precision("fc1", float16)
    sim.set_precision("fc2", "int4")
    sim.set_precision("fc1:weight", "int8")
    assert not any(sim.ready().values())
    calibrate(sim, batches(door), progress=False)
    config = w8a8().skip("fc1", dtype=float16).override("fc2", weight="int4").override("fc1:weight", weight="int8")
    direct = sim_at(door, config)
    calibrate(direct, batches(door), progress=False)
    assert sim.plan == direct.plan
    assert sim.encodings == direct.encodings
    assert np.array_equal(outputs(sim), outputs(direct))


@both
def test_a_snapshot_puts_everything_back(door):
    sim = sim_at(door)
    sim.freeze("conv1")
    before, given_outputs, state = everything(sim), outputs(sim), sim.snapshot()
    sim.set_precision("*", float32)
    assert not sim.encodings
    assert not np.array_equal(outputs(sim), given_outputs)
    sim.restore(state)
    assert everything(sim) == before
    assert np.array_equal(outputs(sim), given_outputs)
    with pytest.raises(RuntimeError, match="in the middle"), put_back_on_error(sim):
        _fail_in_the_middle(sim)
    assert everything(sim) == before


def _fail_in_the_middle(sim):
    sim.set_precision("fc1", "int4")
    raise RuntimeError("in the middle")


@both
def test_a_weight_that_is_not_finite_is_named(door):
    sim = sim_at(door)
    sim.set_precision("fc1:weight", float16)
    if door == "torch":
        sim.model.fc1.weight.data[0, 0] = float("nan")
    else:
        tensor = next(t for t in sim._marked.graph.initializer if t.name == "fc1.weight")
        tensor.raw_data = np.float32(np.nan).tobytes() + tensor.raw_data[4:]
    before = everything(sim)
    with pytest.raises(DataError, match=r"NaN or inf in the stored tensor at fc1:weight; load weights that are finite"):
        sim.set_precision("fc1:weight", int8)
    assert everything(sim) == before


def test_a_state_that_cannot_be_is_taken_back():
    sim = sim_at("torch")
    before, given_outputs, state = everything(sim), outputs(sim), sim.snapshot()
    lost = replace(state.plan.decisions["fc2:output"], tied_to="nowhere:output")
    broken = replace(state, plan=replace(state.plan, decisions={**state.plan.decisions, "fc2:output": lost}))
    with pytest.raises(ModelError, match="the plan points at nowhere:output"), put_back_on_error(sim):
        sim.restore(broken)
    assert everything(sim) == before
    assert np.array_equal(outputs(sim), given_outputs)


CHOICES = st.sampled_from(
    [
        *[("*", float32), ("bn*", float16), ("fc1", "int4"), ("conv*", "uint16"), ("relu1:output", uint8)],
        *[("fc?:weight", int8), ("x:input", float16), ("fc2", "float8e4m3fn"), ("conv2:weight", "int4")],
        *[("cat.0:output", "uint4"), ("fc*", uint8)],
    ]
)


@pytest.mark.spread(1)
@both
@settings(max_examples=12, deadline=None)
@given(choices=st.lists(CHOICES, min_size=1, max_size=4))
def test_any_way_there_leads_back(door, choices):
    """Whatever is set: the plan is a pure function of the config, encodings fit it, and a snapshot leads back."""
    sim = _shared(door)
    before, state = everything(sim), sim.snapshot()
    for match, dtype in choices:
        sim.set_precision(match, dtype)
    assert sim.plan.decisions == make_plan(sim.graph, sim.config).decisions
    for site, encoding in sim.encodings_where_ready().items():
        decision = sim.plan.decisions[site]
        assert encoding.dtype == decision.spec.dtype
        encoding.fake_quantize(np.zeros([n if isinstance(n, int) else 2 for n in decision.shape], np.float32))
    sim.restore(state)
    assert everything(sim) == before


@functools.cache
def _shared(door):
    return sim_at(door)


def test_scales_that_are_being_learned_are_left_alone():
    sim = sim_at("torch")
    with (
        sim.training(learn_scales=True),
        pytest.raises(ConfigError, match="leave the training block before you change"),
    ):
        sim.set_precision("fc1", "int4")
    sim.set_precision("fc1", "int4")


def test_the_search_skips_float_layers_and_a_trained_sim_changes_too():
    sim = sim_at("torch", "w4a8")
    sim.set_precision("fc1", float16)
    sim.set_precision("conv2", float32)
    for verb in (seq_mse, qsdk.adaround):
        notes = {row["site"]: row["note"] for row in verb(sim, batches("torch"), progress=False).rows}
        assert "kept float16 by a rule" in notes["fc1:weight"]
        assert "kept float32 by a rule" in notes["conv2:weight"]
        assert not notes["conv1:weight"]
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-3))
        model(batches("torch")[0]).square().sum().backward()
        assert isinstance(model.fc1.weight.grad, torch.Tensor)
        optimizer.step()
    rounded = sim.encodings["conv1:weight"]
    assert rounded.frozen
    sim.set_precision("conv1:weight", int8)
    assert not sim.encodings["conv1:weight"].frozen
    assert sim.encodings["conv1:weight"] != rounded


@pytest.mark.slow
def test_the_state_dict_of_a_changed_sim_is_that_of_one_quantized_so():
    sim = sim_at("torch")
    sim.set_precision("fc1", float16)
    direct = sim_at("torch", w8a8().skip("fc1", dtype=float16))
    calibrate(direct, batches("torch"), progress=False)
    assert list(sim.model.state_dict()) == list(direct.model.state_dict())
    direct.model.load_state_dict(sim.model.state_dict())
    assert np.array_equal(outputs(direct), outputs(sim))
    assert type(sim.unwrap().fc1) is nn.Linear
