"""Configs as JSON: round trips, typed reading, the schema, files."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from json_schema import fits

import qsdk
from qsdk import ConfigError, ExportError, FileFormatError, QuantConfig, float16, load_config, w4a8, w8a8
from qsdk.core.config import json_form
from qsdk.core.config.json_form import config_schema
from qsdk.core.config.rules import CHOICES, CONDITIONS, TENSOR_DTYPES, Rule, make_rule
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, DTYPES
from qsdk.core.patterns.terms import Pattern, op

HEAD = {"format": "qsdk.config", "version": 1}
TENSORS = [d for d in DTYPES.values() if d.kind != "scale"]
dtypes = st.sampled_from([*TENSORS, *(d.strict for d in TENSORS if d.is_integer and d.signed)])
biases = st.sampled_from([d for d in TENSORS if d.kind == "float" or d.name == "int32"])
numbers = st.floats(-1e6, 1e6).map(float)
ranges = st.tuples(numbers, numbers).filter(lambda pair: pair[0] < pair[1]) | st.just("observed")
texts = st.text(max_size=8)
choices = {
    "weight": dtypes | st.sampled_from(list(BLOCK_FORMATS.values())),
    **dict.fromkeys(("activation", "input", "output", "kv_cache"), dtypes),
    "kv_cache_scales": st.sampled_from(["tensor", "head", "channel"]),
    "bias": biases,
    "block_size": st.integers(1, 512),
    "scale_bits": st.integers(1, 24),
    **dict.fromkeys(("per_channel", "symmetric_weights", "symmetric_activations", "tie", "supergroup"), st.booleans()),
    **dict.fromkeys(("dynamic_activations", "per_channel_activations", "two_level_scales"), st.booleans()),
    "fixed_range": ranges,
    "compute": st.sampled_from(["float32", "int8"]),
}
conditions = {
    "op_type": st.lists(texts, min_size=1, max_size=3).map(tuple),
    "shape": st.lists(st.none() | st.integers(0, 99) | texts, max_size=4).map(tuple),
    "tensor_dtype": st.sampled_from(TENSOR_DTYPES),
}


def some(strategies: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping of any of the keys."""
    return st.fixed_dictionaries({}, optional=strategies)


rules = st.builds(
    lambda pattern, said, where, optional: make_rule(pattern, {**said, **where}, optional=optional),
    texts,
    some(choices).filter(bool),
    some(conditions),
    st.booleans(),
)
configs = st.builds(
    lambda said, more, listed: QuantConfig(**said, **more, rules=tuple(listed)),
    some(choices),
    some(
        {
            "layers": st.dictionaries(texts, st.lists(texts, max_size=2).map(tuple), max_size=2),
            "supergroups": st.lists(texts, max_size=3).map(tuple),
            "hardware": texts,
        }
    ),
    st.lists(rules, max_size=4),
)


def test_the_strategies_draw_every_choice_and_condition():
    assert set(choices) == set(CHOICES)
    assert set(conditions) == set(CONDITIONS)
    assert set(Rule.__dataclass_fields__) == {"pattern", "choices", "optional", "accepted", *CONDITIONS}
    assert set(CHOICES) < set(QuantConfig.__dataclass_fields__)


@pytest.mark.slow
@given(config=configs)
def test_a_config_survives_json(config: QuantConfig):
    data = json.loads(json.dumps(config.to_dict()))
    assert QuantConfig.from_dict(data) == config
    assert fits(data, config_schema())


# the schema


JUNK = [None, True, False, 0, 1, -1, 1.5, "True", "int8", "", "int77", [], ["Conv"], [0, 1], {}, {"a": ["b"]}, [None]]


@pytest.mark.slow
@given(config=configs, seed=st.integers(0, 2**32 - 1))
def test_what_the_schema_accepts_is_read_and_the_rest_is_refused(config: QuantConfig, seed: int):
    """One value or key is changed at random; reading and schema agree, but for what no schema can say."""
    data, rng = json.loads(json.dumps(config.to_dict())), random.Random(seed)
    spoilt = rng.choice([data, *data["rules"]])
    name = rng.choice([*spoilt, "wieght", "block_size", "tie", "op_type", "$schema"])
    spoilt[name] = rng.choice(JUNK)
    error = refusal(data)
    beyond = ("overrides nothing", "is no range", "a bias is int32 or float")
    assert fits(data, config_schema()) == (not error or any(said in error for said in beyond)), error


def refusal(data: dict[str, Any]) -> str:
    try:
        QuantConfig.from_dict(data)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_schema_lies_beside_the_code():
    """After a change: `python -m json.tool` of `config_schema()` is what the file holds."""
    text = (Path(json_form.__file__).parent / "config.schema.json").read_text(encoding="utf-8")
    assert json.loads(text) == config_schema()
    assert text == json.dumps(config_schema(), indent=2) + "\n"


def test_power_of_two_is_one_significant_digit():
    assert QuantConfig.from_dict({**HEAD, "power_of_two": True}) == QuantConfig(scale_bits=1)
    assert QuantConfig.from_dict({**HEAD, "power_of_two": False}) == QuantConfig()
    with pytest.raises(ConfigError, match=r"config\.power_of_two is true or false, not 1"):
        QuantConfig.from_dict({**HEAD, "power_of_two": 1})


def test_a_file_may_name_its_schema():
    assert QuantConfig.from_dict({**HEAD, "$schema": "config.schema.json"}) == QuantConfig()
    with pytest.raises(ConfigError, match=r"config\.\$schema is a string, not 3"):
        QuantConfig.from_dict({**HEAD, "$schema": 3})


# refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"per_channel": "True"},
            "config.per_channel is true or false, not the string 'True'; write true without quotes",
        ),
        ({"per_channel": 1}, "config.per_channel is true or false, not 1"),
        ({"block_size": True}, "config.block_size is a whole number from 1, not True"),
        ({"block_size": 0}, "config.block_size is a whole number from 1, not 0"),
        (
            {"weight": 8},
            'config.weight is the name of a dtype, such as "int8", or of a format of blocks, such as "mxfp4", not 8',
        ),
        ({"weight": "int77"}, "config.weight: unknown dtype 'int77'; choose one of"),
        ({"bias": "int8"}, r"a bias is int32 or float, not int8 \(config\)"),
        ({"wieght": "int8"}, "config has the unknown key 'wieght'; did you mean 'weight'?"),
        ({"zzz": 1}, "config has the unknown key 'zzz'; known are weight, activation"),
        ({"tie": None}, "config.tie is null; leave the key out where it is not meant"),
        ({"supergroups": "Conv+Relu"}, "config.supergroups is a list of strings, not the string 'Conv[+]Relu'"),
        ({"layers": {"Scale": "gain"}}, "config.layers is an object of lists of strings, not dict"),
        ({"fixed_range": [0]}, r'config.fixed_range is \[low, high\] or "observed", not list'),
        ({"fixed_range": [1, 0]}, r"config.fixed_range: fixed_range=\[1, 0\] is no range; give \(low, high\)"),
        ({"version": 2}, "config has version 2, this qsdk reads up to 1; update qsdk"),
        ({"format": "other"}, "config is no qsdk.config: it lacks"),
        ({"rules": {}}, "config.rules is a list of objects, not dict"),
        ({"rules": ["fc"]}, r"config.rules\[0\] is an object, not the string 'fc'"),
        ({"rules": [{"weight": "int8"}]}, r'config.rules\[0\] has no "pattern"; give a glob'),
        ({"rules": [{"pattern": "fc"}]}, r"config.rules\[0\]: the rule for 'fc' overrides nothing"),
        ({"rules": [{"pattern": "*", "tie": "False"}]}, r"rules\[0\].tie is true or false.*write false without quotes"),
        (
            {"rules": [{"pattern": "*", "optype": ["Conv"], "tie": True}]},
            "unknown key 'optype'; did you mean 'op_type'",
        ),
        ({"rules": [{"pattern": "*", "op_type": "Conv", "tie": True}]}, "op_type is a list of strings"),
        ({"rules": [{"pattern": "*", "shape": [1.5], "tie": True}]}, "shape is a list of dimensions, null for any"),
        ({"rules": [{"pattern": "*", "tensor_dtype": "int8", "tie": True}]}, "tensor_dtype is one of float32, float16"),
        ({"rules": [{"pattern": "*", "fixed_range": [2, 1]}]}, r"rules\[0\].fixed_range: fixed_range=.* is no range"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_place(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        QuantConfig.from_dict({**HEAD, **change})


def test_patterns_are_python():
    config = w8a8().pattern(Pattern("Root", op("Sqrt", op("Abs", "x"))))
    with pytest.raises(ConfigError, match="a file cannot hold the patterns Root; save the config without"):
        config.to_dict()


# files


def test_a_file_round_trip(tmp_path):
    config = w4a8(block_size=16).override("head", op_type="Gemm", weight="int8").skip("bn*", dtype=float16)
    config = replace(config.layer("Scale", "gain"), supergroups=("Conv+Relu",), hardware="v73")
    config.save(tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config
    assert qsdk.load_config(str(tmp_path / "config.json")) == config
    assert qsdk.load_config(config.to_dict()) == config
    assert load_config(tmp_path / "config.json").notes is None


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**HEAD, "rules": [{"pattern": "a", "weigth": "int8"}]}))
    with pytest.raises(
        ConfigError, match=r"config.json.rules\[0\] has the unknown key 'weigth'; did you mean 'weight'"
    ):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "qsdk.config", ', "is truncated or no JSON at line 1, column"),
        ('{"format": "qsdk.config", "version": 1, "tie": true, "tie": false}', "names 'tie' twice; keep one of them"),
        ("[" * 100_000, "is nested too deeply .*give another config file"),
    ],
)
def test_what_is_no_json(tmp_path, text: str, message: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        load_config(path)


def test_bytes_that_are_no_text_and_a_folder(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="is no text; give a JSON file"):
        load_config(tmp_path / "config.json")
    with pytest.raises(FileFormatError, match=r"is a folder; give a JSON file"):
        load_config(tmp_path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"w8a8"', "{}"])
def test_json_of_another_kind(tmp_path, text: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"is no qsdk\.config"):
        load_config(path)


def test_options_for_foreign_files_are_refused_with_ones_own():
    for options in ({"base": w8a8()}, {"enforce_kernels": True}):
        with pytest.raises(ConfigError, match="is no AIMET config, so base= and enforce_kernels= mean nothing"):
            load_config(w8a8().to_dict(), **options)


def test_saving_where_nothing_can_be_written(tmp_path):
    with pytest.raises(ExportError, match="cannot write"):
        w8a8().save(tmp_path / "missing" / "config.json")
