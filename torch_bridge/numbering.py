"""Numbering: the calls of a model that runs are called what its trace calls them, also where it leaves some out.

A trace makes calls that the model leaves out when it runs: models drop a mask of ones, unless they are traced.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qsdk.core.site import owner_of
from torch_bridge.prepare import Prepared, visited
from torch_bridge.sites.call_scopes import Frame
from torch_bridge.sites.source_lines import Call, place
from torch_bridge.tracing.trace import Traced, marked_onnx

Groups = Mapping[str, Sequence[str]]  # calls of one op or module in one call of a module -> places, in their order


class Numbers:
    """The numbers of calls by their place, for the groups of calls of which a run leaves some out."""

    def __init__(self, groups: Groups) -> None:
        self._numbers: dict[str, dict[str, list[int]]] = {}
        for group, places in groups.items():
            for number, where in enumerate(places):
                self._numbers.setdefault(group, {}).setdefault(where, []).append(number)

    def name(self, call: str, frame: Frame | None, *, op: bool) -> str:
        """The name of a call in the trace; a call at an unknown place has a number that no other has."""
        group = _group(call, op=op)
        known = self._numbers.get(group)
        if known is None or frame is None:
            return call
        where = place()
        numbers = known.get(where, [])
        seen = f"{group} at {where}" if numbers else f"{group} elsewhere"
        nth = frame.next(seen) if op else frame.next_call(seen)
        number = numbers[nth] if nth < len(numbers) else sum(map(len, known.values())) + nth
        if op:
            return f"{group}.{number}"
        return f"{group}@{number}" if number else group


def traced_and_numbered(prepared: Prepared) -> tuple[Traced, Prepared]:
    """Trace a prepared model; gives the trace, and the model with its sites named as there.

    Raises:
        ExportError: torch cannot trace the model.
    """
    runtime = prepared.runtime
    runtime.noted = []
    try:
        traced = marked_onnx(prepared.model, runtime, prepared.example, prepared.outputs)
    finally:
        noted, runtime.noted = runtime.noted, None
    # torch may run a model more than once to trace it
    last = max((index for index, call in enumerate(noted) if not call.name), default=0)
    shifted = _shifted(_grouped(prepared.calls), _grouped(noted[last:]))
    if not shifted:
        return traced, prepared
    views, runtime.views = runtime.views, frozenset()  # they go by the names that change
    before, _ = visited(prepared.model, runtime, prepared.example)
    runtime.numbers, runtime.placed = Numbers(shifted), True
    sites, _ = visited(prepared.model, runtime, prepared.example)
    moved = dict(zip(before, sites, strict=True))
    calls = {owner_of(one): owner_of(other) for one, other in moved.items()}
    runtime.views = frozenset(moved.get(site, site) for site in views)
    runtime.write_back = frozenset(moved.get(site, site) for site in runtime.write_back)
    runtime.overwritten = frozenset(moved.get(site, site) for site in runtime.overwritten)
    named = {call: calls.get(name, name) for call, name in runtime.training_names.items()}
    runtime.training_names = {**calls, **named}
    return traced, replace(prepared, eager_sites=tuple(dict.fromkeys(sites)))


def _group(call: str, *, op: bool) -> str:
    return call.rpartition(".")[0] if op else re.sub(r"@\d+$", "", call)


def _grouped(calls: Sequence[Call]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for call in calls:
        found.setdefault(_group(call.name, op=call.op), []).append(call.place)
    return found


def _shifted(ran: Groups, traced: Groups) -> dict[str, Sequence[str]]:
    """The groups of which the trace makes all calls that a run made, and others at other places."""
    found = {}
    for group, places in traced.items():
        made = ran.get(group, ())
        fuller = 0 < len(made) < len(places) and all(made.count(where) <= places.count(where) for where in made)
        if fuller and len(set(places)) > 1:
            found[group] = places
    return found
