"""The path that a model takes in train mode, held against that of eval mode, which is the exported file's.

What only training has, such as stochastic depth and auxiliary heads, has no site in the file: it stays float.
"""

import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from qsdk.core.site import owner_of, port_of, site_name
from torch_bridge.sites.runtime import Runtime
from torch_bridge.sites.source_lines import Call
from torch_bridge.torch_values.module_state import Attributes, attributes_of, emptied, unchanged
from torch_bridge.wrapping.dataflow import watch


@dataclass(frozen=True)
class TrainingLook:
    """What one forward pass in train mode has shown.

    Attributes:
        calls: of modules and ops, in order, numbered as they came.
        sites: that it reached.
        overwritten: sites whose tensor something is written over.
        emptied: the caches that train mode has emptied, as they are then.
        failed: why there is nothing of all this; empty where there is.
    """

    calls: Sequence[Call] = ()
    sites: Sequence[str] = ()
    overwritten: frozenset[str] = frozenset()
    emptied: Attributes = field(default_factory=dict)
    failed: str = ""


def look_in_training(model: nn.Module, runtime: Runtime, run: Callable[[], Any]) -> TrainingLook:
    """Run a wrapped model in train mode once; all but the caches that this empties is afterwards as before.

    BatchNorms stay in eval mode: they compute the same ops, and take no batch of one in train mode.
    """
    before = attributes_of(model)
    gone: Attributes = {}
    runtime.noted = []
    try:
        with unchanged(model), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the user's code, which is not being trained
            model.train()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.eval()
            wiring = watch(model, runtime, run)
            gone = emptied(before, attributes_of(model))
        found = TrainingLook(runtime.noted, tuple(wiring.sites), frozenset(wiring.overwritten), gone)
    except Exception as error:  # the user's code raises what it likes, such as for labels that are missing
        found = TrainingLook(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    finally:
        runtime.noted = None
    return found


def set_training_path(runtime: Runtime, example: Sequence[Call], sites: Collection[str], look: TrainingLook) -> None:
    """Tell a runtime what training calls by the names of the example, and which sites training alone has."""
    if look.failed:
        runtime.training_places = dict(runtime.places)
    else:
        matched = _Matched(example, look.calls)
        runtime.training_names, runtime.training_places = matched.names, matched.places
        reached = [matched.site(site) for site in look.sites]
        runtime.only_training = {site: _kind(site) for site in reached if site not in sites}
        runtime.overwritten |= {matched.site(site) for site in look.overwritten}
    runtime.placed = bool(runtime.places or runtime.training_places or runtime.training_names)


def _kind(site: str) -> str:
    port = port_of(site)
    return "activation" if port.startswith("output") else "bias" if port == "bias" else "weight"


class _Matched:
    """The calls of a pass in train mode, matched with those of the example.

    A call is the one at the same line of code; of what is left, modules match in order, and so do ops where there are
    as many. What matches nothing gets the numbers that follow.

    Attributes:
        names: call as it is numbered in training -> its name, where that is another.
        places: call as it is numbered in training -> line of code, where only that tells it apart.
    """

    def __init__(self, example: Sequence[Call], training: Sequence[Call]) -> None:
        self.names: dict[str, str] = {}
        self.places: dict[str, str] = {}
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

    def _match(self, group: str, calls: Sequence[Call], known: Mapping[str, Sequence[Call]]) -> None:
        parent = calls[0].parent
        start = self._name_of.get(parent, parent)
        own = start + group[len(parent) :]
        there = known.get(own, ())
        names = _paired(there, calls)
        number = len(there)
        told_apart = len({call.place for call in (*calls, *there)}) > 1
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
                self.places[key] = call.place


def _groups(calls: Sequence[Call]) -> dict[str, list[Call]]:
    """The calls of the same op or module in one call of a module, in order."""
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(re.sub(r"\.\d+$" if call.op else r"@\d+$", "", call.name), []).append(call)
    return found


def _paired(there: Sequence[Call], calls: Sequence[Call]) -> list[str | None]:
    """The names of the calls of the example that calls in training are."""
    left = list(there)
    found: list[str | None] = []
    for call in calls:
        same = next((one for one in left if one.place == call.place), None)
        found.append(None if same is None else same.name)
        if same is not None:
            left.remove(same)
    missing = [i for i, name in enumerate(found) if name is None]
    if not calls[0].op or len(missing) == len(left):
        for i, one in zip(missing, left, strict=False):
            found[i] = one.name
    return found
