"""Stacks of experts in a walk: what is written for single experts, and stored when all of a stack are solved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from qsdk.core.layers.layer_problem import Layer
from qsdk.core.numerics.encoding import Encoding
from torch_bridge.sim import QuantSim
from torch_bridge.walk.forward_pairs import LayerWeights


@dataclass
class _Stack:
    """A stack that is being solved: its values, its encoding, and whether values were written."""

    values: Tensor
    encoding: Encoding
    rounded: bool = False


class SolvedExperts:
    """The experts of a walk, by the site of each: `...:down_proj[3]`."""

    def __init__(self, weights: LayerWeights, sim: QuantSim, stacks: Mapping[str, Sequence[Layer]]) -> None:
        self._weights, self._sim = weights, sim
        self._places = {layer.site: (site, number) for site, own in stacks.items() for number, layer in enumerate(own)}
        self._open: dict[str, _Stack] = {}

    def __contains__(self, site: str) -> bool:
        return site in self._places

    def weight(self, site: str) -> Tensor:
        """Return the weight of an expert in the float model, float32."""
        stack, number = self._places[site]
        return self._weights.original(stack)[number]

    def encoding(self, site: str) -> Encoding:
        """Return the encoding that the weight of an expert has now, as that of a matrix."""
        stack, number = self._places[site]
        held = self._open.get(stack)
        whole = self._sim.quantizers[stack].encoding() if held is None else held.encoding
        axis = None if whole.axis is None else whole.axis - 1
        return replace(whole, scale=whole.scale[number], zero_point=whole.zero_point[number], axis=axis)

    def write(self, site: str, encoding: Encoding | None, weight: Tensor | None) -> None:
        """Keep what an expert gets until its stack is stored: copying whole stacks for each expert takes long."""
        stack, number = self._places[site]
        if stack not in self._open:
            values = self._weights.original(stack).clone()
            self._open[stack] = _Stack(values, self._sim.quantizers[stack].encoding())
        held = self._open[stack]
        if encoding is not None:
            scale, zero_point = np.array(held.encoding.scale), np.array(held.encoding.zero_point)
            scale[number], zero_point[number] = encoding.scale, encoding.zero_point
            held.encoding = replace(held.encoding, scale=scale, zero_point=zero_point)
        if weight is not None:
            held.values[number], held.rounded = weight, True

    def store(self, stack: str) -> None:
        """Change the quantized model at a stack, as its experts were written."""
        held = self._open.pop(stack, None)
        if held is not None:
            values = held.values if held.rounded else None
            self._weights.write(stack, encoding=held.encoding, weight=values, frozen=held.rounded)
