"""Products with stored codes as MatMulNBits: weights packed as that kernel reads them, layers of one input merged.

The kernel takes a matrix [out, in] in blocks along its inputs, 2, 4 or 8 bits a code, unsigned, the lowest first, and a
scale for each block (ONNX Runtime, contrib operator MatMulNBits).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.proto.lazy_tensors import PIECE
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.layer_inputs import PART_KEY
from onnx_backend.readers import BLOCK_KEY, COPY_KEY
from qsdk.core.arrays import Array

#: stored type -> bits, and what makes its codes unsigned
CODES: dict[int, tuple[int, int]] = {
    TensorProto.INT2: (2, 2),
    TensorProto.UINT2: (2, 0),
    TensorProto.INT4: (4, 8),
    TensorProto.UINT4: (4, 0),
    TensorProto.INT8: (8, 128),
    TensorProto.UINT8: (8, 0),
}
_BLOCKS = (256, 128, 64, 32, 16)
_INT8_LEVEL = 4  # at which the kernel rounds its input to int8
#: bits for which the kernel has no fast form in floats (onnxruntime 1.32: 87 times the time, one row)
_SLOW_IN_FLOATS = 8
IN_FLOATS = "in floats, slowly"


@dataclass(frozen=True)
class Product:
    """A product with stored codes.

    Attributes:
        source: the tensor that is multiplied.
        output: the result, with the bias.
        site: of the weight.
        bits: of a code.
        block: length of a block.
        sizes: inputs and outputs.
        level: of accuracy, as the kernel counts it.
        codes: gives them, [inputs, outputs], as they are stored.
        lift: what makes them unsigned.
        scales: gives them, [outputs, blocks].
        zeros: unsigned zero points [outputs, blocks]; None where all are half of the grid.
        bias: [outputs], or None.
    """

    source: str
    output: str
    site: str
    bits: int
    block: int
    sizes: tuple[int, int]
    level: int
    codes: Callable[[], Array]
    lift: int
    scales: Callable[[], Array]
    zeros: Array | None
    bias: Array | None

    @property
    def grid(self) -> tuple[int, int]:
        """Return how many outputs there are, and blocks of each."""
        return self.sizes[1], -(-self.sizes[0] // self.block)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what products that become one have in common."""
        return self.source, self.bits, self.block, self.sizes[0], self.level


def find_products(editor: Editor) -> list[Product]:
    """Return the products of a model that MatMulNBits computes, in the order of the nodes."""
    found = (_product(editor, node) for node in editor.model.graph.node)
    return [product for product in found if product is not None]


def merged(editor: Editor, products: Sequence[Product], output: str) -> NodeProto:
    """Return one MatMulNBits of several products with one input, its results side by side."""
    first, name = products[0], products[0].site.partition(":")[0]
    if len(products) > 1:
        name = f"{name.rpartition('.')[0]}.{'_'.join(p.site.partition(':')[0].rpartition('.')[2] for p in products)}"
    width, made = first.sizes[0], sum(product.sizes[1] for product in products)
    blocks, bytes_of_block = first.grid[1], first.block * first.bits // 8
    codes = partial(_packed, products)
    inputs = [first.source, editor.keep_lazily(f"{name}.codes", (made, blocks, bytes_of_block), codes)]
    scales = partial(_side_by_side, products)
    inputs.append(editor.keep_lazily(f"{name}.scales", (made, blocks), scales, TensorProto.FLOAT))
    half = 1 << (first.bits - 1)
    if any(product.zeros is not None for product in products):
        zeros = [np.full(p.grid, half, np.uint8) if p.zeros is None else p.zeros for p in products]
        inputs.append(editor.keep(f"{name}.zero_points", packed_bits(np.concatenate(zeros), first.bits)))
    if any(product.bias is not None for product in products):
        biases = [np.zeros(p.sizes[1], np.float32) if p.bias is None else p.bias for p in products]
        inputs += [""] * (5 - len(inputs)) + [editor.keep(f"{name}.bias", np.concatenate(biases))]
    for product in products:
        slow = f", {IN_FLOATS}" if product.bits == _SLOW_IN_FLOATS and not product.level else ""
        editor.forms[product.site] = f"MatMulNBits, {product.bits} bits, blocks of {product.block}{slow}"
    sizes = {"K": width, "N": made, "bits": first.bits, "block_size": first.block, "accuracy_level": first.level}
    return editor.node("MatMulNBits", inputs, [output], domain=MICROSOFT, **sizes)


def merge_alike(products: Iterable[Product]) -> list[list[Product]]:
    """Return products in groups that one kernel computes, neighbours only."""
    return [[*group] for _, group in groupby(products, lambda product: product.kind)]


def packed_bits(codes: Array, bits: int) -> Array:
    """Return unsigned codes [..., n] as bytes, the first code lowest; the last byte is filled with zeros."""
    per_byte = 8 // bits
    missing = -codes.shape[-1] % per_byte
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, missing)]).astype(np.uint8, copy=False)
    lanes = padded.reshape(*codes.shape[:-1], -1, per_byte)
    result = lanes[..., 0].copy()
    for lane in range(1, per_byte):
        result |= lanes[..., lane] << (bits * lane)
    return result


def _side_by_side(products: Sequence[Product]) -> Array:
    """Return the scales of products, [outputs, blocks]."""
    return np.concatenate([product.scales() for product in products])


def _packed(products: Sequence[Product]) -> Array:
    """Return the codes of products as the kernel reads them, bytes [outputs, blocks, bytes of a block]."""
    first, made = products[0], sum(product.sizes[1] for product in products)
    result, end = np.empty((made, first.grid[1], first.block * first.bits // 8), np.uint8), 0
    for product in products:
        codes, missing = product.codes(), -product.sizes[0] % product.block
        step = max(PIECE // product.sizes[0], 1)  # a few outputs at a time, in each of the forms that they take
        for start in range(0, product.sizes[1], step):
            rows = (codes[:, start : start + step].T.astype(np.int16) + product.lift).astype(np.uint8)
            rows = np.pad(rows, [(0, 0), (0, missing)], constant_values=1 << (product.bits - 1))
            result[end : end + len(rows)] = packed_bits(rows.reshape(len(rows), -1, product.block), product.bits)
            end += len(rows)
    return result


def _product(editor: Editor, layer: NodeProto) -> Product | None:
    if layer.op_type not in ("MatMul", "Gemm") or editor.options(layer).get("transB"):
        return None
    pair = _table(editor, layer.input[1])
    held = None if pair is None else editor.index.stored.get(pair.input[0])
    scale = None if pair is None else editor.index.stored.get(pair.input[1])
    if pair is None or held is None or scale is None or held.data_type not in CODES or len(held.dims) != 2:
        return None
    if scale.data_type != TensorProto.FLOAT:
        return None
    facts, (width, made) = metadata(pair), held.dims
    bits, lift = CODES[held.data_type]
    block = int(facts.get(BLOCK_KEY, 0))
    level = _INT8_LEVEL if block else 0
    options = editor.options(pair)
    axis, given = options.get("axis", 1) % 2, options.get("block_size", 0)
    if (scale.dims and axis != 1 and not given) or (given and (axis != 0 or given not in _BLOCKS)):
        return None
    block = given or block or next(size for size in (*_BLOCKS, 16) if width % size == 0 or size == 16)
    if block not in _BLOCKS:
        return None
    blocks = -(-width // block)

    def by_block(values: Array) -> Array:
        whole = values.T if given else np.broadcast_to(values.reshape(-1, 1), (values.size, blocks))
        return np.ascontiguousarray(np.broadcast_to(whole, (made, blocks)))

    zeros = None
    if len(pair.input) > 2 and pair.input[2]:
        zeros = by_block(editor.stored(pair.input[2])()).astype(np.int16) + lift
    elif not lift:
        zeros = np.zeros((made, blocks), np.int16)
    if zeros is not None and (zeros == 1 << (bits - 1)).all():
        zeros = None
    stored = editor.stored(pair.input[1])
    found = _with_bias(editor, layer, made)
    if found is None:
        return None
    output, bias = found
    unsigned = None if zeros is None else zeros.astype(np.uint8)
    site = facts.get("qsdk.site", layer.name)
    sizes = (int(width), int(made))
    codes = editor.stored(pair.input[0])
    rounded = editor.index.makers.get(layer.input[0]) if level else None  # which the kernel does
    source = layer.input[0] if rounded is None else metadata(rounded).get(PART_KEY, layer.input[0])

    def scales() -> Array:  # made when they are written: a large model has many
        return by_block(stored())

    return Product(source, output, site, bits, block, sizes, level, codes, lift, scales, unsigned, bias)


def _table(editor: Editor, weight: str) -> NodeProto | None:
    """Return the DequantizeLinear of a weight, also behind a barrier: what is written says its level of accuracy."""
    barrier = editor.index.makers.get(weight)
    if barrier is None or COPY_KEY not in metadata(barrier) or len(barrier.input) > 1:
        return editor.maker(weight, "DequantizeLinear")
    pair = editor.maker(barrier.input[0], "DequantizeLinear")
    held = None if pair is None else editor.index.stored.get(pair.input[0])
    # outputs of 2 bits that are no whole bytes: the kernel gets them wrong
    of_two_bits = held is not None and held.data_type in (TensorProto.INT2, TensorProto.UINT2)
    return None if held is None or (of_two_bits and held.dims[-1] % 4) else pair


def _with_bias(editor: Editor, layer: NodeProto, made: int) -> tuple[str, Array | None] | None:
    """Return the result of a layer with its bias, and that, if one is stored; None where it is computed."""
    output = layer.output[0]
    if layer.op_type == "Gemm":
        added = layer.input[2] if len(layer.input) > 2 else ""
        return (output, editor.stored(added)()) if added in editor.index.stored else None if added else (output, None)
    total = editor.reader(output, "Add")
    added = "" if total is None else next((name for name in total.input if name != output), "")
    stored = editor.index.stored.get(added)
    if total is None or stored is None or [*stored.dims] != [made] or stored.data_type != TensorProto.FLOAT:
        return output, None
    return total.output[0], editor.stored(added)()
