"""Watching one forward pass: who made which tensor, who read it, and which in-place results are read by old names."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qsdk.core.site import owner_of, port_of, without_calls
from torch_bridge.sites.call_scopes import Frame
from torch_bridge.sites.runtime import Runtime
from torch_bridge.wrapping.aliases import Aliases, all_tensors
from torch_bridge.wrapping.wrapper import state_of


class Wiring:
    """Who made which tensor, who read it, and how often each module ran; modules go by their first path."""

    def __init__(self, model: nn.Module) -> None:
        found = model.named_modules(remove_duplicate=False)
        self.first_path = {path: state_of(module).path for path, module in found}
        self.kept: list[Tensor] = []  # keeps ids unique while we watch
        self.sites: dict[str, None] = {}  # in the order in which they are reached
        self.maker: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.read_by_maker: dict[int, Tensor] = {}  # what a function computes -> the first tensor that it reads
        self.calls: Counter[str] = Counter()
        self.result_of: dict[str, Tensor] = {}
        self.versions: dict[int, tuple[str, int]] = {}  # what is emitted -> its site, and how often it was written then
        self.overwritten: set[str] = set()
        self.aliases = Aliases(model)
        self.writes: list[str] = []  # what is written over, or where

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Note which owner made a tensor."""
        self.kept.append(x)
        self.sites[site] = None
        self.versions[id(x)] = site, x._version
        self.aliases.site(site, x, given=port_of(site) == "input")
        if port_of(site) == "output":
            owner = without_calls(owner_of(site))
            # a module that its caller holds outside its own modules is `caller/path`
            owner = self.first_path.get(owner) or self.first_path.get(owner.partition("/")[2]) or owner
            self.maker[id(x)] = owner
            self.calls[owner] += 1
            self.result_of[owner] = x
        return x

    def wrote_over(self, site: str, x: Tensor) -> Tensor:
        """Note an in-place op; its result goes on under another identity, so that reads of the old one are seen."""
        again = x.view_as(x)
        self.kept.append(x)
        self.aliases.wrote_over(site, x, again)
        return again

    def begins(self, arguments: Any) -> None:
        """Note the tensors that a function is about to get."""
        self.aliases.calls(arguments)

    def read(self, frame: Frame, name: str, arguments: Any, result: Any) -> None:
        """Note who read which tensors to compute another."""
        self.aliases.called(name, arguments, result)
        self._note_in_place(*arguments)
        if not all_tensors(result):
            return  # a shape or a number
        given = all_tensors(arguments)
        for made in all_tensors(result):
            self.kept.append(made)
            self.read_by_maker[id(made)] = given[0] if given else made
        for tensor in given:
            self.kept.append(tensor)
            self.readers.setdefault(id(tensor), []).append(frame.path)

    def _note_in_place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """An op that writes over its argument when it is trained; a Dropout does not do it in eval mode."""
        if (kwargs or {}).get("inplace") and args and id(args[0]) in self.versions:
            self.overwritten.add(self.versions[id(args[0])][0])

    def finish(self, result: Any) -> None:
        """Note what the model gives away, and what was written over."""
        self.aliases.finish(result)
        for leaf in all_tensors(result):
            self.readers.setdefault(id(leaf), []).append("")
            if id(leaf) in self.versions:
                self.overwritten.add(self.versions[id(leaf)][0])  # its owner may write over it
        versions = {id(x): x._version for x in self.kept}
        changed = {site for key, (site, version) in self.versions.items() if versions[key] != version}
        self.overwritten |= changed
        self.writes = self.aliases.places or [f"what {site} gives" for site in sorted(changed)]


def watch(model: nn.Module, runtime: Runtime, run: Callable[[], Any]) -> Wiring:
    """Run the model once and note its wiring."""
    wiring = Wiring(model)
    runtime.watcher = wiring
    try:
        with runtime.in_phase("visit", wiring.visit), torch.no_grad():
            result = run()
    finally:
        runtime.watcher = None
    wiring.finish(result)
    return wiring
