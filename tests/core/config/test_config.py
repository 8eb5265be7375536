"""Configs: presets, rules and what they refuse."""

import copy
import dataclasses
import pickle

import pytest

from qsdk import (
    ConfigError,
    QuantConfig,
    bfloat16,
    float16,
    float32,
    int4,
    int8,
    int16,
    int32,
    uint8,
    uint16,
    w4a8,
    w4a16,
    w8a8,
    w8a16,
)
from qsdk.core.config.rules import CHOICES, Place, Rule
from qsdk.core.numerics.dtypes import DTYPES, mxfp4
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec, axis_of, block_size_of
from qsdk.core.planning.context import Resolver


@pytest.mark.parametrize(
    ("preset", "weight", "activation"),
    [(w8a8, int8, uint8), (w8a16, int8, uint16), (w4a8, int4, uint8), (w4a16, int4, uint16)],
)
def test_presets(preset, weight, activation):
    assert preset() == QuantConfig(weight, activation)
    assert preset().bias == int32
    assert preset().per_channel
    assert preset().rules == ()
    assert preset(block_size=32).block_size == 32
    assert preset(symmetric_activations=True).symmetric_activations
    assert not preset().symmetric_activations


def at(config: QuantConfig, *owners: str) -> tuple[QuantConfig, str]:
    choice = Resolver(config).at(Place(owners))
    return choice.wanted, choice.decided_by(*CHOICES)


def test_a_rule_gives_a_new_config():
    base = w8a8()
    ruled = base.override("head", weight="int4")
    assert base.rules == ()
    assert ruled.rules == (Rule("head", {"weight": int4}),)
    assert hash(ruled) == hash(base.override("head", weight=int4))
    assert copy.deepcopy(ruled) == pickle.loads(pickle.dumps(ruled)) == ruled
    with pytest.raises(AttributeError, match="a rule has no wight; its choices are weight, activation"):
        _ = ruled.rules[0].wight
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        ruled.weight = int4  # type: ignore[misc]


def test_the_last_matching_rule_wins_for_each_choice():
    config = w8a8().override("conv*", weight=int4, activation="uint16").override("conv2", weight=int16)
    chosen, decided = at(config, "block.conv2")
    assert (chosen.weight, chosen.activation) == (int16, uint16)
    assert decided == "'conv2' -> weight=int16"
    swapped = w8a8().override("conv2", weight=int16).override("conv*", weight=int4)
    assert at(swapped, "block.conv2")[0].weight == int4


def test_no_matching_rule_is_the_default():
    chosen, decided = at(w8a8().override("conv", weight=int4), "fc")
    assert (chosen.weight, decided) == (int8, "default")


def test_a_rule_matches_any_of_the_owners():
    assert at(w8a8().override("relu", activation=uint16), "conv", "relu")[0].activation == uint16


@pytest.mark.parametrize(
    ("choice", "value"),
    [
        ("weight", int4),
        ("activation", uint16),
        ("bias", float32),
        ("block_size", 16),
        ("per_channel", False),
        ("symmetric_activations", True),
    ],
)
def test_every_choice_can_be_overridden(choice: str, value):
    chosen, decided = at(w8a8().override("fc", **{choice: value}), "fc")
    assert getattr(chosen, choice) == value
    assert decided == f"'fc' -> {choice}={value}"


@pytest.mark.parametrize("field", ["weight", "activation", "bias"])
def test_an_unknown_dtype_is_answered_with_the_known_ones(field: str):
    with pytest.raises(ConfigError, match="unknown dtype 'int77'; choose one of int2, int4"):
        w8a8().override("fc", **{field: "int77"})
    with pytest.raises(ConfigError, match="unknown dtype 'half'"):
        w8a8().skip("fc", "half")


def test_a_config_takes_names_for_dtypes():
    named = QuantConfig(weight="int4", activation="uint16", bias="float32", input="uint8", output="float16")
    assert named == QuantConfig(weight=int4, activation=uint16, bias=float32, input=uint8, output=float16)
    assert QuantConfig(weight="mxfp4").weight == mxfp4
    with pytest.raises(ConfigError, match="unknown dtype 'int77'"):
        QuantConfig(weight="int77")


def test_a_rule_that_says_nothing_is_refused():
    with pytest.raises(ConfigError, match="the rule for 'fc' overrides nothing; give weight=, activation= or another"):
        w8a8().override("fc")


@pytest.mark.parametrize("bias", ["int8", "int16", "uint8", "float8e4m3fn"])
def test_a_bias_is_int32_or_float(bias: str):
    with pytest.raises(ConfigError, match=rf"a bias is int32 or float, not {bias} \(rule 'fc'\)"):
        w8a8().override("fc", bias=bias)


@pytest.mark.parametrize("bias", [int32, float32, float16, bfloat16])
def test_biases_that_are_accepted(bias):
    assert at(w8a8().override("fc", bias=bias), "fc")[0].bias == bias


def test_skip_leaves_everything_of_an_owner_float():
    chosen, _ = at(w8a8().skip("bn*"), "layer1.0.bn1")
    assert (chosen.weight, chosen.activation, chosen.bias) == (float32, float32, float32)
    chosen, _ = at(w8a8().skip("bn*", dtype=float16), "bn1")
    assert (chosen.weight, chosen.activation, chosen.bias) == (float16, float16, float16)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float8e4m3fn", "float4e2m1", "float8e8m0"])
def test_skipping_to_a_dtype_that_is_not_float_is_refused(dtype: str):
    message = rf"skip\('fc'\) keeps owners float; {dtype} is not a float dtype, use override"
    with pytest.raises(ConfigError, match=message):
        w8a8().skip("fc", dtype)


@pytest.mark.parametrize(
    ("pattern", "owner", "expected"),
    [("bn*", "layer1.0.bn1", True), ("bn*", "layer1.0.conv1", False), ("*", "bn1", False), ("**", "bn1", False)],
)
def test_a_bare_star_names_nobody(pattern: str, owner: str, expected: bool):
    assert w8a8().skip(pattern).names(owner) is expected


def test_declared_layers_add_up():
    config = w8a8().layer("Scale", "gain").layer("Mix", "left", "right")
    assert config.layers == {"Scale": ("gain",), "Mix": ("left", "right")}
    assert config.layer("Scale", "offset").layers == {"Scale": ("offset",), "Mix": ("left", "right")}
    assert w8a8().layers is None


# specs


def test_granularities_say_what_they_are():
    assert [str(g) for g in (PerTensor(), PerChannel(1), PerBlock(0, 32))] == [
        *("per tensor", "per channel (axis 1)", "per block of 32 (axis 0)")
    ]
    assert [axis_of(g) for g in (PerTensor(), PerChannel(1), PerBlock(0, 32))] == [None, 1, 0]
    assert [block_size_of(g) for g in (PerTensor(), PerChannel(1), PerBlock(0, 32))] == [None, None, 32]


def test_specs_that_cannot_be_meant():
    with pytest.raises(ConfigError, match="float8e8m0 is a type for scales; it cannot hold a tensor"):
        Spec(DTYPES["float8e8m0"])
    with pytest.raises(ConfigError, match="float8e4m3fn has no zero point; ask for symmetric=True"):
        Spec(DTYPES["float8e4m3fn"], symmetric=False)
    with pytest.raises(ConfigError, match="block size 0 is not positive"):
        Spec(int8, PerBlock(0, 0))
