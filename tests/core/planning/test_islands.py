"""Which ops compute in the narrow float type that a rule keeps their sites in."""

import numpy as np
import pytest
from plans import embedding, matmul_network, small_network
from strategies import GraphBuilder

from qsdk import bfloat16, float16, w8a8
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.islands import ISLAND_OPS
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Plan, coverage_report, explanation


def islands(plan: Plan) -> dict[str, str]:
    return {site: decision.computes_in for site, decision in plan.decisions.items() if decision.computes_in}


@pytest.mark.parametrize("dtype", [float16, bfloat16])
def test_a_layer_whose_sites_are_narrow_computes_in_their_type(dtype):
    assert islands(make_plan(matmul_network(), w8a8().skip("fc", dtype))) == {"fc:output": dtype.name}
    assert islands(make_plan(embedding(), w8a8().skip("emb", dtype))) == {"emb:output": dtype.name}


def test_a_layer_and_its_activation_are_one_or_none():
    plan = make_plan(small_network(), w8a8().skip("conv1", float16))  # its Relu has the site of both
    assert islands(plan) == {"relu:output": "float16"}
    (row,) = (row for row in coverage_report(plan).rows if row["site"] == "relu:output")
    assert row["reason"].startswith("kept float16 by a rule, computed in float16 [")
    assert "kept float16 by a rule, computed in float16;" in explanation(plan, "relu:output")
    assert islands(make_plan(small_network(), w8a8().skip("relu", float16))) == {}  # the weight is quantized


@pytest.mark.parametrize("choice", [{"activation": float16}, {"weight": float16}, {"weight": float16, "bias": float16}])
def test_a_rule_that_leaves_a_weight_or_the_result_out_makes_no_island(choice: dict):
    assert islands(make_plan(matmul_network(), w8a8().override("fc", **choice))) == {}


def test_a_model_in_a_narrow_type_itself_has_no_island():
    b = GraphBuilder()
    x = b.input(dtype="float16")
    assert islands(make_plan(b.graph(b.relu(x, "relu")), w8a8().skip("*", float16))) == {}


def scaled(factor: float, shape: tuple[int, ...] = ()) -> Graph:
    b = GraphBuilder()
    number = b.stored(None, shape, value=np.full(shape, factor))
    return b.graph(b.op("Mul", [b.input(), number], "mul:output"))


@pytest.mark.parametrize(("factor", "exact"), [(0.5, True), (0.1, False), (1e6, False), (2.0**-24, True)])
def test_a_number_that_the_type_does_not_hold_keeps_its_op_in_float32(factor: float, exact: bool):
    for shape in ((), (1, 1)):
        assert islands(make_plan(scaled(factor, shape), w8a8().skip("mul", float16))) == (
            {"mul:output": "float16"} if exact else {}
        )


def batch_norm(variance: np.ndarray | None) -> Graph:
    b = GraphBuilder()
    ones = [b.stored(None, (4,), value=np.ones(4)) for _ in range(3)]
    read = [b.input(), *ones, b.stored(None, (4,), value=variance)]
    return b.graph(b.op("BatchNormalization", read, "bn:output"))


def test_the_parameters_of_a_batch_norm_are_narrow_if_the_type_reaches_that_far():
    rule = w8a8().override("bn", weight=float16, activation=float16)
    plan = make_plan(batch_norm(np.full(4, 0.1)), rule)
    assert islands(plan) == {"bn:output": "float16"}
    assert [d.spec.dtype for d in plan.inside if d.spec is not None] == [float16] * 4
    for variance in (np.full(4, 1e6), None):
        plan = make_plan(batch_norm(variance), rule)
        assert islands(plan) == {}
        assert {(d.spec, d.reason.partition("; ")[2]) for d in plan.inside} == {
            (None, "the result alone is rounded to float16")
        }


def written_out_norm() -> Graph:
    b = GraphBuilder()
    x = b.input(shape=(2, 8))
    squares = b.op("Mul", [x, x], "mul.0:output", (2, 8))
    mean = b.op("ReduceMean", [squares], "mean:output", (2, 1), axes=[-1], keepdims=1)
    lifted = b.op("Add", [mean, b.stored(None, (), value=1e-6)], "add:output", (2, 1))
    root = b.op("Sqrt", [lifted], "sqrt:output", (2, 1))
    return b.graph(b.op("Div", [x, root], "div:output", (2, 8)))


def test_a_norm_that_is_written_out_in_ops_stays_in_float32():
    plan = make_plan(written_out_norm(), w8a8().skip("*", float16))
    assert plan.decisions["mean:output"].reason == "inside RMSNorm"
    assert islands(plan) == {}


@pytest.mark.parametrize("op_type", ["ConvTranspose", "LSTM", "LogSoftmax", "Resize", "Custom"])
def test_ops_that_round_several_times_or_that_nobody_knows_are_no_islands(op_type: str):
    b = GraphBuilder()
    assert op_type not in ISLAND_OPS
    assert islands(make_plan(b.graph(b.op(op_type, [b.input()], "op:output")), w8a8().skip("op", float16))) == {}
