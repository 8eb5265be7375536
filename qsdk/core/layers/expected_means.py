"""Means of the values in a network without any data: those that BatchNorms set, followed through the ops behind them.

The output of a BatchNorm has mean beta and standard deviation |gamma| per channel; Relu and Clip make a clipped normal
distribution of it. Source: Nagel et al. 2019, Data-Free Quantization, section 4.2.1 and appendix C.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qsdk.core.errors import FileFormatError
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.graph.op_facts import AVERAGES, LINEAR
from qsdk.core.layers.layer_problem import activation_of
from qsdk.core.patterns.linear import bias_of_add
from qsdk.core.site import owner_of


@dataclass(frozen=True, eq=False)
class FoldedNorm:
    """The mean and deviation, per channel, of a layer's output or input, as the folded BatchNorm normalised them.

    Attributes:
        mean: float32 [channels]: its beta, or, if it came before the layer, the running mean of its input.
        std: float32 [channels]: the magnitude of its gamma, or the root of the running variance of its input.
        before: whether these are the layer's inputs and not its outputs.
    """

    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]
    before: bool = False


def norms_to_json(norms: Mapping[str, FoldedNorm]) -> dict[str, Any]:
    """Return the norms as lists and numbers, for a file."""
    return {
        layer: {"mean": norm.mean.tolist(), "std": norm.std.tolist(), "before": norm.before}
        for layer, norm in norms.items()
    }


def read_norms(given: Any, where: str) -> dict[str, FoldedNorm]:
    """Return the norms that `norms_to_json` wrote into the file `where`."""
    try:
        return {
            layer: FoldedNorm(np.array(norm["mean"], np.float32), np.array(norm["std"], np.float32), norm["before"])
            for layer, norm in dict(given).items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"{where} is damaged ({error!r}); write it again with qsdk.save(sim, path)") from error


FloatArray = npt.NDArray[np.float64]
StoredReader = Callable[[str], npt.NDArray[np.float32] | None]
_KEEPS = frozenset({"Identity", "Dropout"})


@dataclass(frozen=True, eq=False)
class ExpectedMoments:
    """The expected moments of a tensor's values, per channel (axis 1).

    Attributes:
        mean: float64 [channels].
        variance: float64 [channels] of values that are assumed normal; None where they are not, or it is unknown.
    """

    mean: FloatArray
    variance: FloatArray | None


def expected_values(graph: Graph, norms: Mapping[str, FoldedNorm], stored: StoredReader) -> dict[int, ExpectedMoments]:
    """Return the expected moments by tensor id, as far as the BatchNorms in a graph determine them.

    The terms of sums are assumed independent and normal; zero padding is ignored, as in the paper.

    Args:
        graph: of either side.
        norms: owner of a layer -> the BatchNorm that was folded into it.
        stored: returns a stored tensor, or None, by its name in the graph: for BatchNorms that were not folded.
    """
    result: dict[int, ExpectedMoments] = {}
    for index, op in enumerate(graph.ops):
        norm = _folded_into(graph, op, norms)
        tensor = None if norm is None else op.inputs[0] if norm.before else _result(graph, index)
        if norm is not None and tensor is not None:
            result[tensor] = ExpectedMoments(norm.mean.astype(np.float64), np.square(norm.std.astype(np.float64)))
        if op.outputs and op.outputs[0] not in result:
            made = _expected_output(graph, op, result, stored)
            if made is not None:
                result[op.outputs[0]] = made
    return result


def clipped_normal(mean: FloatArray, std: FloatArray, low: float, high: float) -> FloatArray:
    """Return the mean of a normal variable that is clipped to `low..high` (either may be infinite), elementwise.

    Source: Nagel et al. 2019, appendix C, equation 19.
    """
    spread = np.maximum(std, 1e-30)
    below, above = (low - mean) / spread, (high - mean) / spread
    inside = _share(above) - _share(below)
    result = mean * inside + spread * (_density(below) - _density(above))
    if math.isfinite(low):
        result = result + low * _share(below)
    if math.isfinite(high):
        result = result + high * (1 - _share(above))
    return np.where(std > 0, result, mean.clip(low, high))


def _density(x: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi))


def _share(x: FloatArray) -> FloatArray:
    """Return the share of a standard normal distribution below x."""
    return np.asarray(np.vectorize(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), otypes=[np.float64])(x))


def _folded_into(graph: Graph, op: Op, norms: Mapping[str, FoldedNorm]) -> FoldedNorm | None:
    """Return the BatchNorm that was folded into the layer that an op is."""
    root = graph.constant_root(op.inputs[1]) if op.type in LINEAR else None
    site = None if root is None else graph.tensors[root].site
    return None if site is None else norms.get(owner_of(site))


def _result(graph: Graph, index: int) -> int:
    """Return the tensor id of a layer's output, with its bias added."""
    following = graph.sole_consumer(graph.ops[index].outputs[0])
    if graph.ops[index].type == "MatMul" and following is not None and bias_of_add(graph, following) is not None:
        return graph.ops[following].outputs[0]
    return graph.ops[index].outputs[0]


def _expected_output(
    graph: Graph, op: Op, found: Mapping[int, ExpectedMoments], stored: StoredReader
) -> ExpectedMoments | None:
    """Return the expected moments of an op's output; None where they are unknown."""
    if op.type == "BatchNormalization":
        gamma, beta = map(graph.constant_root, op.inputs[1:3])
        if gamma is None or beta is None:
            return None
        shift, scale = (stored(graph.tensors[root].name) for root in (beta, gamma))
        if shift is None or scale is None:
            return None
        return ExpectedMoments(shift.astype(np.float64), np.square(scale.astype(np.float64)))
    read = [None if tensor is None else found.get(tensor) for tensor in op.inputs]
    first = read[0] if read else None
    if op.type == "Add" and len(read) == 2 and first is not None and read[1] is not None:
        return _sum(first, read[1])
    if op.type == "Concat" and op.attributes.get("axis") == 1 and all(part is not None for part in read):
        return _concatenate([part for part in read if part is not None])
    if first is None:
        return None
    if op.type in ("Relu", "Clip"):
        return _clipped(graph, op, first)
    if op.type in _KEEPS:
        return first
    if op.type in AVERAGES and _keeps_means(graph, op):
        return ExpectedMoments(first.mean, None)
    if op.type in ("Flatten", "Reshape", "Squeeze"):
        return _flattened(graph, op, first)
    return None


def _sum(one: ExpectedMoments, other: ExpectedMoments) -> ExpectedMoments | None:
    if one.mean.shape != other.mean.shape:
        return None
    known = one.variance is not None and other.variance is not None
    return ExpectedMoments(one.mean + other.mean, one.variance + other.variance if known else None)  # type: ignore[operator]


def _concatenate(parts: list[ExpectedMoments]) -> ExpectedMoments:
    variances = [part.variance for part in parts if part.variance is not None]
    mean = np.concatenate([part.mean for part in parts])
    return ExpectedMoments(mean, np.concatenate(variances) if len(variances) == len(parts) else None)


def _clipped(graph: Graph, op: Op, x: ExpectedMoments) -> ExpectedMoments | None:
    function = activation_of(graph, op)
    if function is None or x.variance is None:
        return None
    return ExpectedMoments(clipped_normal(x.mean, np.sqrt(x.variance), function.low, function.high), None)


def _keeps_means(graph: Graph, op: Op) -> bool:
    """Return whether a pooling op averages within channels and counts no padding."""
    if op.type == "AveragePool":
        return not any(op.attributes.get("pads") or ()) and op.attributes.get("auto_pad", "NOTSET") in (
            "NOTSET",
            "VALID",
        )
    if op.type == "ReduceMean":
        axes = graph.reduced_axes(op)
        return axes is not None and all(axis >= 2 for axis in axes)
    return True


def _flattened(graph: Graph, op: Op, x: ExpectedMoments) -> ExpectedMoments | None:
    """Return the moments after [N, C, ...] became [N, C * ...]: the values of each channel are adjacent."""
    assert op.inputs[0] is not None
    before, after = graph.tensors[op.inputs[0]].shape, graph.tensors[op.outputs[0]].shape
    channels = len(x.mean)
    if before is None or after is None or len(before) < 2 or len(after) != 2 or before[1] != channels:
        return None
    inner, size = before[2:], after[1]
    if not isinstance(size, int) or size % channels:
        return None
    if all(isinstance(n, int) for n in inner) and math.prod(n for n in inner if isinstance(n, int)) * channels != size:
        return None
    repeats = size // channels
    variance = None if x.variance is None else np.repeat(x.variance, repeats)
    return ExpectedMoments(np.repeat(x.mean, repeats), variance)
