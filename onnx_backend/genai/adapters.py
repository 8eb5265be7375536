"""Low-rank adapters beside products that become one: their matrices side by side, as inputs of one sum."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from onnx import NodeProto, helper

from onnx_backend.genai.editor import Editor
from onnx_backend.genai.products import Product
from onnx_backend.proto.external_data import array
from qsdk.core.arrays import Array

#: matrices of an adapter by name -> one that is made of them
Joined = Callable[[Mapping[str, Array]], Array]


@dataclass(frozen=True)
class Adapted:
    """The sum of a product and an adapter's.

    Attributes:
        base: the product's result.
        source: what the adapter multiplies.
        matrices: the inputs [in, rank] and [rank, out].
    """

    base: str
    source: str
    matrices: tuple[str, str]


def find_adapted(editor: Editor) -> dict[str, Adapted]:
    """Return the sums with the products of an adapter whose matrices are inputs, by their result."""
    inputs, found = {value.name for value in editor.model.graph.input}, dict[str, Adapted]()
    for node in editor.model.graph.node:
        for base, name in ((0, 1), (1, 0)) if node.op_type == "Add" else ():
            up = editor.maker(node.input[name], "MatMul")
            down = None if up is None else editor.maker(up.input[0], "MatMul")
            if up is not None and down is not None and inputs.issuperset((up.input[1], down.input[1])):
                found[node.output[0]] = Adapted(node.input[base], down.input[0], (down.input[1], up.input[1]))
    return found


def with_adapters(
    editor: Editor, packed: str, parts: Sequence[tuple[Product, Adapted | None]]
) -> tuple[str, list[NodeProto]]:
    """Return the sum of products side by side and their adapters', some of which have none, and its nodes.

    The matrices [in, rank] are one, with their columns side by side, and those [rank, out] are the blocks of another.
    """
    downs = [one.matrices[0] for _, one in parts if one is not None]
    ups = [(one.matrices[1] if one is not None else "", product.sizes[1]) for product, one in parts]
    if not downs:
        return packed, []
    values = {name: array(editor.index.stored[name]) for name in (*downs, *(name for name, _ in ups if name))}
    path, layers = downs[0].rpartition(".lora_A")[0].rpartition(".")[0], list[str]()
    for name in downs:
        layers.append(name.rpartition(".lora_A")[0].rpartition(".")[2])
    name, inputs = f"{path}.{'_'.join(layers)}", list[str]()
    for part, joined in (("lora_A", partial(_columns, downs)), ("lora_B", partial(_blocks, ups))):
        value = joined(values)
        inputs.append(editor.keep(f"{name}.{part}", value))
        sizes: list[int | str] = [*value.shape]
        sizes[part == "lora_A"] = f"{name}.rank"
        kind = editor.index.stored[inputs[-1]].data_type
        editor.model.graph.input.append(helper.make_tensor_value_info(inputs[-1], kind, sizes))
        editor.joined[inputs[-1]] = joined
    source, low, high, total = parts[0][0].source, *(f"{packed}/{word}" for word in ("low", "high", "sum"))
    nodes = [editor.node("MatMul", [source, inputs[0]], [low]), editor.node("MatMul", [low, inputs[1]], [high])]
    return total, [*nodes, editor.node("Add", [packed, high], [total])]


def _columns(names: Sequence[str], matrices: Mapping[str, Array]) -> Array:
    return np.concatenate([matrices[name] for name in names], axis=1)


def _blocks(parts: Sequence[tuple[str, int]], matrices: Mapping[str, Array]) -> Array:
    """Return matrices [rank, out] as the blocks of one, with columns of zeros where a part has none."""
    known = [(matrices[name], width) if name else (None, width) for name, width in parts]
    ranks = sum(len(matrix) for matrix, _ in known if matrix is not None)
    result, row, column = np.zeros((ranks, sum(width for _, width in parts)), np.float32), 0, 0
    for matrix, width in known:
        if matrix is not None:
            result[row : row + len(matrix), column : column + width] = matrix
            row += len(matrix)
        column += width
    return result
