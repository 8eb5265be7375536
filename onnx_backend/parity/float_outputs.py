"""Judge the outputs that no site covers: can float rounding alone explain the difference?

The bound is measured on the model at hand: every float tensor between the sites and the output is multiplied by numbers
that are as far from 1 as rounding goes, element by element, and the outputs that come out are compared with those that
came out before (stochastic arithmetic, after Vignes, 1993).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, helper

from onnx_backend.proto.graph_queries import names_in, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import replace_nodes
from onnx_backend.proto.weightless import types_of
from onnx_backend.runtime.session import simulation_session
from qsdk.core.errors import QsdkError

Array = npt.NDArray[Any]
_ROUNDING = 2.0**-21  # of one op: a float32 unit, times four for the sums inside an op
_TIMES = 16.0  # the factor by which the noise of a few runs may fall short of the largest possible
_FLOOR = 2.0**-19  # of a value: the difference between two libraries of elementary functions


@dataclass(frozen=True)
class Verdict:
    """The comparison of one output of one batch.

    Attributes:
        steps: distance of each element, in units of the error that rounding explains.
        problem: a defect that is no distance; "" for none.
    """

    steps: Array
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Return True if rounding explains all of the difference."""
        return not self.problem and float(self.steps.max(initial=0.0)) <= 1


def free_outputs(model: ModelProto, read: set[str]) -> list[str]:
    """Return the outputs of a Q/DQ model that are no site's values."""
    return [value.name for value in model.graph.output if value.name not in read]


def verdict(got: Array, wanted: Array, noisy: Sequence[Array]) -> Verdict:
    """Compare an output with the simulation's.

    Args:
        got: of the file, fed with the simulation's values at the sites.
        wanted: of the simulation.
        noisy: of the file, with noise of the size of rounding in it, several times.
    """
    none = np.zeros(0)
    if got.shape != wanted.shape:
        return Verdict(none, f"the model gives the shape {got.shape}, the simulation {wanted.shape}")
    if got.dtype.kind not in "fV" or wanted.dtype.kind not in "fV":
        return _of_integers(got, wanted, noisy)
    left, right = got.astype(np.float64), wanted.astype(np.float64)
    if np.any(np.isnan(left) & ~np.isnan(right)):
        return Verdict(none, "the model gives NaN where the simulation gives none")
    with np.errstate(invalid="ignore"):
        off = np.where((left == right) | (np.isnan(left) & np.isnan(right)), 0.0, np.abs(left - right))
        steps = np.where(off == 0, 0.0, off / _allowed(right, noisy))
    return Verdict(np.where(np.isnan(steps), np.inf, steps))


def _of_integers(got: Array, wanted: Array, noisy: Sequence[Array]) -> Verdict:
    """Compare integers and truth values, which depend on floats by comparisons that rounding may turn."""
    differing = int(np.sum(got != wanted))
    turned = max((int(np.sum(values != got)) if values.shape == got.shape else got.size for values in noisy), default=0)
    if differing <= 4 * turned:
        return Verdict(np.zeros(got.shape))
    return Verdict(np.zeros(0), f"{differing} of {got.size} values differ from the simulation's")


def _allowed(wanted: Array, noisy: Sequence[Array]) -> Array:
    """Return the error that rounding explains: the most that noise moved any element of at most twice its size."""
    size = np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
    floor = _FLOOR * (size + (float(np.median(size)) if size.size else 0.0)) + np.finfo(np.float32).tiny
    if not noisy:
        return np.asarray(floor)
    spread = np.max([np.abs(a.astype(np.float64) - noisy[0].astype(np.float64)) for a in noisy[1:]], axis=0)
    spread = np.where(np.isfinite(spread), spread, 0.0).reshape(-1)
    order = np.argsort(size, axis=None)
    sorted_sizes, largest = size.reshape(-1)[order], np.maximum.accumulate(spread[order])
    last = np.searchsorted(sorted_sizes, 2 * size.reshape(-1), side="right") - 1
    return np.asarray(_TIMES * largest[last].reshape(size.shape) + floor)


class NoisyRuns:
    """The same model with noise of the size of rounding behind every float op; its session is opened on demand."""

    def __init__(self, model: ModelProto, outputs: Sequence[str], runs: int = 3) -> None:
        self.model, self.outputs, self.runs = model, list(outputs), runs
        self.session: Any = None

    def run(self, feeds: Mapping[str, Array], plain: Mapping[str, Array]) -> dict[str, list[Array]]:
        """Return output -> its values without noise and, `runs` times, with noise."""
        if self.session is None:
            self.session = simulation_session(with_noise(self.model, self.outputs))
        known = {value.name for value in self.session.get_inputs()}
        given = {name: value for name, value in feeds.items() if name in known}
        found = {name: [np.asarray(plain[name])] for name in self.outputs}
        for _ in range(self.runs):
            for name, value in zip(self.outputs, self.session.run(None, given), strict=True):
                if np.shape(value) == found[name][0].shape:
                    found[name].append(np.asarray(value))
        return found


def with_noise(model: ModelProto, outputs: Sequence[str]) -> ModelProto:
    """Return a copy of a model with only these outputs, every float32 result multiplied by numbers close to 1."""
    noisy = load(model)
    kept = [value for value in noisy.graph.output if value.name in set(outputs)]
    del noisy.graph.output[:]
    noisy.graph.output.extend(sorted(kept, key=lambda value: list(outputs).index(value.name)))
    try:
        types = types_of(noisy)
    except QsdkError:
        types = {}
    taken, nodes = names_in(noisy.graph), []
    for seed, node in enumerate(noisy.graph.node):
        nodes.append(node)
        for place, name in enumerate(node.output):
            if types.get(name, ("", None))[0] != "float32" or node.op_type == "DequantizeLinear":
                continue
            exact, drawn = (unique(f"{name}/{part}", taken) for part in ("exact", "drawn"))
            node.output[place] = exact
            low, high = 1 - _ROUNDING, 1 + _ROUNDING
            nodes.append(helper.make_node("RandomUniformLike", [exact], [drawn], low=low, high=high, seed=float(seed)))
            nodes.append(helper.make_node("Mul", [exact, drawn], [name]))
    replace_nodes(noisy.graph, nodes)
    del noisy.graph.value_info[:]
    return noisy
