"""The path that a model takes in train mode, compared with that of eval mode, which is the exported file's.

What only training has, such as stochastic depth and auxiliary heads, has no site in the file: it stays float.
"""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qsdk.core.site import owner_of, port_of, site_name
from torch_bridge.sites.calls import RecordedCall
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.module_state import Attributes, attributes_of, emptied_attributes, restoring_state
from torch_bridge.wrapping.dataflow import WrittenStateError, record_dataflow
from torch_bridge.wrapping.wrapped_state import state_of


@dataclass(frozen=True)
class TrainingPath:
    """What one forward pass in train mode has shown.

    Attributes:
        calls: of modules and ops, in order, numbered as they came.
        sites: that it reached.
        overwritten: sites whose tensor is written over.
        aliased: those of them that are views.
        emptied: snapshots of the caches that train mode has emptied.
        failed: why the pass failed; empty where it did not.
        written: parameters and buffers that it writes and reads -> the line that writes.
    """

    calls: Sequence[RecordedCall] = ()
    sites: Sequence[str] = ()
    overwritten: frozenset[str] = frozenset()
    aliased: frozenset[str] = frozenset()
    emptied: Attributes = field(default_factory=dict)
    failed: str = ""
    written: Mapping[str, str] = field(default_factory=dict)


def record_training_path(model: nn.Module, runtime: Runtime, run: Callable[[], Any]) -> TrainingPath:
    """Run a wrapped model in train mode once, and restore all but the caches that this empties.

    BatchNorms stay in eval mode: they compute the same ops, and accept no batch of one in train mode.
    """
    before = attributes_of(model)
    emptied: Attributes = {}
    runtime.recorded_calls = []
    try:
        with restoring_state(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the user's code make no sense here: nothing is trained
            model.train()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase) and not state_of(module).without_norm:
                    module.training = False
            dataflow = record_dataflow(model, runtime, run)
            emptied = emptied_attributes(before, attributes_of(model))
        overwritten, aliased = frozenset(dataflow.overwritten), frozenset(dataflow.aliased)
        result = TrainingPath(runtime.recorded_calls, tuple(dataflow.sites), overwritten, aliased, emptied)
    except WrittenStateError as error:
        result = TrainingPath(failed=str(error), written=error.lines)
    except Exception as error:  # the user's code may raise anything, for missing labels for example
        result = TrainingPath(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        runtime.recorded_calls = None
    return result


def set_training_path(
    runtime: Runtime, example: Sequence[RecordedCall], sites: Collection[str], training: TrainingPath
) -> None:
    """Set in a runtime the names of training's calls on the example, and the sites that training alone has."""
    if training.failed:
        runtime.training_lines, runtime.written_in_training = dict(runtime.source_lines), dict(training.written)
    else:
        matching = _CallMatching(example, training.calls)
        runtime.training_names, runtime.training_lines = matching.names, matching.source_lines
        reached = [matching.site(site) for site in training.sites]
        runtime.only_training = {site: _kind(site) for site in reached if site not in sites}
        runtime.overwritten |= {matching.site(site) for site in training.overwritten}
        runtime.aliased |= {matching.site(site) for site in training.aliased}
    runtime.tracks_calls = bool(runtime.source_lines or runtime.training_lines or runtime.training_names)


def _kind(site: str) -> str:
    port = port_of(site)
    return "activation" if port.startswith("output") else "bias" if port == "bias" else "weight"


class _CallMatching:
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
        known = _groups(example)
        for group, calls in _groups(training).items():
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


def _groups(calls: Sequence[RecordedCall]) -> dict[str, list[RecordedCall]]:
    """Return the calls of the same op or module in one call of a module, in order."""
    result: dict[str, list[RecordedCall]] = {}
    for call in calls:
        result.setdefault(re.sub(r"\.\d+$" if call.op else r"@\d+$", "", call.name), []).append(call)
    return result


def _match_names(known_calls: Sequence[RecordedCall], calls: Sequence[RecordedCall]) -> list[str | None]:
    """Return, for each call in training, the name of the matching call of the example, or None."""
    left = list(known_calls)
    result: list[str | None] = []
    for call in calls:
        same = next((one for one in left if one.source_line == call.source_line), None)
        result.append(None if same is None else same.name)
        if same is not None:
            left.remove(same)
    missing = [i for i, name in enumerate(result) if name is None]
    if not calls[0].op or len(missing) == len(left):
        for i, one in zip(missing, left, strict=False):
            result[i] = one.name
    return result
