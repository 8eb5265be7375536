"""Planning on graphs built by hand: what is quantized, how, shared with what, and why not."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plans import embedding, inside, matmul_network, site, small_network, spec_of
from strategies import GraphBuilder

from qsdk import ConfigError, Encoding, QuantConfig, float16, int8, int32, uint8, uint16, w4a8, w8a8, w8a16
from qsdk.core.graph.graph import Graph
from qsdk.core.layers.graph_layers import graph_layers
from qsdk.core.layers.layer_problem import Activation
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerChannel, PerTensor, Spec
from qsdk.core.patterns.terms import Pattern, op, stored
from qsdk.core.planning.from_encodings import plan_as_given, plan_with_given
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Decision, Plan

# what the reference does


def test_each_tensor_of_a_small_network_has_the_expected_spec():
    plan = make_plan(small_network(), w8a8())
    states = {name: d.state for name, d in plan.decisions.items() if d.kind in ("input", "activation", "output")}
    assert states == {
        "x:input": "quantized",
        "relu:output": "quantized",
        "conv2:output": "quantized",
        "flatten:output": "tied",
        "fc:output": "quantized",
    }
    assert inside(plan, "Conv") == ["inside Conv+Relu"]
    assert site(plan, "relu:output").reason == "Conv+Relu"
    assert spec_of(plan, "relu:output") == Spec(uint8, PerTensor(), symmetric=False)
    for name in ("conv1:weight", "conv2:weight", "fc:weight"):
        assert spec_of(plan, name) == Spec(int8, PerChannel(0))
    for name, fed in (("conv1", "x:input"), ("conv2", "relu:output"), ("fc", "conv2:output")):
        assert spec_of(plan, f"{name}:bias") == Spec(int32, PerChannel(0))
        assert site(plan, f"{name}:bias").bias_of == (fed, f"{name}:weight")
    assert site(plan, "flatten:output").tied_to == "conv2:output"
    assert site(plan, "flatten:output").passes_through
    kinds = {name: site(plan, name).kind for name in ("x:input", "relu:output", "fc:output", "fc:weight", "fc:bias")}
    assert list(kinds.values()) == ["input", "activation", "output", "weight", "bias"]
    assert plan.calibrated_sites() == ["x:input", "relu:output", "conv2:output", "flatten:output", "fc:output"]


def test_concat_of_three_branches_shares_one_encoding():
    b = GraphBuilder()
    x = b.input()
    branches = [b.conv(x, f"branch{i}") for i in range(3)]
    plan = make_plan(b.graph(b.op("Concat", branches, "cat:output", axis=1)), w8a8())
    homes = {
        site(plan, name).encoding_site for name in ("branch0:output", "branch1:output", "branch2:output", "cat:output")
    }
    assert homes == {"branch0:output"}
    assert site(plan, "cat:output").passes_through
    assert not site(plan, "branch1:output").passes_through
    assert site(plan, "branch1:output").reason == "shares the encoding of branch0:output"


@pytest.mark.parametrize("between", [None, "MaxPool", "Reshape"])
def test_a_concat_of_a_relu_and_a_signed_part_shares_no_grid(between: str | None):
    """One zero point for both would keep runtimes from computing the layer and its Relu as one op on codes."""
    b = GraphBuilder()
    x = b.input()
    rectified = b.op("Relu", [b.conv(x, "conv")], "relu:output")
    moved = rectified if between is None else b.op(between, [rectified], "moved:output")
    joined = b.op("Concat", [moved, b.conv(x, "signed")], "cat:output")
    graph = b.graph(b.conv(joined, "after"))
    plan = make_plan(graph, w8a8())
    homes = [site(plan, name).encoding_site for name in ("relu:output", "signed:output", "cat:output")]
    assert homes == ["relu:output", "signed:output", "cat:output"]
    for config in (w8a8().override("cat", tie=True), w8a8(symmetric_activations=True)):
        plan = make_plan(graph, config)
        assert len({site(plan, name).encoding_site for name in ("relu:output", "signed:output", "cat:output")}) == 1


@pytest.mark.parametrize("other", ["Relu", "Sigmoid"])
def test_a_concat_of_a_relu_and_a_part_that_is_never_negative_shares_one(other: str):
    b = GraphBuilder()
    x = b.input()
    parts = [b.op("Relu", [b.conv(x, "conv")], "relu:output"), b.op(other, [b.conv(x, "second")], "other:output")]
    plan = make_plan(b.graph(b.conv(b.op("Concat", parts, "cat:output"), "after")), w8a8())
    assert len({site(plan, name).encoding_site for name in ("relu:output", "other:output", "cat:output")}) == 1


@pytest.mark.parametrize("type", ["MaxPool", "Reshape", "Transpose"])
def test_ops_that_move_values_share_their_inputs_encoding(type: str):
    b = GraphBuilder()
    plan = make_plan(b.graph(b.op(type, [b.conv(b.input(), "conv")], "move:output")), w8a8())
    assert site(plan, "move:output").tied_to == "conv:output"
    assert site(plan, "move:output").passes_through


def test_a_tie_reaches_through_reshape_and_concat():
    b = GraphBuilder()
    x = b.input()
    reshaped = b.op("Reshape", [b.conv(x, "conv1")], "reshape:output")
    plan = make_plan(b.graph(b.op("Concat", [reshaped, b.conv(x, "conv2")], "cat:output")), w8a8())
    for name in ("conv1:output", "reshape:output", "conv2:output", "cat:output"):
        assert site(plan, name).encoding_site == "conv1:output"


@pytest.mark.parametrize(("value", "state"), [(9.0, "quantized"), (0.0, "tied")])
def test_pad_with_a_constant_outside_the_range_has_its_own_encoding(value: float, state: str):
    b = GraphBuilder()
    pads, constant = b.stored(None, (8,), value=[1] * 8, dtype="int64"), b.stored(None, (), value=value)
    y = b.op("Pad", [b.conv(b.input(), "conv"), pads, constant], "pad:output")
    assert site(make_plan(b.graph(y), w8a8()), "pad:output").state == state


def test_an_output_before_relu_keeps_its_own_decision():
    b = GraphBuilder()
    middle = b.conv(b.input(), "conv")
    y = b.relu(middle, "relu")
    plan = make_plan(b.graph(middle, y), w8a8())
    assert (site(plan, "conv:output").state, site(plan, "conv:output").kind) == ("quantized", "output")
    assert site(plan, "relu:output").reason == "Relu"
    assert site(make_plan(b.graph(y), w8a8()), "conv:output").reason == "inside Conv+Relu"


def test_a_second_reader_before_relu_keeps_the_decision_too():
    b = GraphBuilder()
    middle = b.conv(b.input(), "conv")
    y = b.op("Add", [middle, b.relu(middle, "relu")], "add:output")
    assert site(make_plan(b.graph(y), w8a8()), "conv:output").state == "quantized"


def chain(names: list[str]) -> tuple[Graph, list[str]]:
    b = GraphBuilder()
    y, made = b.input(), []
    for i in range(5):
        y = b.conv(y, f"conv{i}")
        made.append(y)
    for tensor, name in zip(made, names, strict=True):
        b.tensors[tensor] = replace(b.tensors[tensor], name=name)
    return b.graph(*made[1:4]), [f"conv{i}:weight" for i in range(5)]


def test_outputs_named_hidden_output_change_nothing_in_the_plan():
    hidden = ["hidden_output_3", "hidden_output", "hidden_output_1", "hidden_output_2", "hidden_output"]
    graph, weights = chain(hidden)
    plan = make_plan(graph, w8a8())
    assert plan == make_plan(chain(list("abcde"))[0], w8a8())
    assert {spec_of(plan, name).granularity for name in weights} == {PerChannel(0)}
    assert all(d.state == "quantized" for d in plan.decisions.values())


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        *((type, (0.0, 1.0)) for type in ("Softmax", "Sigmoid", "HardSigmoid")),
        *((type, (-1.0, 1.0)) for type in ("Tanh", "Sin", "Cos")),
        ("Relu", None),
    ],
)
def test_bounded_functions_have_a_fixed_range(type: str, expected):
    b = GraphBuilder()
    plan = make_plan(b.graph(b.op(type, [b.input()], "f:output")), w8a8())
    assert spec_of(plan, "f:output").fixed_range == expected


# ties and passing through


def test_a_fixed_range_passes_through_a_reshape():
    b = GraphBuilder()
    y = b.op("Reshape", [b.op("Softmax", [b.input()], "softmax:output")], "reshape:output")
    plan = make_plan(b.graph(y), w8a8())
    assert spec_of(plan, "reshape:output").fixed_range == (0.0, 1.0)
    assert spec_of(plan, "softmax:output").fixed_range == (0.0, 1.0)


@pytest.mark.parametrize("softmax_first", [True, False])
def test_a_fixed_range_does_not_clip_what_it_is_concatenated_with(softmax_first: bool):
    b = GraphBuilder()
    x = b.input()
    if softmax_first:
        operands = [b.op("Softmax", [x], "softmax:output"), b.conv(x, "conv")]
    else:
        operands = [b.conv(x, "conv"), b.op("Softmax", [x], "softmax:output")]
    joined = b.op("Concat", operands, "cat:output")
    plan = make_plan(b.graph(b.conv(joined, "after")), w8a8())
    homes = {site(plan, name).encoding_site for name in ("softmax:output", "conv:output", "cat:output")}
    assert len(homes) == 1
    for name in ("softmax:output", "conv:output", "cat:output"):
        assert spec_of(plan, name).fixed_range is None


def test_two_equal_fixed_ranges_stay_fixed_when_concatenated():
    b = GraphBuilder()
    x = b.input()
    operands = [b.op("Softmax", [x], "softmax:output"), b.op("Sigmoid", [x], "sigmoid:output")]
    plan = make_plan(b.graph(b.op("Concat", operands, "cat:output")), w8a8())
    assert spec_of(plan, "cat:output").fixed_range == (0.0, 1.0)


def test_a_concat_with_a_stored_or_float_operand_must_be_quantized_again():
    b = GraphBuilder()
    x = b.input()
    y = b.op("Concat", [b.conv(x, "conv"), b.stored("token:weight", (1, 4, 8, 8))], "cat:output")
    plan = make_plan(b.graph(y), w8a8())
    assert site(plan, "cat:output").tied_to == "conv:output"
    assert not site(plan, "cat:output").passes_through
    assert spec_of(plan, "token:weight") == Spec(int8, PerTensor())

    b = GraphBuilder()
    x = b.input()
    y = b.op("Concat", [b.conv(x, "conv"), b.conv(x, "left_float")], "cat:output")
    plan = make_plan(b.graph(y), w8a8().skip("left_float"))
    assert site(plan, "left_float:output").state == "float"
    assert not site(plan, "cat:output").passes_through


def test_an_op_that_interpolates_never_passes_through_even_inside_one_class():
    b = GraphBuilder()
    y = b.conv(b.input(), "conv")
    resized = b.op("Resize", [y], "resize:output", mode="linear")
    plan = make_plan(b.graph(b.op("Concat", [y, resized], "cat:output")), w8a8())
    assert site(plan, "resize:output").tied_to == "conv:output"
    assert not site(plan, "resize:output").passes_through
    assert site(plan, "cat:output").passes_through


def test_a_tie_is_not_carried_past_a_float_tensor():
    b = GraphBuilder()
    y = b.op("Reshape", [b.conv(b.input(), "conv")], "first:output")
    plan = make_plan(b.graph(b.op("Reshape", [y], "second:output")), w8a8().skip("first"))
    assert site(plan, "first:output").state == "float"
    assert site(plan, "second:output").state == "quantized"


# rules


def test_a_rule_that_matches_nothing_names_the_nearest_owners():
    with pytest.raises(ConfigError, match=r"the rule 'conv3' -> weight=int4 matches no owner .* nearest are: conv[12]"):
        make_plan(small_network(), w8a8().override("conv3", weight="int4"))


@pytest.mark.parametrize(
    ("pattern", "choices", "message"),
    [
        ("relu", {"weight": "int4"}, "has only activations; owners that have one are: conv1, conv2, fc"),
        ("*", {"op_type": "Relu", "weight": "int4"}, "has only activations; owners .*: conv1, conv2, fc"),
        ("relu", {"block_size": 32}, "has only activations"),
        ("conv2:output", {"weight": "int4"}, "has only activations; owners that have one are: conv2"),
        ("conv2:weight", {"activation": "uint16"}, "is a stored tensor; owners that have one are: conv2"),
        ("conv2", {"input": "uint16"}, "is no input of the model; .* are: x; what a layer reads is an activation of"),
    ],
)
def test_a_rule_whose_choices_reach_nothing_is_refused(pattern: str, choices: dict[str, Any], message: str):
    config = w8a8().override(pattern, **choices)
    with pytest.raises(ConfigError, match=rf"the rule {re.escape(str(config.rules[0]))} reaches nothing: .*{message}"):
        make_plan(small_network(), config)
    make_plan(small_network(), w8a8().override(pattern, **choices, optional=True))


@pytest.mark.parametrize(
    ("pattern", "choices"),
    [
        ("relu", {"weight": "int4", "activation": "uint16"}),
        ("conv2", {"activation": "uint16"}),
        ("conv2:bias", {"bias": "float32"}),
        ("conv2:weight", {"weight": "int4"}),
        ("x", {"input": "uint16"}),
        ("*", {"input": "uint16"}),
    ],
)
def test_a_rule_one_of_whose_choices_reaches_something_is_accepted(pattern: str, choices: dict[str, Any]):
    make_plan(small_network(), w8a8().override(pattern, **choices))


def test_a_bare_star_may_be_about_weights_that_a_model_has_not():
    b = GraphBuilder()
    graph = b.graph(b.op("Relu", [b.input()], "relu:output"))
    make_plan(graph, w8a8().override("*", weight="int4"))
    with pytest.raises(ConfigError, match="has only activations; nothing in the model has one"):
        make_plan(graph, w8a8().override("relu", weight="int4"))


def test_a_rule_about_what_stays_float_for_a_reason_is_accepted():
    """A factor of what becomes integers is float whatever a rule says, but it is a weight."""
    b = GraphBuilder()
    x = b.input()
    made = b.op("Mul", [x, b.stored("mul:weight", (8,))], "mul:output")
    counted = b.op("Cast", [made], None, to=7)
    b.tensors[counted] = replace(b.tensors[counted], dtype="int64")
    plan = make_plan(b.graph(counted), w8a8().override("mul", weight="int16"))
    assert site(plan, "mul:weight").state == "float"


def test_a_rule_about_a_weight_behind_a_reshape_is_accepted():
    b = GraphBuilder()
    slope = b.op("Unsqueeze", [b.stored("act:weight", (3,))], None, (3, 1, 1), axes=(1, 2))
    y = b.op("PRelu", [b.input(), slope], "act:output", (1, 3, 8, 8))
    plan = make_plan(b.graph(y), w8a8().override("act", weight="int16"))
    assert spec_of(plan, "act:weight").dtype.name == "int16"


def test_a_rule_may_name_a_folded_owner():
    config = w8a8().skip("bn1")
    with pytest.raises(ConfigError, match="matches no owner"):
        make_plan(small_network(), config)
    assert make_plan(small_network(), config, extra_owners=["bn1"]) == make_plan(small_network(), w8a8())


def test_the_last_matching_rule_wins_and_is_named():
    plan = make_plan(small_network(), w8a8().override("conv*", weight="int4").override("conv2", weight="int16"))
    assert [spec_of(plan, f"{n}:weight").dtype.name for n in ("conv1", "conv2", "fc")] == ["int4", "int16", "int8"]
    assert site(plan, "conv2:weight").rule == "'conv2' -> weight=int16"
    assert site(plan, "conv1:weight").rule == "'conv*' -> weight=int4"
    assert site(plan, "fc:weight").rule == "default"


def test_skipping_leaves_a_layer_float_with_the_rule_as_reason():
    plan = make_plan(small_network(), w8a8().skip("fc"))
    for name in ("fc:weight", "fc:bias", "fc:output"):
        assert (site(plan, name).state, site(plan, name).spec) == ("float", None)
        assert site(plan, name).reason == "kept float32 by a rule"
        assert "'fc' ->" in site(plan, name).rule
    assert site(plan, "flatten:output").state == "tied"


def test_skipping_to_float16_keeps_the_dtype():
    plan = make_plan(small_network(), w8a8().skip("fc", float16))
    assert spec_of(plan, "fc:weight") == Spec(float16)
    assert site(plan, "fc:weight").state == "float"
    assert site(plan, "fc:weight").reason == "kept float16 by a rule"


def test_a_rule_on_a_layer_reaches_the_output_of_its_group():
    plan = make_plan(small_network(), w8a8().override("conv1", activation="uint16"))
    assert spec_of(plan, "relu:output").dtype == uint16


def test_minifloat_activations_are_symmetric():
    plan = make_plan(small_network(), QuantConfig(DTYPES["float8e4m3fn"], DTYPES["float8e4m3fn"]))
    assert spec_of(plan, "relu:output") == Spec(DTYPES["float8e4m3fn"], PerTensor(), symmetric=True)
    assert site(plan, "fc:bias").reason == "its input is not an integer of 8 bits or fewer"


def test_choices_for_activations_reach_the_specs():
    plan = make_plan(small_network(), replace(w8a8(symmetric_activations=True), scale_bits=1))
    assert spec_of(plan, "relu:output") == Spec(uint8, PerTensor(), symmetric=True, scale_bits=1)
    assert spec_of(plan, "fc:weight").scale_bits == 1


@pytest.mark.parametrize("size", [0, -4])
def test_a_block_size_that_is_not_positive_is_refused(size: int):
    with pytest.raises(ConfigError, match=f"block size {size} is not positive"):
        make_plan(matmul_network(), w4a8(block_size=size))


@pytest.mark.parametrize("field", ["weight", "activation"])
def test_a_scale_type_cannot_hold_a_tensor(field: str):
    with pytest.raises(ConfigError, match="float8e8m0 is a type for scales; it cannot hold a tensor"):
        make_plan(matmul_network(), w8a8().override("fc", **{field: "float8e8m0"}))


# the whole


def everything() -> Graph:
    """One graph with all the ways a float tensor can occur."""
    b = GraphBuilder()
    x, ids = b.input(), b.input("ids", (2,), "int64")
    y = b.conv(x, "conv1", bias=True, site=False)
    low, high = b.stored(None, (), value=0.0), b.stored(None, (), value=6.0)
    y = b.op("Clip", [y, low, high], "relu6:output")
    y = b.op("Pow", [y, b.stored(None, (), value=2.0)], "pow:output")
    y = b.op("Mul", [y, b.stored(None, (1,), value=[0.5])], "scaled:output")
    y = b.op("Tanh", [b.op("Exp", [y])], "f:output")
    y = b.op("Unheard", [y, b.stored("odd:weight", (4, 4))], "odd:output")
    y = b.op("Reshape", [y], "flat:output", (1, 256))
    b.stored("spare:weight", (3,))
    view = b.op(
        "Transpose", [b.op("Identity", [b.stored("fc:weight", (9, 256))], "fc2:weight", (9, 256))], None, (256, 9)
    )
    y = b.op("MatMul", [y, view], "fc:output", (1, 9))
    table = b.op("Gather", [b.stored("emb:weight", (50, 9)), ids], "emb:output", (2, 9))
    return b.graph(b.op("Add", [y, table], "sum:output", (2, 9)))


@pytest.mark.parametrize("config", [w8a8(), w8a16(), w4a8(block_size=8), w8a8().skip("*"), w8a8().skip("fc", float16)])
def test_every_float_tensor_has_a_decision_with_a_reason(config: QuantConfig):
    graph = everything()
    plan = make_plan(graph, config)
    decided = [*plan.decisions.values(), *plan.inside]
    floats = [t for t in graph.tensors if t.is_float]
    assert sorted(d.site for d in decided) == sorted(t.site or f"({t.name})" for t in floats)
    assert all(d.reason and d.op_type for d in decided)
    assert set(plan.decisions) == {t.site for t in floats if t.site}


def test_the_reasons_of_what_stays_float():
    plan = make_plan(everything(), w8a8())
    reasons = {d.reason for d in plan.inside}
    assert {"inside Conv+Clip", "inside a module or function whose output is the site", "a scalar constant"} <= reasons
    assert {f"a parameter of {op} that has no integer form of its own" for op in ("Clip", "Pow")} <= reasons
    assert site(plan, "odd:weight").reason == "a parameter of Unheard that has no integer form of its own"
    assert site(plan, "spare:weight").reason == "no op reads it"
    assert not site(plan, "odd:weight").quantized


def relabelled(graph: Graph) -> Graph:
    tensors = [replace(t, name=f"hidden_output_{i % 3}") for i, t in enumerate(graph.tensors)]
    ops = [replace(op, name=f"n{i % 2}") for i, op in enumerate(graph.ops)]
    return Graph(tensors, ops, graph.inputs, graph.outputs)


@pytest.mark.parametrize("graph", [small_network(), matmul_network(), embedding(), everything()])
@pytest.mark.parametrize("config", [w8a8(), w4a8(block_size=8), w8a8().skip("fc")])
def test_labels_do_not_change_the_plan(graph: Graph, config: QuantConfig):
    plan, other = make_plan(graph, config), make_plan(relabelled(graph), config)
    assert plan.decisions == other.decisions
    assert list(plan.decisions) == list(other.decisions)
    assert [replace(d, site="") for d in plan.inside] == [replace(d, site="") for d in other.inside]


def test_renamed_sites_rename_the_plan_and_nothing_else():
    plan, other = make_plan(matmul_network("fc"), w8a8()), make_plan(matmul_network("head"), w8a8())
    assert [d.site.replace("fc", "head") for d in plan.decisions.values()] == list(other.decisions)
    assert [d.spec for d in plan.decisions.values()] == [d.spec for d in other.decisions.values()]


def test_states():
    base = Decision("a:output", "Relu", "activation", Spec(uint8), "Relu")
    assert (base.state, base.quantized, base.encoding_site) == ("quantized", True, "a:output")
    tied = replace(base, tied_to="b:output")
    assert (tied.state, tied.quantized, tied.encoding_site) == ("tied", True, "b:output")
    assert (replace(base, spec=None).state, replace(base, spec=Spec(float16)).state) == ("float", "float")


def test_the_graph_is_left_alone():
    graph = small_network()
    before = list(graph.tensors), list(graph.ops)
    make_plan(graph, w8a8())
    assert (list(graph.tensors), list(graph.ops)) == before
    assert make_plan(graph, w8a8()) == make_plan(graph, w8a8())


def test_skipping_an_activation_leaves_the_weights_of_its_supergroup_quantized():
    plan = make_plan(small_network(), w8a8().skip("relu"))
    states = {site: decision.state for site, decision in plan.decisions.items()}
    assert states["conv1:weight"] == "quantized"
    assert states["relu:output"] == "float"


# the plan's own supergroups, for all that works on a planned graph


def sine_then_relu() -> Graph:
    b = GraphBuilder()
    return b.graph(b.op("Relu", [b.op("Sin", [b.conv(b.input(), "conv1", site=False)])], "relu:output"))


def activations_of_layers(graph: Graph, plan: Plan) -> dict[str, Activation | None]:
    return {found.layer.site: found.layer.activation for found in graph_layers(graph, plan, ())[0]}


def test_layers_are_solved_with_the_activation_that_the_plan_quantizes_with_them():
    graph = small_network()
    relu, alone = {"conv1:weight": Activation(low=0.0)}, {"conv1:weight": None}
    for config, expected in (
        (w8a8(), relu),
        (replace(w8a8(), supergroup=False), alone),
        (w8a8().override("relu", supergroup=False), alone),
        (replace(w8a8(), supergroups=()), alone),
        (replace(w8a8(), supergroups=("Conv+Relu",)), relu),
        (w8a8().pattern(Pattern("Mine", op("Relu", op("Conv", "x", stored("w"), stored("b"))))), relu),
    ):
        found = activations_of_layers(graph, make_plan(graph, config))
        assert found == expected | {"conv2:weight": None, "fc:weight": None}, config


def test_an_activation_behind_other_ops_of_a_pattern_is_not_the_layers():
    graph, mine = sine_then_relu(), Pattern("Mine", op("Relu", op("Sin", op("Conv", "x", stored("w")))))
    plan = make_plan(graph, w8a8().pattern(mine))
    assert plan.groups[0].name == "Mine"
    assert activations_of_layers(graph, plan) == {"conv1:weight": None}


def test_a_file_with_a_pair_inside_a_supergroup_does_not_have_that_group():
    graph = small_network()
    graph = replace(graph, tensors=[replace(t, site=t.site or f"{t.name}:inner") for t in graph.tensors])
    given = Encoding(uint8, np.float32([0.1]), np.int32([0]))
    inner, outer = (graph.tensors[graph.ops[op].outputs[0]].site or "" for op in (0, 1))
    whole, broken = (plan_as_given(graph, dict.fromkeys(sites, given), {}) for sites in ([outer], [inner, outer]))
    assert (0 in whole.groups, 0 in broken.groups) == (True, False)
    assert 0 not in plan_with_given(graph, make_plan(graph, w8a8()), {inner: given}, {}).groups


@pytest.mark.parametrize("network", [small_network, matmul_network, embedding])
def test_a_plan_of_given_encodings_names_the_ops_that_read_stored_tensors(network):
    graph = network()
    planned, given = make_plan(graph, w8a8()), plan_as_given(graph, {}, {})
    assert planned.decisions
    assert all(given.decisions[site].op_type == decision.op_type for site, decision in planned.decisions.items())
