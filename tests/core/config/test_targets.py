"""Targets are files of facts: what a config becomes for one, and what is wrong with a file that describes one."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

import qsdk
from qsdk.core.aimet_config.load_config import aimet_alias, aimet_aliases
from qsdk.core.config import target as target_module
from qsdk.core.config.target import Target, load_target, shipped_targets
from qsdk.core.errors import ConfigError, FileFormatError

CHIP = """
name = "abacus"
title = "Abacus 3"
activations = ["int8"]
activations_instead = { uint8 = "int8" }
weights = ["int8", "int4"]
per_channel = false
block_sizes = [32, 64]
symmetric_activations = true
scale_bits = 1
integer_ops = ["Conv", "Relu"]
tied_ops = ["Concat"]
fixed_ranges = { Softmax = [0.0, 1.0] }
opsets = [13, 17]
"""


@pytest.fixture
def chip(tmp_path: Path) -> Path:
    path = tmp_path / "chip.toml"
    path.write_text(CHIP, "utf-8")
    return path


def test_a_config_becomes_what_the_file_says(chip: Path):
    config = qsdk.w8a8().override("head", activation="uint8", per_channel=True).for_dialect(chip)
    assert (config.weight, config.activation) == (qsdk.int8, qsdk.int8)
    assert config.symmetric_activations
    assert not config.per_channel
    assert config.scale_bits == 1
    assert config.integer_ops == ("Conv", "Relu")
    softmax, concat, head = config.rules
    assert (softmax.op_type, softmax.fixed_range, softmax.optional) == (("Softmax",), (0.0, 1.0), True)
    assert (concat.op_type, concat.tie) == (("Concat",), True)
    assert head.choices == {"activation": qsdk.int8, "per_channel": False}


def test_a_config_for_a_target_is_itself_for_it(chip: Path):
    config = qsdk.w8a8().for_dialect(chip)
    assert config.for_dialect(chip) == config
    assert qsdk.QuantConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (qsdk.w8a16(), "activation=uint16 cannot be had in the dialect abacus; it has int8"),
        (qsdk.QuantConfig(weight="int16"), "weight=int16 cannot be had in the dialect abacus; it has int4, int8"),
        (qsdk.weight_only("int4", block_size=16), "block_size=16 cannot be had in the dialect abacus; choose 32 or 64"),
        (qsdk.w8a8().override("x", weight="mxfp4"), "weight=mxfp4 cannot be had in the dialect abacus; it has int4"),
    ],
)
def test_what_a_target_has_not_is_refused_with_what_it_has(config, said: str, chip: Path):
    with pytest.raises(ConfigError, match=said):
        config.for_dialect(chip)


def test_a_narrower_grid_in_a_dtype_that_a_target_has_can_be_had(chip: Path):
    assert (
        qsdk.QuantConfig(weight="int7", activation="int8").for_dialect(chip).weight == qsdk.QuantConfig("int7").weight
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("colour = 1", r"chip\.toml has the unknown key 'colour'"),
        ("activation = []", r"the unknown key 'activation'; did you mean 'activations'\?"),
        ("activations = 8", r'chip\.toml\.activations is a list of dtypes, such as \["int8"\], not 8'),
        ('weights = ["int8", "int99"]', r"chip\.toml\.weights: unknown dtype 'int99'"),
        ("scale_bits = 0", r"chip\.toml\.scale_bits is a whole number from 1, not 0"),
        ("opsets = [17, 13]", r"chip\.toml\.opsets is two whole numbers, the lower one first"),
        (
            "fixed_ranges = { Softmax = [1.0, 0.0] }",
            r"chip\.toml\.fixed_ranges: fixed_range=\[1\.0, 0\.0\] is no",
        ),
        ("per_channel = ", r"chip\.toml is no TOML"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_key(line: str, said: str, tmp_path: Path):
    path = tmp_path / "chip.toml"
    path.write_text(f'name = "abacus"\n{line}\n', "utf-8")
    with pytest.raises(ConfigError, match=said):
        qsdk.w8a8().for_dialect(path)


def test_a_file_without_a_name_or_none_at_all_is_an_error(tmp_path: Path):
    (tmp_path / "chip.toml").write_text("scale_bits = 1\n", "utf-8")
    with pytest.raises(ConfigError, match=r'chip\.toml has no "name"'):
        load_target(tmp_path / "chip.toml")
    with pytest.raises(FileFormatError, match=r"there is no file .*none\.toml; name a \.toml file"):
        load_target(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"unknown dialect 'abacus'; choose one of axera, .*, or name a \.toml file"):
        load_target("abacus")


@pytest.mark.parametrize("name", shipped_targets())
def test_a_shipped_target_has_the_name_of_its_file_its_pages_and_what_it_was_tried_on(name: str):
    target = load_target(name)
    assert target.name == name
    assert target.title
    assert all(page.startswith("https://") for page in target.pages)
    assert target.pages
    assert target.tried or name == "onnx"


def test_every_key_of_a_target_is_used_by_a_shipped_one():
    """A key that none needs is to go; three of them are those of AIMET's configs."""
    folder = Path(target_module.__file__).parent / "targets"
    used = {key for path in folder.glob("*.toml") for key in tomllib.loads(path.read_text("utf-8"))}
    used |= {"float_results", "one_scale_ops", "supergroups"}
    assert used == set(Target.__dataclass_fields__)


def aimet(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content), "utf-8")
    return path


@pytest.mark.parametrize("name", aimet_aliases())
def test_each_of_aimets_configs_is_a_target(name: str, tmp_path: Path):
    """What the target makes of the default config agrees with the config that `load_config` reads."""
    path, whole = aimet(tmp_path / f"{name}.json", aimet_alias(name)), qsdk.load_config(name)
    config = qsdk.w8a8().for_dialect(path)
    assert config.for_dialect(path) == config
    assert (config.hardware, config.supergroups) == (whole.hardware, whole.supergroups)
    assert config.symmetric_activations == whole.symmetric_activations
    assert config.activation == whole.activation
    ranges = {rule.op_type: rule.fixed_range for rule in whole.rules if rule.fixed_range is not None}
    assert {rule.op_type: rule.fixed_range for rule in config.rules if rule.fixed_range is not None} == ranges
    floats = {op for rule in whole.rules if rule.choices.get("activation") == qsdk.float32 for op in rule.op_type}
    assert {op for rule in config.rules if "activation" in rule.choices for op in rule.op_type} == floats


def test_supported_kernels_of_aimet_are_the_dtypes_of_the_target(tmp_path: Path):
    kernels = [
        {"activation": {"bitwidth": bits, "dtype": kind}, "param": {"bitwidth": weight, "dtype": kind}}
        for bits, weight, kind in ((8, 8, "int"), (16, 4, "int"), (16, 16, "float"))
    ]
    defaults = {"supported_kernels": kernels, "strict_symmetric": "True", "per_channel_quantization": "True"}
    content = {"defaults": {**defaults, "ops": {"is_symmetric": "True"}}, "op_type": {"Gemm": {}}}
    content["op_type"]["Gemm"]["per_channel_quantization"] = "False"
    target = load_target(aimet(tmp_path / "chip.json", content))
    assert target.activations == {"int8", "int16"}
    assert target.weights == {"int8", "uint8", "int4", "uint4"}
    config = qsdk.w4a8().for_dialect(tmp_path / "chip.json")
    assert (config.weight, config.activation) == (qsdk.int4.strict, qsdk.int8)
    assert config.rules[0].choices == {"per_channel": False}
    with pytest.raises(ConfigError, match="weight=int16 cannot be had in the dialect chip"):
        qsdk.QuantConfig(weight="int16").for_dialect(tmp_path / "chip.json")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1], "is no AIMET config; a target of your own is a .toml file"),
        ({"name": "abacus"}, "is no AIMET config"),
        ({"defaults": {}, "supergroup": []}, "unknown section 'supergroup'"),
        ({"defaults": 3}, "defaults is a table, not 3"),
        ({"defaults": {"strict_symmetric": "yes"}}, "strict_symmetric is True or False, not 'yes'"),
        ({"defaults": {"supported_kernels": 8}}, r"supported_kernels is a list, not 8"),
        ({"defaults": {"supported_kernels": [{"param": {"bitwidth": 3, "dtype": "int"}}]}}, "not int 3; correct it"),
        ({"op_type": {"Relu": {"encoding_constraints": {"min": 1, "max": 0}}}}, "fixed_ranges|Relu"),
        ({"op_type": {}, "supergroups": [{"op_list": ["Conv"]}]}, r"supergroups\[0\] needs an op_list of two"),
    ],
)
def test_what_is_no_config_of_aimet_is_an_error_that_names_the_key(content: Any, said: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=said):
        load_target(aimet(tmp_path / "chip.json", content))
