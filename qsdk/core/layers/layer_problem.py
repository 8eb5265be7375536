"""Layers as solvers see them: the problem of one layer, and the walk over all of them, which both sides implement."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import ModelError
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.numerics.spec import Spec


@dataclass(frozen=True)
class Activation:
    """The function `clip(x, low, high)`, with negative x multiplied by a slope before. It never falls where x rises.

    Attributes:
        slope: of negative values.
        low: lower bound.
        high: upper bound.
    """

    slope: float = 1.0
    low: float = -math.inf
    high: float = math.inf

    def __call__(self, x: Any) -> Any:
        """Return the function of a NumPy or torch array of any shape."""
        if self.slope != 1:
            x = x.clip(0, None) + self.slope * x.clip(None, 0)
        return x.clip(self.low, self.high)

    def derivative(self, x: Any) -> Any:
        """Return the derivative; at a bound and at 0, the one from the left."""
        inside = (x > self.low) & (x <= self.high)
        return inside * (1 + (self.slope - 1) * (x <= 0))


def activation_of(graph: Graph, op: Op) -> Activation | None:
    """Return the activation function that an op computes; None for another op or unknown bounds."""
    if op.type == "Relu":
        return Activation(low=0.0)
    if op.type == "LeakyRelu":
        slope = float(op.attributes.get("alpha", 0.01))
        return Activation(slope=slope) if slope >= 0 else None
    if op.type != "Clip":
        return None
    bounds = []
    for position, name, absent in ((1, "min", -math.inf), (2, "max", math.inf)):
        tensor = op.inputs[position] if len(op.inputs) > position else None
        stored = op.attributes.get(name, absent) if tensor is None else graph.scalar(graph.constant_root(tensor))
        if stored is None:
            return None
        bounds.append(float(stored))
    return Activation(low=bounds[0], high=bounds[1])


LayerKind = Literal["linear", "conv", "conv_transpose", "embedding"]


@dataclass(frozen=True)
class WeightLayout:
    """The way in which a stored weight becomes a matrix [groups, out_per_group, K] and back.

    K runs over the input channels of a group and, within them, over the kernel's positions in order.

    Attributes:
        kind: type of the layer.
        shape: of the stored weight.
        groups: of a convolution.
        channel_axis: output channels of the stored weight (those of one group for `conv_transpose`).
        input_axis: input channels of the stored weight (those of one group for `conv`).
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
        """Return the groups, the outputs per group, and K."""
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
        """Return the scale of each weight, int64 [groups, out_per_group, K]: indices into the flattened scale."""
        index = np.arange(encoding.scale.size).reshape(encoding.scale.shape)
        aligned = affine.align(index, self.shape, encoding.axis, encoding.block_size)
        return np.array(self.to_matrix(np.broadcast_to(aligned, self.shape)), np.int64)

    @property
    def _grouped(self) -> int:
        return self.channel_axis if self.kind in ("linear", "conv") else self.input_axis

    @property
    def _split(self) -> tuple[int, ...]:
        at = self._grouped
        return (*self.shape[:at], self.groups, self.shape[at] // self.groups, *self.shape[at + 1 :])

    @property
    def _moves(self) -> list[tuple[int, int]]:
        """Return the axis moves, in order, that bring the split weight's group, channel and input axes to the front."""
        axes = list(range(len(self.shape) + 1))
        moves = []
        shifted = [axis + (axis >= self._grouped) for axis in (self.channel_axis, self.input_axis)]
        for target, axis in enumerate((self._grouped, *shifted)):
            source = axes.index(axis)
            axes.insert(target, axes.pop(source))
            moves.append((source, target))
        return moves


def _move_axis(x: Any, source: int, target: int) -> Any:
    # swapaxes is the one permutation with the same name in NumPy and torch
    step = 1 if target > source else -1
    for axis in range(source, target, step):
        x = x.swapaxes(axis, axis + step)
    return x


@dataclass(frozen=True)
class PatchGeometry:
    """The inputs that a convolution multiplies for each of its outputs; one entry per spatial dimension.

    Attributes:
        kernel: sizes.
        stride: steps between outputs (between inputs, transposed).
        padding: `(before, after)`.
        dilation: steps between the kernel's elements.
        groups: of the channels.
        mode: values of the padding.
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
        """Return the spatial size of the output for a spatial input size."""
        extents = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        pads = [sum(pad) for pad in self.padding]
        if not self.transposed:
            spans = zip(size, pads, extents, self.stride, strict=True)
            return tuple((n + pad - extent) // stride + 1 for n, pad, extent, stride in spans)
        extra = self.output_padding or (0,) * len(size)
        parts = zip(size, pads, extents, self.stride, extra, strict=True)
        return tuple((n - 1) * stride - pad + extent + more for n, pad, extent, stride, more in parts)


@dataclass(frozen=True)
class LayerProblem:
    """A weight, how it is to be quantized, and the statistics of its inputs.

    Attributes:
        site: of the weight.
        spec: of the site.
        encoding: its present one.
        layout: how `weight` is stored.
        weight: W, float32 [groups, out_per_group, K].
        h: X~X~', float32 [groups, K, K]; None where `x_quantized` replaces it, or where a solver needs means only.
        linear: `W (X~ - X) X~'`, float32 [groups, out_per_group, K]; None where `drifted` replaces it.
        drifts: `||W (X - X~)||^2` per output, [groups, out_per_group]; None likewise.
        rows: number of rows of data in the moments.
        count: number of rows that they represent: more, where a convolution's patches were sampled.
        x_quantized: all rows of X~, float32 [groups, rows, K], where they are few; a row that represents n rows is
            multiplied by the root of n.
        drifted: W (X~ - X) for these rows, float32 [groups, rows, out_per_group], multiplied likewise.
        roots: factors of the rows, float32 [rows]; None for ones.
        mean: of X over the rows, float32 [groups, K]; None where it was not gathered.
        mean_quantized: of X~, likewise.
        samples: some rows of X and X~, float32 [groups, rows, K] each, where a solver needs them.
        held_back: the same problem with the statistics of held-back data, to guard against overfitting; None where
            nothing was held back.
        activation: the function right behind the layer, if there is one and it is known.
        bias: of the float model's layer, float32 [groups, out_per_group]; None where it has none.
        without_mean: whether errors exclude the part that a shift of the bias removes; see `centered`.
        input_steps: of the grid of the layer's input, which integer kernels multiply; None for floats.
    """

    site: str
    spec: Spec
    encoding: Encoding
    layout: WeightLayout
    weight: Any
    h: Any | None
    linear: Any
    drifts: Any
    rows: int
    count: float
    x_quantized: Any | None = None
    drifted: Any | None = None
    roots: Any | None = None
    mean: Any | None = None
    mean_quantized: Any | None = None
    samples: tuple[Any, Any] | None = None
    held_back: "LayerProblem | None" = None
    activation: Activation | None = None
    bias: Any | None = None
    without_mean: bool = False
    input_steps: int | None = None

    def __post_init__(self) -> None:
        groups, out, k = self.layout.matrix_shape
        for name, result, wanted in (
            ("weight", self.weight, (groups, out, k)),
            ("linear term", self.linear, (groups, out, k)),
            ("second moment", self.h, (groups, k, k)),
        ):
            if result is not None and tuple(result.shape) != wanted:
                raise ModelError(f"{self.site}: a {name} of {tuple(result.shape)}, not {wanted}")

    @cached_property
    def g_quantized(self) -> Any:
        """Return X~X~', float32 [groups, K, K]."""
        return self.h if self.x_quantized is None else self.x_quantized.swapaxes(-1, -2) @ self.x_quantized

    @cached_property
    def linear_term(self) -> Any:
        """Return `W (X~ - X) X~'`, [groups, out_per_group, K].

        With d = W~ - W the output error is `d g_quantized d' + 2 d linear_term' + drift`: unlike the three traces,
        this form does not lose a small error in the difference of large numbers.
        """
        if self.linear is not None or self.drifted is None:
            return self.linear
        return self.drifted.swapaxes(-1, -2) @ self.x_quantized

    @cached_property
    def drift(self) -> Any:
        """Return `||W (X - X~)||^2` per output, [groups, out_per_group]: the error of W~ = W."""
        if self.drifts is not None or self.drifted is None:
            return self.drifts
        return (self.drifted * self.drifted).sum(-2)

    @cached_property
    def energy(self) -> Any:
        """Return `||WX||^2` per output, [groups, out_per_group], which errors are relative to."""
        # WX = WX~ + W(X - X~), and the cross term is that of `linear_term`
        if self.drifted is not None:
            outputs = self._outputs(self.weight) - self.drifted.swapaxes(-1, -2)
            energies = (outputs * outputs).sum(-1)
        else:
            energies = ((self.weight_product - 2 * self.linear) * self.weight).sum(-1) + self.drifts
        if self.without_mean:
            assert self.mean is not None
            energies = energies + self.count * (self.weight @ self.mean[..., None])[..., 0] ** 2
        return energies.clip(0, None)

    @cached_property
    def weight_product(self) -> Any:
        """Return `W X~X~'`, [groups, out_per_group, K]."""
        return self.product(self.weight)

    def product(self, d: Any) -> Any:
        """Return `d X~X~'`, [groups, out_per_group, K], for a deviation of the weight."""
        if self.h is not None:
            return d * self.h if d.shape[-1] == 1 else d @ self.h
        if self.x_quantized is None:
            raise ModelError(f"{self.site}: the second moments of its inputs were not gathered")
        return self._outputs(d) @ self.x_quantized

    def _outputs(self, d: Any) -> Any:
        """Return `d X~`, [groups, out_per_group, rows], where rows are kept in place of second moments."""
        rows: Any = self.x_quantized
        return d @ rows.swapaxes(-1, -2)

    def errors(self, quantized: Any) -> Any:
        """Return `||WX - W~X~||^2` per output, [groups, out_per_group], for W~ as a matrix."""
        d = quantized - self.weight
        if self.drifted is not None:
            outputs = self._outputs(d) + self.drifted.swapaxes(-1, -2)
            return (outputs * outputs).sum(-1)
        if self.x_quantized is None:
            return ((self.product(d) + 2 * self.linear) * d).sum(-1) + self.drifts
        outputs = self._outputs(d)
        return (outputs * outputs).sum(-1) + 2 * (d * self.linear).sum(-1) + self.drifts

    def relative_error(self, quantized: Any) -> float:
        """Return `||WX - W~X~||^2 / ||WX||^2` of the layer; 0 where its outputs are all 0."""
        return self.relative(self.errors(quantized))

    def relative(self, errors: Any) -> float:
        """Return the sum of errors per output over the layer's energy; 0 where its outputs are all 0."""
        energy = float(self.energy.sum())
        return max(float(errors.sum()), 0.0) / energy if energy > 0 else 0.0

    def mean_error(self, quantized: Any) -> Any:
        """Return `E[WX - W~X~]` per output, [groups, out_per_group]: the part that a shift of the bias removes."""
        if self.mean is None or self.mean_quantized is None:
            raise ModelError(f"{self.site}: the means of its inputs were not gathered")
        return ((self.weight @ self.mean[..., None]) - quantized @ self.mean_quantized[..., None])[..., 0]

    def centered(self) -> "LayerProblem":
        """Return the problem that remains when the bias absorbs the mean error of any solution.

        Its errors are those after the shift; energies and means are unchanged.
        """
        shift, mean = -self.mean_error(self.weight), self.mean_quantized
        assert mean is not None
        assert self.mean is not None
        root = 1 if self.roots is None else self.roots[:, None]

        def less(values: Any, product: Any) -> Any:
            return None if values is None else values - product

        h = self.h
        if h is not None:  # in place: of a wide layer each matrix of this size counts
            h = (self.count * mean)[..., :, None] * mean[..., None, :]
            h *= -1
            h += self.h
        return replace(
            self,
            h=h,
            x_quantized=less(self.x_quantized, root * mean[..., None, :]),
            drifted=less(self.drifted, root * shift[..., None, :]),
            linear=less(self.linear, (self.count * shift)[..., None] * mean[..., None, :]),
            drifts=less(self.drifts, self.count * shift * shift),
            samples=self.samples and (self.samples[0] - self.mean[..., None, :], self.samples[1] - mean[..., None, :]),
            held_back=self.held_back and self.held_back.centered(),
            without_mean=True,
        )


@dataclass(frozen=True)
class Solution:
    """The result of a solver for a layer problem.

    Attributes:
        encoding: the new one.
        weight: W~ on that encoding's grid, float32 [groups, out_per_group, K]; None where W stays.
        error_before: relative output error with the problem's encoding and nearest rounding.
        error_after: the same with this solution.
        note: why the layer is unchanged, if it is.
        bias_shift: added to the layer's bias, float32 [groups, out_per_group]; None where it stays.
    """

    encoding: Encoding
    weight: Any | None
    error_before: float
    error_after: float
    note: str = ""
    bias_shift: Any | None = None


Solver = Callable[[LayerProblem], Solution]


@dataclass(frozen=True)
class Layer:
    """A stored weight that inputs are multiplied with.

    Attributes:
        site: of the weight.
        spec: of that site.
        layout: maps the stored weight to a matrix.
        geometry: of a convolution, None for a linear layer.
        bias: site of the bias that is added to the product, `""` where there is none.
        activation: the function right behind the layer, if there is one and it is known.
        dtype: the float dtype in which the weight is stored.
        expert: its number in a stack of experts; None for a weight of its own.
        input_steps: of the grid of its input, which integer kernels multiply; None for floats.
    """

    site: str
    spec: Spec
    layout: WeightLayout
    geometry: PatchGeometry | None = None
    bias: str = ""
    activation: Activation | None = None
    dtype: str = "float32"
    expert: int | None = None
    input_steps: int | None = None


class WalkStep(Protocol):
    """One stop of a walk: layers that read one input and are solved together.

    Attributes:
        layers: at least one.
        reached: numbers of the batches that call them.
    """

    @property
    def layers(self) -> Sequence[Layer]:
        """Return the layers that read this input."""

    @property
    def reached(self) -> Sequence[int]:
        """Return the numbers of the batches that call these layers, each as often as the others, in order."""

    def inputs(self) -> Iterable[tuple[Any, Any]]:
        """Return the input of the layers, call by call: in the float model, and in the quantized one as it is now.

        Float32 arrays of one shape, NumPy or torch, [..., groups * K] for a layer without geometry and
        [N, C, *spatial] for a convolution; of an embedding its integer indices, twice.
        The quantized input is what the layer multiplies, fake-quantized. May be iterated more than once.
        """


class Walk(Protocol):
    """The layers of a sim in the order in which they run; each step sees the solutions that were written before it.

    Attributes:
        layers: all layers of the walk.
        left: weight site -> why it is no layer here ("float: ...", "its encoding is frozen").
        batches: number of batches.
        float_seconds: time spent in the float model so far, so that costs can be given in float passes.
    """

    @property
    def layers(self) -> Sequence[Layer]:
        """Return all layers, in order."""

    @property
    def left(self) -> Mapping[str, str]:
        """Return the weight sites that cannot be solved, and why."""

    @property
    def batches(self) -> int:
        """Return the number of batches in the data."""

    @property
    def float_seconds(self) -> float:
        """Return the seconds spent in the float model so far."""

    def __iter__(self) -> Iterator[WalkStep]:
        """Yield the steps; each next step runs with the solutions that were written."""

    def weight(self, site: str) -> Any:
        """Return the stored weight in the float model, float32, of its stored shape."""

    def bias(self, site: str) -> Any | None:
        """Return the float model's bias of the layer with this weight, float32 [out channels]; None for none."""

    def encoding(self, site: str) -> Encoding:
        """Return the present encoding of a weight."""

    def write(
        self, site: str, *, encoding: Encoding | None = None, weight: Any | None = None, bias_shift: Any | None = None
    ) -> None:
        """Change the quantized model at a layer.

        Args:
            site: of the layer's weight.
            encoding: its new encoding.
            weight: its new values, of the stored shape and on the encoding's grid; the encoding is then frozen, since
                any other grid would round them again.
            bias_shift: the layer's new bias less that of the float model, [out channels].
        """
