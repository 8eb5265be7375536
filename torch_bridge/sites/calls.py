"""The calls of modules and ops that are running, their names in sites, and the lines of code that tell them apart."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from qsdk.core.errors import ModelError
from qsdk.core.site import owner_of, port_of, site_name

Phase = Literal["float", "quantize", "visit", "mark"]
Visitor = Callable[[str, Tensor], Tensor]
#: calls of one op or module in one call of a module -> their source lines, in order
Groups = Mapping[str, Sequence[str]]


def call_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Return the arguments of a call, including tensors in `out=`: the tensors that the call may write over."""
    if not kwargs:
        return args
    out = kwargs.get("out")
    return *args, *kwargs.values(), *(out if isinstance(out, tuple | list) else ())


class NarrowParameters(Protocol):
    """The interface of what casts the parameters that a call reads."""

    def narrow(self, x: Tensor) -> Tensor:
        """Return a tensor in the type that the call computes in."""
        ...


@dataclass
class Frame:
    """One call of a wrapped module.

    Attributes:
        path: path of the module in the model, the same for every call.
        name: name of this call in sites: the path that the caller used, with `@1` from the second call on.
        leaf: whether the module is one op.
        foreign: whether this calls a foreign module: a leaf, inside of which modules are named as if its caller called.
        recording: whether gradients were recorded when the call began.
        hook: the saved-tensors hook that was active then (see `checkpointing.saved_tensors_hook`).
        training: whether the module was in train mode.
        counts: number of calls so far of each op in this frame.
        calls: number of calls so far of each module in the whole forward pass; all frames of the pass share it,
            because a module may call another one that lies deep inside a third.
        weights: of recurrent layers, as the pass has marked them, by site; shared likewise.
        narrowing: casts the parameters of the module while it computes in a narrow float type.
    """

    path: str
    name: str
    leaf: bool
    foreign: bool = False
    recording: bool = False
    hook: Any = None
    training: bool = False
    counts: dict[str, int] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    narrowing: "NarrowParameters | None" = None

    def count_op(self, name: str) -> int:
        """Count a call of an op and return its number, from 0."""
        return _count(self.counts, name)

    def count_call(self, name: str) -> int:
        """Count a call of a module and return its number, from 0."""
        return _count(self.calls, name)

    def next_owner(self, name: str) -> str:
        """Count a call of an op in this frame and return the name of that call, the owner of its sites."""
        owner = f"{self.name}/{name}" if self.name else name
        return f"{owner}.{self.count_op(name)}"


def _count(counts: dict[str, int], name: str) -> int:
    number = counts.get(name, 0)
    counts[name] = number + 1
    return number


class DataflowRecorder(Protocol):
    """The interface of what records the dataflow of a model while it runs."""

    def before_call(self, arguments: Any) -> None:
        """Record that a torch function is about to be called with these arguments."""

    def after_call(self, frame: Frame, name: str, arguments: Any, result: Any) -> None:
        """Record that a torch function was called in a frame and returned a result."""

    def after_write(self, site: str, x: Tensor) -> Tensor:
        """Record that an op wrote its result over its argument; return the tensor to go on with."""
        ...


def call_name(parent: Frame | None, paths: tuple[str, ...]) -> str:
    """Return the name of a call of a module: the path by which its caller reaches it.

    It is numbered from the second call on.
    """
    if parent is None:
        return paths[0]
    prefix = f"{parent.path}." if parent.path else ""
    if len(paths) == 1 and parent.name == parent.path and paths[0].startswith(prefix):
        return _with_number(parent, paths[0])  # the common case, kept short because it runs at every call
    inside = [path[len(prefix) :] for path in paths if path.startswith(prefix)]
    if inside:
        nearest = inside[0]
        for path in inside[1:]:  # written out because torch.compile does not trace min() with a key
            nearest = path if path.count(".") < nearest.count(".") else nearest
        name = f"{parent.name}.{nearest}" if parent.name else nearest
    else:
        name = f"{parent.name}/{paths[0]}"  # the module is not inside the caller
    return _with_number(parent, name)


def _with_number(parent: Frame, name: str) -> str:
    number = parent.count_call(name)
    return f"{name}@{number}" if number else name


_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class RecordedCall:
    """A call of a module, or of an op, in a forward pass.

    Its name, the owner of its sites, is numbered; `parent` is the call of a module in which it happens.
    """

    name: str
    parent: str
    op: bool
    source_line: str


def source_line() -> str:
    """Return the innermost line of code that is neither torch's nor ours, counted from the start of its function."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_INSIDE) and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_qualname}, line {frame.f_lineno - frame.f_code.co_firstlineno + 1}"


def lines_of_ambiguous_calls(places: Mapping[str, str]) -> dict[str, str]:
    """Return the line of each call that only its line identifies.

    Those are the calls of an op or module that one call of a module makes from several lines.
    """
    groups: dict[str, dict[str, str]] = {}
    for call, where in places.items():
        groups.setdefault(re.sub(r"(@\d+|\.\d+)$", "", call), {})[call] = where
    ambiguous = [group for group in groups.values() if len(set(group.values())) > 1]
    return {call: where for group in ambiguous for call, where in group.items()}


def require_same_line(call: str, known: str, *, recomputed: bool) -> None:
    """Refuse a call that is made from another line than on the example."""
    if (now := source_line()) != known and not recomputed:  # a backward pass has no line of the user's code
        raise ModelError(
            f"{call} was called at {known} with the example, and is called at {now} now: the model takes another path, "
            "which would take its encodings for those of another call; call qsdk.quantize with an example that takes "
            "the same path, or give the op a module of its own in each branch"
        )


def is_recomputing() -> bool:
    """Return whether a backward pass is running, which calls checkpointed modules again."""
    return torch._C._current_graph_task_id() != -1


class CallNames:
    """Which call is this: the names of the calls of a sim's model in sites.

    Calls of one op or module are numbered in their order. Where a pass leaves calls out or makes others, their lines of
    code tell which they are: a trace makes calls that a run leaves out (models drop a mask of ones, unless they are
    traced), a pass with a cache or with labels takes a path of its own, and train mode has calls that eval mode lacks.

    Attributes:
        recorded: all calls of a forward pass while they are recorded, else None.
        differ: whether calls are compared with those on the example, or have other names than their order gives.
    """

    def __init__(self) -> None:
        self.recorded: list[RecordedCall] | None = None
        self.differ = False
        self._example_lines: dict[str, str] = {}  # call -> line, for calls that only their line tells apart
        self._training_lines: dict[str, str] = {}  # the same, for calls named by their order in train mode
        self._training_names: dict[str, str] = {}  # call by its order in train mode -> name on the example, if another
        self._as_traced: NumbersByLine | None = None  # where a run leaves out some calls of the trace
        self._on_own_path: NumbersByLine | None = None

    @contextmanager
    def recording(self) -> Iterator[list[RecordedCall]]:
        """Record all calls inside the block, named by their order."""
        self.recorded = calls = list[RecordedCall]()
        try:
            yield calls
        finally:
            self.recorded = None

    def name(self, call: str, frame: Frame | None, *, op: bool, phase: Phase, own_path: bool) -> str:
        """Return the name of a call that is numbered by order; record it, or compare its line with the example's.

        `frame` is the call of the module that makes it, None for the model itself; `own_path` says that this pass may
        take another path than the example.
        """
        if self.recorded is not None:
            self.recorded.append(RecordedCall(call, "" if frame is None else frame.name, op, source_line()))
            return call
        training = frame is not None and frame.training
        if self._on_own_path is not None and own_path and not training:
            return self._on_own_path.name(call, frame, op=op)
        if not self.differ:
            return call
        has_lines = not torch.compiler.is_compiling()
        if not training and self._as_traced is not None and phase != "mark" and has_lines:
            call = self._as_traced.name(call, frame, op=op)
        lines = self._training_lines if training else self._example_lines
        if phase == "quantize" and call in lines and has_lines:
            require_same_line(call, lines[call], recomputed=is_recomputing())
        return self._training_names.get(call, call) if training else call

    def set_example(self, calls: Sequence[RecordedCall]) -> None:
        """Compare calls with these of the example, where only their lines tell them apart, in train mode too."""
        self._example_lines = lines_of_ambiguous_calls({call.name: call.source_line for call in calls})
        self._training_lines, self.differ = dict(self._example_lines), bool(self._example_lines)

    def set_training(self, matched: "TrainingCalls") -> None:
        """Name the calls of train mode as those of the example that they were matched with."""
        self._training_names, self._training_lines = matched.names, matched.source_lines
        self.differ = bool(self._example_lines or self._training_lines or self._training_names)

    def set_trace(self, ran: Sequence[RecordedCall], traced: Sequence[RecordedCall]) -> dict[str, Sequence[str]]:
        """Number the calls of passes on paths of their own by the lines of a trace; return the groups to renumber.

        Those are the groups of which the run left calls out; `renumber` makes every pass number them as the trace.
        """
        ran_lines, traced_lines = _grouped_lines(ran), _grouped_lines(traced)
        self._on_own_path = NumbersByLine(traced_lines, ran_lines)
        return _groups_with_gaps(ran_lines, traced_lines)

    def renumber(self, groups: Groups) -> None:
        """Number the calls of these groups by their lines, as the trace does."""
        self._as_traced, self.differ = NumbersByLine(groups), True
        # the lines of these groups decide the number already, which is another one now
        self._example_lines = {
            call: line
            for call, line in self._example_lines.items()
            if not {_group_of(call, op=True), _group_of(call, op=False)} & groups.keys()
        }

    def rename(self, names: Mapping[str, str]) -> None:
        """Give calls of the example, and those of train mode that are the same, other names."""
        self._training_names = {**names, **{call: names.get(name, name) for call, name in self._training_names.items()}}


class NumbersByLine:
    """The numbers of calls by their source line, for the groups of calls of which a run leaves some out.

    The calls of a run (`others`) count where they are made from lines that the trace does not have.
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


def _group_of(call: str, *, op: bool) -> str:
    return re.sub(r"\.\d+$" if op else r"@\d+$", "", call)


def grouped_calls(calls: Iterable[RecordedCall]) -> dict[str, list[RecordedCall]]:
    """Return the calls of the same op or module in one call of a module, in order."""
    result: dict[str, list[RecordedCall]] = {}
    for call in calls:
        result.setdefault(_group_of(call.name, op=call.op), []).append(call)
    return result


def _grouped_lines(calls: Iterable[RecordedCall]) -> dict[str, list[str]]:
    return {group: [call.source_line for call in same] for group, same in grouped_calls(calls).items()}


def _groups_with_gaps(ran: Groups, traced: Groups) -> dict[str, Sequence[str]]:
    """Return the groups of which the trace makes all calls that a run makes, and others at other lines."""
    result = {}
    for group, lines in traced.items():
        ran_lines = ran.get(group, ())
        has_gaps = 0 < len(ran_lines) < len(lines) and all(
            ran_lines.count(where) <= lines.count(where) for where in ran_lines
        )
        if has_gaps and len(set(lines)) > 1:
            result[group] = lines
    return result


class TrainingCalls:
    """The calls of a pass in train mode, matched with those of the example.

    A call is matched with the one from the same line of code. Of the rest, modules match in order, and so do ops if
    there are as many. A call that matches nothing gets one of the numbers that follow.

    Attributes:
        names: call as it is numbered in training -> its name, where they differ.
        source_lines: call as it is numbered in training -> line of code, where only that distinguishes it.
    """

    def __init__(self, example: Sequence[RecordedCall], training: Sequence[RecordedCall]) -> None:
        self.names: dict[str, str] = {}
        self.source_lines: dict[str, str] = {}
        self._name_of: dict[str, str] = {}
        known = grouped_calls(example)
        for group, calls in grouped_calls(training).items():
            self._match(group, calls, known)

    def site(self, site: str) -> str:
        """Return the name of a site that the pass has reached."""
        owner = owner_of(site)
        if owner in self._name_of:
            return site_name(self._name_of[owner], port_of(site))
        frame, slash, op = owner.rpartition("/")
        return site_name(f"{self._name_of[frame]}/{op}", port_of(site)) if slash and frame in self._name_of else site

    def _match(self, group: str, calls: Sequence[RecordedCall], known: Mapping[str, Sequence[RecordedCall]]) -> None:
        parent = calls[0].parent
        start = self._name_of.get(parent, parent)
        own = start + group[len(parent) :]
        known_calls = known.get(own, ())
        names = _match_names(known_calls, calls)
        number = len(known_calls)
        told_apart = len({call.source_line for call in (*calls, *known_calls)}) > 1
        for call, paired in zip(calls, names, strict=True):
            name = paired
            if name is None:
                mark = "." if call.op else "@"
                name = f"{own}{mark}{number}" if call.op or number else own
                number += 1
            self._name_of[call.name] = name
            key = start + call.name[len(parent) :]
            if key != name:
                self.names[key] = name
            if told_apart:
                self.source_lines[key] = call.source_line


def _match_names(known_calls: Sequence[RecordedCall], calls: Sequence[RecordedCall]) -> list[str | None]:
    """Return, for each call in training, the name of the matching call of the example, or None."""
    unmatched = list(known_calls)
    result: list[str | None] = []
    for call in calls:
        same = next((one for one in unmatched if one.source_line == call.source_line), None)
        result.append(None if same is None else same.name)
        if same is not None:
            unmatched.remove(same)
    missing = [i for i, name in enumerate(result) if name is None]
    if not calls[0].op or len(missing) == len(unmatched):
        for i, one in zip(missing, unmatched, strict=False):
            result[i] = one.name
    return result
