"""Small graphs that tests plan, and looks at their plans."""

from strategies import GraphBuilder

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.plan import Decision, Plan


def site(plan: Plan, name: str) -> Decision:
    return plan.decisions[name]


def spec_of(plan: Plan, name: str) -> Spec:
    spec = plan.decisions[name].spec
    assert spec is not None, plan.decisions[name]
    return spec


def inside(plan: Plan, op_type: str) -> list[str]:
    return [d.reason for d in plan.inside if d.op_type == op_type]


def small_network() -> Graph:
    """Conv-Relu-Conv-Flatten-Linear, with biases."""
    b = GraphBuilder()
    x = b.input()
    y = b.relu(b.conv(x, "conv1", bias=True, site=False), "relu")
    y = b.conv(y, "conv2", outputs=5, bias=True)
    y = b.op("Flatten", [y], "flatten:output", (1, 320))
    w, c = b.stored("fc:weight", (10, 320)), b.stored("fc:bias", (10,))
    return b.graph(b.op("Gemm", [y, w, c], "fc:output", (1, 10), transB=1))


def matmul_network(owner: str = "fc", *, bias_shape: tuple[int, ...] = (7,), bias_first: bool = False) -> Graph:
    b = GraphBuilder()
    x = b.input(shape=(2, 6))
    y = b.op("MatMul", [x, b.stored(f"{owner}:weight", (6, 7))], None, (2, 7))
    bias = b.stored(f"{owner}:bias", bias_shape)
    operands = [bias, y] if bias_first else [y, bias]
    return b.graph(b.op("Add", operands, f"{owner}:output", (2, 7)))


def embedding() -> Graph:
    b = GraphBuilder()
    ids = b.input("ids", (2,), "int64")
    y = b.op("Gather", [b.stored("emb:weight", (50, 8)), ids], "emb:output", (2, 8))
    return b.graph(b.op("MatMul", [y, b.stored("fc:weight", (8, 3))], "fc:output", (2, 3)))
