"""Constraints of a target chip on a plan: operands of MatMul, weights of norms. Facts of AIMET 2.42, but for `qnn`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from qsdk.core.config.aimet_target import GENERIC
from qsdk.core.config.config import QuantConfig
from qsdk.core.errors import ConfigError
from qsdk.core.numerics.dtypes import DTYPES, DType
from qsdk.core.numerics.spec import Spec
from qsdk.core.planning.context import ONNX_NAMES, PlanningContext
from qsdk.core.planning.plan import Decision
from qsdk.core.planning.ties import JOINS, keeps_grid


@dataclass(frozen=True)
class Hardware:
    """The constraints of a target.

    Attributes:
        as_output: norms whose weight takes the bits and the symmetry of their output.
        symmetric_if_wide: norms whose weight is symmetric if it has 16 bits, and not otherwise.
        widest_norm_weight: bits that weights of `symmetric_if_wide` have at most; None for no bound.
        second_operand: the condition on a computed second operand of MatMul: none; symmetric; symmetric and 8 bits; or,
            if it has 16 bits, symmetric beside a first operand of 16 bits.
        only_kernels: activations of 8 bits are quantized only where an integer kernel reads or writes them.
        one_table: an embedding that is an output layer too is stored once, in the blocks of that layer.
    """

    as_output: frozenset[str] = frozenset({"GroupNormalization", "InstanceNormalization", "RMSNormalization"})
    symmetric_if_wide: frozenset[str] = frozenset({"LayerNormalization", "BatchNormalization"})
    widest_norm_weight: int | None = None
    second_operand: Literal["free", "symmetric", "8 bits", "16 beside 16"] = "free"
    only_kernels: bool = False
    one_table: bool = False


_BEFORE_V73 = Hardware(widest_norm_weight=8, second_operand="8 bits")
_SINCE_V73 = Hardware(second_operand="16 beside 16")
HARDWARE = MappingProxyType(
    {GENERIC: Hardware()}
    | dict.fromkeys(("v66", "v68", "v69"), _BEFORE_V73)
    | dict.fromkeys(("v73", "v75", "v79", "v81", "v85"), _SINCE_V73)
    # what `for_dialect` asks for: the HTP rounds a second operand again unless its grid is a signed one, moved; and
    # around an op that ONNX Runtime computes in floats, a pair only takes time
    | {"qnn": Hardware(frozenset(), frozenset(), second_operand="symmetric")}
    | {"onnxruntime": Hardware(frozenset(), frozenset(), only_kernels=True)}
    | {"genai": Hardware(frozenset(), frozenset(), one_table=True)}
)


def _target_of(config: QuantConfig) -> Hardware | None:
    """Return the constraints of the target that a config names, in any case; an unknown one is a ConfigError."""
    if config.hardware is None:
        return None
    if config.hardware.lower() not in HARDWARE:
        raise ConfigError(f"unknown hardware {config.hardware!r}; known are {', '.join(HARDWARE)}")
    return HARDWARE[config.hardware.lower()]


def only_kernels(config: QuantConfig) -> bool:
    """Return whether activations of 8 bits are quantized only where an integer kernel reads or writes them."""
    target = _target_of(config)
    return target is not None and target.only_kernels


def has_one_table(config: QuantConfig) -> bool:
    """Return whether an embedding that is an output layer too is stored once, in the blocks of that layer."""
    target = _target_of(config)
    return target is not None and target.one_table


def constrain_matmuls(context: PlanningContext, activations: Mapping[int, Decision]) -> dict[int, Decision]:
    """Return the activations with the operands of every MatMul as the target needs them; ties are kept."""
    target = _target_of(context.config)
    result, members = dict(activations), dict[str, list[int]]()
    for tensor, decision in activations.items():
        members.setdefault(decision.encoding_site, []).append(tensor)
    if context.config.exact_weights is not None:
        _unsign_second_operands(context, result, members)
    if target is None or target.second_operand == "free":
        return result
    # later ops first: a raised operand may be the second one of an earlier MatMul, and then raises another
    waiting = [index for index, op in enumerate(context.graph.ops) if op.type == "MatMul"]
    changed = True
    while changed:
        changed = False
        for index in reversed(waiting):
            changed |= _constrain(context, index, result, members, target)
    return result


def _unsign_second_operands(
    context: PlanningContext, decisions: dict[int, Decision], members: Mapping[str, list[int]]
) -> None:
    """Make second operands of products, which may hold any codes, uint8: the kernels of int8 add pairs in 16 bits.

    Keys and values of a cache keep the dtype in which files take them: what stands between makes them unsigned.
    """
    for op in context.graph.ops:
        homes = [quantized_at(context, t, decisions) for t in op.inputs] if op.type == "MatMul" else []
        specs = [None if home is None else decisions[home].spec for home in homes]
        if not homes or any(spec is None or not spec.dtype.is_integer or spec.dtype.bits != 8 for spec in specs):
            continue
        home, spec = homes[1], specs[1]
        assert home is not None
        assert spec is not None
        shared = members[decisions[home].encoding_site]
        cached = context.config.has_kv_cache and any(decisions[tensor].kind == "input" for tensor in shared)
        if spec.dtype.signed and not cached:
            why = "8-bit kernels are exact with it on every processor"
            _set_spec(decisions, shared, replace(spec, dtype=DTYPES["uint8"]), why)


def _constrain(
    context: PlanningContext,
    matmul: int,
    decisions: dict[int, Decision],
    members: Mapping[str, list[int]],
    target: Hardware,
) -> bool:
    homes = [quantized_at(context, tensor, decisions) for tensor in context.graph.ops[matmul].inputs]
    specs = [None if home is None else decisions[home].spec for home in homes]
    if len(homes) != 2 or any(spec is None or not spec.dtype.is_integer for spec in specs):
        return False
    first, second = specs
    assert first is not None
    assert second is not None
    if target.second_operand in ("8 bits", "symmetric"):
        bits = 8 if target.second_operand == "8 bits" else second.dtype.bits
        wanted = [(homes[1], replace(second, dtype=_with_bits(second.dtype, bits), symmetric=True))]
    elif second.dtype.bits == 16:
        wanted = [(homes[1], replace(second, symmetric=True))]
        if len({decisions[home].encoding_site for home in homes if home is not None}) == 1:
            first = wanted[0][1]  # one encoding for both
        wanted.append((homes[0], replace(first, dtype=_with_bits(first.dtype, 16))))
    else:
        return False
    changed = False
    for home, spec in wanted:
        if home is not None and decisions[home].spec != spec:
            _set_spec(
                decisions,
                members[decisions[home].encoding_site],
                spec,
                f"a MatMul of {context.config.hardware} needs it",
            )
            changed = True
    return changed


def quantized_at(context: PlanningContext, tensor: int | None, decisions: Mapping[int, Decision]) -> int | None:
    """Return the tensor whose encoding an operand has, its own or that of its source; None if it is stored."""
    current = tensor
    while current is not None and current in decisions and not decisions[current].quantized:
        made_by = context.graph.producer.get(current)
        op = None if made_by is None else context.graph.ops[made_by]
        moved = op is not None and op.type not in JOINS and keeps_grid(context.graph, op)
        current = op.inputs[0] if op is not None and moved else None
    return current if current in decisions else None


def _set_spec(decisions: dict[int, Decision], tensors: list[int], spec: Spec, why: str) -> None:
    for tensor in tensors:
        reason = decisions[tensor].reason
        note = f"{reason}; {spec.dtype}{', symmetric' if spec.symmetric else ''}: {why}"
        decisions[tensor] = replace(decisions[tensor], spec=spec, reason=note)


def constrain_norms(
    context: PlanningContext, activations: Mapping[int, Decision], stored: Mapping[int, Decision]
) -> dict[int, Decision]:
    """Return the stored tensors with the weights of norms as the target needs them."""
    target, result = _target_of(context.config), dict(stored)
    if target is None:
        return result
    for index, op in enumerate(context.graph.ops):
        group = context.groups.get(index)
        type = op.type if group is None else ONNX_NAMES.get(group.name, op.type)
        if type not in target.as_output | target.symmetric_if_wide:
            continue
        last = index if group is None else group.ops[-1]
        output = activations.get(context.graph.ops[last].outputs[0])
        for operand in context.operands[index]:
            decision = result.get(operand.root)
            if decision is None or decision.kind != "weight" or decision.spec is None:
                continue
            if decision.spec.dtype.is_integer:
                spec = _norm_weight(decision.spec, type, target, output)
                if spec != decision.spec:
                    _set_spec(result, [operand.root], spec, f"{type} on {context.config.hardware} needs it")
    return result


def _norm_weight(spec: Spec, type: str, target: Hardware, output: Decision | None) -> Spec:
    bits = max(spec.dtype.bits, 8)
    if type in target.as_output:
        made = output.spec if output is not None and output.quantized else None
        wide = made.dtype.bits if made is not None and made.dtype.is_integer else bits
        return replace(spec, dtype=_with_bits(spec.dtype, wide), symmetric=made is not None and made.symmetric)
    if target.widest_norm_weight is not None:
        bits = target.widest_norm_weight
    return replace(spec, dtype=_with_bits(spec.dtype, bits), symmetric=bits >= 16)


def _with_bits(dtype: DType, bits: int) -> DType:
    """Return the dtype of that many bits, with the sign and strictness of this one."""
    result = DTYPES[re.sub(r"\d+.*", str(bits), dtype.name)]
    return result.strict if dtype.signed and dtype.lo == -dtype.hi else result
