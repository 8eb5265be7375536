"""Which ops compute in float16 or bfloat16 inside a float32 model, because a rule keeps them in that type.

An island is an op of the model (a module of torch.nn, a function, an ONNX node) whose result is at a site of a narrow
float type, and whose parameters are too. Its inputs may be anything: what comes from outside is cast in front of it.
"""

from collections.abc import Mapping
from dataclasses import replace

import ml_dtypes
import numpy as np
import numpy.typing as npt

from qsdk.core.graph.graph import Graph
from qsdk.core.numerics.dtypes import dtype_named
from qsdk.core.numerics.spec import Spec
from qsdk.core.patterns.chains import is_chain
from qsdk.core.patterns.supergroup import Supergroup
from qsdk.core.planning.operands import operands_of
from qsdk.core.planning.plan import Decision, Plan

_TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
#: The ops that torch computes in float32 and rounds once where its tensors are float16 or bfloat16, so that a file can
#: be computed alike. torch rounds several times in ConvTranspose, InstanceNormalization, LogSoftmax and Softsign; the
#: others that are missing have more than data among their float inputs, or kernels in few places.
ISLAND_OPS = frozenset(
    {"Conv", "Gemm", "MatMul", "BatchNormalization", "LayerNormalization", "RMSNormalization", "GroupNormalization"}
    | {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sqrt", "Exp", "Reciprocal", "Max", "Min", "Clip", "Where", "Relu"}
    | {"LeakyRelu", "PRelu", "Elu", "Selu", "Celu", "Gelu", "Sigmoid", "HardSigmoid", "HardSwish", "Swish", "Mish"}
    | {"Softplus", "Tanh", "Erf", "Softmax", "AveragePool", "GlobalAveragePool", "MaxPool", "GlobalMaxPool"}
    | {"ReduceMean", "ReduceMax", "ReduceMin", "Identity", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze"}
    | {"Slice", "Split", "Concat", "Gather", "Expand", "Tile", "Pad"}
)


def with_islands(
    graph: Graph, groups: Mapping[int, Supergroup], decisions: Mapping[int, Decision]
) -> dict[int, Decision]:
    """Return the decisions by tensor, in which the results of islands say the type that their op computes in.

    Parameters without a site (those of a BatchNorm) are kept in a narrow type only where an island reads them. A group
    that the model writes out in several ops is no island: the squares inside of a norm overflow float16, so it computes
    in float32 and is rounded at its end. A layer with its activation is one.
    """
    result = dict(decisions)
    read: set[int] = set()
    for op in range(len(graph.ops)):
        dtype = _wanted(graph, groups, decisions, op)
        units = _units(graph, groups, op) if dtype else []
        parameters = [_parameters(graph, unit, decisions, dtype) for unit in units]
        if dtype and None not in parameters:
            read.update(*(found for found in parameters if found is not None))
            for tensor in graph.ops[op].outputs:
                result[tensor] = replace(result[tensor], computes_in=dtype)
    for tensor, decision in decisions.items():
        unsited = graph.tensors[tensor].site is None and decision.spec is not None
        if unsited and graph.tensors[tensor].constant and tensor not in read:
            assert decision.spec is not None
            reason = f"a parameter of {decision.op_type} that has no integer form of its own"
            alone = f"; the result alone is rounded to {decision.spec.dtype}"
            result[tensor] = replace(decision, spec=None, rule="default", reason=reason + alone)
    return result


def with_given_islands(graph: Graph, plan: Plan) -> Plan:
    """Return a plan that follows given encodings, with the islands that an export of these sites has.

    No file says what becomes of parameters without a site: they are taken to be of the type of their op's result.
    """
    decisions = {graph.sites[site]: decision for site, decision in plan.decisions.items()}
    if not any(spec.dtype.name in _TYPES for decision in decisions.values() if (spec := decision.spec) is not None):
        return plan
    for op, held in enumerate(graph.ops):
        dtype = _wanted(graph, plan.groups, decisions, op)
        for tensor in (held.inputs[at] for at in statistics_at(graph, op)) if dtype else ():
            if tensor is not None:
                spec = Spec(dtype_named(dtype))
                decisions[tensor] = Decision(f"({graph.tensors[tensor].name})", held.type, "weight", spec, "")
    found = with_islands(graph, plan.groups, decisions)
    return replace(plan, decisions={site: found[graph.sites[site]] for site in plan.decisions})


def _units(graph: Graph, groups: Mapping[int, Supergroup], op: int) -> list[tuple[int, ...]]:
    """Return the units of an op and of the others in its chain: all of them compute in the narrow type, or none."""
    members = groups[op].ops if op in groups and is_chain(groups[op].name) else (op,)
    sited = (member for member in members if any(graph.tensors[t].site for t in graph.ops[member].outputs))
    return [unit_of(graph, member) for member in sited]


def unit_of(graph: Graph, last: int) -> tuple[int, ...]:
    """Return the ids of the ops that an op of the model is exported as, given the last one.

    They lie behind the nearest sites; what only turns a stored tensor round is among them.
    """
    found: set[int] = set()
    waiting = [last]
    while waiting:
        op = waiting.pop()
        found.add(op)
        inside = (t for t in float_inputs(graph, op).values() if graph.tensors[t].site is None and t in graph.producer)
        waiting += [graph.producer[tensor] for tensor in inside if graph.producer[tensor] not in found]
    return tuple(sorted(found))


def float_inputs(graph: Graph, op: int) -> dict[int, int]:
    """Return position -> tensor of the floating-point inputs of an op."""
    inputs = enumerate(graph.ops[op].inputs)
    return {at: tensor for at, tensor in inputs if tensor is not None and graph.tensors[tensor].is_float}


def statistics_at(graph: Graph, op: int) -> frozenset[int]:
    """Return the positions at which an op reads parameters of a norm that have no site."""
    roots = {operand.tensor for operand in operands_of(graph, op) if operand.role == "statistic"}
    unsited = (at for at, tensor in float_inputs(graph, op).items() if graph.tensors[tensor].site is None)
    return frozenset(at for at in unsited if graph.ops[op].inputs[at] in roots)


def _wanted(graph: Graph, groups: Mapping[int, Supergroup], decisions: Mapping[int, Decision], op: int) -> str:
    """Return the narrow type of all results of an op, or "" where there is none."""
    results = graph.ops[op].outputs
    if not results or any(t not in decisions or graph.tensors[t].site is None for t in results):
        return ""
    group = groups.get(op)
    if group is not None and len(group.ops) > 1:
        inner = [t for member in group.ops[:-1] for t in graph.ops[member].outputs]
        if is_chain(group.name):
            results = graph.ops[group.ops[-1]].outputs
        elif any(graph.tensors[t].site is not None for t in inner):
            return ""
    kept = [decisions[t].spec for t in results if t in decisions and graph.tensors[t].dtype == "float32"]
    types = {"" if spec is None else spec.dtype.name for spec in kept}
    (dtype,) = types if len(types) == 1 and len(kept) == len(results) else ("",)
    return dtype if dtype in _TYPES else ""


def _parameters(
    graph: Graph, unit: tuple[int, ...], decisions: Mapping[int, Decision], dtype: str
) -> frozenset[int] | None:
    """Return the parameters without a site that a unit reads in a narrow type; None if it cannot compute in it."""
    found: set[int] = set()
    for op in unit:
        held = graph.ops[op]
        if held.type not in ISLAND_OPS or held.domain not in ("", "ai.onnx"):
            return None
        inner = [t for t in held.outputs if graph.tensors[t].site is None and graph.constant_root(t) is None]
        if any(set(graph.consumers[t]) - set(unit) or t in graph.output_set for t in inner):
            return None
        statistics = statistics_at(graph, op)
        for at, tensor in float_inputs(graph, op).items():
            facts = graph.tensors[tensor]
            if facts.dtype != "float32":
                return None
            decision = decisions.get(tensor)
            kept = decision is not None and decision.spec is not None and decision.spec.dtype.name == dtype
            if at in statistics:
                if not kept or not _is_finite(facts.value, dtype):
                    return None
                found.add(tensor)
            elif graph.constant_root(tensor) is None or (facts.site is None and not facts.constant):
                continue  # a computed tensor, or a view that the unit computes
            elif not (kept and facts.site is not None) and not _is_exact(facts.value, dtype):
                return None
    return frozenset(found)


def _is_finite(value: npt.NDArray[np.generic] | None, dtype: str) -> bool:
    with np.errstate(over="ignore"):
        return value is not None and bool(np.isfinite(np.asarray(value).astype(_TYPES[dtype]).astype(np.float32)).all())


def _is_exact(value: npt.NDArray[np.generic] | None, dtype: str) -> bool:
    """Return whether a narrow type holds a constant as it is: torch rounds numbers for some ops and not for others."""
    if value is None:
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(np.asarray(value).astype(_TYPES[dtype]).astype(np.float32), value)
