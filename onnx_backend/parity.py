"""Teacher-forced parity: every site of an exported model is fed the simulation's own input, in one cut model."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper

from onnx_backend.dynamic import dynamic_places
from onnx_backend.large_tensors import rows_of
from onnx_backend.model import array, input_names, load, metadata, rename_inputs, replace_nodes
from onnx_backend.qdq_read import Place, places, stored_tensors
from onnx_backend.session import simulation_session
from onnx_backend.subgraphs import reads
from qsdk.core.dtypes import uint8
from qsdk.core.encoding import Encoding
from qsdk.core.errors import DataError
from qsdk.core.report import Report

Array = npt.NDArray[Any]
#: what the runtime hands out as NumPy arrays
_HANDED_OUT = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "float16": TensorProto.FLOAT16} | {
    "uint16": TensorProto.UINT16,
    "int16": TensorProto.INT16,
}
_COMPUTED = (TensorProto.FLOAT, TensorProto.UINT8)  # what DynamicQuantizeLinear gives besides codes
_MANTISSA = {"float16": 10, "bfloat16": 7}  # bits
_FLOATS = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclass
class _Tally:
    """The differences found at one site so far."""

    kind: str
    largest: float = 0.0
    total: float = 0.0
    elements: int = 0
    note: str = ""

    def add(self, difference: Array) -> None:
        self.largest = max(self.largest, float(difference.max(initial=0)))
        self.total += float(difference.sum())
        self.elements += difference.size

    def fail(self, note: str) -> None:
        self.largest, self.note = float("inf"), self.note or note

    def row(self, site: str) -> dict[str, Any]:
        mean = self.total / self.elements if self.elements else float("inf" if self.note else 0)
        found = {"site": site, "kind": self.kind, "max_lsb": self.largest, "mean_lsb": mean, "elements": self.elements}
        return {**found, "note": self.note} if self.note else found


@dataclass(frozen=True)
class Cut:
    """Where an activation site can be cut.

    Attributes:
        site: its name.
        kind: activation, input or output.
        compared: the tensor that holds its codes (or its float16 values).
        read: the tensor that its readers read.
        dtype: of `compared`: a container, `float16` or `bfloat16`.
        computed: the tensors that hold its scale and zero point, if they are found while the model runs.
    """

    site: str
    kind: str
    compared: str
    read: str
    dtype: str
    computed: tuple[str, ...] = ()


def check(
    model: ModelProto,
    captures: Iterable[Mapping[str, Array]],
    stored: Mapping[str, Array],
    encodings: Mapping[str, Encoding],
    reference: Iterable[Sequence[Array]] | None = None,
) -> Report:
    """Compare a Q/DQ model with its simulation, site by site, each fed with the simulation's own input.

    Args:
        model: as exported.
        captures: per batch: site -> the simulation's fake-quantized float32 values, and graph input name -> its values.
        stored: site -> the simulation's fake-quantized weight or bias, float32, in its own layout.
        encodings: of the simulation.
        reference: per batch: the simulation's outputs in graph order, for the end-to-end figure.

    Returns:
        Rows `site`, `kind`, `max_lsb` (ulp for float16), `mean_lsb`, `elements` (and `note` where something is
        wrong); summary `weights_max_lsb`, `activations_max_lsb`, `sqnr_db`, `passed`: 0 LSB on stored tensors, at most
        1 on activations, and no site missing on either side.

    Raises:
        FileFormatError: the model cannot be read or loaded.
    """
    model = load(model)
    found = places(model)
    tallies = {place.site: _Tally(place.kind or ("weight" if place.stored else "activation")) for place in found}
    _compare_encodings(found, encodings, tallies)
    _compare_stored(model, found, stored, tallies)
    sqnr = _compare_activations(model, captures, reference, encodings, tallies)
    return _report(tallies, sqnr)


def _report(tallies: Mapping[str, _Tally], sqnr: float | None) -> Report:
    stored = [t.largest for t in tallies.values() if t.kind in ("weight", "bias")]
    activations = [t.largest for t in tallies.values() if t.kind not in ("weight", "bias")]
    weights_max, activations_max = max(stored, default=0.0), max(activations, default=0.0)
    summary = {
        "weights_max_lsb": weights_max,
        "activations_max_lsb": activations_max,
        "sqnr_db": sqnr,
        "passed": weights_max == 0 and activations_max <= 1,
    }
    return Report("Parity with ONNX Runtime", [tally.row(site) for site, tally in tallies.items()], summary)


def _compare_encodings(found: Iterable[Place], encodings: Mapping[str, Encoding], tallies: dict[str, _Tally]) -> None:
    seen = set()
    for place in found:
        seen.add(place.site)
        wanted = encodings.get(place.site)
        if wanted is None:
            tallies[place.site].fail("the simulation has no encoding here")
        elif wanted != place.encoding:
            tallies[place.site].fail("the model has another scale, zero point or dtype than the simulation")
    for site, encoding in encodings.items():
        if encoding.dtype.is_quantized and site not in seen:
            tallies.setdefault(site, _Tally("activation")).fail("the model does not quantize this site")


def _compare_stored(
    model: ModelProto, found: Iterable[Place], stored: Mapping[str, Array], tallies: dict[str, _Tally]
) -> None:
    tensors = stored_tensors(model)
    for place in found:
        if place.stored is None:
            continue
        tally = tallies[place.site]
        if place.site not in stored:
            tally.fail("the simulation stores no tensor here")
            continue
        codes = array(tensors[place.stored])
        if place.permutation is not None:
            codes = codes.transpose(np.argsort(place.permutation))
        wanted = np.asarray(stored[place.site], np.float32)
        if wanted.shape != codes.shape:
            tally.fail(f"the model stores the shape {codes.shape}, the simulation {wanted.shape}")
            continue
        for rows, encoding in rows_of(place.encoding, codes.shape):
            tally.add(lsb(codes[rows], encoding.quantize(wanted[rows])))
    for site, (kind, values) in _stored_casts(model, tensors).items():
        tallies[site] = tally = _Tally(kind)
        if site not in stored or stored[site].shape != values.shape:
            tally.fail("the simulation stores no tensor of this shape here")
        else:
            with np.errstate(over="ignore"):
                tally.add(lsb(values, stored[site].astype(values.dtype)))
    for site in stored:
        if site not in tallies:
            tallies[site] = _Tally("weight")
            tallies[site].fail("the model stores no tensor here")


def _stored_casts(model: ModelProto, tensors: Mapping[str, TensorProto]) -> dict[str, tuple[str, Array]]:
    """Site -> kind and value of every tensor stored as float16 or bfloat16."""
    found = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type == "Cast" and "qsdk.site" in facts and node.input[0] in tensors:
            found[facts["qsdk.site"]] = (facts["qsdk.kind"], array(tensors[node.input[0]]))
    return found


def lsb(left: Array, right: Array) -> Array:
    """The distance of two arrays of codes in steps of their grid."""
    return np.asarray(np.abs(_ordered(left) - _ordered(right)))


def _float_lsb(left: Array, right: Array) -> Array:
    """The distance of two arrays of computed floats in units of the last place.

    Below 1/1024 of the tensor's largest value, more than one is counted in units of that size: an op that cancels,
    such as GELU far below zero, is no more exact in float32 either.
    """
    largest = float(np.abs(right.astype(np.float32)).max(initial=0))
    steps = lsb(left, right)
    if not 0 < largest < np.inf:
        return steps
    unit = np.ldexp(1.0, int(np.floor(np.log2(largest))) - 10 - _MANTISSA[right.dtype.name])
    with np.errstate(invalid="ignore"):  # infinities, which only the representation can tell apart
        coarse = np.rint(np.abs(left.astype(np.float64) - right.astype(np.float64)) / unit)
    return np.where(np.isfinite(coarse), np.minimum(steps, np.maximum(coarse, 1)), steps)


def _ordered(codes: Array) -> npt.NDArray[np.int64]:
    """Codes as integers whose difference counts representable values."""
    if np.issubdtype(codes.dtype, np.integer) or codes.dtype.name in ("int4", "uint4", "int2", "uint2"):
        return codes.astype(np.int64)
    bits = codes.view(f"u{codes.dtype.itemsize}").astype(np.int64)
    sign = 1 << (8 * codes.dtype.itemsize - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def find_cuts(model: ModelProto) -> list[Cut]:
    """List the activation sites of a Q/DQ model, float16 and bfloat16 ones included, in graph order."""
    cuts = []
    for place in places(model):
        if place.quantize is not None:
            kind = place.kind or "activation"
            output = place.dequantize.output[0]
            cuts.append(Cut(place.site, kind, place.quantize.output[0], output, place.encoding.dtype.container))
    for dynamic in dynamic_places(model):
        codes, *computed = dynamic.quantize.output
        cuts.append(Cut(dynamic.site, dynamic.kind, codes, dynamic.dequantize.output[0], "uint8", tuple(computed)))
    first: dict[str, NodeProto] = {}
    for node in model.graph.node:
        facts = metadata(node)
        if node.op_type != "Cast" or "qsdk.site" not in facts:
            continue
        site = facts["qsdk.site"]
        if site not in first:
            first[site] = node
        if node.name.endswith("/cast_back") and first[site] is not node:
            cuts.append(Cut(site, facts["qsdk.kind"], first[site].output[0], node.output[0], facts["qsdk.dtype"]))
    return cuts


def cut_model(model: ModelProto, cuts: Sequence[Cut]) -> tuple[ModelProto, dict[str, str]]:
    """Build the model in which every cut's tensor is an output, in order, and its readers read a new input.

    What cuts compute of scales and zero points follows, in the same order.

    Returns:
        The model, and site -> name of its new input, for every site that something reads.
    """
    cut = load(model)
    feeds = {item.read: f"{item.site}/fed" for item in cuts}
    replace_nodes(cut.graph, [node for node in cut.graph.node if node.output[0] not in feeds])
    rename_inputs(cut.graph.node, feeds)
    del cut.graph.output[:]
    for item in cuts:
        name, code = item.compared, _HANDED_OUT.get(item.dtype)
        if code is None:
            # the runtime's Python face knows no such arrays; both casts are exact
            signed = item.dtype.startswith("int")
            code = TensorProto.FLOAT if "float" in item.dtype else TensorProto.INT8 if signed else TensorProto.UINT8
            name = f"{item.site}/compared"
            cut.graph.node.append(helper.make_node("Cast", [item.compared], [name], name, to=code))
        cut.graph.output.append(helper.make_tensor_value_info(name, code, None))
    for name, code in zip((name for item in cuts for name in item.computed), cycle(_COMPUTED), strict=False):
        cut.graph.output.append(helper.make_tensor_value_info(name, code, []))
    read = {name for node in cut.graph.node for name in reads(node)}
    fed = {item.site: feeds[item.read] for item in cuts if feeds[item.read] in read}
    cut.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in fed.values())
    del cut.graph.value_info[:]
    return cut, fed


class _Teacher:
    """Sessions over cut models, one per set of sites that a batch brings."""

    def __init__(self, model: ModelProto, cuts: Sequence[Cut]) -> None:
        self.model, self.cuts = model, cuts
        self.inputs = input_names(model.graph)
        self.sessions: dict[frozenset[str], tuple[ort.InferenceSession, dict[str, str]]] = {}

    def run(self, batch: Mapping[str, Array]) -> tuple[dict[str, Array], dict[str, Encoding]]:
        """Give the codes at every site that the batch captured, and the encodings that were found on the way."""
        cuts = [cut for cut in self.cuts if cut.site in batch]
        if not cuts:
            return {}, {}
        key = frozenset(cut.site for cut in cuts)
        if key not in self.sessions:
            model, fed = cut_model(self.model, cuts)
            self.sessions[key] = simulation_session(model), fed
        session, fed = self.sessions[key]
        feeds = {**raw_inputs(batch, self.inputs), **{name: batch[site] for site, name in fed.items()}}
        # a graph input that only cut-off nodes read may be gone
        known = {value.name for value in session.get_inputs()}
        feeds = {name: value for name, value in feeds.items() if name in known}
        values = iter(session.run(None, feeds))
        codes = {cut.site: next(values) for cut in cuts}
        computed = (cut.site for cut in cuts if cut.computed)
        return codes, {site: Encoding(uint8, next(values), next(values)) for site in computed}


def raw_inputs(batch: Mapping[str, Array], names: Iterable[str]) -> dict[str, Array]:
    """The values of the graph inputs in a captured batch.

    Raises:
        DataError: one of them is missing.
    """
    missing = [name for name in names if name not in batch]
    if missing:
        raise DataError(f"the captures lack the graph input(s) {', '.join(missing)}; put them under their own names")
    return {name: batch[name] for name in names}


def _compare_activations(
    model: ModelProto,
    captures: Iterable[Mapping[str, Array]],
    reference: Iterable[Sequence[Array]] | None,
    encodings: Mapping[str, Encoding],
    tallies: dict[str, _Tally],
) -> float | None:
    """Fill the tallies, one batch in memory at a time; gives the end-to-end signal-to-noise ratio in dB."""
    cuts = find_cuts(model)
    for cut in cuts:
        tallies.setdefault(cut.site, _Tally(cut.kind))
    teacher, noise = _Teacher(model, cuts), _Noise()
    whole = simulation_session(model) if reference is not None else None
    batches = 0
    for batch, outputs in _paired(captures, reference):
        batches += 1
        given = set(batch) - set(teacher.inputs)
        for cut in cuts:
            if cut.site not in given:
                tallies[cut.site].fail("the simulation captured nothing here")
        stored = {site for site, tally in tallies.items() if tally.kind in ("weight", "bias")}
        for site in sorted(given - stored - {cut.site for cut in cuts}):
            tallies.setdefault(site, _Tally("activation")).fail("the model has no such site")
        got, computed = teacher.run(batch)
        for cut in cuts:
            if cut.site in got:
                known = computed if cut.computed else encodings
                _compare(cut, got[cut.site], np.asarray(batch[cut.site]), known, tallies[cut.site])
        if whole is not None and outputs is not None:
            noise.add(whole.run(None, raw_inputs(batch, teacher.inputs)), outputs)
    if not batches:
        raise DataError("there are no batches to compare on; give at least one (a generator can be used only once)")
    return noise.decibels() if whole is not None else None


def _paired(
    captures: Iterable[Mapping[str, Array]], reference: Iterable[Sequence[Array]] | None
) -> Iterator[tuple[Mapping[str, Array], Sequence[Array] | None]]:
    if reference is None:
        yield from ((batch, None) for batch in captures)
        return
    outputs = iter(reference)
    for batch in captures:
        expected = next(outputs, None)
        if expected is None:
            raise DataError("the reference outputs end before the captures; give one per batch")
        yield batch, expected


def _compare(cut: Cut, got: Array, captured: Array, encodings: Mapping[str, Encoding], tally: _Tally) -> None:
    if got.shape != captured.shape:
        tally.fail(f"the model gives the shape {got.shape}, the simulation {captured.shape}")
    elif cut.dtype in _FLOATS:
        with np.errstate(over="ignore"):
            tally.add(_float_lsb(got.astype(_FLOATS[cut.dtype]), captured.astype(_FLOATS[cut.dtype])))
    elif cut.site in encodings:
        wanted = encodings[cut.site].quantize(captured)
        tally.add(lsb(got.astype(wanted.dtype), wanted))


class _Noise:
    """Powers of a signal and of what differs from it."""

    def __init__(self) -> None:
        self.signal = self.difference = 0.0

    def add(self, got: Sequence[Array], wanted: Sequence[Array]) -> None:
        for left, right in zip(got, wanted, strict=True):
            exact = np.asarray(right, np.float64)
            self.signal += float((exact**2).sum())
            self.difference += float(((np.asarray(left, np.float64) - exact) ** 2).sum())

    def decibels(self) -> float:
        if self.difference == 0:
            return float("inf")
        return float(10 * np.log10(self.signal / self.difference)) if self.signal else float("-inf")
