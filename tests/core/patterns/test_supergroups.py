"""The matcher itself: patterns of one's own, what a group may swallow, names and operand order, and its cost."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm_models import DIVISIONS, SQUARES, Norm, build
from onnx import ModelProto, helper
from other_norm_models import group_norm, tensorflow_norm
from rope_models import rope
from strategies import GraphBuilder

from onnx_backend.opening.read_graph import read_graph
from qsdk.core.graph.graph import Graph, Op, Tensor
from qsdk.core.graph.op_facts import COMMUTATIVE
from qsdk.core.patterns.find import PATTERNS, match_supergroups
from qsdk.core.patterns.supergroup import MatchResult, NearMiss, Supergroup
from qsdk.core.patterns.terms import Pattern, any_of, number, op, product, stored

SNAKE = Pattern(
    "Snake", op("Add", "x", op("Div", op("Pow", op("Sin", product("x", stored("alpha"))), 2.0), stored("alpha")))
)


def snake(b: GraphBuilder, x: int, alpha: int | None = None, *, exponent: float = 2.0) -> int:
    alpha = b.stored("alpha:weight", (8,)) if alpha is None else alpha
    sine = b.op("Sin", [b.op("Mul", [alpha, x])])
    squared = b.op("Pow", [sine, b.stored(None, (), value=exponent)])
    return b.op("Add", [b.op("Div", [squared, alpha]), x])


# patterns of one's own


def test_a_pattern_of_ones_own_in_one_line():
    b = GraphBuilder()
    x = b.input()
    graph = b.graph(snake(b, x))
    assert match_supergroups(graph).groups == {}
    group = match_supergroups(graph, (SNAKE, *PATTERNS)).groups[0]
    assert (group.name, group.ops) == ("Snake", (0, 1, 2, 3, 4))
    alpha = next(i for i, t in enumerate(graph.tensors) if t.site == "alpha:weight")
    assert group.tensors == {"x": x, "alpha": alpha}
    assert group.roles[alpha] == "constant"


def test_the_same_name_means_the_same_tensor():
    b = GraphBuilder()
    x, other = b.input(), b.input("z")
    alpha = b.stored("alpha:weight", (8,))
    sine = b.op("Sin", [b.op("Mul", [alpha, other])])
    squared = b.op("Pow", [sine, b.stored(None, (), value=2.0)])
    y = b.op("Add", [b.op("Div", [squared, alpha]), x])
    assert match_supergroups(b.graph(y), (SNAKE,)).groups == {}


def test_an_own_pattern_reports_near_misses_if_it_says_when():
    b = GraphBuilder()
    graph = b.graph(snake(b, b.input(), exponent=3.0))
    assert match_supergroups(graph, (SNAKE,)) == MatchResult({}, ())
    curious = replace(SNAKE, near=("Sin",))
    (miss,) = match_supergroups(graph, (curious,)).near_misses
    assert miss == NearMiss(4, "Snake", "3 stands where 2 was expected")
    assert str(miss) == "Snake-like, not fused: 3 stands where 2 was expected"


def test_a_check_refuses_a_match_and_a_name_may_depend_on_it():
    b = GraphBuilder()
    graph = b.graph(snake(b, b.input()))
    refusing = replace(SNAKE, check=lambda graph, found: "its alpha is too long")
    assert match_supergroups(graph, (refusing,)).near_misses == (NearMiss(4, "Snake", "its alpha is too long"),)
    naming = replace(SNAKE, named=lambda graph, found: f"Snake{len(found.ops)}")
    assert match_supergroups(graph, (naming,)).groups[0].name == "Snake5"


def test_the_first_pattern_wins():
    b = GraphBuilder()
    x = b.input()
    graph = b.graph(b.op("Mul", [x, b.op("Sigmoid", [x])]))
    mine = Pattern("Mine", op("Mul", "x", op("Sigmoid", "x")))
    assert match_supergroups(graph, (mine, *PATTERNS)).groups[0].name == "Mine"
    assert match_supergroups(graph, (*PATTERNS, mine)).groups[0].name == "SiLU"


def test_ops_of_another_domain_are_other_ops():
    b = GraphBuilder()
    x = b.input()
    graph = b.graph(b.op("Mul", [x, b.op("Sigmoid", [x])]))
    foreign = replace(graph, ops=[replace(graph.ops[0], domain="com.example"), graph.ops[1]])
    assert match_supergroups(foreign).groups == {}


def test_numbers_may_lie_between_bounds():
    leaky = Pattern("Leaky", op("Max", "x", op("Mul", "x", number(0.0, 1.0, "a slope"))))
    for slope, expected in ((0.5, ["Leaky"]), (1.5, [])):
        b = GraphBuilder()
        x = b.input()
        graph = b.graph(b.op("Max", [b.op("Mul", [x, b.stored(None, (), value=slope)]), x]))
        assert [
            g.name for g in {id(g): g for g in match_supergroups(graph, (leaky,)).groups.values()}.values()
        ] == expected


# what a group may swallow


def silu(*, leaves: bool = False, reader: str | None = None) -> Graph:
    b = GraphBuilder()
    x = b.input()
    s = b.op("Sigmoid", [x])
    y = b.op("Mul", [x, s])
    others = [b.op(reader, [s])] if reader else []
    return b.graph(y, *others, *([s] if leaves else []))


def test_an_inner_tensor_that_is_needed_outside_forbids_the_group():
    assert match_supergroups(silu()).groups[0].name == "SiLU"
    assert match_supergroups(silu(reader="Shape")).groups[0].name == "SiLU"
    for graph, reason in (
        (silu(leaves=True), "'t1' inside it leaves the model"),
        (silu(reader="Relu"), "'t1' inside it is read by Relu 'n2' outside it"),
    ):
        assert match_supergroups(graph) == MatchResult({}, (NearMiss(1, "SiLU", reason),))


def test_the_output_of_a_group_may_leave_and_be_read():
    b = GraphBuilder()
    x = b.input()
    y = b.op("Mul", [x, b.op("Sigmoid", [x])])
    graph = b.graph(y, b.op("Relu", [y]), x)
    groups = match_supergroups(graph).groups
    assert groups[0].name == "SiLU"
    assert 2 not in groups


def test_an_identity_behind_a_group_stays_outside():
    b = GraphBuilder()
    x = b.input()
    y = b.op("Mul", [x, b.op("Sigmoid", [x])])
    groups = match_supergroups(b.graph(b.op("Identity", [y]))).groups
    assert groups[0].ops == (0, 1)


def test_groups_of_two_types_share_the_cast_between_them_with_the_first():
    b = GraphBuilder()
    x, ops = b.input(), []
    for _ in range(2):
        wide = b.op("Cast", [x])
        y = b.op("Mul", [wide, b.op("Sigmoid", [wide])])
        for tensor in (wide, y - 1, y):
            b.tensors[tensor] = replace(b.tensors[tensor], dtype="float64")
        x = b.op("Cast", [y])
        ops.append(tuple(range(len(b.ops) - 4, len(b.ops))))
    groups = match_supergroups(b.graph(x)).groups
    assert list(dict.fromkeys(groups[op].ops for op in sorted(groups))) == ops


def test_a_group_takes_ops_once():
    b = GraphBuilder()
    x = b.input()
    s = b.op("Sigmoid", [x])
    graph = b.graph(b.op("Mul", [x, s]), b.op("Mul", [s, x]))
    found = match_supergroups(graph)
    assert found.groups == {}
    assert {miss.pattern for miss in found.near_misses} == {"SiLU"}


@pytest.mark.parametrize("shared", [False, True])
def test_a_reshape_of_a_stored_tensor_belongs_to_its_one_reader(shared):
    b = GraphBuilder()
    alpha = b.op("Reshape", [b.stored("alpha:weight", (8,)), b.stored(None, (2,))])
    x, sines = b.input(), []
    for _ in range(1 + shared):
        sines.append(b.op("Sin", [b.op("Mul", [alpha, x])]))
    groups = match_supergroups(b.graph(*sines), [Pattern("Wave", op("Sin", product("x", stored("alpha"))))]).groups
    assert {group.ops for group in groups.values()} == ({(1, 2), (3, 4)} if shared else {(0, 1, 2)})


def test_a_cast_that_several_groups_read_stays_outside():
    b = GraphBuilder()
    half = replace(Tensor(""), dtype="float16")
    x = b.input()
    b.tensors[x] = replace(b.tensors[x], dtype=half.dtype)
    cast = b.op("Cast", [x])
    outputs = [b.op("Mul", [cast, b.op("Sigmoid", [cast])]) for _ in range(2)]
    groups = match_supergroups(b.graph(*outputs)).groups
    assert 0 not in groups
    assert {group.ops for group in groups.values()} == {(1, 2), (3, 4)}
    assert {group.tensors["x"] for group in groups.values()} == {cast}


# names and operand order


MODELS = {
    **{f"layer {s} {d}": build(Norm(square=s, divide=d, opset=21)) for s in SQUARES for d in DIVISIONS},
    **{f"rms {d}": build(Norm("rms", divide=d, beta=None, opset=13)) for d in DIVISIONS},
    "two Subs": build(Norm(centred="twice")),
    "late": build(Norm(epsilon="late")),
    "E[x2]": build(Norm(variance="difference")),
    "casts": build(Norm("rms", casts="in out")),
    "group norm": group_norm(by_arithmetic=True),
    "tensorflow": tensorflow_norm(),
    "rope": rope(),
    "rope by parts": rope("pairs", "by parts"),
}


def shuffled(model: ModelProto, seed: int) -> ModelProto:
    """The same model with the operands of commutative ops swapped and every name changed at random."""
    rng = np.random.default_rng(seed)
    changed = ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    hostile = [f"hidden_output_{i}" for i in range(len(names))]
    renamed = dict(zip(sorted(names), rng.permutation(hostile), strict=True))
    for node in graph.node:
        node.name = f"{rng.integers(1 << 30)}"
        inputs = [renamed[name] for name in node.input]
        if node.op_type in COMMUTATIVE and rng.integers(2):
            inputs.reverse()
        node.input[:] = inputs
        node.output[:] = [renamed[name] for name in node.output]
    for value in (*graph.input, *graph.output, *graph.initializer):
        value.name = renamed[value.name]
    return changed


def shapes_of(found: MatchResult) -> list[object]:
    groups = {group.ops: group for group in found.groups.values()}.values()
    return [
        sorted((group.ops, group.name, sorted(group.roles.values())) for group in groups),
        [(miss.op, miss.pattern) for miss in found.near_misses],
    ]


@pytest.mark.slow
@given(st.sampled_from(sorted(MODELS)), st.integers(0, 2**32 - 1))
def test_neither_names_nor_the_order_of_operands_change_what_is_found(name, seed):
    model = MODELS[name]
    before = match_supergroups(read_graph(model))
    assert before.groups or before.near_misses
    assert shapes_of(match_supergroups(read_graph(shuffled(model, seed)))) == shapes_of(before)


@pytest.mark.slow
@given(st.sampled_from(sorted(MODELS)), st.data())
def test_a_tensor_that_leaves_the_model_is_never_inside_a_group(name, data):
    model = ModelProto()
    model.CopyFrom(MODELS[name])
    made = [output for node in model.graph.node for output in node.output]
    for output in data.draw(st.lists(st.sampled_from(made), max_size=3, unique=True)):
        if output not in {value.name for value in model.graph.output}:
            model.graph.output.append(helper.make_empty_tensor_value_info(output))
    graph = Graph(*_with_outputs(MODELS[name], [value.name for value in model.graph.output]))
    for op_id, group in match_supergroups(graph).groups.items():
        for tensor in graph.ops[op_id].outputs:
            assert op_id == group.ops[-1] or tensor not in graph.outputs


def _with_outputs(model: ModelProto, names: list[str]):
    graph = read_graph(model)
    index = {tensor.name: i for i, tensor in enumerate(graph.tensors)}
    return graph.tensors, graph.ops, graph.inputs, [index[name] for name in names]


# cost


def transformer(ops: int) -> Graph:
    """Blocks of RMSNorm, rotary embedding, masked attention and GELU until there are that many ops."""
    b = GraphBuilder()
    x = b.input()
    two, half, eps = (b.stored(None, (), value=value) for value in (2.0, 0.5, 1e-5))
    root, one = b.stored(None, (), value=1.41421356), b.stored(None, (), value=1.0)
    axes = b.stored(None, (1,), value=[-1], dtype="int64")
    y, count = x, 0
    while len(b.ops) < ops:
        variance = b.op("ReduceMean", [b.op("Pow", [y, two]), axes])
        norm = b.op("Div", [y, b.op("Sqrt", [b.op("Add", [variance, eps])])])
        scaled = b.op("Mul", [norm, b.stored(f"{count}:gamma", (8,))])
        hidden = b.op("MatMul", [scaled, b.stored(f"{count}:weight", (8, 8))])
        biased = b.op("Add", [hidden, b.stored(f"{count}:bias", (8,))])
        erf = b.op("Erf", [b.op("Div", [biased, root])])
        gelu = b.op("Mul", [b.op("Mul", [biased, b.op("Add", [erf, one])]), half])
        scores = b.op("Mul", [b.op("Add", [gelu, y]), b.op("Sigmoid", [b.op("Sub", [gelu, y])])])
        y = b.op("Add", [b.op("Relu", [scores]), y])
        count += 1
    return b.graph(y)


@pytest.mark.slow
def test_the_time_is_linear_in_the_ops():
    taken = {}
    for ops in (1000, 10_000):
        graph = transformer(ops)
        start = time.process_time()
        found = match_supergroups(graph)
        taken[ops] = time.process_time() - start
        assert {group.name for group in found.groups.values()} == {"RMSNorm", "Gelu", "MatMul+Add", "Mul+Relu"}
        assert found.near_misses == ()
    assert taken[10_000] < 30 * taken[1000]


@pytest.mark.parametrize("type", ["Add", "Mul", "Cast", "Where"])
def test_a_long_chain_of_one_op_is_no_trouble(type):
    count = 5000
    tensors = [Tensor("x"), *(Tensor(f"t{i}") for i in range(count))]
    ops = [Op(type, (i, i) if type in ("Add", "Mul") else (i,), (i + 1,)) for i in range(count)]
    if type == "Where":
        ops = [Op(type, (0, i, i), (i + 1,)) for i in range(count)]
    assert match_supergroups(Graph(tensors, ops, [0], [count])) == MatchResult({}, ())


def test_supergroups_are_facts():
    with pytest.raises(AttributeError):
        Supergroup((1,), "a").name = "b"  # type: ignore[misc]
    assert any_of("x", any_of(1.0)).flat[0].name == "x"
