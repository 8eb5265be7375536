"""Products as MatMulNBits, and look-ups in a table that is an output layer too on the codes of that layer."""

import json
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from onnx_backend.genai.editor import MICROSOFT, Editor
from onnx_backend.genai.products import CODES, Product, find_products, merged
from onnx_backend.proto.nodes import metadata
from onnx_backend.qdq.forms import FORM_KEY

_BITS = (4, 8)  # of codes that the kernel reads


@dataclass(frozen=True)
class LookUp:
    """Rows that a model takes from a table of stored codes.

    Attributes:
        table: the DequantizeLinear of the table, or of its rows.
        codes: name of the stored table.
        places: the tensor of row numbers.
        output: the rows.
    """

    table: NodeProto
    codes: str
    places: str
    output: str

    def site(self) -> str:
        """Return the site of the table."""
        facts = metadata(self.table)
        if FORM_KEY in facts:  # of rows: the form notes the table first
            facts = metadata(NodeProto.FromString(b64decode(json.loads(facts[FORM_KEY])[0])))
        return facts.get("qsdk.site", self.codes)


def write_products(editor: Editor) -> None:
    """Write every product with stored codes as a MatMulNBits, and look-ups in the same codes as what reads those."""
    written = [(product, merged(editor, [product], product.output)) for product in find_products(editor)]
    for product, node in written:
        editor.replace(product.output, [node])
    for rows in _look_ups(editor):
        match = next(((product, node) for product, node in written if _is_table_of(editor, rows, product)), None)
        if match is not None:
            editor.replace(rows.output, _nodes(editor, rows, *match))
    editor.apply()


def _look_ups(editor: Editor) -> Iterator[LookUp]:
    """Yield the look-ups along the first axis, whether rows or the table are dequantized."""
    for node in editor.model.graph.node:
        if node.op_type != "Gather" or editor.options(node).get("axis", 0) != 0:
            continue
        table, rows = editor.maker(node.input[0], "DequantizeLinear"), editor.reader(node.output[0], "DequantizeLinear")
        if table is not None and table.input[0] in editor.index.stored:
            yield LookUp(table, table.input[0], node.input[1], node.output[0])
            continue
        scale = None if rows is None else editor.index.stored.get(rows.input[1])
        if rows is not None and scale is not None and not scale.dims and node.input[0] in editor.index.stored:
            yield LookUp(rows, node.input[0], node.input[1], rows.output[0])


def _is_table_of(editor: Editor, found: LookUp, product: Product) -> bool:
    """Return True if the table of a look-up has the codes and the grids of a product, transposed, in whole blocks."""
    stored, (width, made) = editor.index.stored[found.codes], product.sizes
    bits, lift = CODES.get(stored.data_type, (0, 0))
    if [*stored.dims] != [made, width] or width % product.block or bits != product.bits or bits not in _BITS:
        return False
    options = editor.options(found.table)
    axis, block = options.get("axis", 1) % 2, options.get("block_size", 0)
    if lift != product.lift or (block and (axis != 1 or block != product.block)):
        return False
    names = [name for name in found.table.input[1:] if name]
    grids = [editor.stored(name)() for name in names]
    if any(grid.ndim == 1 and axis != 0 for grid in grids):
        return False
    wide = [grid if block else np.broadcast_to(grid.reshape(-1, 1), product.grid) for grid in grids]
    half = 1 << (bits - 1)
    zeros = wide[1].astype(np.int16) + lift if len(wide) > 1 else np.full(product.grid, lift, np.int16)
    theirs = np.full(product.grid, half) if product.zeros is None else product.zeros
    same = np.array_equal(wide[0], product.scales()) and np.array_equal(zeros, theirs)
    return same and np.array_equal(editor.stored(found.codes)(), product.codes().T)


def _nodes(editor: Editor, found: LookUp, product: Product, layer: NodeProto) -> list[NodeProto]:
    """Return the look-up in what the layer's kernel reads: the same codes, their blocks side by side."""
    flat = editor.shaped(layer.input[1], [0, -1], f"{found.output}/table")
    inputs = [flat.output[0], found.places, *layer.input[2:4]]
    options = {"bits": product.bits, "block_size": product.block, "gather_axis": 0, "quantize_axis": 1}
    form = f"{product.bits} bits, blocks of {product.block}"
    editor.forms[found.site()] = f"GatherBlockQuantized, {form}, the codes of {product.site}"
    return [flat, editor.node("GatherBlockQuantized", inputs, [found.output], domain=MICROSOFT, **options)]
