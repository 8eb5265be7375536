"""Validate a model for the runtime that is to run it."""

from dataclasses import asdict

from onnx import ModelProto

from onnx_backend.runtimes.onnxruntime import default_session
from onnx_backend.runtimes.registry import runtime_named
from onnx_backend.runtimes.runtime import Runtime
from onnx_backend.validation.rules import findings
from qsdk.core.config.for_dialect import AnyDialect
from qsdk.core.errors import ExportError
from qsdk.core.report import Report

_OF_ONNXRUNTIME = ("runtime", "kernel")  # rules on what its CPU cannot load
_SHOWN = 5  # problems that an error quotes


def validate(model: ModelProto, *, dialect: AnyDialect | None = None) -> Report:
    """Check a model's quantization, functions and branches included, and how the runtime of a dialect runs it.

    No dialect stands for ONNX Runtime at its default level. Returns rows `node`, `rule`, `severity` (error or warning),
    `problem`, `remedy`; summary `errors`, `warnings`.
    """
    runtime = runtime_named(dialect or "onnxruntime")
    found = [item for item in findings(model) if runtime.simulates or item.rule not in _OF_ONNXRUNTIME]
    if not any(finding.severity == "error" for finding in found):
        found += default_session(model) if runtime.simulates else runtime.findings(model)
    errors = sum(finding.severity == "error" for finding in found)
    return Report("Validation", [asdict(f) for f in found], {"errors": errors, "warnings": len(found) - errors})


def require_readable(model: ModelProto, runtime: Runtime) -> dict[str, list[str]]:
    """Refuse a model that a runtime would refuse or misread; the ExportError names each node with its remedy.

    Returns what it computes a few steps off, in words, under `computed_otherwise`; what it computes right but slowly,
    under `placement`; and what its table does not know, under `not_probed`.
    """
    found = list(runtime.findings(model))
    wrong = [f"{item.node or 'the model'}: {item.problem}; {item.remedy}" for item in found if item.severity == "error"]
    if wrong:
        more = f"\n... and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ExportError(
            f"the dialect {runtime.name} cannot have this model as it is:\n" + "\n".join(wrong[:_SHOWN]) + more
        )
    facts: dict[str, list[str]] = {"computed_otherwise": [], "placement": [], "not_probed": []}
    for item in found:
        facts[item.rule if item.rule in facts else "computed_otherwise"].append(f"{item.node}: {item.problem}")
    return facts
