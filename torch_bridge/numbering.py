"""Numbering of calls: the calls of a running model are named as in its trace.

A trace makes calls that the model leaves out when it runs: models drop a mask of ones, unless they are traced.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsdk.core.site import owner_of
from torch_bridge.prepare import PreparedModel, record_sites
from torch_bridge.sites.calls import Frame, RecordedCall, source_line
from torch_bridge.tracing.trace import Trace, trace_marked

Groups = Mapping[
    str, Sequence[str]
]  # calls of one op or module in one call of a module -> source lines, in their order


class NumbersByLine:
    """The numbers of calls by their source line, for the groups of calls of which a run leaves some out.

    Args:
        groups: the calls of the trace.
        others: the calls of a run, which count where they are made from lines that the trace does not have.
    """

    def __init__(self, groups: Groups, others: Groups | None = None) -> None:
        self._numbers: dict[str, dict[str, list[int]]] = {}
        self._count: dict[str, int] = {}  # calls in a group
        for calls in (groups, others or {}):
            for group, places in calls.items():
                known = self._numbers.setdefault(group, {})
                before = frozenset(known)
                for number, where in enumerate(places):
                    if where not in before:
                        known.setdefault(where, []).append(number)
                self._count[group] = max(self._count.get(group, 0), len(places))

    def name(self, call: str, frame: Frame | None, *, op: bool) -> str:
        """Return the name of a call in the trace; a call at an unknown line gets a number that no other has."""
        group = _group_of(call, op=op)
        known = self._numbers.get(group)
        if known is None or frame is None or (not op and self._count[group] == 1):
            return call
        where = source_line()
        numbers = known.get(where, [])
        seen = f"{group} at {where}" if numbers else f"{group} elsewhere"
        nth = frame.count_op(seen) if op else frame.count_call(seen)
        number = numbers[nth] if nth < len(numbers) else self._count[group] + nth
        if op:
            return f"{group}.{number}"
        return f"{group}@{number}" if number else group


def trace_and_number(prepared: PreparedModel) -> tuple[Trace, PreparedModel]:
    """Trace a prepared model; return the trace, and the model with its sites named as in the trace.

    Raises:
        ExportError: torch cannot trace the model.
    """
    runtime = prepared.runtime
    runtime.recorded_calls = []
    try:
        traced = trace_marked(prepared.model, runtime, prepared.example, prepared.outputs)
    finally:
        recorded, runtime.recorded_calls = runtime.recorded_calls, None
    # torch may run a model more than once to trace it
    last = max((index for index, call in enumerate(recorded) if not call.name), default=0)
    traced_groups = _group_calls(recorded[last:])
    runtime.numbers_by_line = NumbersByLine(traced_groups, _group_calls(prepared.calls))
    shifted = _groups_with_gaps(_group_calls(prepared.calls), traced_groups)
    if not shifted:
        return traced, prepared
    views, runtime.views = runtime.views, frozenset()  # their names are about to change
    before, _ = record_sites(prepared.model, runtime, prepared.example)
    runtime.call_names, runtime.tracks_calls = NumbersByLine(shifted), True
    lines = runtime.source_lines.items()  # of these groups they decide the number already, which is another one now
    runtime.source_lines = {
        call: line for call, line in lines if not {_group_of(call, op=True), _group_of(call, op=False)} & shifted.keys()
    }
    sites, _ = record_sites(prepared.model, runtime, prepared.example)
    moved = dict(zip(before, sites, strict=True))
    calls = {owner_of(one): owner_of(other) for one, other in moved.items()}
    runtime.views = frozenset(moved.get(site, site) for site in views)
    runtime.write_back = frozenset(moved.get(site, site) for site in runtime.write_back)
    runtime.overwritten = frozenset(moved.get(site, site) for site in runtime.overwritten)
    named = {call: calls.get(name, name) for call, name in runtime.training_names.items()}
    runtime.training_names = {**calls, **named}
    return traced, replace(prepared, eager_sites=tuple(dict.fromkeys(sites)))


def _group_of(call: str, *, op: bool) -> str:
    return call.rpartition(".")[0] if op else re.sub(r"@\d+$", "", call)


def _group_calls(calls: Sequence[RecordedCall]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for call in calls:
        result.setdefault(_group_of(call.name, op=call.op), []).append(call.source_line)
    return result


def _groups_with_gaps(ran: Groups, traced: Groups) -> dict[str, Sequence[str]]:
    """Return the groups of which the trace makes all calls that a run ran_lines, and others at other lines."""
    result = {}
    for group, lines in traced.items():
        ran_lines = ran.get(group, ())
        has_gaps = 0 < len(ran_lines) < len(lines) and all(
            ran_lines.count(where) <= lines.count(where) for where in ran_lines
        )
        if has_gaps and len(set(lines)) > 1:
            result[group] = lines
    return result
