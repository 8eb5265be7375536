"""A walk over modules of a sim, such as its blocks, in the order they run, with their float and quantized arguments."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward
from torch_bridge.torch_values.pytree import clone_tensors
from torch_bridge.training.training import eval_mode
from torch_bridge.walk.forward_pairs import ForwardPairs, LayerWeights
from torch_bridge.walk.paused_forward import PausedForward


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call: by position and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class ModuleCall:
    """One batch's call of a module.

    `number` is that of the batch; `result` is the float model's.
    """

    number: int
    float: Arguments
    quantized: Arguments
    result: Any


@dataclass(frozen=True)
class ModuleStep:
    """A module that has been reached, and its calls."""

    path: str
    calls: Sequence[ModuleCall]


@dataclass(frozen=True)
class _PausePoint:
    """The point where a forward is paused: before a module, or after it."""

    path: str
    arguments: Arguments
    result: Any = None
    after: bool = False


class _Calls(Sequence[ModuleCall]):
    """The calls of a module by the forwards that are paused there."""

    def __init__(self, pairs: ForwardPairs, forwards: Sequence[tuple[PausedForward, PausedForward]]) -> None:
        self._pairs, self._forwards = pairs, forwards

    def __len__(self) -> int:
        return len(self._forwards)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        in_float, quantized = self._forwards[index]
        with self._pairs.in_memory(in_float, quantized):
            call = ModuleCall(in_float.number, in_float.at.arguments, quantized.at.arguments, in_float.at.result)
            return clone_tensors(call) if self._pairs.offloads else call


@dataclass
class ModuleWalk:
    """The walk over modules of a sim.

    `order` are the modules that the first batch calls once, in that order, `left` the others, and why they have no
    step.
    """

    weights: LayerWeights
    order: Sequence[str]
    left: dict[str, str]
    _pairs: ForwardPairs
    _passed: set[str]
    _forwards: list[PausedForward]

    @property
    def batches(self) -> int:
        """Return the number of batches."""
        return self._pairs.batches

    @property
    def float_seconds(self) -> float:
        """Return the seconds spent in the float model so far."""
        return self._pairs.float_seconds

    def __iter__(self) -> Iterator[ModuleStep]:
        """Yield the steps; asking for the next one goes on with what was changed."""
        for path in self.order:
            paused = {quantized: self._paused_before(path, quantized) for quantized in (False, True)}
            in_float = list(paused[False].values())
            self._pairs.resume(in_float)  # through the module, to get its result
            pairs = [(one, paused[True][one.number]) for one in in_float if one.number in paused[True]]
            pairs = [(one, other) for one, other in pairs if not one.finished and one.at.after]
            if pairs:
                yield ModuleStep(path, _Calls(self._pairs, pairs))
            self._passed.add(path)
            self.weights.drop_cache()
            self._pairs.resume([one for one in in_float if not one.finished and one.at.after])
            self._pairs.resume(list(paused[True].values()))

    def _paused_before(self, path: str, quantized: bool) -> dict[int, PausedForward]:
        return {
            one.number: one
            for one in self._forwards
            if one.quantized == quantized and not one.finished and one.at.path == path
        }


@contextmanager
def walk_modules(
    sim: QuantSim,
    data: Iterable[Any],
    paths: Sequence[str],
    *,
    forward: Forward | None = None,
    max_memory: int | None = None,
) -> Iterator[ModuleWalk]:
    """Walk modules in eval mode and without gradients, with one float and one quantized pass over the data.

    Beyond `max_memory` bytes, tensors of paused forwards go to temporary files, and calls return copies. Whatever is
    raised, here or inside the block, what was written by `weights` is undone.
    """
    _ = sim.encodings  # raises where a site has no encoding
    with sim.alone(), eval_mode(sim.model), torch.no_grad():
        pairs = ForwardPairs(sim, data, forward, max_memory)
        calls: list[str] = []
        pairs.run_first_batch(lambda: _hooks_around(sim, paths, lambda at: calls.append(at.path)))
        order = [path for path in dict.fromkeys(calls) if calls.count(path) == 2]  # once before it and once after it
        left = {
            path: "one forward calls it several times" if path in calls else "the first batch does not call it"
            for path in paths
            if path not in order
        }

        passed: set[str] = set()

        def pause(at: _PausePoint) -> None:
            one = pairs.running
            if one is not None and at.path not in passed and not (at.after and one.quantized):
                pairs.pause(at)

        with _hooks_around(sim, order, pause), pairs.started() as forwards:
            yield ModuleWalk(pairs.weights, order, left, pairs, passed, forwards)


@contextmanager
def _hooks_around(sim: QuantSim, paths: Sequence[str], reached: Callable[[_PausePoint], Any]) -> Iterator[None]:
    """Call back before and after each call of a module, inside the block."""

    def before(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reached(_PausePoint(path, Arguments(args, kwargs)))

    def after(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        reached(_PausePoint(path, Arguments(args, kwargs), result, after=True))

    with ExitStack() as hooks:
        for path in paths:
            module = sim.model.get_submodule(path)
            hooks.callback(module.register_forward_pre_hook(partial(before, path), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(partial(after, path), with_kwargs=True).remove)
        yield
