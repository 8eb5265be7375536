"""Layer problems: one linear layer as a solver sees it, the same for both doors.

A linear layer, or a convolution seen as patches, has the weight matrix W, float inputs X and quantized inputs X~
(one column per row of data). All a solver of W~ needs of them are second moments: with g = XX', c = XX~' and
g_quantized = X~X~', the output error is `||WX - W~X~||^2 = tr(W g W') - 2 tr(W c W~') + tr(W~ g_quantized W~')`.
Arrays are duck-typed: NumPy or torch, on any device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from qsdk.core import affine
from qsdk.core.encoding import Encoding
from qsdk.core.errors import ModelError
from qsdk.core.spec import Spec

LayerKind = Literal["linear", "conv", "conv_transpose"]


@dataclass(frozen=True)
class WeightLayout:
    """How a stored weight becomes a matrix [groups, out_per_group, K] and back.

    K runs over the input channels of a group and, within them, over the kernel's positions in order.

    Attributes:
        kind: what the layer computes.
        shape: of the stored weight.
        groups: of a convolution.
        channel_axis: output channels of the stored weight (those of one group for `conv_transpose`).
        input_axis: input channels of the stored weight (those of one group for `conv`).

    Raises:
        ModelError: a linear weight is not a matrix, or the groups do not divide their axis.
    """

    kind: LayerKind
    shape: tuple[int, ...]
    groups: int = 1
    channel_axis: int = 0
    input_axis: int = 1

    def __post_init__(self) -> None:
        if self.kind == "linear" and (len(self.shape) != 2 or self.groups != 1):
            raise ModelError(f"a linear weight is one matrix; got shape {self.shape} with {self.groups} groups")
        if self.shape[self._grouped] % self.groups:
            raise ModelError(f"{self.groups} groups do not divide axis {self._grouped} of a weight of {self.shape}")

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        """Groups, outputs per group, and K."""
        rows = self.shape[self.channel_axis] // (self.groups if self.kind == "conv" else 1)
        return self.groups, rows, int(np.prod(self.shape)) // (self.groups * rows)

    def to_matrix(self, stored: Any) -> Any:
        """Reshape an array of the stored shape to [groups, out_per_group, K]."""
        split = stored.reshape(self._split)
        for source, target in self._moves:
            split = _move_axis(split, source, target)
        return split.reshape(self.matrix_shape)

    def from_matrix(self, matrix: Any) -> Any:
        """Reshape [groups, out_per_group, K] to the stored shape."""
        moved = np.empty(self._split, np.bool_)
        for source, target in self._moves:
            moved = _move_axis(moved, source, target)
        split = matrix.reshape(moved.shape)
        for source, target in reversed(self._moves):
            split = _move_axis(split, target, source)
        return split.reshape(self.shape)

    def cells(self, encoding: Encoding) -> npt.NDArray[np.int64]:
        """Which scale each weight uses: int64 [groups, out_per_group, K], an index into the flattened scale."""
        index = np.arange(encoding.scale.size).reshape(encoding.scale.shape)
        aligned = affine.align(index, self.shape, encoding.axis, encoding.block_size)
        return np.array(self.to_matrix(np.broadcast_to(aligned, self.shape)), np.int64)

    @property
    def _grouped(self) -> int:
        return self.input_axis if self.kind == "conv_transpose" else self.channel_axis

    @property
    def _split(self) -> tuple[int, ...]:
        at = self._grouped
        return (*self.shape[:at], self.groups, self.shape[at] // self.groups, *self.shape[at + 1 :])

    @property
    def _moves(self) -> list[tuple[int, int]]:
        """Axis moves, in order, that bring the split weight's group, channel and input axes to the front."""
        axes = list(range(len(self.shape) + 1))
        moves = []
        shifted = [axis + (axis >= self._grouped) for axis in (self.channel_axis, self.input_axis)]
        for target, axis in enumerate((self._grouped, *shifted)):
            source = axes.index(axis)
            axes.insert(target, axes.pop(source))
            moves.append((source, target))
        return moves


def _move_axis(x: Any, source: int, target: int) -> Any:
    # swapaxes is the one permutation that NumPy and torch spell alike
    step = 1 if target > source else -1
    for axis in range(source, target, step):
        x = x.swapaxes(axis, axis + step)
    return x


@dataclass(frozen=True)
class PatchGeometry:
    """Which inputs a convolution multiplies for each of its outputs; one entry per spatial dimension.

    Attributes:
        kernel: sizes.
        stride: steps between outputs (between inputs, transposed).
        padding: `(before, after)`.
        dilation: steps between the kernel's elements.
        groups: of the channels.
        mode: what stands in the padding.
        transposed: a transposed convolution.
        output_padding: of a transposed convolution.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros"
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    def output_size(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Spatial size of the output for a spatial input size."""
        extents = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        pads = [sum(pad) for pad in self.padding]
        if not self.transposed:
            spans = zip(size, pads, extents, self.stride, strict=True)
            return tuple((n + pad - extent) // stride + 1 for n, pad, extent, stride in spans)
        extra = self.output_padding or (0,) * len(size)
        parts = zip(size, pads, extents, self.stride, extra, strict=True)
        return tuple((n - 1) * stride - pad + extent + more for n, pad, extent, stride, more in parts)


class MomentsLike(Protocol):
    """Second moments as they are accumulated (`qsdk.algorithms.moments.Moments`)."""

    g: Any
    c: Any
    g_quantized: Any
    rows: int

    def update(self, x_float: Any, x_quantized: Any) -> None:
        """Add a batch of the layer's inputs."""


class NewMoments(Protocol):
    """Makes empty moments for one layer."""

    def __call__(
        self, layout: WeightLayout, geometry: PatchGeometry | None, *, batches: int, generator: Any, device: Any
    ) -> MomentsLike:
        """Start at zero; `batches` updates will follow, sampled by `generator`."""


@dataclass(frozen=True)
class LayerProblem:
    """A weight, how it is to be quantized, and the second moments of its inputs.

    Attributes:
        site: of the weight.
        spec: what is wanted.
        encoding: what it has now.
        layout: how `weight` is stored.
        weight: W, float32 [groups, out_per_group, K].
        g: XX', float32 [groups, K, K].
        c: XX~', float32 [groups, K, K].
        g_quantized: X~X~', float32 [groups, K, K].
        rows: how many rows of data the moments hold.
        mean: of X over the rows, float32 [groups, K]; None where it was not gathered.
        mean_quantized: of X~, likewise.
        samples: some rows of X and X~, float32 [groups, rows, K] each, where a solver asked for them.
        held_back: the same problem as data tells it that was not used for the moments here, to guard against
            solutions that fit the data and not the layer; None where nothing was held back.
        activation: op type of the activation function that is one with the layer, `""` where there is none.

    Raises:
        ModelError: the shapes do not belong together.
    """

    site: str
    spec: Spec
    encoding: Encoding
    layout: WeightLayout
    weight: Any
    g: Any
    c: Any
    g_quantized: Any
    rows: int
    mean: Any | None = None
    mean_quantized: Any | None = None
    samples: tuple[Any, Any] | None = None
    held_back: "LayerProblem | None" = None
    activation: str = ""

    def __post_init__(self) -> None:
        groups, _, k = self.layout.matrix_shape
        if tuple(self.weight.shape) != self.layout.matrix_shape:
            raise ModelError(f"{self.site}: a weight of {tuple(self.weight.shape)}, not {self.layout.matrix_shape}")
        for moment in (self.g, self.c, self.g_quantized):
            if tuple(moment.shape) != (groups, k, k):
                raise ModelError(f"{self.site}: moments of shape {tuple(moment.shape)}, not {(groups, k, k)}")

    def linear_term(self) -> Any:
        """`W (g_quantized - c)`, [groups, out_per_group, K].

        With d = W~ - W the output error is `d g_quantized d' + 2 d linear_term' + drift`: unlike the three traces,
        this form does not lose a small error in the difference of large numbers.
        """
        return self.weight @ (self.g_quantized - self.c)

    def drift(self) -> Any:
        """`||W (X - X~)||^2` per output, [groups, out_per_group]: the error that no choice of W~ = W avoids."""
        difference = self.g - self.c - self.c.swapaxes(-1, -2) + self.g_quantized
        return (self.weight @ difference * self.weight).sum(-1)

    def errors(self, quantized: Any) -> Any:
        """`||WX - W~X~||^2` per output, [groups, out_per_group], for W~ as a matrix."""
        d = quantized - self.weight
        return (d @ self.g_quantized * d).sum(-1) + 2 * (d * self.linear_term()).sum(-1) + self.drift()

    def energy(self) -> Any:
        """`||WX||^2` per output, [groups, out_per_group]: what errors are relative to."""
        return (self.weight @ self.g * self.weight).sum(-1)

    def relative_error(self, quantized: Any) -> float:
        """`||WX - W~X~||^2 / ||WX||^2` of the layer; 0 where there is nothing to get wrong."""
        energy = float(self.energy().sum())
        return max(float(self.errors(quantized).sum()), 0.0) / energy if energy > 0 else 0.0


@dataclass(frozen=True)
class Solution:
    """What a solver found for a layer problem.

    Attributes:
        encoding: to use from now on.
        weight: W~ on that encoding's grid, float32 [groups, out_per_group, K]; None where W is to stay.
        error_before: relative output error with the problem's encoding and nearest rounding.
        error_after: the same with this solution.
        note: why nothing was done, where nothing was.
        bias_shift: what to add to the layer's bias, float32 [groups, out_per_group]; None where it stays.
    """

    encoding: Encoding
    weight: Any | None
    error_before: float
    error_after: float
    note: str = ""
    bias_shift: Any | None = None


Solver = Callable[[LayerProblem], Solution]
