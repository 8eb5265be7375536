"""The tensors of an ONNX model by every name that other tools give them, and their values, also taught by a side."""

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, helper

from onnx_backend.opening.encodings_of_file import UNMARKED
from onnx_backend.parity.cuts import with_outputs
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, input_names, names_in, producers, unique
from onnx_backend.proto.nodes import metadata, rename_inputs
from onnx_backend.proto.subgraphs import reads
from onnx_backend.qdq.read import QdqPair, qdq_pairs, stored_tensors
from onnx_backend.runtime.feeds import as_feeds, run_session
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.runtime.session import simulation_session
from qsdk.core.comparing.place import (
    NOT_COUNTED,
    Array,
    Place,
    epsilon_of,
    op_names,
    owner_names,
    parts_of_traced_name,
    rounding_noise,
)
from qsdk.core.site import owner_of, port_of

_SCOPES = "pkg.torch.onnx.name_scopes"  # in which torch's exporter keeps the paths of the modules of a node
_STORED = ("weight", "bias")
_CODES = "/quantized"  # behind the name of a site, the codes of that site
_NARROW = {name: epsilon_of(name) for name in ("float16", "bfloat16")}
_NO_TENSOR = ("Sequence", "Optional")


@dataclass(frozen=True)
class OnnxPlace:
    """A place of an ONNX model.

    Attributes:
        facts: its names and grid.
        tensor: the one that is read from a session.
        readers_read: the tensors that stand for it where it is read.
    """

    facts: Place
    tensor: str
    readers_read: tuple[str, ...]


class OnnxValues:
    """The tensors of an ONNX model, as the simulation computes them: Q/DQ as written.

    The values of a quantized tensor are what its readers read, behind DequantizeLinear.

    Attributes:
        arguments: makes the batches that the model takes of those of the user.
    """

    def __init__(self, model: ModelProto, providers: Providers = CPU_ONLY) -> None:
        self.arguments: Callable[[Any, str], Any] = lambda batch, where: batch
        self._model, self._providers = model, providers
        self._places: list[OnnxPlace] = places_of(model)
        self._kinds: dict[str, np.dtype[Any]] = {}  # by tensor, from the first run on
        self._session: ort.InferenceSession | None = None
        self._taught: tuple[ort.InferenceSession, dict[str, str]] | None = None

    @property
    def places(self) -> Sequence[Place]:
        """Return the places in graph order; after the first run, only those that hold floats or codes."""
        return [place.facts for place in self._places]

    @property
    def teachable(self) -> bool:
        """Return whether the model computes on floats, so that it can go on from given ones."""
        return not any(place.facts.codes for place in self._places)

    def values(self, batch: Any, where: str) -> Mapping[str, Array]:
        """Return the values at every place, in float32, codes as they are; see `Side`."""
        if self._session is None:
            self._session = simulation_session(self._exposed(), providers=self._providers)
        values = self._run(self._session, batch, where, {}, ())
        if not self._kinds:
            self._kinds = {name: value.dtype for name, value in values.items()}
            comparable = [place for place in self._places if _is_comparable(place, values)]
            self._places = [_with_epsilon(place, values) for place in comparable]
        return self._by_place(values)

    def taught(self, batch: Any, where: str, given: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the values where each is computed from the given ones; see `Side`."""
        if self._taught is None:
            self._taught = self._with_given(given)
        session, fed = self._taught
        names = {place.facts.name: place.tensor for place in self._places if place.facts.given} | fed
        values = {
            names[place.facts.name]: given[place.facts.name].astype(self._kinds[place.tensor])
            for place in self._places
            if place.facts.name in given and place.facts.name in names
        }
        return self._by_place(self._run(session, batch, where, values, fed.values()))

    def _run(
        self,
        session: ort.InferenceSession,
        batch: Any,
        where: str,
        given: Mapping[str, Array],
        added: Collection[str],
    ) -> dict[str, Array]:
        """Return the values of all inputs and outputs, where some are given and some inputs are none of the model's."""
        inputs = [value for value in session.get_inputs() if value.name not in added]
        feeds = as_feeds(self.arguments(batch, where), inputs, where)
        results = run_session(session, {**feeds, **given}, where)
        return {**feeds, **dict(zip((output.name for output in session.get_outputs()), results, strict=True))}

    def _by_place(self, values: Mapping[str, Array]) -> dict[str, Array]:
        found = {place.facts.name: values[place.tensor] for place in self._places}
        return {name: x.astype(np.float32) if x.dtype.kind == "f" else x for name, x in found.items()}

    def _exposed(self) -> ModelProto:
        """Return the model with every place as an output."""
        return with_outputs(self._model, [place.tensor for place in self._places])

    def _with_given(self, given: Mapping[str, Array]) -> tuple[ort.InferenceSession, dict[str, str]]:
        """Return a session whose nodes read new inputs in place of the given places, and place -> such an input."""
        model = self._exposed()
        taken, fed, renamed = names_in(model.graph), dict[str, str](), dict[str, str]()
        for place in self._places:
            if place.facts.name in given and not place.facts.given:
                fed[place.facts.name] = unique(f"{place.tensor}/given", taken)
                renamed.update(dict.fromkeys(place.readers_read, fed[place.facts.name]))
        rename_inputs(model.graph.node, renamed)
        read = {name for node in model.graph.node for name in reads(node)}
        for place in self._places:
            new = fed.get(place.facts.name)
            if new in read:
                code = int(helper.np_dtype_to_tensor_dtype(self._kinds[place.tensor]))
                model.graph.input.append(helper.make_tensor_value_info(new, code, None))
        del model.graph.value_info[:]
        fed = {name: new for name, new in fed.items() if new in read}
        return simulation_session(model, providers=self._providers), fed


def _is_comparable(found: OnnxPlace, values: Mapping[str, Array]) -> bool:
    kind = values[found.tensor].dtype.kind
    return kind in "iu" if found.facts.codes else kind == "f"


def _with_epsilon(found: OnnxPlace, values: Mapping[str, Array]) -> OnnxPlace:
    known = 0.0 if found.facts.codes else float(np.finfo(values[found.tensor].dtype).eps)
    return replace(found, facts=replace(found.facts, epsilon=max(known, found.facts.epsilon)))


def places_of(model: ModelProto) -> list[OnnxPlace]:
    """Return the places of a model in the order of its nodes: float, Q/DQ, or integer-only with the names of sites.

    The tensor in front of a QuantizeLinear that nothing else reads is no place of its own: the quantized one has its
    names.
    """
    return list(_Places(model).all())


class _Places:
    """What is known about the tensors of a model, and the places that follow from it."""

    def __init__(self, model: ModelProto) -> None:
        self.model, nodes = model, model.graph.node
        #: by the tensor that holds the codes
        self.pairs = {pair.quantize.output[0]: pair for pair in qdq_pairs(model) if pair.quantize is not None}
        self.outputs = {value.name: index for index, value in enumerate(model.graph.output)}
        self.modules, self.ops = names_of_tensors(model)
        self.makers, self.readers = producers(nodes), consumers(nodes)
        #: tensor of codes -> the results of all DequantizeLinear that read it, copies of one pair included
        self.dequantized: dict[str, list[str]] = {}
        for node in nodes:
            if node.op_type == "DequantizeLinear":
                self.dequantized.setdefault(node.input[0], []).append(node.output[0])

    def all(self) -> Iterator[OnnxPlace]:
        """Yield the places, with the rounding of the weights in front of each since the places before."""
        constant = set(stored_tensors(self.model))
        weights, carried = _weight_noises(self.model), dict[str, float]()
        for name in input_names(self.model.graph):
            if not self._only_quantized(name):
                yield OnnxPlace(Place(name, values=(name,), given=True, output=self.outputs.get(name)), name, (name,))
        quantized = {pair.output: pair for pair in self.pairs.values()}
        behind = {name for names in self.dequantized.values() for name in names} - set(quantized)
        for node in self.model.graph.node:
            read = reads(node)
            if all(name in constant for name in read) and node.op_type != "RandomNormal":
                constant.update(node.output)
                behind_weights = sum(weights.get(name, 0.0) for name in read)
                weights.update({name: behind_weights for name in node.output if name not in weights})
                continue
            noise = sum(weights.get(name, 0.0) + carried.get(name, 0.0) for name in read)
            for name in filter(None, node.output):
                carried[name] = noise
                if name in behind or name in self.pairs or node.op_type.startswith(_NO_TENSOR):
                    continue
                if name in quantized:
                    yield self._of_pair(quantized[name], noise)
                elif self._only_quantized(name):
                    continue
                else:
                    yield OnnxPlace(self._of_result(node, name, noise), name, (name,))
                carried[name] = 0.0

    def _of_pair(self, pair: QdqPair, noise: float) -> OnnxPlace:
        assert pair.quantize is not None
        raw = pair.quantize.input[0]
        maker, read = self.makers.get(raw), (pair.output, *self.dequantized[pair.quantize.output[0]])
        names = (raw, pair.output, *((maker.name,) if maker is not None and len(maker.output) == 1 else ()))
        site = pair.site if "qsdk.site" in metadata(pair.dequantize) else ""
        module, op = owner_names(site)
        modules = (*module, *self.modules.get(raw, ()), *self.modules.get(pair.output, ()))
        facts = Place(
            pair.site,
            site=site,
            modules=tuple(dict.fromkeys(modules)),
            values=tuple(dict.fromkeys(name for name in names if name)),
            ops=tuple(dict.fromkeys((*op, *self.ops.get(raw, ())))),
            view=maker is not None and maker.op_type in NOT_COUNTED,
            encoding=pair.encoding,
            weight_noise=noise,
            output=next((self.outputs[name] for name in read if name in self.outputs), None),
        )
        return OnnxPlace(facts, pair.output, tuple(dict.fromkeys(read)))

    def _of_result(self, node: NodeProto, name: str, noise: float) -> Place:
        codes = name.endswith(_CODES)
        shown = name.removesuffix(_CODES).removesuffix(UNMARKED)
        facts = metadata(node) if node.op_type == "Cast" and node.name.endswith("/cast_back") else {}
        site = shown if codes else facts.get("qsdk.site", "")
        module, op = owner_names(site)
        return Place(
            site or shown,
            site=site,
            modules=(*module, *self.modules.get(name, ())),
            ops=(*op, *self.ops.get(name, ())),
            view=node.op_type in NOT_COUNTED,
            values=(shown, *((node.name,) if node.name and len(node.output) == 1 else ())),
            weight_noise=noise,
            epsilon=_NARROW.get(facts.get("qsdk.dtype", ""), 0.0),
            codes=codes,
            output=self.outputs.get(name),
        )

    def _only_quantized(self, name: str) -> bool:
        """Return True if a tensor is read by the QuantizeLinear of a site, and by nothing else."""
        following = self.readers.get(name, ())
        quantizers = [n for n in following if n.op_type == "QuantizeLinear" and n.output[0] in self.pairs]
        return bool(following) and name not in self.outputs and len(quantizers) == len(following)


def _weight_noises(model: ModelProto) -> dict[str, float]:
    """Return name of a dequantized weight -> power of its rounding, relative to its own."""
    stored = stored_tensors(model)
    found = {}
    for pair in qdq_pairs(model):
        if pair.stored is None or pair.kind == "bias" or pair.encoding.dtype.name == "int32":
            continue
        codes = array(stored[pair.stored])
        if pair.permutation is not None:
            codes = codes.transpose(tuple(int(i) for i in np.argsort(pair.permutation)))
        found[pair.output] = rounding_noise(pair.encoding, pair.encoding.dequantize(codes))
    return found


def names_of_tensors(model: ModelProto) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return tensor -> paths of the modules that it leaves, the innermost first; and -> its name as a functional op."""
    nodes = model.graph.node
    readers = consumers(nodes)
    scopes: dict[str, tuple[str, ...]] = {}  # by tensor; nodes that were put in belong to the module in front of them
    ops: dict[str, tuple[str, ...]] = {}
    calls: Counter[str] = Counter()
    for node in nodes:
        own = _scopes(node)
        before = next((scopes[name] for name in node.input if name in scopes), ())
        scopes.update(dict.fromkeys(node.output, before if own is None else own))
        if own is not None and len(node.output) == 1:
            place = f"{own[-1] if own else ''}/{node.op_type}"
            ops[node.output[0]] = op_names(own[-1] if own else "", node.op_type, calls[place])
            calls[place] += 1
    outputs, by_weights = {value.name for value in model.graph.output}, _modules_by_weights(model)
    modules: dict[str, tuple[str, ...]] = {}
    for name, paths in scopes.items():
        names, more = parts_of_traced_name(name)
        following = [scopes.get(output, ()) for node in readers.get(name, ()) for output in node.output[:1]]
        for path in reversed(paths):
            if name in outputs or any(path not in other for other in following):
                names = (*names, f"{path}@{calls[path]}" if calls[path] else path)
                calls[path] += 1
        if not names and name in by_weights:
            names = (by_weights[name],)
        modules[name], ops[name] = names, (*more, *ops.get(name, ()))
    return modules, ops


def _modules_by_weights(model: ModelProto) -> dict[str, str]:
    """Return tensor -> path of the module whose stored weight and bias the node that makes it, and those before, read.

    A stored tensor that several nodes read says nothing: exporters merge equal ones.
    """
    parts = {name: name.rpartition(".") for name in stored_tensors(model)}
    constant = {name: path if last in _STORED else "" for name, (path, _, last) in parts.items()}
    readers = consumers(model.graph.node)
    found: dict[str, str] = {}  # module -> the last tensor that it makes
    for node in model.graph.node:
        read = reads(node)
        if read and all(name in constant for name in read):
            site = metadata(node).get("qsdk.site", "")
            path = owner_of(site) if port_of(site) in _STORED else constant[read[0]]
            constant.update(dict.fromkeys(node.output, path))
            continue
        for name in read:
            if constant.get(name) and len(readers[name]) == 1:
                found[constant[name]] = node.output[0]
    return {tensor: path for path, tensor in found.items()}


def _scopes(node: NodeProto) -> tuple[str, ...] | None:
    """Return the paths of the modules that a node belongs to, the outermost first; None where the file says nothing."""
    text = metadata(node).get(_SCOPES)
    if text is None:
        return None
    try:
        given = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
    if not isinstance(given, list):
        return None
    return tuple(str(path) for path in given[:-1] if path)
