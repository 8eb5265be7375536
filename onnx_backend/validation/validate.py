"""Validate quantized models where the usual checkers see nothing: every finding names its node and a remedy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

import onnx
from onnx import ModelProto, NodeProto

from onnx_backend.dialects.dialect import writing_of
from onnx_backend.proto.weightless import checkable
from onnx_backend.validation import pair_rules, runtime_rules, session_rules, shape_rules, type_rules, value_rules
from onnx_backend.validation.dialect_rules import dialect_findings
from onnx_backend.validation.finding import Finding, error
from onnx_backend.validation.scope import STANDARD, Scope, is_quantizer, scopes
from qsdk.core.errors import ExportError, FileFormatError
from qsdk.core.report import Report

_OF_ONNXRUNTIME = ("runtime", "kernel")  # rules on what its CPU cannot load
_SHOWN = 5  # problems that an error quotes
_Rule = Callable[[NodeProto, Scope], Iterator[Finding]]
_BOTH: tuple[_Rule, ...] = (
    type_rules.conflict,
    type_rules.quantized_type,
    type_rules.float_types,
    type_rules.node_attributes,
    shape_rules.shapes,
    value_rules.scales,
    runtime_rules.kernels,
    pair_rules.unused,
)
_RULES: Mapping[str, tuple[_Rule, ...]] = {
    "QuantizeLinear": (*_BOTH, value_rules.float_values),
    "DequantizeLinear": (*_BOTH, value_rules.grid, pair_rules.pairs),
}


def validate(model: ModelProto, *, dialect: str | None = None) -> Report:
    """Check a model's quantization, functions and branches included, and how the runtime's default level runs it.

    Args:
        model: any.
        dialect: of the runtime that is to run it; None for ONNX Runtime's CPU.

    Returns:
        Rows `node`, `rule`, `severity` (error or warning), `problem`, `remedy`; summary `errors`, `warnings`.
    """
    for_onnxruntime = dialect is None or writing_of(dialect).for_onnxruntime
    found = [item for item in _findings(model) if for_onnxruntime or item.rule not in _OF_ONNXRUNTIME]
    if not any(finding.severity == "error" for finding in found):
        found += session_rules.default_session(model) if for_onnxruntime else dialect_findings(model, str(dialect))
    errors = sum(finding.severity == "error" for finding in found)
    return Report("Validation", [asdict(f) for f in found], {"errors": errors, "warnings": len(found) - errors})


def require_readable(model: ModelProto, dialect: str) -> dict[str, list[str]]:
    """Refuse a model that the runtime of a dialect would refuse or misread.

    Returns:
        What it computes a few steps off, in words, under `computed_otherwise`; what it computes right but slowly, under
        `placement`; and what its table does not know, under `not_probed`.

    Raises:
        ExportError: names each node with its remedy.
    """
    found = list(dialect_findings(model, dialect))
    wrong = [f"{item.node or 'the model'}: {item.problem}; {item.remedy}" for item in found if item.severity == "error"]
    if wrong:
        more = f"\n... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ExportError(
            f"the dialect {dialect} cannot have this model as it is:\n" + "\n".join(wrong[:_SHOWN]) + more
        )
    facts: dict[str, list[str]] = {"computed_otherwise": [], "placement": [], "not_probed": []}
    for item in found:
        facts[item.rule if item.rule in facts else "computed_otherwise"].append(f"{item.node}: {item.problem}")
    return facts


def require_valid(model: ModelProto, where: str) -> None:
    """Refuse a model that cannot be loaded as it is.

    A model that only lacks a kernel can still be opened, read and validated, and weights of any dtype can be simulated.

    Raises:
        FileFormatError: it has errors, or the runtime is too old for it; the message names `where` and the node.
    """
    for finding in _findings(model):
        if finding.severity == "error" or finding.rule == "runtime":
            at = f", node {finding.node!r}" if finding.node else ""
            raise FileFormatError(f"{where}{at}: {finding.problem}; {finding.remedy}")


def _findings(model: ModelProto) -> Iterator[Finding]:
    known = list(scopes(model))
    found = list(runtime_rules.versions(model))
    for scope, _ in known:
        found += value_rules.stored_tensors(scope)
    if not any(finding.severity == "error" for finding in found):  # the values can be read
        for scope, nodes in known:
            for node in nodes:
                if is_quantizer(node) and len(node.input) > 1:
                    for rule in _RULES[node.op_type]:
                        found.extend(rule(node, scope))
    yield from found
    if not any(finding.severity == "error" for finding in found):
        yield from _checker(model)


def _checker(model: ModelProto) -> Iterator[Finding]:
    """Yield the error of onnx's own checker, last, because it repeats these findings without the node's name."""
    standard = all(entry.domain in STANDARD for entry in model.opset_import)
    try:
        onnx.checker.check_model(checkable(model), full_check=standard)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError, ValueError) as wrong:
        problem = " ".join(str(wrong).split())
        yield error("", "checker", problem, "export the model again, or correct it where the checker says")
