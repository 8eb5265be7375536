"""Plans of random graphs: what they may depend on, and what an output changes."""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GraphBuilder

from qsdk import QuantConfig, load_config, w4a8, w8a8, w8a16
from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import PerChannel
from qsdk.core.planning.activations import FIXED_RANGES
from qsdk.core.planning.context import PlanningContext
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Decision
from qsdk.core.planning.ties import find_assemblies, keeps_grid
from qsdk.core.site import owner_of, port_of

UNARY = ("Relu", "Softmax", "Sigmoid", "Tanh", "Sin", "MaxPool", "AveragePool", "Reshape", "Transpose", "Identity")
BINARY = ("Add", "Mul", "Sub", "Concat", "MatMul")
BLOCKS = ("Conv", "ConvBias", "Linear", "Clip", "Pad", "SiLU", "RMSNorm", "Shared")
HOSTILE = [
    *("hidden_output", "hidden_output_1", "hidden_output_2", "hidden_outpu", "output", "output_", "x", "x_updated"),
    *("/model/layers.0/Add", "/model/layers.0/Add_output_0", "a:b", "a:b:output", "[0]", "*", "?", ".", "..", "/", " "),
    *("naïve", "層", "\N{SNOWMAN}", "self", "weight", "x.weight", "0", "-1", "None", "\t", "a@1", "a@1.b", "'q'"),
]
CONFIGS: dict[str, QuantConfig] = {
    "w8a8": w8a8(),
    "w4a8 blocks": w4a8(block_size=2),
    "by op type": w8a8().override(op_type="Conv", weight="int4", optional=True).skip(op_type="Tanh", optional=True),
    "by shape": w8a8().override(shape=(None, 4, None, None), activation="uint16", optional=True),
    "tied": replace(w8a8(), tie=True),
    "one by one": replace(w8a8(), supergroup=False),
    "v73": load_config("htp_v73", base=w8a16()),
    "v68": load_config("htp_v68", base=w8a16()),
}


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs of 1 to 14 blocks, of which some outputs are tensors that others read too."""
    b = GraphBuilder()
    made = [b.input("x0", (1, 4, 8, 8)), b.input("x1", (1, 4, 8, 8))]
    stored: list[int] = []
    for k in range(draw(st.integers(1, 14))):
        type = draw(st.sampled_from((*UNARY, *BINARY, *BLOCKS)))
        # most blocks read what was made last, so that long chains arise
        x, y = (made[-1 - draw(st.integers(0, min(3, len(made) - 1)))] for _ in range(2))
        if type in UNARY:
            made.append(b.op(type, [x], f"n{k}:output"))
        elif type in BINARY:
            made.append(b.op(type, [x, y], f"n{k}:output"))
        else:
            made.append(_block(b, type, x, f"n{k}", stored, draw(st.booleans())))
    read = {t for op in b.ops for t in op.inputs}
    return b.graph(*[t for t in made if t not in read])


def _block(b: GraphBuilder, type: str, x: int, owner: str, stored: list[int], flag: bool) -> int:
    site = f"{owner}:output"
    match type:
        case "Conv" | "ConvBias":
            return b.conv(x, owner, bias=type == "ConvBias")
        case "Linear":
            operands = [x, b.stored(f"{owner}:weight", (8, 8))]
            product = b.op("MatMul", operands, f"{owner}/matmul.0:output" if flag else None)
            return b.op("Add", [product, b.stored(f"{owner}:bias", (8,))], site)
        case "Clip":
            return b.op("Clip", [x, *(b.stored(None, (), value=v) for v in (0.0, 6.0))], site)
        case "Pad":
            pads = b.stored(None, (8,), value=[1] * 8, dtype="int64")
            return b.op("Pad", [x, pads, b.stored(None, (), value=0.0 if flag else 9.0)], site)
        case "SiLU":
            return b.op("Mul", [x, b.op("Sigmoid", [x], f"{owner}/sigmoid.0:output")], site)
        case "RMSNorm":
            mean = b.op("ReduceMean", [b.op("Mul", [x, x], f"{owner}/mul.0:output")], None, axes=[-1], keepdims=1)
            root = b.op("Sqrt", [b.op("Add", [mean, b.stored(None, (), value=1e-5)])], f"{owner}/sqrt.0:output")
            return b.op("Mul", [b.op("Div", [x, root]), b.stored(f"{owner}:weight", (8,))], site)
    if not stored:
        stored.append(b.stored(f"{owner}:weight", (8, 8)))
    return b.op("MatMul", [x, b.op("Identity", [stored[0]], f"{owner}:table", (8, 8))], site)


@st.composite
def new_names(draw: st.DrawFn, graph: Graph) -> Graph:
    """The same graph, its labels drawn from hostile ones (twice the same, too), its owners renamed one to one."""
    owners = list(dict.fromkeys(owner_of(site) for site in graph.sites))
    fresh = draw(
        st.lists(
            st.sampled_from(HOSTILE) | st.text(max_size=4), min_size=len(owners), max_size=len(owners), unique=True
        )
    )
    named = dict(zip(owners, fresh, strict=True))
    labels = st.sampled_from(["", *HOSTILE])
    tensors = [
        replace(t, name=draw(labels), site=None if t.site is None else f"{named[owner_of(t.site)]}:{port_of(t.site)}")
        for t in graph.tensors
    ]
    ops = [replace(op, name=draw(labels)) for op in graph.ops]
    return Graph(tensors, ops, graph.inputs, graph.outputs)


def by_tensor(graph: Graph, config: QuantConfig) -> dict[int, tuple[object, ...]]:
    """Tensor id -> what is decided, with other sites as tensor ids and no name anywhere."""
    plan = make_plan(graph, config)
    assert list(plan.decisions) == [t.site for t in graph.tensors if t.site in plan.decisions]
    found = {graph.sites[site]: decision for site, decision in plan.decisions.items()}
    bare = [i for i, t in enumerate(graph.tensors) if t.is_float and t.site is None]
    assert len(bare) == len(plan.inside)
    found |= dict(zip(bare, plan.inside, strict=True))
    return {tensor: without_names(graph, decision) for tensor, decision in found.items()}


def without_names(graph: Graph, d: Decision) -> tuple[object, ...]:
    tied = None if d.tied_to is None else graph.sites[d.tied_to]
    bias_of = None if d.bias_of is None else tuple(graph.sites[site] for site in d.bias_of)
    says = ("shares the encoding of ", "the same parameter as ", "a view of ")
    # a near miss names what is in the way, and a supergroup that an output splits becomes one
    reason = re.sub(r" \(\w+-like, not fused: .*", "", next((s for s in says if d.reason.startswith(s)), d.reason))
    return d.kind, d.spec, d.op_type, d.state, tied, d.passes_through, bias_of, d.shape, reason, d.rule


@pytest.mark.slow
@settings(max_examples=150)
@given(data=st.data(), name=st.sampled_from(sorted(CONFIGS)))
def test_a_plan_does_not_depend_on_names(data: st.DataObject, name: str):
    config, graph = CONFIGS[name], data.draw(graphs())
    renamed = data.draw(new_names(graph))
    assert by_tensor(graph, config) == by_tensor(renamed, config)


@st.composite
def with_more_outputs(draw: st.DrawFn) -> tuple[Graph, Graph, set[int]]:
    """A graph, the same one with further tensors as outputs, and these tensors."""
    graph = draw(graphs())
    made = [t for op in graph.ops for t in op.outputs if graph.constant_root(t) is None]
    inner = [t for t in made if t not in graph.output_set and graph.tensors[t].site is not None]
    more = draw(st.lists(st.sampled_from(inner), min_size=1, max_size=3, unique=True)) if inner else []
    order = draw(st.permutations([*graph.outputs, *more]))
    return graph, Graph(graph.tensors, graph.ops, graph.inputs, tuple(order)), set(more)


@settings(max_examples=60)
@pytest.mark.parametrize("name", ["w8a8", "tied", "by op type"])
@given(drawn=with_more_outputs())
def test_an_output_changes_nothing_but_what_is_documented(name: str, drawn: tuple[Graph, Graph, set[int]]):
    config, (graph, other, more) = CONFIGS[name], drawn
    before, after = by_tensor(graph, config), by_tensor(other, config)
    touched = reach_of_outputs(graph, other, config, before, after, more)
    for tensor in before:
        if tensor in more:
            assert after[tensor][0] == "output"
            assert not str(after[tensor][8]).startswith("inside ")
        if tensor not in touched:
            kind = after[tensor][0] if tensor in more else before[tensor][0]
            assert after[tensor] == (kind, *before[tensor][1:])


def reach_of_outputs(
    graph: Graph,
    other: Graph,
    config: QuantConfig,
    before: dict[int, tuple[object, ...]],
    after: dict[int, tuple[object, ...]],
    more: set[int],
) -> set[int]:
    """What further outputs may change: supergroups they split, assemblies, their ties, and the biases that follow."""
    old, new = PlanningContext(graph, config), PlanningContext(other, config)
    split = {op for op, group in old.groups.items() if more & {t for m in group.ops[:-1] for t in graph.ops[m].outputs}}
    split |= {op for group in new.groups.values() if split & set(group.ops) for op in group.ops}
    changed = {op for op in range(len(graph.ops)) if members(old, op) != members(new, op)}
    assert changed <= split
    reached = {t for op in split for t in graph.ops[op].outputs} | assembled(old).symmetric_difference(assembled(new))
    growing = True
    while growing:
        size = len(reached)
        for found in (before, after):
            home = {tensor: tensor if facts[4] is None else facts[4] for tensor, facts in found.items()}
            homes = {home[tensor] for tensor in reached if tensor in home}
            reached |= {tensor for tensor in home if home[tensor] in homes}
        growing = len(reached) > size
    for found in (before, after):
        reached |= {t for t, facts in found.items() if isinstance(facts[6], tuple) and reached & set(facts[6])}
    return reached | {operand.root for op in split for operand in old.operands[op]}


def members(context: PlanningContext, op: int) -> tuple[int, ...]:
    return context.groups[op].ops if op in context.groups else (op,)


def assembled(context: PlanningContext) -> set[int]:
    graph, choice = context.graph, context.config.tie
    movers = {i: choice for i, op in enumerate(graph.ops) if op.outputs and keeps_grid(graph, op)}
    return set(find_assemblies(graph, movers, FIXED_RANGES))


@pytest.mark.slow
@given(drawn=with_more_outputs())
def test_layers_stay_per_channel_whatever_leaves_the_model(drawn: tuple[Graph, Graph, set[int]]):
    graph = drawn[1]
    for decision in make_plan(graph, w8a8()).decisions.values():
        if decision.op_type == "Conv" and decision.kind == "weight":
            assert decision.spec is not None
            assert decision.spec.granularity == PerChannel(0)


def chain(rename: Callable[[int], str]) -> Graph:
    """Five convolutions of which the inner three leave the model."""
    b = GraphBuilder()
    y, made = b.input(), []
    for i in range(5):
        y = b.conv(y, rename(i))
        made.append(y)
    return b.graph(y, *made[1:4])


def test_owners_that_are_prefixes_of_others_keep_every_layer_per_channel():
    names = ["hidden_output", "hidden_output_1", "hidden_output_2", "hidden_output_1_2", "hidden"]
    hostile, plain = (by_tensor(chain(name), w8a8()) for name in (lambda i: names[i], lambda i: f"conv{i}"))
    assert hostile == plain
    plan = make_plan(chain(lambda i: names[i]), w8a8())
    assert {d.spec.granularity for d in plan.decisions.values() if d.kind == "weight" and d.spec} == {PerChannel(0)}
    assert all(d.state == "quantized" for d in plan.decisions.values())


def test_a_rule_for_one_of_two_names_with_the_same_start_reaches_that_one_alone():
    graph = chain(lambda i: "hidden_output" + (f"_{i}" if i else ""))
    config = w8a8().override("hidden_output", weight="int4").override("hidden_output_2:*", weight="int16")
    plan = make_plan(graph, config)
    found = [d.spec.dtype.name for d in plan.decisions.values() if d.kind == "weight" and d.spec]
    assert found == ["int4", "int8", "int16", "int8", "int8"]
