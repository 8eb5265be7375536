"""AIMET's quantsim configs: every key of theirs, their built-in ones, and what they have no counterpart for."""

import json
import random
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.defs import get_all_schemas_with_history
from plans import inside, matmul_network, site, small_network, spec_of
from strategies import GraphBuilder

from qsdk import ConfigError, QuantConfig, float16, float32, int4, int8, int32, load_config, uint8, w4a8, w8a8, w8a16
from qsdk.core.aimet_config.load_config import aimet_alias, aimet_aliases
from qsdk.core.graph.graph import Graph
from qsdk.core.graph.op_facts import ONNX_OPS
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerChannel, PerTensor, Spec
from qsdk.core.planning.make_plan import make_plan

ALIASES = [
    *("default", "htp_v66", "htp_v68", "htp_v69", "htp_v73", "htp_v75", "htp_v79", "htp_v81", "htp_v85"),
    *("enpu_v6", "enpu_v7", "enpu_v7_per_channel", "htp_v73_per_channel_linear"),
]


def file(**sections: Any) -> dict[str, Any]:
    """The smallest whole file, with some sections replaced."""
    defaults = {"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"}}
    whole = {"defaults": defaults, "params": {}, "op_type": {}, "supergroups": []}
    return {**whole, "model_input": {"is_input_quantized": "True"}, "model_output": {}, **sections}


def defaults(**keys: Any) -> dict[str, Any]:
    return {**file()["defaults"], **keys}


def notes(config: QuantConfig) -> dict[str, tuple[str, str]]:
    """Key -> state and note."""
    assert config.notes is not None
    return {row["key"]: (row["state"], row["note"]) for row in config.notes.rows}


def unary(type: str) -> Graph:
    b = GraphBuilder()
    return b.graph(b.op(type, [b.input()], "f:output"))


# built-in configs


@pytest.mark.parametrize("name", ALIASES)
def test_every_alias_loads_with_a_note_for_every_key(name: str):
    config = load_config(name)
    data = aimet_alias(name)
    assert data is not None
    assert config.notes is not None
    assert config.notes.title == f"AIMET config {name}"
    keys = list(notes(config))
    for op_type in data["op_type"]:
        assert any(key.startswith(f"op_type.{op_type}.") for key in keys)
    assert sum(key.startswith("supergroups[") for key in keys) == len(data["supergroups"])
    assert sum(config.notes.summary.values()) == len(config.notes.rows)
    make_plan(small_network(), config)
    make_plan(matmul_network(), config)


def test_aliases_of_the_reference_are_all_known():
    assert set(ALIASES) <= set(aimet_aliases())
    assert load_config("htp_quantsim_config_v73.json") == load_config("htp_v73")
    assert load_config("default_config_per_channel.json") == load_config("default")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"no file htp_v99, and no built-in config .* default, .*htp_v85"):
        load_config("htp_v99")


def test_the_default_config():
    plan = make_plan(small_network(), load_config("default"))
    assert spec_of(plan, "conv1:weight") == Spec(int8, PerChannel(0))
    assert spec_of(plan, "relu:output") == Spec(uint8, PerTensor(), symmetric=False)
    assert inside(plan, "Conv") == ["inside Conv+Relu"]
    assert site(plan, "fc:bias").spec is None
    assert site(plan, "x:input").quantized
    assert site(plan, "flatten:output").tied_to == "conv2:output"
    plan = make_plan(small_network(), load_config("default_config"))
    assert spec_of(plan, "conv1:weight") == Spec(int8, PerTensor())


def test_v66_knows_no_supergroup_of_convolutions():
    plan = make_plan(small_network(), load_config("htp_v66"))
    assert inside(plan, "Conv") == ["inside a module or function whose output is the site"]
    assert spec_of(plan, "conv1:weight").granularity == PerTensor()


def test_linear_layers_are_one_where_the_file_says_so():
    assert inside(make_plan(matmul_network(), load_config("htp_v73")), "MatMul") == ["inside MatMul+Add"]
    alone = make_plan(matmul_network(), load_config("htp_v66"))
    assert inside(alone, "MatMul") == ["inside a module or function whose output is the site"]


def test_symmetric_activations_of_the_enpu():
    b = GraphBuilder()
    y = b.op("HardSwish", [b.conv(b.input(), "conv")], "swish:output")
    plan = make_plan(b.graph(y), load_config("enpu_v7"))
    assert spec_of(plan, "swish:output") == Spec(
        int8, PerTensor(), symmetric=True
    )  # signed: unsigned_symmetric is False
    assert site(plan, "conv:output").reason == "inside Conv+HardSwish"
    assert spec_of(plan, "conv:weight").granularity == PerTensor()
    assert spec_of(make_plan(b.graph(y), load_config("enpu_v7_per_channel")), "conv:weight").granularity == PerChannel(
        0
    )


def test_the_dtypes_come_from_the_base():
    plan = make_plan(small_network(), load_config("default", base=w4a8().override("fc", weight="int8")))
    assert [spec_of(plan, f"{n}:weight").dtype for n in ("conv1", "fc")] == [int4, int8]


def test_rules_of_the_user_come_last():
    plan = make_plan(small_network(), load_config("htp_v73").override("*", bias="int32").skip("fc"))
    assert site(plan, "conv1:bias").quantized
    assert site(plan, "fc:weight").spec is None


# keys


def spelled(value: Any, flags: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        return {name: spelled(item, flags) for name, item in value.items()}
    if isinstance(value, list):
        return [spelled(item, flags) for item in value]
    return flags.get(value, value) if isinstance(value, str) else value


@pytest.mark.parametrize("name", ["default", "htp_v73", "enpu_v7"])
def test_real_booleans_mean_the_same_as_strings(name: str, tmp_path):
    data = aimet_alias(name)
    real = spelled(data, {"True": True, "False": False})
    assert real != data
    path = tmp_path / "aimet.json"
    path.write_text(json.dumps(real))
    assert load_config(path) == load_config(name)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d: d["defaults"]["ops"].update(is_symmetric="true"),
            r"is_symmetric is true or false .* not 'true'",
        ),
        (lambda d: d["defaults"]["ops"].update(is_symmetric=1), r"defaults.ops.is_symmetric is true or false .*not 1"),
        (lambda d: d.update(optype={}), "the file has the unknown key 'optype'; did you mean 'op_type'"),
        (lambda d: d["defaults"].update(hw="V73"), "defaults has the unknown key 'hw'"),
        (
            lambda d: d["op_type"].update(Conv={"is_symetric": "True"}),
            "op_type.Conv has .* did you mean 'is_symmetric'",
        ),
        (lambda d: d["op_type"].update(Conv="True"), "op_type.Conv is an object, not 'True'"),
        (lambda d: d.update(supergroups={}), "supergroups is a list, not {}"),
        (
            lambda d: d.update(supergroups=[{"op_list": ["Conv"]}]),
            r"supergroups\[0\] needs two op types or more; it has 1",
        ),
        (lambda d: d.update(supergroups=[{"op_list": [1, 2]}]), r"op_list\[0\] is a string, not 1"),
        (
            lambda d: d["op_type"].update(Relu={"encoding_constraints": {"max": 1}}),
            "min is a finite number, not absent",
        ),
        (lambda d: d["op_type"].update(Relu={"encoding_constraints": {"min": "0"}}), "min is a finite number, not '0'"),
        (
            lambda d: d["op_type"].update(Tanh={"encoding_constraints": {"min": 1, "max": -1}}),
            r"\(config: op_type.Tanh.encoding_constraints\) is no range",
        ),
        (lambda d: d["defaults"].update(hw_version=73), "defaults.hw_version is a string, not 73"),
        (lambda d: d["model_input"].update(x=1), "model_input has the unknown key 'x'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_key(spoil, message: str):
    data = deepcopy(file())
    spoil(data)
    with pytest.raises(ConfigError, match=message):
        load_config(data)


PARTS: list[Any] = [None, 0, -1, 1.5, "True", "", "Conv", [], ["Conv"], {}, {"min": 0}, {"op_list": []}, [[]], True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:config.*ONNX has no op type:UserWarning")
@settings(max_examples=500)
@given(name=st.sampled_from(ALIASES), seed=st.integers(0, 2**32 - 1))
def test_a_file_with_anything_in_the_wrong_place_is_read_or_refused_by_name(name: str, seed: int):
    rng, data = random.Random(seed), aimet_alias(name)
    at: Any = data
    while True:
        key = rng.choice([*at]) if isinstance(at, dict) else rng.randrange(len(at))
        if not isinstance(at[key], dict | list) or not at[key] or rng.random() < 0.3:
            break
        at = at[key]
    at[key] = rng.choice(PARTS)
    try:
        config = load_config(data)
    except ConfigError as error:
        said = str(error)
    else:
        make_plan(small_network(), config)
        return
    assert "config: " in said or said.startswith("config is no qsdk.config"), said


def test_nothing_is_quantized_that_the_file_does_not_ask_for():
    data = file(defaults={"ops": {}, "params": {}}, model_input={})
    plan = make_plan(small_network(), load_config(data))
    assert {d.state for d in plan.decisions.values()} == {"float"}
    data = file(defaults={"ops": {}, "params": {}})
    plan = make_plan(small_network(), load_config(data))
    assert [d.site for d in plan.decisions.values() if d.quantized] == ["x:input"]


def test_weights_are_asymmetric_unless_the_file_says_otherwise():
    config = load_config(file(defaults={"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True"}}))
    assert not spec_of(make_plan(small_network(), config), "fc:weight").symmetric


def test_strict_and_unsigned_symmetric():
    ops = {"is_output_quantized": "True", "is_symmetric": "True"}
    config = load_config(file(defaults=defaults(ops=ops, strict_symmetric="True", unsigned_symmetric="False")))
    assert (config.weight, config.activation) == (int8.strict, int8.strict)
    config = load_config(file(defaults=defaults(ops=ops, unsigned_symmetric="True")))
    assert (config.activation, config.symmetric_activations) == (uint8, True)
    assert notes(config)["defaults.unsigned_symmetric"][0] == "holds already"


def test_parameters_by_name():
    config = load_config(file(params={"weight": {"is_symmetric": "False"}, "bias": {"is_quantized": "False"}}))
    plan = make_plan(small_network(), config)
    assert not spec_of(plan, "fc:weight").symmetric
    assert site(plan, "fc:bias").spec is None
    plan = make_plan(small_network(), load_config(file(params={"bias": {"is_quantized": "True"}})))
    assert spec_of(plan, "fc:bias").dtype == int32
    config = load_config(file(params={"running_mean": {"is_quantized": "True"}, "alpha": {"is_quantized": "False"}}))
    assert notes(config)["params.running_mean.is_quantized"] == ("no counterpart", "statistics of a norm stay float")
    assert config.rules[-1].pattern == "*:alpha"


def test_later_sections_win():
    """defaults < params < op_type < model_output, as with AIMET."""
    op_type = {"Gemm": {"params": {"bias": {"is_quantized": "True"}}, "is_output_quantized": "False"}}
    data = file(params={"bias": {"is_quantized": "False"}}, op_type=op_type)
    plan = make_plan(small_network(), load_config(data))
    assert (site(plan, "fc:bias").quantized, site(plan, "conv1:bias").quantized) == (True, False)
    assert site(plan, "fc:output").spec is None
    plan = make_plan(small_network(), load_config({**data, "model_output": {"is_output_quantized": "True"}}))
    assert site(plan, "fc:output").quantized
    data = file(op_type={"Gemm": {"is_output_quantized": "True"}}, model_output={"is_output_quantized": "False"})
    assert site(make_plan(small_network(), load_config(data)), "fc:output").spec is None


def test_ops_that_move_values_share_an_encoding_instead_of_staying_float():
    config = load_config(file(op_type={"Flatten": {"is_output_quantized": "False"}}))
    assert notes(config)["op_type.Flatten.is_output_quantized"][0] == "holds already"
    assert site(make_plan(small_network(), config), "flatten:output").state == "tied"


def test_what_has_no_counterpart_is_said():
    op_type = {
        "Conv": {"is_input_quantized": "True", "is_symmetric": "True"},
        "PRelu": {"per_channel_quantization": "True"},
        "GroupNormalization": {"params": {"bias": {"is_quantized": "True"}}},
        "Exp": {"encoding_constraints": {"min": 0.5}},
    }
    config = load_config(file(op_type=op_type, supergroup_pass_list=["LayerNormalization", "Unheard"]))
    found = notes(config)
    none = [key for key, (state, _) in found.items() if state == "no counterpart"]
    assert none == [
        "op_type.Conv.is_input_quantized",
        "op_type.PRelu.per_channel_quantization",
        "op_type.GroupNormalization.params.bias.is_quantized",
        "op_type.Exp.encoding_constraints",
        "supergroup_pass_list[1]",
    ]
    assert found["op_type.Conv.is_symmetric"][0] == "taken over"
    assert config.supergroups == ("LayerNorm",)
    assert config.notes is not None
    assert config.notes.summary["no counterpart"] == 5
    assert "op_type.PRelu.per_channel_quantization" in str(config.notes)


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (
            {"activation": {"bitwidth": 16, "dtype": "float"}, "param": {"bitwidth": 16, "dtype": "float"}},
            (float16,) * 2,
        ),
        ({"activation": {"bitwidth": 16, "dtype": "int"}}, (DTYPES["uint16"], int8)),
        ({"activation": {"bitwidth": 32, "dtype": "float"}, "param": {"bitwidth": 4, "dtype": "int"}}, (float32, int4)),
    ],
)
def test_supported_kernels(kernel: dict[str, Any], expected):
    data = file(op_type={"Gemm": {"supported_kernels": [kernel]}})
    state, note = notes(load_config(data))["op_type.Gemm.supported_kernels"]
    assert (state, "enforce_kernels=True" in note) == ("no counterpart", True)
    assert load_config(data).rules == ()
    enforced = load_config(data, enforce_kernels=True).rules[-1]
    assert (enforced.activation, enforced.weight or int8) == expected
    own = {"activation": {"bitwidth": 8, "dtype": "int"}, "param": {"bitwidth": 8, "dtype": "int"}}
    data = file(op_type={"Gemm": {"supported_kernels": [kernel, own]}})
    assert notes(load_config(data, enforce_kernels=True))["op_type.Gemm.supported_kernels"][0] == "holds already"
    data = file(defaults=defaults(supported_kernels=[kernel]))
    config = load_config(data, enforce_kernels=True)
    assert (config.activation, config.weight) == expected


def test_a_target_that_is_not_known():
    config = load_config(file(defaults=defaults(hw_version="V99")))
    assert config.hardware == "aimet"
    assert notes(config)["defaults.hw_version"][0] == "no counterpart"


@pytest.mark.parametrize("kernel", [{"bitwidth": 8, "dtype": "float"}, {"bitwidth": 7, "dtype": "int"}])
def test_a_kernel_that_cannot_be(kernel: dict[str, Any]):
    data = file(op_type={"Gemm": {"supported_kernels": [{"activation": kernel}]}})
    with pytest.raises(ConfigError, match=r"activation is int 4, 8, 16 or 32, or float 16 or 32, not"):
        load_config(data)


def test_a_constraint_of_both_ends_fixes_the_range_and_of_equal_ends_the_zero_point():
    config = load_config("htp_v73")
    for type, low, symmetric in (("Softmax", 0.0, False), ("Tanh", -1.0, True), ("Sin", -1.0, True)):
        spec = spec_of(make_plan(unary(type), config), "f:output")
        assert (spec.fixed_range, spec.symmetric) == ((low, 1.0), symmetric)
    assert notes(config)["op_type.Relu.encoding_constraints"] == ("holds already", "nothing it makes is negative")


def test_a_config_for_16_bit_activations_keeps_their_dtype():
    assert load_config("htp_v73", base=w8a16()).activation == DTYPES["uint16"]
    assert load_config("htp_v73", base=w8a8()).hardware == "v73"
    assert load_config("default").hardware == "aimet"


def test_an_op_type_that_onnx_does_not_have_is_noted_and_warned_of_where_it_looks_misspelt():
    off = {"is_output_quantized": "False"}
    data = file(op_type={"MatMul": off, "MatMull": off, "Zzz": off}, supergroups=[{"op_list": ["Conv", "Rellu"]}])
    with pytest.warns(UserWarning, match="ONNX has no op type") as seen:
        config = load_config(data)
    so = "so it reaches nothing but custom ops of that name"
    assert [str(w.message) for w in seen] == [
        f"config: op_type.MatMull: ONNX has no op type 'MatMull', {so}; did you mean 'MatMul'?",
        f"config: supergroups[0]: ONNX has no op type 'Rellu', {so}; did you mean 'Relu'?",
    ]
    found = [(row["key"], row["state"]) for row in config.notes.rows if row["note"].startswith("ONNX has no op type")]
    keys = ("op_type.MatMull", "op_type.Zzz", "supergroups[0]")
    assert found == [(key, "no counterpart") for key in keys]


def test_every_op_type_of_the_standard_is_known():
    assert {schema.name for schema in get_all_schemas_with_history() if schema.domain in ("", "ai.onnx")} == ONNX_OPS
