"""Random small networks: modules that run a list of steps, and the builder that grows such a list."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import distinct

BATCH = 2


@dataclass(frozen=True)
class Step:
    """One line of a forward: `function(layer, *values)`, which gives one value or several."""

    title: str
    function: Callable[..., Any]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    layer: str | None = None


class RandomNetwork(nn.Module):
    """Runs its steps in order; the outputs are values by number."""

    takes_any = False  # forward takes *args

    def __init__(self, layers: dict[str, nn.Module], steps: list[Step], inputs: tuple[int, ...], outputs: list[int]):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.steps, self.inputs, self.outputs = tuple(steps), inputs, tuple(outputs)

    def compute(self, *given: Tensor) -> Any:
        values: dict[int, Tensor] = dict(zip(self.inputs, given, strict=True))
        for step in self.steps:
            layer = () if step.layer is None else (getattr(self, step.layer),)
            made = step.function(*layer, *(values[i] for i in step.reads))
            made = (made,) if isinstance(made, Tensor) else tuple(made)
            values.update(zip(step.writes, made, strict=True))
        found = tuple(values[i] for i in self.outputs)
        return found[0] if len(found) == 1 else found

    def live_steps(self) -> list[Step]:
        """The steps that reach an output."""
        found, needed = [], set(self.outputs)
        for step in reversed(self.steps):
            if needed & set(step.writes):
                found.append(step)
                needed |= set(step.reads)
        return found[::-1]

    def __repr__(self) -> str:
        lines = [f"  {s.writes} = {s.title}({s.layer or ''}) of {s.reads}" for s in self.steps]
        return "\n".join([f"{type(self).__name__} inputs {self.inputs}", *lines, f"  outputs {self.outputs}"])


class OneInput(RandomNetwork):
    """Takes `x`."""

    def forward(self, x: Tensor) -> Any:
        return self.compute(x)


class TwoInputs(RandomNetwork):
    """Takes `x` and `y`, also by keyword."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.compute(x, y)


class AnyInputs(RandomNetwork):
    """Takes `*args`."""

    takes_any = True

    def forward(self, *args: Tensor) -> Any:
        return self.compute(*args)


class DictResult(RandomNetwork):
    """Takes `x` and gives a mapping."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = self.compute(x)
        found = (found,) if isinstance(found, Tensor) else found
        return {("hidden_output" if i == 0 else f"hidden_output_{i}"): value for i, value in enumerate(found)}


class Builder:
    """Grows a network, running it on its example as it goes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.layers: dict[str, nn.Module] = {}
        self.steps: list[Step] = []
        self.values: dict[int, Tensor] = {}
        self.inputs: list[int] = []

    def given(self, x: Tensor) -> int:
        self.inputs.append(self._keep(x))
        return self.inputs[-1]

    def layer(self, title: str, layer: nn.Module, *reads: int) -> int:
        name = f"{title}{len(self.layers)}"
        self.layers[name] = distinct(layer, seed=len(self.layers))
        return self.call(title, name, *reads)

    def call(self, title: str, name: str, *reads: int) -> int:
        """Call a layer, also one that was called before."""
        return self._step(title, lambda layer, *values: layer(*values), reads, name)[0]

    def op(self, title: str, function: Callable[..., Any], *reads: int) -> int:
        return self._step(title, function, reads, None)[0]

    def ops(self, title: str, function: Callable[..., Any], *reads: int) -> tuple[int, ...]:
        return self._step(title, function, reads, None)

    def _step(
        self, title: str, function: Callable[..., Any], reads: tuple[int, ...], layer: str | None
    ) -> tuple[int, ...]:
        with torch.no_grad():
            values = (self.values[i] for i in reads)
            made = function(*(() if layer is None else (self.layers[layer],)), *values)
        made = (made,) if isinstance(made, Tensor) else tuple(made)
        writes = tuple(self._keep(x) for x in made)
        self.steps.append(Step(title, function, reads, writes, layer))
        return writes

    def _keep(self, x: Tensor) -> int:
        assert x.shape[0] == BATCH
        assert bool(x.isfinite().all())
        self.values[len(self.values)] = x
        return len(self.values) - 1

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(self.values[index].shape)

    def like(self, index: int, *, free: int | None = None) -> int:
        """A random value of the same shape, whose axis `free` may differ; the value itself if there is no other."""
        mine = self.shape(index)
        same = [
            i
            for i in self.values
            if len(self.shape(i)) == len(mine)
            and all(a == b or axis == free for axis, (a, b) in enumerate(zip(self.shape(i), mine, strict=True)))
        ]
        return self.rng.choice(same)
