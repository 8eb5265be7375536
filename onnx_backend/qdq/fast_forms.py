"""Pairs in forms that ONNX Runtime computes fast, and back: a node says in its metadata which nodes it stands for.

Each computes the same numbers; measured on onnxruntime 1.32:

- DynamicQuantizeLinear -> DequantizeLinear -> MatMul runs as it stands, in floats; with MatMulInteger, Cast and Mul in
  place of the others it is one kernel (DynamicQuantizeMatMul). Sums in float32 are rounded, those of integers are not.
- A DequantizeLinear of a stored weight that no kernel reads on codes runs in every run; Cast and Mul of the same codes
  are folded to floats once, when the session is opened (an LSTM of 128 to 256 took 1.3 times float).
- So does that of a table of 30,000 words; a Gather of codes and a DequantizeLinear behind reads only some rows. Where
  a layer whose weight alone is quantized reads these, a Sum stands between: behind a DequantizeLinear it has no kernel.
- Nor has it one if its weight has one scale that something else reads too, as a table that is looked up does; with
  that scale for each channel it has.
- 1 over a square root is a Div in the norms that the runtime has a kernel for, not the Reciprocal that torch writes.
- Zeros around the input of a convolution, with a pair of the encoding in front, are the convolution's own zeros: 0 has
  a code.
- A MatMul and the Add of its bias run as a product of codes, a DequantizeLinear of the bias and a sum of floats where
  the number of rows is open; a Gemm between two Reshapes, which the runtime itself makes of them at fixed sizes, is
  one QGemm.
- A mean over all positions of an image runs in floats, and in the slow layout; a GlobalAveragePool on codes.
- Tokens that are transposed and then made an image keep the runtime from computing on it with the channels last; tokens
  that are made an image and then transposed do not.
- A Concat copies codes four times as fast as floats; a QuantizeLinear behind it gives the same codes in front of it.
- A GroupNormalization is written out by the runtime in eight passes; an InstanceNormalization of its groups
  is a kernel.
- The shares of masked scores are denormal numbers, with which a processor computes 10 to 20 times as long: Softmax and
  the QuantizeLinear behind. Where a score is less than the largest of its row by more than 60, its share is below
  1e-26 and changes no sum; it may as well be exactly 60 less.
- A product of codes with a stored number, between two pairs, has the same codes as before where the second scale is the
  first one times that number, which 256 codes tell: only the scale with which they are read is another.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import initializers
from onnx_backend.proto.nodes import (
    attributes,
    constant_tensor,
    copied,
    drop_unused_initializers,
    is_constant,
    metadata,
    replace_nodes,
    set_attributes,
)
from onnx_backend.proto.weightless import is_large
from onnx_backend.qdq.form_writer import changed
from onnx_backend.qdq.forms import FORM_KEY, PART_OF_FORM, in_order, meant_by
from onnx_backend.qdq.layer_inputs import PART_KEY
from onnx_backend.qdq.norm_forms import NormForms
from onnx_backend.qdq.token_rows import write_rows
from onnx_backend.readers import quantizers
from qsdk.core.errors import FileFormatError
from qsdk.core.graph.op_facts import LINEAR

_NOTES = {FORM_KEY, PART_OF_FORM}
_SPREAD = ("channel_scales", "channel_zero_points")
#: ends of the names of numbers that forms store
_NUMBERS = tuple(f"/{end}" for end in ("shape", "one", "axes", "depth", "gains", "biases", *_SPREAD))
_BYTES = (TensorProto.INT8, TensorProto.UINT8)
_FOLDED = (*_BYTES, TensorProto.INT4, TensorProto.UINT4)
_LOOKED_UP = (*_BYTES, TensorProto.INT16, TensorProto.UINT16)
_CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
#: op without a kernel on codes -> the operands that are weights
_IN_FLOATS = {"LSTM": (1, 2), "GRU": (1, 2), "RNN": (1, 2), "LayerNormalization": (1, 2), "GroupNormalization": (1, 2)}
_LOOK_UPS = frozenset({"Gather", "GatherElements", "GatherND"})
_CUTS = frozenset({"Resize", "Slice"})
_APART = frozenset({"Concat", "QuantizeLinear", "Resize"})  # read what is made of a stored tensor, and not its codes
_BETWEEN = (["Reshape"], ["QuantizeLinear", "DequantizeLinear", "Reshape"])  # what stands behind a Transpose of tokens
_IMAGE = 4  # axes
_SHAPE_IN_PART = 15  # the opset from which a Shape gives some of the sizes
_LEAST_AXES = 3  # below that, the runtime itself makes a Gemm of a MatMul and an Add
_MANY = 2**15  # numbers, below which a node more costs what it saves
_PADDED = ("QuantizeLinear", "DequantizeLinear", "Pad", "QuantizeLinear", "DequantizeLinear")


def write_fast_forms(model: ModelProto, *, rows: bool = True) -> None:
    """Write what the runtime computes fast in another form in that form, in place; tokens as `rows` between them."""
    writer = _Writer(model)
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and writer.is_folded(node):
            writer.fold(node)
        elif node.op_type == "DequantizeLinear" and writer.shares_scale(node):
            writer.spread(node)
        elif node.op_type == "DequantizeLinear" and (chain := writer.multiplied(node)):
            writer.read_as_before(node, chain)
        elif node.op_type == "QuantizeLinear" and (concat := writer.joined_before(node)):
            writer.join_codes(concat, node)
        elif node.op_type == "Softmax" and writer.is_masked(node):
            writer.keep_normal(node)
        elif node.op_type == "GroupNormalization" and writer.is_sized_group_norm(node):
            writer.normalize_groups(node)
        elif node.op_type in ("MatMul", "Gemm") and writer.is_dynamic(node):
            writer.multiply(node)
        elif node.op_type in LINEAR and writer.is_behind_pair(node):
            writer.multiply_apart(node)
        elif node.op_type == "Gather" and writer.reads_table(node):
            writer.look_up(node)
        elif node.op_type == "Reciprocal" and writer.is_in_norm(node):
            writer.divide(node)
        elif node.op_type == "Conv" and (zeros := writer.zeros_before(node)):
            writer.pad(node, zeros)
        elif node.op_type == "Add" and (layer := writer.layer_of(node)) is not None:
            writer.flatten(layer, node)
        elif node.op_type == "ReduceMean" and writer.is_pool(node):
            writer.pool(node)
        elif node.op_type == "Reshape" and (chain := writer.transposed(node)):
            writer.transpose_behind(chain)
        else:
            writer.nodes.append(node)
    replace_nodes(model.graph, writer.without_unread())
    if rows:
        write_rows(model.graph, writer.types)
    drop_unused_initializers(model.graph)


def with_pairs(model: ModelProto) -> ModelProto:
    """Return the model, or a changed copy, with the nodes that `write_fast_forms` has replaced.

    A form that does not compute what it says to stand for is a FileFormatError.
    """
    if not _forms_of(model):
        return model
    result = copied(model)
    graph = result.graph
    made = {name for node in graph.node if PART_OF_FORM not in metadata(node) for name in node.output}
    stored, nodes, behind = initializers(graph), list[NodeProto](), dict[str, list[NodeProto]]()
    for node in graph.node:
        facts = metadata(node)
        if FORM_KEY in facts:
            *others, last = meant_by(node)
            for one in others:
                source = next(iter(one.input), "")
                if made.intersection(one.output):  # it has other readers, or another form notes it
                    continue
                if is_constant(one):
                    if stored.setdefault(one.output[0], tensor := constant_tensor(one)) is tensor:
                        graph.initializer.append(tensor)
                    continue
                if source in stored or made.intersection(one.input[1:]):
                    nodes.append(one)
                elif source in made:  # where export finds it: an opened file, exported again, comes out the same
                    behind.setdefault(source, []).append(one)
                made.update(one.output)
            nodes.append(last)
        elif PART_OF_FORM not in facts:
            nodes.append(node)
    replace_nodes(graph, in_order(nodes, behind))
    drop_unused_initializers(graph)
    edges = {"input": graph.input, "output": graph.output}
    again = ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, graph=GraphProto(node=graph.node, **edges)
    )
    for tensor in graph.initializer:  # of large ones, no form has more than the shape
        stub = TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type)
        again.graph.initializer.append(stub if is_large(tensor.dims) else tensor)
    forms, wrong = _forms_of(model), list[str]()
    for has_rows in (True, False):  # older files have none
        other = copied(again)
        write_fast_forms(other, rows=has_rows)
        written = _forms_of(other)
        wrong = [name for name, form in forms.items() if written.get(name) != form]
        if not wrong:
            return result
    raise FileFormatError(
        f"the nodes that {FORM_KEY} notes are not those that stand in the file at {wrong[0]!r}; it was changed, "
        "export it again"
    )


def _forms_of(model: ModelProto) -> dict[str, bytes]:
    """Return the nodes of forms by their first result, and the numbers that they alone read."""
    noted = [node for node in model.graph.node if _NOTES & metadata(node).keys()]
    read = {name for node in noted for name in node.input if name.endswith(_NUMBERS)}
    own = {t.name: array(t).tobytes() for t in model.graph.initializer if t.name in read}
    return {node.output[0]: node.SerializeToString(deterministic=True) for node in noted} | own


class _Writer(NormForms):
    """A graph while all forms are written."""

    def is_folded(self, pair: NodeProto) -> bool:
        """Return True for a DequantizeLinear of a weight whose readers compute in floats."""
        codes, scale = self._stored(pair, _FOLDED), self.stored.get(pair.input[1])
        readers, facts = self.readers.get(pair.output[0], []), attributes(pair)
        if codes is None or scale is None or scale.data_type != TensorProto.FLOAT or not readers:
            return False
        if facts.get("output_dtype") or pair.output[0] in self.outputs:
            return False
        block = facts.get("block_size", 0)
        if block:
            whole = len(codes.dims) == 2 and codes.dims[facts.get("axis", 1) % 2] % block == 0
            return self._on_codes and whole and all(self._multiplies_blocks(node, pair) for node in readers)
        return all(self._is_in_floats(node, pair.output[0]) for node in readers)

    def fold(self, pair: NodeProto) -> None:
        """Write a DequantizeLinear as what is folded when a session is opened."""
        last, dims, facts = pair.output[0], [*self.stored[pair.input[0]].dims], attributes(pair)
        axis, block = facts.get("axis", 1) % len(dims), facts.get("block_size", 0)
        values = self._part(last, "Cast", [pair.input[0]], to=TensorProto.FLOAT)
        if block:
            count = dims[axis] // block
            values = self._shaped(last, "blocks", values, [*dims[:axis], count, block, *dims[axis + 1 :]])
            along = [*dims[:axis], count, 1, *dims[axis + 1 :]]
        else:
            along = [-1 if place == axis else 1 for place in range(len(dims))]
        if len(pair.input) > 2:
            zero = self._part(last, "Cast", [pair.input[2]], to=TensorProto.FLOAT)
            values = self._part(last, "Sub", [values, self._shaped(last, "along", zero, along)])
        scaled = [values, self._shaped(last, "along", pair.input[1], along)]
        if block:
            shape = self._numbers(f"{last}/whole/shape", dims)
            node = helper.make_node("Reshape", [self._part(last, "Mul", scaled), shape], [last], pair.name)
        else:
            node = helper.make_node("Mul", scaled, [last], pair.name)
        self._last(node, [pair])

    def shares_scale(self, pair: NodeProto) -> bool:
        """Return True for a weight of MatMulNBits with one scale that something else reads too, or an equal one.

        The runtime stores equal scalars once, and leaves a layer as it is whose scale has other readers.
        """
        scale = self.stored.get(pair.input[1])
        if pair.input[0] not in self.stored or scale is None or scale.dims or self._scalars[array(scale).tobytes()] < 2:
            return False
        layers = self.readers.get(pair.output[0], [])
        return any(pair.output[0] in layer.input[1:2] and self.becomes_nbits(layer) for layer in layers)

    def spread(self, pair: NodeProto) -> None:
        """Write the one scale of a weight, and its zero point, once for each output channel."""
        channels, last = self.stored[pair.input[0]].dims[1], pair.output[0]
        spread = [
            self._store_once(f"{last}/{end}", np.full(channels, array(self.stored[name])))
            for name, end in zip(pair.input[1:], _SPREAD, strict=False)
        ]
        node = changed(pair, [pair.input[0], *spread])
        set_attributes(node, {"axis": 1})
        self._last(node, [*self._read_by([pair])])

    @cached_property
    def _scalars(self) -> Counter[bytes]:
        """Return how many nodes read each stored float32 scalar."""
        counts = Counter[bytes]()
        for name, tensor in self.stored.items():
            if not tensor.dims and tensor.data_type == TensorProto.FLOAT:
                counts[array(tensor).tobytes()] += len(self.readers.get(name, ()))
        return counts

    def read_as_before(self, pair: NodeProto, chain: Sequence[NodeProto]) -> None:
        """Write a pair behind a product of codes as a DequantizeLinear of the codes before it."""
        source, product, quantize = chain
        self._dropped.update(node.output[0] for node in chain)
        read = changed(pair, [source.input[0], *pair.input[1:]])
        self._last(read, [source, *self._read_by([product, quantize]), pair])

    def joined_before(self, quantize: NodeProto) -> NodeProto | None:
        """Return the Concat of many floats before a QuantizeLinear with one scale, unless it joins codes already."""
        concat = self.makers.get(quantize.input[0])
        if concat is None or concat.op_type != "Concat" or not self.is_read_once(concat.output[0]):
            return None
        pairs = [self.makers.get(name) for name in concat.input]
        if all(pair is not None and pair.op_type == "DequantizeLinear" for pair in pairs):
            return None  # QLinearConcat
        many = math.prod(size or 1 for size in self._sizes.get(concat.output[0], ())) >= _MANY
        # the runtime does not load a Reshape beside signed codes
        in_bytes = self.dtype(quantize) == "uint8" and self.operands(quantize) is not None
        return concat if many and in_bytes else None

    def join_codes(self, concat: NodeProto, quantize: NodeProto) -> None:
        """Write a Concat of floats and the QuantizeLinear behind as a Concat of codes, which are fewer bytes."""
        last = quantize.output[0]
        self._dropped.add(concat.output[0])
        codes = {
            name: self._part(last, "QuantizeLinear", [name, *quantize.input[1:]], **attributes(quantize))
            for name in dict.fromkeys(concat.input)
        }
        joined = helper.make_node("Concat", [codes[name] for name in concat.input], [last], quantize.name)
        set_attributes(joined, attributes(concat))
        self._last(joined, [concat, quantize])

    def layer_of(self, bias: NodeProto) -> NodeProto | None:
        """Return the MatMul to which an Add adds its bias, if a Gemm of as many rows as there are runs on codes."""
        layer = next((n for name in bias.input if (n := self.makers.get(name)) and n.op_type == "MatMul"), None)
        if layer is None or len(self.readers[layer.output[0]]) > 1 or layer.output[0] in self.outputs:
            return None
        source, weight, added = (self.makers.get(name) for name in _operands_of(layer, bias))
        behind = [self.dtype(node) for node in quantizers(bias, self)]
        if source is None or weight is None or added is None or {*behind, self.codes_behind(source)} != {"uint8"}:
            return None  # the runtime does not load a Reshape beside signed codes
        codes, numbers = self._stored(weight, _BYTES), self._stored(added, (TensorProto.INT32,))
        sizes = self._sizes.get(layer.input[0], ())
        most = len(sizes) if self._opset >= _SHAPE_IN_PART else 1
        if codes is None or numbers is None or len(sizes) < _LEAST_AXES or sizes[:-1].count(None) > most:
            return None
        scales = [self.stored.get(pair.input[1]) for pair in (source, weight)]
        in_float32 = all(scale is not None and scale.data_type == TensorProto.FLOAT for scale in scales)
        are_matrices = len(codes.dims) == 2 and list(numbers.dims) == [codes.dims[1]]
        have_zero_points = {len(source.input), len(weight.input)} == {3} and not attributes(weight).get("block_size")
        return layer if in_float32 and are_matrices and have_zero_points else None

    def flatten(self, layer: NodeProto, bias: NodeProto) -> None:
        """Write a MatMul and the Add of its bias as a Gemm of all rows."""
        last, (source, weight, added) = bias.output[0], _operands_of(layer, bias)
        width, made = self.stored[self.makers[weight].input[0]].dims
        self._dropped.add(layer.output[0])
        rows = self._part(last, "Reshape", [source, self._numbers(f"{last}/rows/shape", [-1, width])])
        product = self._part(last, "Gemm", [rows, weight, added])
        sizes, options = self._sizes[layer.input[0]][:-1], dict[str, Any]()
        if sizes.count(None) <= 1:
            shape = self._numbers(f"{last}/shape", [*(-1 if size is None else size for size in sizes), made])
        else:
            of_rows = self._part(last, "Shape", [source], end=-1)
            shape = self._part(last, "Concat", [of_rows, self._numbers(f"{last}/columns/shape", [made])], axis=0)
            options = {"allowzero": 1}  # an empty axis is one
        self._last(helper.make_node("Reshape", [product, shape], [last], bias.name, **options), [layer, bias])

    def is_pool(self, mean: NodeProto) -> bool:
        """Return True for a mean over all positions of an image that stands there as unsigned codes."""
        source, facts = self.makers.get(mean.input[0]), attributes(mean)
        axes = self.stored.get(mean.input[1]) if len(mean.input) > 1 else None
        rank = len(self._sizes.get(mean.input[0], ()))
        if source is None or axes is None or rank < _LEAST_AXES or facts.get("keepdims", 1) != 1:
            return False
        over = sorted(int(axis) % rank for axis in array(axes).reshape(-1))
        return over == [*range(2, rank)] and self.codes_behind(source) == "uint8"

    def pool(self, mean: NodeProto) -> None:
        """Write a mean over all positions as a GlobalAveragePool."""
        self._last(helper.make_node("GlobalAveragePool", mean.input[:1], mean.output, mean.name), self._read_by([mean]))

    def transposed(self, reshape: NodeProto) -> list[NodeProto]:
        """Return the nodes from a Transpose of tokens [N, T, C] to the Reshape to an image [N, C, H, W], else none.

        Between them may stand a pair with the encoding of the pair in front, which changes nothing.
        """
        chain = [reshape]
        while chain[0].op_type != "Transpose":
            name = chain[0].input[0]
            maker = self.makers.get(name)
            if maker is None or len(self.readers[name]) > 1 or name in self.outputs:
                return []
            if len(chain) > len(_BETWEEN[1]):
                return []
            chain.insert(0, maker)
        first, pair = chain[0], chain[1:-1]
        shape, sizes = self.stored.get(reshape.input[1]), self._sizes.get(first.input[0], ())
        if [node.op_type for node in chain[1:]] not in _BETWEEN or shape is None or len(sizes) != _LEAST_AXES:
            return []
        wanted = array(shape).reshape(-1).tolist()
        is_image = len(wanted) == _IMAGE and wanted[1] == sizes[2] and wanted[2] * wanted[3] == sizes[1]
        if attributes(first).get("perm") != [0, 2, 1] or not is_image or wanted[0] > 0:
            return []
        before = self.makers.get(first.input[0], first)
        same = all(self.operands(node) == self.operands(before) for node in pair) and None not in map(
            self.operands, pair
        )
        return chain if not pair or (same and self.codes_behind(before) == self.dtype(pair[0])) else []

    def transpose_behind(self, chain: Sequence[NodeProto]) -> None:
        """Write a Transpose of tokens and the Reshape to an image as a Reshape and a Transpose of the image."""
        last = chain[-1].output[0]
        batch, channels, *image = array(self.stored[chain[-1].input[1]]).reshape(-1).tolist()
        self._dropped.update(node.output[0] for node in chain[:-1])
        rows = self._part(
            last, "Reshape", [chain[0].input[0], self._numbers(f"{last}/shape", [batch, *image, channels])]
        )
        self._last(
            helper.make_node("Transpose", [rows], [last], chain[-1].name, perm=[0, 3, 1, 2]), self._read_by(chain)
        )

    def is_dynamic(self, layer: NodeProto) -> bool:
        """Return True for a product of a dynamically quantized tensor and a stored matrix."""
        pair, weight = (self.makers.get(name) for name in layer.input[:2])
        if pair is None or weight is None or {pair.op_type, weight.op_type} != {"DequantizeLinear"}:
            return False
        quantize, codes = self.makers.get(pair.input[0]), self._stored(weight, _BYTES)
        if quantize is None or quantize.op_type != "DynamicQuantizeLinear" or pair.input[:] != quantize.output[:]:
            return False
        scale, facts = self.stored.get(weight.input[1]), attributes(weight)
        if codes is None or scale is None or scale.data_type != TensorProto.FLOAT or len(codes.dims) != 2:
            return False
        plain = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
        if any(value != plain.get(name) for name, value in attributes(layer).items()):
            return False
        return not facts.get("block_size") and (not scale.dims or facts.get("axis", 1) % 2 == 1)

    def multiply(self, layer: NodeProto) -> None:
        """Write a layer with a dynamically quantized input as the product of integers that the runtime fuses."""
        pair, weight = (self.makers[name] for name in layer.input[:2])
        last, (codes, scale, zero) = layer.output[0], pair.input
        self._dropped.update(layer.input[:2])
        total = self._part(last, "MatMulInteger", [codes, weight.input[0], zero, *weight.input[2:]])
        whole = self._part(last, "Cast", [total], to=TensorProto.FLOAT)
        scales = self._part(last, "Mul", [scale, weight.input[1]])
        op, inputs = "Mul", [whole, scales]
        if len(layer.input) > 2:
            op, inputs = "Add", [self._part(last, "Mul", inputs), layer.input[2]]
        self._last(helper.make_node(op, inputs, [last], layer.name), [pair, weight, layer])

    def is_behind_pair(self, layer: NodeProto) -> bool:
        """Return True for a layer behind a pair whose weight is folded, in a graph with further pairs."""
        pair, weight = (self.makers.get(name) for name in layer.input[:2])
        if pair is None or weight is None or {pair.op_type, weight.op_type} != {"DequantizeLinear"}:
            return False
        return self._on_codes and self.is_folded(weight)

    def multiply_apart(self, layer: NodeProto) -> None:
        """Write a layer apart from its input's pair: between pairs, the runtime makes int8 of weights in floats."""
        apart = self._part(layer.output[0], "Sum", [layer.input[0]])
        self._last(changed(layer, [apart, *layer.input[1:]]), [layer])

    def reads_table(self, gather: NodeProto) -> bool:
        """Return True for a look-up of rows in a stored table whose rows have the same scales."""
        table = self.makers.get(gather.input[0])
        codes = None if table is None else self._stored(table, _LOOKED_UP)
        if table is None or codes is None or attributes(gather).get("axis", 0) != 0:
            return False
        scale, facts = self.stored.get(table.input[1]), attributes(table)
        if scale is None or facts.get("block_size") or len(codes.dims) < 2:
            return False
        return not scale.dims or facts.get("axis", 1) % len(codes.dims) != 0

    def look_up(self, gather: NodeProto) -> None:
        """Write a look-up on codes; channels of the rows are counted from the last axis."""
        table = self.makers[gather.input[0]]
        last, rank = gather.output[0], len(self.stored[table.input[0]].dims)
        self._dropped.add(table.output[0])
        codes = self._part(last, "Gather", [table.input[0], gather.input[1]])
        facts = attributes(table)
        facts |= {"axis": facts["axis"] % rank - rank} if "axis" in facts else {}
        operands = [codes, *table.input[1:]]
        if any(self.becomes_nbits(reader) for reader in self._behind(last)):  # not if it reads a DequantizeLinear
            apart = self._part(last, "DequantizeLinear", operands, **facts)
            rows = helper.make_node("Sum", [apart], [last], gather.name)
        else:
            rows = helper.make_node("DequantizeLinear", operands, [last], gather.name, **facts)
        self._last(rows, [table, gather])

    def _behind(self, tensor: str) -> Iterator[NodeProto]:
        """Yield the readers of a tensor, and of what only gives it another shape."""
        for reader in self.readers.get(tensor, []):
            yield reader
            if reader.op_type == "Reshape":
                yield from self._behind(reader.output[0])

    def zeros_before(self, conv: NodeProto) -> list[NodeProto]:
        """Return the pair, the Pad and its pair before a convolution that can put the zeros itself; else nothing."""
        nodes: list[NodeProto] = []
        for op in reversed(_PADDED):
            node = self.makers.get(nodes[0].input[0] if nodes else conv.input[0])
            if node is None or node.op_type != op:
                return []
            nodes.insert(0, node)
        pad, *_, dequantize = taken = nodes[2:]
        readers = [self.readers[node.output[0]] for node in taken]
        operands = [self.operands(node) for node in nodes if node is not pad]
        if any(len(found) > 1 for found in readers[:-1]) or None in operands or len(set(operands)) > 1:
            return []
        if self.outputs.intersection(node.output[0] for node in taken) or not self.zeros_of(pad):
            return []
        return nodes if all(_can_pad(node, dequantize.output[0]) for node in readers[-1]) else []

    def pad(self, conv: NodeProto, zeros: Sequence[NodeProto]) -> None:
        """Write a convolution with the zeros that a Pad would put."""
        first, before, pad, quantize, dequantize = zeros
        padded, own = changed(conv, [before.output[0], *conv.input[1:]]), attributes(conv).get("pads", ())
        sizes = [a + b for a, b in zip(self.zeros_of(pad), own or repeat(0), strict=False)]
        set_attributes(padded, {"pads": sizes})
        self._dropped.update(node.output[0] for node in zeros[2:])
        # the pair behind the Pad has the operands of the pair in front
        pair = [
            changed(like, [node.input[0], *like.input[1:]], node)
            for like, node in ((first, quantize), (before, dequantize))
        ]
        self._last(padded, [*self._read_by([pad]), *pair, conv])

    def _is_in_floats(self, reader: NodeProto, weight: str) -> bool:
        """Return True if nothing that the runtime has computes a reader of a stored weight on its codes."""
        places = [place for place, name in enumerate(reader.input) if name == weight]
        if PART_KEY in metadata(reader):  # of the codes that an LSTM computes with
            return reader.op_type == "Transpose"
        if reader.op_type == "Mul":  # of a norm's weight
            others = [self.makers.get(name) for name in reader.input if name != weight]
            return all(node is not None and node.op_type == "Mul" for node in others)
        if reader.op_type in _LOOK_UPS:  # of the same rows in every run
            return places == [0] and reader.input[1] in self.stored
        if reader.op_type in _CUTS:  # of the same positions, such as those of the patches of an image
            return places == [0] and self.stored.keys() >= {*reader.input[1:]} - {""} and self._is_apart(reader)
        if reader.op_type in _CONVOLUTIONS:
            return places == [1] and (not self._on_codes or self._is_dynamic_pair(reader.input[0]))
        return set(places) <= set(_IN_FLOATS.get(reader.op_type, ()))

    def _is_apart(self, node: NodeProto) -> bool:
        """Return True if no kernel on codes reads what a node makes of a stored tensor."""
        readers = [reader for name in node.output for reader in self.readers.get(name, [])]
        return all(
            reader.op_type in _APART or (reader.op_type in ("Reshape", "Transpose") and self._is_apart(reader))
            for reader in readers
        )

    def _is_dynamic_pair(self, tensor: str) -> bool:
        pair = self.makers.get(tensor)
        maker = None if pair is None or pair.op_type != "DequantizeLinear" else self.makers.get(pair.input[0])
        return maker is not None and maker.op_type == "DynamicQuantizeLinear"

    def _multiplies_blocks(self, layer: NodeProto, pair: NodeProto) -> bool:
        own = layer.op_type in ("MatMul", "Gemm") and list(layer.input).index(pair.output[0]) == 1
        return own and not self.becomes_nbits(layer)


def _operands_of(layer: NodeProto, bias: NodeProto) -> list[str]:
    return [*layer.input, next((name for name in bias.input if name != layer.output[0]), "")]


def _can_pad(node: NodeProto, source: str) -> bool:
    own = attributes(node).get("auto_pad", "NOTSET") == "NOTSET"
    return node.op_type == "Conv" and own and list(node.input).count(source) == 1
