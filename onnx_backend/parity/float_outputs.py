"""Judge the outputs that no site covers: can float rounding alone explain the difference?

The bound is measured on the model at hand: every float tensor between the sites and the output is multiplied by numbers
that are as far from 1 as rounding goes, element by element, and the outputs that come out are compared with those that
came out before (stochastic arithmetic, after Vignes, 1993).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, defs, helper

from onnx_backend.proto.graph_queries import names_in, unique
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import replace_nodes
from onnx_backend.proto.subgraphs import all_nodes
from onnx_backend.proto.weightless import dtype_name, types_of
from onnx_backend.qdq.read import FLOAT_CODES
from onnx_backend.runtime.providers import Providers
from onnx_backend.runtime.session import simulation_session
from qsdk.core.arrays import Array
from qsdk.core.errors import QsdkError

_RANDOM = 21  # the last opset whose RandomUniformLike the runtime has (1.32); of later ones it has Dropout alone
_KEEPS = (2 / 3, 1 / 2)  # how often Dropouts keep a number, so that -1, 0 and 1 come equally often
_USUAL = 16.0  # times the power of noise of a step everywhere; a runtime's own roundings turn far fewer codes
_PARTS = ("wide", "ratio", "training", "kept", "sign", "low", "middle", "high")  # names of what stands for a draw
_TIMES = 16.0  # the factor by which the noise of a few runs may fall short of the largest possible
#: of one op: a float32 unit, times four for the sums inside an op; of a narrow float, whose ops add up in float32, one
#: unit. Where the runtime has no kernel in float64, it computes in float32.
_ROUNDING = MappingProxyType({"float32": 2.0**-21, "float64": 2.0**-21, "float16": 2.0**-10, "bfloat16": 2.0**-7})
#: of a value: the difference between two libraries of elementary functions, at least a unit of the last rounding
_FLOOR = MappingProxyType({"float32": 2.0**-19, "float64": 2.0**-19, "float16": 2.0**-10, "bfloat16": 2.0**-7})


@dataclass(frozen=True)
class Verdict:
    """The distances of one output of one batch, in units of the error that rounding explains, or what else is wrong."""

    steps: Array
    problem: str = ""

    @property
    def passed(self) -> bool:
        """Return True if rounding explains all of the difference."""
        return not self.problem and float(self.steps.max(initial=0.0)) <= 1


def free_outputs(model: ModelProto, read: set[str]) -> dict[str, str]:
    """Return name -> type of the outputs of a Q/DQ model that are no site's values."""
    found = (value for value in model.graph.output if value.name not in read)
    return {value.name: dtype_name(value.type.tensor_type.elem_type) for value in found}


def verdict(got: Array, wanted: Array, noisy: Sequence[Array], tensor_type: str = "float32") -> Verdict:
    """Compare an output of a file, fed with the simulation's values at the sites, with the simulation's.

    `noisy` is the same output with noise of the size of rounding in the file, several times; `tensor_type` is that of
    the file, since arrays of bfloat16 come as float32.
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
        steps = np.where(off == 0, 0.0, off / _allowed(right, noisy, _FLOOR[tensor_type]))
    return Verdict(np.where(np.isnan(steps), np.inf, steps))


def _of_integers(got: Array, wanted: Array, noisy: Sequence[Array]) -> Verdict:
    """Compare integers and truth values, which depend on floats by comparisons that rounding may turn."""
    differing = int(np.sum(got != wanted))
    turned = max((int(np.sum(values != got)) if values.shape == got.shape else got.size for values in noisy), default=0)
    if differing <= 4 * turned:
        return Verdict(np.zeros(got.shape))
    return Verdict(np.zeros(0), f"{differing} of {got.size} values differ from the simulation's")


def _allowed(wanted: Array, noisy: Sequence[Array], least: float) -> Array:
    """Return the error that rounding explains: the most that noise moved any element of at most twice its size."""
    size = np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
    other_than_zero = size[size > 0]  # half of a Relu's results are zeros, and sums near 0 are as far off as others
    usual = float(np.median(other_than_zero)) if other_than_zero.size else 0.0
    floor = least * (size + usual) + np.finfo(np.float32).tiny
    if not noisy:
        return np.asarray(floor)
    spread = np.max([np.abs(a.astype(np.float64) - noisy[0].astype(np.float64)) for a in noisy[1:]], axis=0)
    spread = np.where(np.isfinite(spread), spread, 0.0).reshape(-1)
    order = np.argsort(size, axis=None)
    sorted_sizes, largest = size.reshape(-1)[order], np.maximum.accumulate(spread[order])
    last = np.searchsorted(sorted_sizes, 2 * size.reshape(-1), side="right") - 1
    return np.asarray(_TIMES * largest[last].reshape(size.shape) + floor)


class NoisyRuns:
    """The same model with noise of the size of rounding behind every float op; its session is opened on demand.

    With `steps`, what is dequantized is up to a step off besides, as it is behind the kernels of a runtime.
    """

    def __init__(
        self, model: ModelProto, outputs: Sequence[str], providers: Providers, runs: int = 3, *, steps: bool = False
    ) -> None:
        self.model, self.outputs, self.providers, self.runs = model, list(outputs), providers, runs
        self.steps = steps
        self.session: Any = None

    def run(self, feeds: Mapping[str, Array], plain: Mapping[str, Array]) -> dict[str, list[Array]]:
        """Return output -> its values without noise and, `runs` times, with noise."""
        if self.session is None:
            self.session = simulation_session(
                with_noise(self.model, self.outputs, steps=self.steps), providers=self.providers
            )
        known = {value.name for value in self.session.get_inputs()}
        given = {name: value for name, value in feeds.items() if name in known}
        found = {name: [np.asarray(plain[name])] for name in self.outputs}
        for _ in range(self.runs):
            for name, value in zip(self.outputs, self.session.run(None, given), strict=True):
                if np.shape(value) == found[name][0].shape:
                    found[name].append(np.asarray(value))
        return found


def unexplained(
    runs: NoisyRuns, feeds: Mapping[str, Array], got: Mapping[str, Array], wanted: Mapping[str, Array]
) -> list[str]:
    """Return the outputs of a whole model in a runtime that are further off than steps and rounding bring about."""
    types = {value.name: dtype_name(value.type.tensor_type.elem_type) for value in runs.model.graph.output}
    noisy = runs.run(feeds, wanted)
    verdicts = {name: verdict(got[name], np.asarray(wanted[name]), noisy[name], types[name]) for name in runs.outputs}
    return [n for n, found in verdicts.items() if not found.passed or not _is_usual(got[n], wanted[n], noisy[n])]


def _is_usual(got: Array, wanted: Array, noisy: Sequence[Array]) -> bool:
    """Return True if the power of a whole output's error is that of the noisy runs, whatever its largest element."""
    if np.asarray(wanted).dtype.kind not in "fV":
        return True
    first, *others = (np.asarray(values, np.float64) for values in noisy)
    with np.errstate(invalid="ignore"):  # infinite in both
        most = max((float(np.nansum((values - first) ** 2)) for values in others), default=np.inf)
        found = float(np.nansum((np.asarray(got, np.float64) - np.asarray(wanted, np.float64)) ** 2))
    return most == 0 or found <= _USUAL * most


def with_noise(model: ModelProto, outputs: Sequence[str], *, steps: bool = False) -> ModelProto:
    """Return a copy of a model with only these outputs, every float result multiplied by numbers close to 1.

    With `steps`, -1, 0 or 1 is added to the codes of every computed tensor that is dequantized.
    """
    noisy = load(model)
    by_dropout = any(_is_newer(node) for node in all_nodes(noisy.graph.node))
    for entry in () if by_dropout else noisy.opset_import:  # what is in both opsets means the same in them
        entry.version = min(entry.version, _RANDOM) if entry.domain in ("", "ai.onnx") else entry.version
    kept = [value for value in noisy.graph.output if value.name in set(outputs)]
    del noisy.graph.output[:]
    noisy.graph.output.extend(sorted(kept, key=lambda value: list(outputs).index(value.name)))
    try:
        types = types_of(noisy)
    except QsdkError:
        types = {}
    taken, nodes = names_in(noisy.graph), list[NodeProto]()
    computed = {name for node in noisy.graph.node for name in node.output} if steps else set()
    for seed, node in enumerate(noisy.graph.node):
        nodes.append(node)
        if node.op_type == "DequantizeLinear" and node.input[0] in computed:
            nodes += _step_noise(node, float(seed), taken)
        for place, name in enumerate(node.output):
            tensor_type = types.get(name, ("", None))[0]
            # a cast of whole numbers rounds nothing, and they may be numbers of experts
            exactly = node.op_type == "Cast" and types.get(node.input[0], ("float32", None))[0] not in _ROUNDING
            if tensor_type in _ROUNDING and node.op_type != "DequantizeLinear" and not exactly:
                node.output[place] = exact = unique(f"{name}/exact", taken)
                nodes += _noise(exact, name, tensor_type, float(seed), taken)
    replace_nodes(noisy.graph, _by_dropout(nodes, taken) if by_dropout else nodes)
    del noisy.graph.value_info[:]
    return noisy


def _is_newer(node: NodeProto) -> bool:
    """Return True for an op of the standard that no opset up to `_RANDOM` has."""
    known = node.domain in ("", "ai.onnx") and defs.has(node.op_type)
    return known and not defs.has(node.op_type, max_inclusive_version=_RANDOM)


def _by_dropout(nodes: Sequence[NodeProto], taken: set[str]) -> list[NodeProto]:
    """Return the nodes with masks of two Dropouts for uniform numbers: three numbers of the same mean and spread."""
    found = list[NodeProto]()
    for node in nodes:
        if node.op_type != "RandomUniformLike":
            found.append(node)
            continue
        low, high, seed = (helper.get_node_attr_value(node, name) for name in ("low", "high", "seed"))
        middle, away = (low + high) / 2, (high - low) / 2 * 2**-0.5
        name = node.output[0]
        wide, ratio, training, kept, sign, *values = (unique(f"{name}/{part}", taken) for part in _PARTS)
        found.append(helper.make_node("Cast", list(node.input), [wide], to=FLOAT_CODES["float32"]))
        numbers = [*values, *(f"{ratio}_{place}" for place in range(2))]
        for value, number in zip(
            numbers, (middle - away, middle, middle + away, *(1 - n for n in _KEEPS)), strict=True
        ):
            found.append(helper.make_node("Constant", [], [value], value_float=number))
        truth = helper.make_tensor(training, TensorProto.BOOL, [], [True])
        found.append(helper.make_node("Constant", [], [training], value=truth))
        for place, mask in enumerate((kept, sign)):
            inputs = [wide, f"{ratio}_{place}", training]
            found.append(helper.make_node("Dropout", inputs, [f"{mask}/values", mask], seed=2 * int(seed) + place))
        low_name, middle_name, high_name = values
        found.append(helper.make_node("Where", [sign, high_name, low_name], [f"{name}/away"]))
        found.append(helper.make_node("Where", [kept, f"{name}/away", middle_name], [name]))
    return found


def _step_noise(dequantize: NodeProto, seed: float, taken: set[str]) -> list[NodeProto]:
    """Make a DequantizeLinear of a computed tensor write elsewhere; return the nodes that add steps to its values."""
    name, parts = dequantize.output[0], ("exact", "drawn", "whole", "codes", "steps")
    exact, drawn, whole, codes, steps = (unique(f"{name}/{part}", taken) for part in parts)
    dequantize.output[0] = exact
    second = NodeProto()
    second.CopyFrom(dequantize)
    second.name = ""
    del second.input[:], second.output[:], second.metadata_props[:]
    second.input.extend([codes, dequantize.input[1]])
    second.output.append(steps)
    return [
        helper.make_node("RandomUniformLike", [exact], [drawn], low=-1.5, high=1.5, seed=seed, dtype=TensorProto.FLOAT),
        helper.make_node("Round", [drawn], [whole]),
        helper.make_node("Cast", [whole], [codes], to=TensorProto.INT8),
        second,
        helper.make_node("Sum", [exact, steps], [name]),
    ]


def _noise(exact: str, name: str, tensor_type: str, seed: float, taken: set[str]) -> list[NodeProto]:
    """Return the nodes that multiply a tensor by numbers close to 1, in float32, which has such numbers."""
    wide, drawn, product = (unique(f"{name}/{part}", taken) for part in ("wide", "drawn", "product"))
    low, high = 1 - _ROUNDING[tensor_type], 1 + _ROUNDING[tensor_type]
    return [
        helper.make_node("Cast", [exact], [wide], to=FLOAT_CODES["float32"]),
        helper.make_node("RandomUniformLike", [wide], [drawn], low=low, high=high, seed=seed),
        helper.make_node("Mul", [wide, drawn], [product]),
        helper.make_node("Cast", [product], [name], to=FLOAT_CODES[tensor_type]),
    ]
