"""The rows of a validation report."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A row of a validation report.

    Attributes:
        node: the node's name (a path through functions and branches), else its first output's; a stored tensor's name
            where no node is at fault; "" for the model.
        rule: output_dtype, dtype, opset, shape, scale, zero_point, pair, grid, stored, unused, runtime,
            kernel, default_session, session, dialect, sizes, clip, placement, not_probed, speed or checker.
        severity: error, warning, or note, of what is right and takes more time than it need.
        problem: what is wrong.
        remedy: what to do.
    """

    node: str
    rule: str
    severity: Literal["error", "warning", "note"]
    problem: str
    remedy: str


def error(node: str, rule: str, problem: str, remedy: str) -> Finding:
    """Return a finding that makes the model invalid, or its meaning contradictory."""
    return Finding(node, rule, "error", problem, remedy)


def warning(node: str, rule: str, problem: str, remedy: str) -> Finding:
    """Return a finding in a valid model: the runtime cannot run it (`runtime`, `kernel`), or it is hardly intended."""
    return Finding(node, rule, "warning", problem, remedy)


def note(node: str, rule: str, problem: str, remedy: str) -> Finding:
    """Return a finding in a model that is right and takes more time than it need."""
    return Finding(node, rule, "note", problem, remedy)
