"""A walk over layers that are given one after the other, each the input of the next: what drivers are tested on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from qsdk import Encoding
from qsdk.core.layers.layer_problem import Layer
from qsdk.core.ranges.ranges import encoding_from_range, range_of


@dataclass
class FakeStep:
    layers: Sequence[Layer]
    pairs: Sequence[tuple[Any, Any]]

    @property
    def reached(self) -> Sequence[int]:
        return range(len(self.pairs))

    def inputs(self) -> Sequence[tuple[Any, Any]]:
        return self.pairs


@dataclass
class FakeWalk:
    """Linear layers with ReLU between them; each stage may have several layers, whose outputs are added up."""

    stages: Sequence[Sequence[Layer]]
    weights: dict[str, Tensor]
    data: Sequence[Tensor]
    left: Mapping[str, str] = field(default_factory=dict)
    float_seconds: float = 1e-3
    numpy: bool = False
    encodings: dict[str, Encoding] = field(default_factory=dict)
    quantized: dict[str, Any] = field(default_factory=dict)
    shifts: dict[str, Any] = field(default_factory=dict)
    written: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for layer in self.layers:
            if layer.site not in self.encodings:
                found = range_of(self.weights[layer.site].numpy(), layer.spec)
                self.encodings[layer.site] = encoding_from_range(found, layer.spec)

    @property
    def layers(self) -> list[Layer]:
        return [layer for stage in self.stages for layer in stage]

    @property
    def batches(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[FakeStep]:
        exact, now = list(self.data), list(self.data)
        for stage in self.stages:
            given = [(x.numpy(), y.numpy()) if self.numpy else (x, y) for x, y in zip(exact, now, strict=True)]
            yield FakeStep(stage, given)
            exact = [self._through(stage, x, quantized=False) for x in exact]
            now = [self._through(stage, x, quantized=True) for x in now]

    def _through(self, stage: Sequence[Layer], x: Tensor, *, quantized: bool) -> Tensor:
        outputs = []
        for layer in stage:
            weight = torch.as_tensor(self.simulated(layer.site)) if quantized else self.weights[layer.site]
            shift = torch.as_tensor(self.shifts.get(layer.site, 0.0)) if quantized else 0
            outputs.append(x @ weight.T + shift)
        return torch.stack(outputs).sum(0).relu()

    def simulated(self, site: str) -> Any:
        """The weight as the quantized model multiplies it."""
        return self.encodings[site].fake_quantize(self.quantized.get(site, self.weights[site]))

    def weight(self, site: str) -> Any:
        return self.weights[site].numpy() if self.numpy else self.weights[site]

    def bias(self, site: str) -> Any | None:
        layer = next(layer for layer in self.layers if layer.site == site)
        zeros = torch.zeros(self.weights[site].shape[0])
        return None if not layer.bias else zeros.numpy() if self.numpy else zeros

    def encoding(self, site: str) -> Encoding:
        return self.encodings[site]

    def write(
        self, site: str, *, encoding: Encoding | None = None, weight: Any | None = None, bias_shift: Any | None = None
    ) -> None:
        self.written.append(site)
        if encoding is not None:
            self.encodings[site] = encoding
        if weight is not None:
            self.quantized[site] = weight
            self.encodings[site] = replace(self.encodings[site], frozen=True)
        if bias_shift is not None:
            self.shifts[site] = bias_shift
