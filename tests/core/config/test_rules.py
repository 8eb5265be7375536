"""Rules in plans: where they match, what they say, and what they answer when they match nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from plans import embedding, inside, site, small_network, spec_of
from strategies import GraphBuilder
from torch import nn
from torch_models import sim_of

from qsdk import ConfigError, QuantConfig, float16, int4, int8, int16, w4a8, w8a8, w8a16
from qsdk.core.config.rules import Place, RuleMatcher, make_rule
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerChannel, PerTensor
from qsdk.core.patterns.terms import Pattern, op
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import explanation


def weights(config: QuantConfig, graph: Graph | None = None) -> list[str]:
    """Dtypes of the weights, in graph order."""
    plan = make_plan(graph or small_network(), config)
    return ["float32" if d.spec is None else d.spec.dtype.name for d in plan.decisions.values() if d.kind == "weight"]


def activations(config: QuantConfig, graph: Graph | None = None) -> dict[str, str]:
    """Owner of an input, activation or output -> its dtype."""
    plan = make_plan(graph or small_network(), config)
    kinds = ("input", "activation", "output")
    chosen = [d for d in plan.decisions.values() if d.kind in kinds]
    return {d.site.split(":")[0]: "float32" if d.spec is None else d.spec.dtype.name for d in chosen}


# conditions


def test_by_op_type():
    assert weights(w8a8().override(op_type="Gemm", weight="int4")) == ["int8", "int8", "int4"]
    assert weights(w8a8().override(op_type=("Gemm", "Conv"), weight="int4")) == ["int4"] * 3
    assert weights(w8a8().override(op_type="G*", weight="int4")) == ["int8", "int8", "int4"]
    assert weights(w8a8().skip(op_type="Conv")) == ["float32", "float32", "int8"]


def test_by_shape_with_wildcards():
    assert weights(w8a8().override(shape=(10, 320), weight="int4")) == ["int8", "int8", "int4"]
    assert weights(w8a8().override(shape=(None, 3, None, None), weight="int4")) == ["int4", "int4", "int8"]
    assert weights(w8a8().override(shape=(5, None, None, None), weight="int4")) == ["int8", "int4", "int8"]


def test_a_shape_of_another_rank_does_not_fit():
    for shape in ((10,), (10, 320, 1), (None, None, None)):
        assert weights(w8a8().override("fc", shape=shape, weight="int4", optional=True)) == ["int8"] * 3


def test_a_named_dimension_is_matched_by_its_name():
    b = GraphBuilder()
    x = b.input(shape=("batch", 4))
    graph = b.graph(b.op("Relu", [x], "relu:output", (2, 4)))
    assert activations(w8a8().override(shape=("batch", None), activation="uint16"), graph)["x"] == "uint16"


def test_an_unknown_dimension_is_matched_by_a_wildcard_alone():
    place = Place(("x",), shape=(None, 4))
    assert make_rule("*", {"shape": (None, 4), "activation": "uint16"}).fits(place)
    assert not make_rule("*", {"shape": (2, 4), "activation": "uint16"}).fits(place)


def test_by_dtype_of_the_tensor():
    b = GraphBuilder()
    y = b.op("MatMul", [b.input(shape=(2, 4)), b.stored("fc:weight", (4, 4), dtype="float16")], "fc:output", (2, 4))
    graph = b.graph(y)
    assert weights(w8a8().override(tensor_dtype="float16", weight="int4"), graph) == ["int4"]
    assert weights(w8a8().override(tensor_dtype=float16, weight="int4"), graph) == ["int4"]
    assert weights(w8a8().override(tensor_dtype="float32", weight="int4"), graph) == ["int8"]


def test_every_condition_must_hold():
    config = w8a8().override("conv1", op_type="Conv", shape=(5, None, None, None), weight="int4", optional=True)
    assert weights(config) == ["int8"] * 3
    assert weights(w8a8().override("conv2", op_type="Conv", shape=(5, None, None, None), weight="int4")) == [
        *("int8", "int4", "int8")
    ]


def test_a_pattern_with_a_colon_matches_whole_sites():
    assert weights(w8a8().override("conv1:weight", weight="int4")) == ["int4", "int8", "int8"]
    assert weights(w8a8().override("*:weight", weight="int4")) == ["int4"] * 3
    plan = make_plan(small_network(), w8a8().skip("fc:bias"))
    assert site(plan, "fc:bias").reason == "kept float32 by a rule"
    assert site(plan, "fc:weight").state == "quantized"
    assert activations(w8a8().skip("x:input"))["x"] == "float32"


def test_a_site_inside_a_supergroup_stands_for_its_output():
    b = GraphBuilder()
    graph = b.graph(b.relu(b.conv(b.input(), "conv"), "relu"))
    assert activations(w8a8().override("conv:output", activation="uint16"), graph)["relu"] == "uint16"
    assert activations(w8a8().override("relu:output", activation="uint16"), graph)["relu"] == "uint16"


def test_call_marks_may_be_left_out_of_a_site():
    matcher = RuleMatcher([make_rule("block.relu:output", {"activation": "uint16"})])
    assert matcher.matching(Place(("block.relu",), sites=("block@1.relu:output",))) == (0,)
    assert matcher.matching(Place(("block.relu",), sites=("block.relu:weight",))) == ()


def test_owners_may_hold_what_globs_and_sites_use():
    b = GraphBuilder()
    y = b.conv(b.conv(b.input(), "stack[0]"), "conv:0")
    graph = b.graph(y)
    assert weights(w8a8().override("stack[0]", weight="int4"), graph) == ["int4", "int8"]
    assert weights(w8a8().override("conv:0", weight="int4"), graph) == ["int8", "int4"]
    assert weights(w8a8().override("conv:0:weight", weight="int4"), graph) == ["int8", "int4"]


def test_a_chain_answers_to_the_op_types_of_its_members():
    b = GraphBuilder()
    y = b.relu(b.conv(b.input(), "conv"), "relu")
    graph = b.graph(b.op("Add", [y, y], "add:output"))
    for type in ("Conv", "Relu"):
        assert activations(w8a8().override(op_type=type, activation="uint16"), graph)["relu"] == "uint16"


def test_the_bias_of_a_linear_layer_is_no_addition():
    b = GraphBuilder()
    x = b.input(shape=(2, 6))
    y = b.op("MatMul", [x, b.stored("fc:weight", (6, 6))], None, (2, 6))
    y = b.op("Add", [y, b.stored("fc:bias", (6,))], "fc:output", (2, 6))
    graph = b.graph(b.op("Add", [x, y], "sum:output", (2, 6)))
    assert activations(w8a8().override(op_type="Add", activation="uint16"), graph) == {
        "x": "uint8",
        "fc": "uint8",
        "sum": "uint16",
    }
    assert activations(w8a8().override(op_type="MatMul", activation="uint16"), graph)["fc"] == "uint16"


def silu() -> Graph:
    b = GraphBuilder()
    x = b.conv(b.input(), "conv")
    return b.graph(b.op("Mul", [x, b.op("Sigmoid", [x], "sigmoid:output")], "mul:output"))


def test_a_pattern_answers_to_its_name_and_its_onnx_type_not_to_its_parts():
    for type in ("SiLU", "Swish"):
        assert activations(w8a8().override(op_type=type, activation="uint16"), silu())["mul"] == "uint16"
    with pytest.raises(ConfigError, match="no op of that type; there are: Conv, Input, SiLU, Swish"):
        make_plan(silu(), w8a8().override(op_type="Mul", activation="uint16"))


# the order of rules


def test_choices_win_one_by_one():
    config = w8a8().override(op_type="Conv", weight="int4").override("conv1", per_channel=False).override("*", tie=True)
    plan = make_plan(small_network(), config)
    assert (spec_of(plan, "conv1:weight").dtype, spec_of(plan, "conv1:weight").granularity) == (int4, PerTensor())
    assert (spec_of(plan, "conv2:weight").dtype, spec_of(plan, "conv2:weight").granularity) == (int4, PerChannel(0))


def test_explain_names_the_rule_that_decided_with_its_conditions():
    config = w8a8().override("conv1", op_type="Conv", shape=(4, None, 3, 3), weight="int4")
    config = config.override("conv1", activation="uint16").override("conv1", bias="float32")
    plan = make_plan(small_network(), config)
    rule = "'conv1' with op_type=Conv, shape=(4, None, 3, 3) -> weight=int4"
    assert site(plan, "conv1:weight").rule == rule
    assert explanation(plan, "conv1:weight").endswith(f"decided by {rule}")
    assert explanation(plan, "conv1:bias").endswith("decided by 'conv1' -> bias=float32")
    assert site(plan, "relu:output").rule == "'conv1' -> activation=uint16"
    assert site(plan, "fc:weight").rule == "default"
    assert "tensor_dtype=float32" in str(make_rule("a", {"tensor_dtype": "float32", "tie": True}))
    assert "op_type=('Conv', 'Gemm')" in str(make_rule("a", {"op_type": ["Conv", "Gemm"], "tie": True}))


def test_what_the_config_itself_keeps_float_is_not_said_of_a_rule():
    plan = make_plan(small_network(), replace(w8a8(), output=float16, weight=float16, bias=float16))
    for name in ("fc:output", "fc:weight", "fc:bias"):
        assert (site(plan, name).reason, site(plan, name).rule) == ("kept float16 by the config", "default")


# inputs and outputs


def test_inputs_and_outputs_have_choices_of_their_own():
    config = w8a8().override(output="float32", input="uint16")
    assert activations(config) == {"x": "uint16", "relu": "uint8", "conv2": "uint8", "flatten": "uint8"} | {
        "fc": "float32"
    }
    assert site(make_plan(small_network(), config), "fc:output").rule == "'*' -> input=uint16, output=float32"


def test_activation_covers_inputs_and_outputs():
    assert set(activations(w8a8().override("*", activation="uint16")).values()) == {"uint16"}
    config = w8a8().override("*", output="float32").override("fc", activation="uint16")
    assert activations(config)["fc"] == "uint16"
    config = w8a8().override("fc", activation="uint16", output="float32")
    assert activations(config)["fc"] == "float32"
    assert activations(w8a8().override("*", output="uint16").skip("fc"))["fc"] == "float32"


# choices


def test_weights_may_be_asymmetric():
    plan = make_plan(small_network(), w8a8().override("fc", symmetric_weights=False))
    assert not spec_of(plan, "fc:weight").symmetric
    assert spec_of(plan, "fc:weight").dtype == int8
    assert spec_of(plan, "conv1:weight").symmetric
    assert spec_of(plan, "fc:bias").dtype.name == "int32"
    plan = make_plan(small_network(), w8a8().override("*", weight="uint8").override("fc", symmetric_weights=True))
    assert [spec_of(plan, f"{n}:weight").symmetric for n in ("conv1", "fc")] == [False, True]
    plan = make_plan(small_network(), w8a8().override("*", weight="float8e4m3fn", symmetric_weights=False))
    assert spec_of(plan, "fc:weight").symmetric  # it has no zero point


def test_strict_symmetric_weights():
    plan = make_plan(small_network(), w8a8().override("*", weight="int8_strict"))
    assert (spec_of(plan, "fc:weight").dtype.lo, spec_of(plan, "fc:weight").dtype.hi) == (-127, 127)


def test_a_fixed_range_by_rule():
    config = w8a8().override("conv2", fixed_range=(-2, 4))
    plan = make_plan(small_network(), config)
    assert spec_of(plan, "conv2:output").fixed_range == (-2.0, 4.0)
    assert spec_of(plan, "flatten:output").fixed_range == (-2.0, 4.0)  # it moves the same values
    assert spec_of(plan, "relu:output").fixed_range is None


def test_the_range_of_an_op_may_be_observed_instead():
    b = GraphBuilder()
    graph = b.graph(b.op("Softmax", [b.input()], "softmax:output"))
    assert spec_of(make_plan(graph, w8a8()), "softmax:output").fixed_range == (0.0, 1.0)
    config = w8a8().override(op_type="Softmax", fixed_range="observed")
    assert spec_of(make_plan(graph, config), "softmax:output").fixed_range is None


@pytest.mark.parametrize("given", [(1, 1), (2, 1), (0,), (0, 1, 2), "free", (0, float("inf")), (float("nan"), 1), 3])
def test_a_range_that_cannot_be_meant(given):
    with pytest.raises(ConfigError, match=r"fixed_range=.* \(rule 'fc'\) is no range; give \(low, high\)"):
        w8a8().override("fc", fixed_range=given)


def test_a_supergroup_may_be_quantized_one_by_one():
    plan = make_plan(small_network(), w8a8())
    assert inside(plan, "Conv") == ["inside Conv+Relu"]
    for name in ("conv1", "relu"):
        plan = make_plan(small_network(), w8a8().override(name, supergroup=False))
        assert inside(plan, "Conv") == ["inside a module or function whose output is the site"]
        assert site(plan, "relu:output").reason == "Relu"
    plan = make_plan(silu(), replace(w8a8(), supergroup=False))
    assert site(plan, "sigmoid:output").state == "quantized"
    plan = make_plan(silu(), replace(w8a8(), supergroup=False).override("mul", supergroup=True))
    assert site(plan, "mul:output").reason == "Mul"  # one member that stays out is enough


def test_supergroups_by_name():
    assert inside(make_plan(small_network(), replace(w8a8(), supergroups=())), "Conv") == [
        "inside a module or function whose output is the site"
    ]
    assert inside(make_plan(small_network(), replace(w8a8(), supergroups=("Conv+Relu",))), "Conv") == [
        "inside Conv+Relu"
    ]
    assert site(make_plan(silu(), replace(w8a8(), supergroups=("SiLU",))), "mul:output").reason == "SiLU"
    assert site(make_plan(silu(), replace(w8a8(), supergroups=("LayerNorm",))), "mul:output").reason == "Mul"


def test_a_chain_that_qsdk_does_not_know_and_the_longest_of_two():
    b = GraphBuilder()
    y = b.op("Tanh", [b.op("Abs", [b.conv(b.input(), "conv")], "abs:output")], "tanh:output")
    plan = make_plan(b.graph(y), replace(w8a8(), supergroups=("Conv+Abs", "Conv+Abs+Tanh")))
    assert site(plan, "conv:output").reason == site(plan, "abs:output").reason == "inside Conv+Abs+Tanh"
    assert spec_of(plan, "tanh:output").fixed_range == (-1.0, 1.0)
    cut = replace(w8a8(), supergroups=("Conv+Abs+Tanh",)).override("tanh", supergroup=False)
    plan = make_plan(b.graph(y), cut)
    assert (site(plan, "conv:output").reason, site(plan, "abs:output").reason) == ("inside Conv+Abs", "Conv+Abs")
    b.tensors[-1] = replace(b.tensors[-1], site="t:output")
    plan = make_plan(b.graph(b.ops[-2].outputs[0], y), replace(w8a8(), supergroups=("Conv+Abs", "Conv+Abs+Tanh")))
    assert site(plan, "conv:output").reason == "inside Conv+Abs"


def test_a_pattern_of_ones_own():
    pattern = Pattern("SignedRoot", op("Mul", op("Sign", "x"), op("Sqrt", op("Abs", "x"))))
    b = GraphBuilder()
    x = b.conv(b.input(), "conv")
    sign, root = b.op("Sign", [x], "sign:output"), b.op("Sqrt", [b.op("Abs", [x], "abs:output")], "sqrt:output")
    graph = b.graph(b.op("Mul", [sign, root], "mul:output"))
    plan = make_plan(graph, w8a8().pattern(pattern))
    assert site(plan, "mul:output").reason == "SignedRoot"
    assert site(plan, "abs:output").reason == "inside SignedRoot"
    assert site(make_plan(graph, w8a8()), "abs:output").state == "quantized"


def test_an_embedding_is_named_by_its_op_type_or_its_shape():
    for where in ({"op_type": "Gather"}, {"shape": (50, 8)}):
        assert spec_of(make_plan(embedding(), w4a8().override(weight="int4", **where)), "emb:weight").dtype == int4
    by_dtype = w4a8().override(tensor_dtype="float32", weight="int4")
    assert spec_of(make_plan(embedding(), by_dtype), "emb:weight").dtype.bits == 8


# rules that match nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "conv3"}, "matches no owner in the model; the nearest are: conv"),
        ({"pattern": "conv1:wieght"}, "matches no site in the model; the nearest are: conv1:weight"),
        ({"op_type": "Embedding"}, "matches no op of that type; there are: Conv, Flatten, Gemm, Input, Relu"),
        ({"pattern": "fc", "op_type": "Conv"}, "matches no op of that type; there are: Gemm"),
        ({"shape": (7, 7)}, r"matches no tensor of that shape and dtype; the nearest are: x: float32 \(1, 3, 8, 8\)"),
        ({"pattern": "fc", "tensor_dtype": "float16"}, "matches no tensor of that shape and dtype; .*fc: float32"),
        ({"pattern": "fc:weight", "op_type": "Conv"}, "matches no op of that type; there are: Gemm"),
    ],
)
def test_a_rule_that_matches_nothing_is_refused(options, message: str):
    with pytest.raises(ConfigError, match=message):
        make_plan(small_network(), w8a8().override(**options, weight="int4"))
    assert weights(w8a8().override(**options, weight="int4", optional=True)) == ["int8"] * 3


def guarded() -> Graph:
    """x / sqrt(Relu(x) + 1), with the root as an output: no grid serves a divisor."""
    b = GraphBuilder()
    x = b.input()
    raised = b.op("Add", [b.relu(x, "relu"), b.stored(None, (), value=np.ones(()))], "add:output")
    root = b.op("Sqrt", [raised], "sqrt:output")
    return b.graph(b.op("Div", [x, root], "div:output"), root)


def test_a_rule_whose_dtypes_no_site_takes_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"the rule 'sqrt' .* has no effect: sqrt:output stays float32: a divisor"):
        make_plan(guarded(), w8a8().override("sqrt", activation="uint8"))
    with pytest.raises(
        ConfigError, match="has no effect: fc:bias stays float32: its input is not an integer of 8 bits"
    ):
        make_plan(small_network(), w8a16().override("fc", bias="int32"))


@pytest.mark.parametrize(
    "config",
    [
        w8a8().override("sqrt", activation="uint8", optional=True),
        w8a8().skip("sqrt"),
        w8a8().skip("sqrt", float16),
        w8a8().override("*", activation="uint8"),
        w8a8().override("???t", activation="uint16").override("sqrt", activation="float32"),
        w8a8().override("[rs]*", activation="uint16"),
    ],
)
def test_a_rule_that_some_site_follows_or_a_later_rule_replaces_is_none_of_those(config: QuantConfig):
    assert make_plan(guarded(), config)


def test_a_tensor_dtype_that_no_tensor_has():
    with pytest.raises(ConfigError, match=r"tensor_dtype='int8' .* is none of float32, float16, bfloat16, float64"):
        w8a8().override(tensor_dtype="int8", weight="int4")


def test_conditions_alone_say_nothing():
    with pytest.raises(ConfigError, match=r"the rule for '\*' overrides nothing"):
        w8a8().override(op_type="Conv")


# at the PyTorch door


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


X = torch.randn(1, 3, 8, 8)


@pytest.mark.slow
def test_a_batch_norm_named_by_its_op_type_is_not_folded():
    sim = sim_of(network(), X, w8a8().skip(op_type="BatchNormalization", dtype=float16))
    types = {d.op_type for d in sim.plan.decisions.values()}
    assert "BatchNormalization" in types
    assert "BatchNormalization" not in {d.op_type for d in sim_of(network(), X, w8a8()).plan.decisions.values()}
    sim = sim_of(network(), X, w8a8().override("1", op_type="BatchNormalization", activation="uint16"))
    norms = {d.site for d in sim.plan.decisions.values() if d.op_type == "BatchNormalization"}
    assert norms <= {"1:output", "1:weight", "1:bias"}
    assert norms


def test_an_optional_rule_does_not_keep_a_batch_norm_from_being_folded():
    sim = sim_of(network(), X, w8a8().skip(op_type="BatchNormalization", optional=True))
    assert "BatchNormalization" not in {d.op_type for d in sim.plan.decisions.values()}


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


class Stranger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift, self.slope = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.slope + self.shift


@pytest.mark.slow
def test_modules_of_unknown_classes_are_quantized_by_their_ops():
    model = nn.Sequential(Odd(), Stranger(), Odd(), nn.Conv2d(3, 4, 3))
    sim = sim_of(model, X)
    assert [sim.plan.decisions[f"{n}:gain"].quantized for n in (0, 2)] == [True, True]
    assert sim.plan.decisions["1:slope"].reason == "a scalar constant"
    skipped = sim_of(model, X, w8a8().skip("0").skip("1").skip("2"))
    rows = [row for row in skipped.coverage().rows if row["site"].split(":")[0].split("/")[0] in ("0", "1", "2")]
    assert rows
    assert {row["state"] for row in rows} == {"float"}
    assert all("kept float32 by a rule" in row["reason"] for row in rows if row["kind"] == "activation")


def test_explain_at_the_door():
    sim = sim_of(network(), X, w8a8().override(op_type="Conv", shape=(4, 4, 1, 1), weight=int16))
    assert "decided by '*' with op_type=Conv, shape=(4, 4, 1, 1) -> weight=int16" in sim.explain("3:weight")
    assert "decided by default" in sim.explain("0:weight")
    assert spec_of(sim.plan, "0:weight").dtype == int8
