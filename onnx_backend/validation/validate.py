"""Validate quantized models where the usual checkers see nothing: every finding names its node and a remedy."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

import onnx
from onnx import ModelProto, NodeProto

from onnx_backend.proto.weightless import checkable
from onnx_backend.validation import pair_rules, runtime_rules, session_rules, shape_rules, type_rules, value_rules
from onnx_backend.validation.finding import Finding, error
from onnx_backend.validation.scope import STANDARD, Scope, is_quantizer, scopes
from qsdk.core.errors import FileFormatError
from qsdk.core.report import Report

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


def validate(model: ModelProto) -> Report:
    """Check a model's quantization, functions and branches included, and how the runtime's default level runs it.

    Returns:
        Rows `node`, `rule`, `severity` (error or warning), `problem`, `remedy`; summary `errors`, `warnings`.
    """
    found = list(_findings(model))
    if not any(finding.severity == "error" for finding in found):
        found += session_rules.default_session(model)
    errors = sum(finding.severity == "error" for finding in found)
    return Report("Validation", [asdict(f) for f in found], {"errors": errors, "warnings": len(found) - errors})


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
