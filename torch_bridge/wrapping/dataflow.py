"""The dataflow of one forward pass: who made which tensor, who read it, and which in-place results are read again."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qsdk.core.site import owner_of, port_of, without_calls
from torch_bridge.sites.call_scopes import Frame
from torch_bridge.sites.runtime import Runtime
from torch_bridge.wrapping.aliases import Aliases, all_tensors
from torch_bridge.wrapping.wrapped_state import state_of

_BATCH_NORM = inspect.signature(F.batch_norm)


class Dataflow:
    """The record of who made which tensor, who read it, and how often each module ran, by first paths."""

    def __init__(self, model: nn.Module) -> None:
        modules = model.named_modules(remove_duplicate=False)
        self.first_path = {path: state_of(module).path for path, module in modules}
        self.tensors: list[Tensor] = []  # keeps ids unique while recording
        self.sites: dict[str, None] = {}  # in the order in which they are reached
        self.maker: dict[int, str] = {}
        self.readers: dict[int, list[str]] = {}
        self.read_by_maker: dict[int, Tensor] = {}  # id of a function's result -> first tensor that the function reads
        self.calls: Counter[str] = Counter()
        self.result_of: dict[str, Tensor] = {}
        self.versions: dict[int, tuple[str, int]] = {}  # id of a site's tensor -> site, and the tensor's version then
        self.norm_calls: dict[str, list[dict[str, Any]]] = {}  # path of a module -> arguments of its F.batch_norm
        self.overwritten: set[str] = set()
        self.aliased: set[str] = set()  # sites of views whose memory is written over later by another name
        self.aliases = Aliases(model)
        self.writes: list[str] = []  # descriptions of the writes, for errors

    def visit(self, site: str, x: Tensor) -> Tensor:
        """Record which owner made a tensor."""
        self.tensors.append(x)
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

    def after_write(self, site: str, x: Tensor) -> Tensor:
        """Record an in-place op; return its result as another object, so that reads of the old one are seen."""
        again = x.view_as(x)
        self.tensors.append(x)
        self.aliases.after_write(site, x, again)
        return again

    def before_call(self, arguments: Any) -> None:
        """Record the tensors that a function is about to get."""
        self.aliases.before_call(arguments)

    def after_call(self, frame: Frame, name: str, arguments: Any, result: Any) -> None:
        """Record who read which tensors to compute another."""
        self.aliases.after_call(name, arguments, result)
        self._note_in_place(*arguments)
        self._note_batch_norm(frame, name, *arguments)
        if not all_tensors(result):
            return  # a shape or a number
        given = all_tensors(arguments)
        for part in all_tensors(result):
            self.tensors.append(part)
            self.read_by_maker[id(part)] = given[0] if given else part
        for tensor in given:
            self.tensors.append(tensor)
            self.readers.setdefault(id(tensor), []).append(frame.path)

    def _note_batch_norm(
        self, frame: Frame, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
    ) -> None:
        """Record a call of `F.batch_norm`; `torch.batch_norm` has an argument more."""
        if name == "batch_norm" and len(args) + len(kwargs or {}) < 9:
            bound = _BATCH_NORM.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            self.norm_calls.setdefault(frame.path, []).append(bound.arguments)

    def _note_in_place(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        """Record an op that writes over its argument in training; a Dropout does not do so in eval mode."""
        if (kwargs or {}).get("inplace") and args and id(args[0]) in self.versions:
            self.overwritten.add(self.versions[id(args[0])][0])

    def finish(self, result: Any) -> None:
        """Record what the model returns, and what was written over."""
        self.aliases.finish(result)
        for leaf in all_tensors(result):
            self.readers.setdefault(id(leaf), []).append("")
            if id(leaf) in self.versions:
                self.overwritten.add(self.versions[id(leaf)][0])  # its owner may write over it
        versions = {id(x): x._version for x in self.tensors}
        changed = {site for key, (site, version) in self.versions.items() if versions[key] != version}
        self.overwritten |= changed
        self.aliased = {
            self.versions[id(x)][0] for x in self.tensors if id(x) in self.versions and x._is_view()
        } & changed
        self.writes = self.aliases.write_lines or [f"what {site} gives" for site in sorted(changed)]


def record_dataflow(model: nn.Module, runtime: Runtime, run: Callable[[], Any]) -> Dataflow:
    """Run the model once and return its dataflow."""
    dataflow = Dataflow(model)
    runtime.recorder = dataflow
    try:
        with runtime.in_phase("visit", dataflow.visit), torch.no_grad():
            result = run()
    finally:
        runtime.recorder = None
    dataflow.finish(result)
    return dataflow
