"""Fold BatchNormalization and added constants into the linear layer before or after (Jacob et al. 2017, section 3.2).

The rules are those of the PyTorch door: into the layer before where nothing else reads its result, else into a layer
after it that pads nothing; never one that a rule of the config names. A constant per channel that an Add behind a layer
adds becomes the layer's bias: a bias has no grid of its own, and some exporters write every bias so.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.proto.external_data import FLOATS, array
from onnx_backend.proto.graph_queries import GraphIndex, initializers
from onnx_backend.proto.nodes import attributes, drop_unused_initializers, node_label, replace_nodes
from onnx_backend.proto.weightless import Types
from qsdk.core.arrays import Array
from qsdk.core.config.config import QuantConfig
from qsdk.core.graph.op_facts import LINEAR
from qsdk.core.layers.expected_means import FoldedNorm

_TOO_LARGE = "folded, a weight or bias of {} would be too large for its type"


@dataclass(frozen=True)
class Folds:
    """The BatchNorms that were folded into a layer, those that stay, with the reason, and the constants that were.

    Attributes:
        folded: their owners.
        unfolded: owner -> why it stays.
        norms: owner of a layer -> mean and deviation that the BatchNorm folded into it declared.
        added: owners of the Adds whose constants are now the biases of layers.
        gone: site or tensor that the model no longer has -> the site that it is in now.
    """

    folded: tuple[str, ...] = ()
    unfolded: Mapping[str, str] = field(default_factory=dict)
    norms: dict[str, FoldedNorm] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    gone: Mapping[str, str] = field(default_factory=dict)


def fold_batch_norms(model: ModelProto, types: Types, config: QuantConfig) -> Folds:
    """Fold each BatchNormalization and each added constant that can be, in place; no graph output changes its name."""
    stored = initializers(model.graph)
    foldable = [node for node in model.graph.node if may_fold(node, stored)]
    if not foldable:
        return Folds()
    folding = _Folding(model, types)
    folded, unfolded, added = [], {}, []
    for node in foldable:
        owner = node_label(node)
        if node.op_type == "Add":
            if not config.names(owner, "Add") and folding.fold_added(node):
                added.append(owner)
            continue
        reason = "a rule names it" if config.names(owner) else folding.fold(node)
        if reason:
            unfolded[owner] = reason
        else:
            folded.append(owner)
    folding.finish()
    return Folds(tuple(folded), unfolded, folding.norms, tuple(added), folding.gone)


def may_fold(node: NodeProto, stored: Container[str]) -> bool:
    """Return whether a node is of a kind that is folded into a layer: a BatchNorm, or an Add of a stored tensor."""
    adds = node.op_type == "Add" and len([name for name in node.input if name in stored]) == 1
    return node.domain == "" and (adds or node.op_type == "BatchNormalization")


@dataclass(frozen=True)
class _LinearLayer:
    """A linear node, and the Add that carries the bias of a MatMul."""

    node: NodeProto
    add: NodeProto | None = None

    @property
    def last(self) -> NodeProto:
        """Return the node whose output is the layer's."""
        return self.add or self.node


class _Folding(GraphIndex):
    """The model while BatchNorms are folded into it."""

    def __init__(self, model: ModelProto, types: Types) -> None:
        super().__init__(model.graph)
        self.types = types
        self.dropped: set[str] = set()  # outputs of nodes that are gone
        self.renamed: dict[str, str] = {}
        self.norms: dict[str, FoldedNorm] = {}
        self.gone: dict[str, str] = {}

    def fold(self, norm: NodeProto) -> str:
        """Fold one BatchNorm; return the reason if it stays, else ""."""
        facts = attributes(norm)
        if facts.get("training_mode", 0) or len([name for name in norm.output if name]) > 1:
            return "it is in training mode"
        if len(norm.input) != 5 or any(name not in self.stored for name in norm.input[1:]):
            return "its statistics are computed"
        scale, bias, mean, var = (array(self.stored[name]).astype(np.float64) for name in norm.input[1:])
        factor = scale / np.sqrt(var + float(facts.get("epsilon", 1e-5)))
        shift = bias - mean * factor
        before = self._layer_before(norm)
        reason = "no linear layer stands directly before or after it"
        if before is not None:
            reason = self._obstacle(before, norm, factor) or self._into_before(before, norm, factor, shift)
            if not reason:
                self.norms[node_label(before.node)] = _folded_norm(bias, abs(scale))
                return ""
        after = self._layer_after(norm)
        if after is not None:
            reason = self._obstacle_after(after, norm, factor) or self._into_after(after, norm, factor, shift)
            if not reason:
                self.norms[node_label(after.node)] = _folded_norm(mean, np.sqrt(var), before=True)
                return ""
        return reason

    def fold_added(self, add: NodeProto) -> bool:
        """Make the constant that an Add behind a layer adds the layer's bias, if it has one value per channel."""
        constant = next(name for name in add.input if name in self.stored)
        made = next(name for name in add.input if name != constant)
        node = self.makers.get(made)
        known = self.types.get(made, ("", None))[1]
        if node is None or node.op_type not in LINEAR or known is None or not self.is_read_once(made):
            return False
        weight = self.stored.get(node.input[1])
        value = None if weight is None else _per_channel(node, self.stored[constant], weight, len(known))
        if weight is None or value is None:
            return False
        if node.op_type == "MatMul":  # with its Add it is one layer, if the constant has one axis
            if self.is_read_once(constant):
                self.stored[constant].dims[:] = [value.size]
            return False
        layer = _LinearLayer(node)
        own = node.input[2] if len(node.input) > 2 else ""
        fits = not own or (own in self.stored and list(self.stored[own].dims) == [value.size])
        if not fits or float(attributes(node).get("beta", 1.0)) != 1.0:
            return False
        bias = self._bias(layer, value.size) + value
        if not self._holds(node, bias):
            return False
        self._replace_bias(node, bias, layer, weight.data_type)
        self.gone |= dict.fromkeys((constant, f"{node_label(add)}:constant"), f"{node_label(node)}:bias")
        self._take_output(node, add)
        return True

    def finish(self) -> None:
        """Remove the folded nodes and the tensors that only they read."""
        kept = [node for node in self.graph.node if not node.output or node.output[0] not in self.dropped]
        replace_nodes(self.graph, kept)
        drop_unused_initializers(self.graph)

    # --- which layer ------------------------------------------------------------------------------------------

    def _layer_before(self, norm: NodeProto) -> _LinearLayer | None:
        maker = self.makers.get(norm.input[0])
        if maker is None:
            return None
        if maker.op_type == "Add":
            head = next((self.makers[n] for n in maker.input if n in self.makers), None)
            bias = next((n for n in maker.input if n in self.stored), None)
            if head is None or bias is None or head.op_type != "MatMul" or not self.is_read_once(head.output[0]):
                return None
            return _LinearLayer(head, maker)
        return _LinearLayer(maker) if maker.op_type in LINEAR else None

    def _layer_after(self, norm: NodeProto) -> _LinearLayer | None:
        readers = self.readers.get(norm.output[0], [])
        is_layer = len(readers) == 1 and readers[0].op_type in LINEAR and readers[0].input[0] == norm.output[0]
        return _LinearLayer(readers[0]) if is_layer else None

    def _obstacle(self, layer: _LinearLayer, norm: NodeProto, factor: Array) -> str:
        """Return why a BatchNorm cannot be folded into the layer before it, or ""."""
        if not self.is_read_once(norm.input[0]):
            return f"the result of {node_label(layer.node)} is also read elsewhere"
        return self._weight_obstacle(layer, factor, norm.input[0])

    def _obstacle_after(self, layer: _LinearLayer, norm: NodeProto, factor: Array) -> str:
        if not self.is_read_once(norm.output[0]):
            return f"its result is also read elsewhere than by {node_label(layer.node)}"
        facts = attributes(layer.node)
        if layer.node.op_type == "ConvTranspose":
            return "a transposed convolution after it adds its taps unevenly at the borders"
        if any(facts.get("pads", [])) or facts.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
            return "the layer after it pads with zeros, which a folded shift would not reach"
        if layer.node.op_type == "MatMul":
            return "a MatMul after it has no bias that could take its shift"
        if layer.node.op_type == "Gemm" and facts.get("transA", 0):
            return f"its channels are not those of {node_label(layer.node)}"
        return self._weight_obstacle(layer, factor, norm.output[0], before=True)

    def _weight_obstacle(self, layer: _LinearLayer, factor: Array, between: str, *, before: bool = False) -> str:
        node = layer.node
        weight = node.input[1] if len(node.input) > 1 else ""
        parameters = [weight, *([node.input[2]] if len(node.input) > 2 and node.input[2] else [])]
        if layer.add is not None:
            parameters.append(next(n for n in layer.add.input if n in self.stored))
        if any(name not in self.stored for name in parameters):
            return f"the weight of {node_label(node)} is computed"
        if not self.is_read_once(weight):
            others = [node_label(reader) for reader in self.readers.get(weight, []) if reader is not node]
            return f"{node_label(node)} shares its weight with {others[0] if others else 'an output'}"
        if any(self.stored[name].data_type not in FLOATS for name in parameters):
            return f"the weight of {node_label(node)} is not float"
        shape = list(self.stored[weight].dims)
        if node.op_type in ("Gemm", "MatMul"):
            known = self.types.get(between, ("", None))[1]
            # BatchNorm counts channels on axis 1, a MatMul on its last one
            if node.op_type == "MatMul" and (known is None or len(known) != 2):
                return f"its channels are not those of {node_label(node)}"
            if len(shape) != 2 or float(attributes(node).get("beta", 1.0)) != 1.0:
                return f"the weight of {node_label(node)} has a form that cannot be folded"
        channels = _channels(node, shape, inputs=before)
        biases = [list(self.stored[name].dims) for name in parameters[1:]]
        wanted = _channels(node, shape, inputs=False)
        if channels != factor.size or any(dims != [wanted] for dims in biases):
            return f"its channels are not those of {node_label(node)}"
        return ""

    # --- the fold itself --------------------------------------------------------------------------------------

    def _into_before(self, layer: _LinearLayer, norm: NodeProto, factor: Array, shift: Array) -> str:
        """Fold a BatchNorm into the layer before it; return why that cannot be, or ""."""
        node = layer.node
        weight = array(self.stored[node.input[1]]).astype(np.float64)
        # the bias is added after alpha, so that alpha stays as it is
        bias = self._bias(layer, factor.size) * factor + shift
        grouped = weight.reshape(_grouped(node, weight.shape)[1])
        folded = (grouped * _along(node, weight.shape, factor, inputs=False)).reshape(weight.shape)
        if not self._holds(node, folded, bias):
            return _TOO_LARGE.format(node_label(node))
        self._replace_weight(node, folded, bias, layer)
        self._take_output(layer.last, norm)
        return ""

    def _take_output(self, last: NodeProto, gone: NodeProto) -> None:
        """Have the last node of a layer make what the node behind it made, which is gone."""
        old = last.output[0]
        last.name = last.name or old  # it keeps its owner
        self.gone |= dict.fromkeys((old, f"{node_label(gone)}:output"), f"{last.name}:output")
        last.output[0] = gone.output[0]
        self.makers[last.output[0]] = last
        self.makers.pop(old, None)
        self._drop(gone, keep_output=True)

    def _into_after(self, layer: _LinearLayer, norm: NodeProto, factor: Array, shift: Array) -> str:
        """Fold a BatchNorm into the layer behind it; return why that cannot be, or ""."""
        node = layer.node
        facts = attributes(node)
        weight = array(self.stored[node.input[1]]).astype(np.float64)
        grouped = weight.reshape(_grouped(node, weight.shape)[1])
        scaled, moved = (_along(node, weight.shape, values, inputs=True) for values in (factor, shift))
        axes = (_input_axis(node), *range(3, grouped.ndim))
        alpha = float(facts.get("alpha", 1.0)) if node.op_type == "Gemm" else 1.0
        added = (grouped * moved).sum(axis=axes) * alpha
        bias = self._bias(layer, _channels(node, weight.shape, inputs=False)) + added.reshape(-1)
        folded = (grouped * scaled).reshape(weight.shape)
        if not self._holds(node, folded, bias):
            return _TOO_LARGE.format(node_label(node))
        self._replace_weight(node, folded, bias, layer)
        node.input[0] = norm.input[0]
        self.readers[norm.input[0]] = [node if r is norm else r for r in self.readers[norm.input[0]]]
        self.gone |= dict.fromkeys((norm.output[0], f"{node_label(norm)}:output"), f"{node_label(node)}:output")
        self._drop(norm, keep_output=False)
        return ""

    def _holds(self, node: NodeProto, *values: Array) -> bool:
        """Return True if the type of a layer's weight holds values without an infinity."""
        dtype = helper.tensor_dtype_to_np_dtype(self.stored[node.input[1]].data_type)
        with np.errstate(over="ignore"):
            return all(bool(np.isfinite(value.astype(dtype)).all()) for value in values)

    def _bias(self, layer: _LinearLayer, channels: int) -> Array:
        name = next((n for n in layer.add.input if n in self.stored), "") if layer.add is not None else ""
        if not name and layer.node.op_type != "MatMul" and len(layer.node.input) > 2:
            name = layer.node.input[2]
        return array(self.stored[name]).astype(np.float64) if name else np.zeros(channels)

    def _replace_weight(self, node: NodeProto, weight: Array, bias: Array, layer: _LinearLayer) -> None:
        data_type = self.stored[node.input[1]].data_type
        node.input[1] = self._store(weight, node.input[1], node, data_type)
        self._replace_bias(node, bias, layer, data_type)

    def _replace_bias(self, node: NodeProto, bias: Array, layer: _LinearLayer, data_type: int) -> None:
        if layer.add is not None:
            position = next(i for i, n in enumerate(layer.add.input) if n in self.stored)
            layer.add.input[position] = self._store(bias, layer.add.input[position], layer.add, data_type)
        elif node.op_type == "MatMul":
            node.op_type = "Gemm"
            node.input.append(self._store(bias, f"{node_label(node)}.bias", node, data_type))
        else:
            name = node.input[2] if len(node.input) > 2 and node.input[2] else f"{node_label(node)}.bias"
            del node.input[2:]
            node.input.append(self._store(bias, name, node, data_type))

    def _store(self, value: Array, name: str, reader: NodeProto, data_type: int) -> str:
        """Store a folded tensor under a name of its own, since the old one may have other readers; rounded once."""
        fresh = self.fresh(f"{name}_folded")
        typed = np.ascontiguousarray(value).astype(helper.tensor_dtype_to_np_dtype(data_type))
        self.graph.initializer.append(numpy_helper.from_array(typed, fresh))
        self.stored[fresh] = self.graph.initializer[-1]
        self.readers[fresh] = [reader]
        self.gone[name] = f"{node_label(reader)}:{'weight' if name == reader.input[1] else 'bias'}"
        return fresh

    def _drop(self, norm: NodeProto, *, keep_output: bool) -> None:
        """Mark a folded node as removed; its own output may be another node's now."""
        if keep_output:
            norm.output[0] = self.fresh(f"{norm.output[0]}/folded")
        self.dropped.add(norm.output[0])


def _per_channel(node: NodeProto, constant: TensorProto, weight: TensorProto, rank: int) -> Array | None:
    """Return one value per output channel of a constant that is added to a layer's result of this rank; else None.

    One number for all channels is none: it is a guard of what divides by the result, or no more than an offset.
    """
    if constant.data_type != weight.data_type or constant.data_type not in FLOATS:
        return None
    if node.op_type in ("Gemm", "MatMul") and len(weight.dims) != 2:
        return None
    axis = 1 if node.op_type in ("Conv", "ConvTranspose") else rank - 1
    channels, dims = _channels(node, list(weight.dims), inputs=False), list(constant.dims)
    wanted = [channels if at == axis else 1 for at in range(rank)]
    padded = [1] * (rank - len(dims)) + dims
    if padded != wanted or (channels == 1 and len(dims) != rank):
        return None
    return array(constant).astype(np.float64).reshape(-1)


def _folded_norm(mean: Array, std: Array, *, before: bool = False) -> FoldedNorm:
    return FoldedNorm(mean.astype(np.float32), std.astype(np.float32), before)


def _channels(node: NodeProto, shape: Sequence[int], *, inputs: bool) -> int:
    """Return the number of input or output channels of a layer's stored weight."""
    groups, rest = _grouped(node, shape)
    return groups * rest[_input_axis(node) if inputs else 3 - _input_axis(node)]


def _grouped(node: NodeProto, shape: Sequence[int]) -> tuple[int, tuple[int, ...]]:
    """Return the number of groups of a layer, and the shape of its weight with an axis of groups in front."""
    groups = int(attributes(node).get("group", 1))
    return groups, (groups, int(shape[0]) // groups, *map(int, shape[1:]))


def _input_axis(node: NodeProto) -> int:
    """Return the axis of input channels of a weight with an axis of groups in front: 1 or 2; the other has outputs."""
    transposed = node.op_type == "Gemm" and bool(attributes(node).get("transB", 0))
    return 2 if transposed or node.op_type == "Conv" else 1


def _along(node: NodeProto, shape: Sequence[int], values: Array, *, inputs: bool) -> Array:
    """Return one value per input or output channel, shaped so that it multiplies the weight `_grouped` views."""
    groups, grouped = _grouped(node, shape)
    axis = _input_axis(node) if inputs else 3 - _input_axis(node)
    return values.reshape(groups, *(grouped[axis] if at == axis else 1 for at in range(1, len(grouped))))
