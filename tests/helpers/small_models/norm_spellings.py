"""Norms in every spelling, and whether a group takes them whole."""

from onnx_backend.opening.read_graph import read_graph
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.patterns.supergroup import MatchResult

ALL = {"x", "gamma", "y"}


def found(model) -> MatchResult:
    return match_supergroups(read_graph(model))


def _groups(model):
    return list({group.ops: group for _, group in sorted(found(model).groups.items())}.values())


def assert_whole(model, name: str) -> None:
    """One group holds every op that computes on x."""
    (group,) = _groups(model)
    assert group.name == name
    assert len(group.ops) == len(read_graph(model).ops)
    assert found(model).near_misses == ()
