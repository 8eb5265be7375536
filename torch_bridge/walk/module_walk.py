"""Walking modules of a sim, such as its blocks, in the order they run: what each is called with, float or quantized."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import Forward
from torch_bridge.torch_values.pytree import Path, mapped
from torch_bridge.training.training import eval_mode
from torch_bridge.walk.forward_pairs import ForwardPairs
from torch_bridge.walk.layer_weights import LayerWeights
from torch_bridge.walk.paused_forward import Suspended


@dataclass(frozen=True)
class Arguments:
    """What a module is called with: by position and by keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class ModuleCall:
    """One batch's call of a module.

    Attributes:
        number: of the batch.
        float: what the module is called with in the float model.
        quantized: what it is called with in the quantized one, as it is now.
        result: what it gives in the float model.
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
class _At:
    """Where a forward stands: before a module, or behind it."""

    path: str
    given: Arguments
    result: Any = None
    behind: bool = False


class _Calls(Sequence[ModuleCall]):
    """The calls of a module by the forwards that stand there."""

    def __init__(self, pairs: ForwardPairs, forwards: Sequence[tuple[Suspended, Suspended]]) -> None:
        self._pairs, self._forwards = pairs, forwards

    def __len__(self) -> int:
        return len(self._forwards)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(len(self))[index]]
        in_float, quantized = self._forwards[index]
        with self._pairs.present(in_float, quantized):
            call = ModuleCall(in_float.number, in_float.at.given, quantized.at.given, in_float.at.result)
            return mapped(call, _copied) if self._pairs.spills else call


def _copied(path: Path, leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@dataclass
class ModuleWalk:
    """The walk over modules of a sim.

    Attributes:
        weights: writes to the sim so that float forwards still see what was.
        order: the modules that the first batch calls once, in that order.
        left: the other modules, and why no step comes by them.
    """

    weights: LayerWeights
    order: Sequence[str]
    left: dict[str, str]
    _pairs: ForwardPairs
    _passed: set[str]
    _forwards: list[Suspended]

    @property
    def batches(self) -> int:
        """How many batches the data has."""
        return self._pairs.batches

    @property
    def float_seconds(self) -> float:
        """Seconds spent in the float model so far."""
        return self._pairs.float_seconds

    def __iter__(self) -> Iterator[ModuleStep]:
        """The steps; to ask for the next one goes on with what was changed."""
        for path in self.order:
            standing = {quantized: self._before(path, quantized) for quantized in (False, True)}
            in_float = list(standing[False].values())
            self._pairs.resume(in_float)  # through the module, to see what it gives
            pairs = [(one, standing[True][one.number]) for one in in_float if one.number in standing[True]]
            pairs = [(one, other) for one, other in pairs if not one.finished and one.at.behind]
            if pairs:
                yield ModuleStep(path, _Calls(self._pairs, pairs))
            self._passed.add(path)
            self.weights.forget()
            self._pairs.resume([one for one in in_float if not one.finished and one.at.behind])
            self._pairs.resume(list(standing[True].values()))

    def _before(self, path: str, quantized: bool) -> dict[int, Suspended]:
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

    Args:
        sim: calibrated.
        data: batches.
        paths: of the modules; none is inside another.
        forward: calls the model on a batch.
        max_memory: bytes that forwards may hold where they stand; beyond it, tensors go to temporary files, and calls
            give copies.

    Raises:
        DataError: no data, data that the model does not take, or more batches than there can be forwards in flight.
        CalibrationError: a site has no encoding yet. Whatever is raised, here or inside the block, what was written
            by `weights` is taken back.
    """
    _ = sim.encodings  # names the sites that have none
    with sim.alone(), eval_mode(sim.model), torch.no_grad():
        pairs = ForwardPairs(sim, data, forward, max_memory)
        calls: list[str] = []
        pairs.look_at_first_batch(lambda: _around(sim, paths, lambda at: calls.append(at.path)))
        order = [path for path in dict.fromkeys(calls) if calls.count(path) == 2]  # before it and behind it
        left = {
            path: "one forward calls it several times" if path in calls else "the first batch does not call it"
            for path in paths
            if path not in order
        }

        passed: set[str] = set()

        def stop(at: _At) -> None:
            one = pairs.running
            if one is not None and at.path not in passed and not (at.behind and one.quantized):
                pairs.stop(at)

        with _around(sim, order, stop), pairs.started() as forwards:
            yield ModuleWalk(pairs.weights, order, left, pairs, passed, forwards)


@contextmanager
def _around(sim: QuantSim, paths: Sequence[str], reached: Callable[[_At], Any]) -> Iterator[None]:
    """Inside, each call of a module tells of itself before it runs and after it has run."""
    handles = []

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            reached(_At(path, Arguments(args, kwargs)))

        return hook

    def behind(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
            reached(_At(path, Arguments(args, kwargs), result, behind=True))

        return hook

    try:
        for path in paths:
            module = sim.model.get_submodule(path)
            handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
            handles.append(module.register_forward_hook(behind(path), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
