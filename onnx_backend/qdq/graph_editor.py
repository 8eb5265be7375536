"""The editor of a model whose marks are being replaced: the nodes so far, and which tensor replaces which.

The runtimes' pairs compute in float32. A float16 tensor whose scales are float16 too has a pair of its own type, which
ONNX Runtime computes in float32 as well (measured; from opset 23 on the attribute `precision` says so, before it no
file can). All others are cast to float32 in front of the pair and back behind it, and these casts record their site.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.proto.graph_queries import GraphIndex, consumers, names_in
from onnx_backend.proto.lazy_tensors import LargeTensor, as_stored
from onnx_backend.proto.nodes import (
    attributes,
    drop_unused_initializers,
    is_mark,
    rename_inputs,
    replace_nodes,
    retain,
    set_metadata,
)
from onnx_backend.proto.weightless import is_large
from onnx_backend.qdq.read import FLOAT32, FLOAT_CODES
from qsdk.core.arrays import Array, Floats
from qsdk.core.errors import ModelError
from qsdk.core.numerics.encoding import Encoding


class GraphEditor(GraphIndex):
    """The editor of a marked model.

    Attributes:
        large: the stored tensors that the model has only stubs of, by name.
        explicit: every pair states its type by a zero point.
        pair_types: float types, other than float32, that pairs can have.
        narrow_scales: see `Runtime`.
        lazy_scales: the scales of blocks are large tensors too, for callers that look at no values of them.
        nodes: the nodes of the new model.
        rows: one per site, for the report.
        renamed: a mark's output -> the tensor that its readers read now.
        taken_over: a producer's output -> the graph output it becomes.
        roots: a mark's output -> the stored tensor behind it.
        folded: outputs of Transposes that went into an initializer.
        reused: (initializer, fingerprint of the change) -> the changed initializer.
    """

    def __init__(
        self,
        model: ModelProto,
        large: dict[str, LargeTensor],
        *,
        explicit: bool = False,
        pair_types: Collection[str] = (),
        narrow_scales: bool = False,
        lazy_scales: bool = False,
    ) -> None:
        super().__init__(model.graph)
        self.taken = names_in(model.graph)  # those of marks, too
        self.model, self.large = model, large
        self.explicit, self.pair_types, self.narrow_scales = explicit, pair_types, narrow_scales
        self.lazy_scales = lazy_scales
        self.nodes: list[NodeProto] = []
        self.rows: list[dict[str, Any]] = []
        self.renamed: dict[str, str] = {}
        self.taken_over: dict[str, str] = {}
        self.roots: dict[str, str] = {}
        self.folded: set[str] = set()
        self.reused: dict[tuple[str, bytes], str] = {}

    def merge_marks(self) -> None:
        """Keep the first mark of each site; readers of the others read it."""
        first: dict[str, NodeProto] = {}
        renamed: dict[str, str] = {}
        kept = []
        for node in self.graph.node:
            rename_inputs([node], renamed)
            site = str(attributes(node)["key"]) if is_mark(node) else ""
            kept_mark = first.setdefault(site, node) if site else node
            if kept_mark is node:
                kept.append(node)
                continue
            if node.input[0] not in (kept_mark.input[0], kept_mark.output[0]):
                tensors = f"{kept_mark.input[0]!r} and {node.input[0]!r}"
                raise ModelError(f"the site {site} marks two tensors, {tensors}; give them sites of their own")
            if node.output[0] in self.outputs:
                kept.append(helper.make_node("Identity", [kept_mark.output[0]], [node.output[0]], f"{site}/again"))
            else:
                renamed[node.output[0]] = kept_mark.output[0]
        replace_nodes(self.graph, kept)
        self.readers = consumers(self.graph.node)

    def finish(self) -> None:
        """Apply the renames to every reader, and drop what nothing reads any more."""
        for node in self.nodes:
            node.output[:] = [self.taken_over.get(name, name) for name in node.output]
        final = {name: self.final(name) for name in (*self.renamed, *self.taken_over)}
        rename_inputs(self.nodes, final)
        replace_nodes(self.graph, self.nodes)
        drop_unused_initializers(self.graph)
        computed = {name for node in self.nodes for name in node.output}  # a stored tensor has a type of its own
        retain(self.graph.value_info, lambda value: value.name in computed)
        retain(self.model.opset_import, lambda entry: entry.domain != "qsdk")

    def final(self, name: str) -> str:
        """Return the tensor that readers of a tensor read in the end."""
        while name in self.renamed:
            name = self.renamed[name]
        return self.taken_over.get(name, name)

    def bypass(self, source: str, output: str) -> None:
        """Connect the readers of a mark to the tensor that it marks."""
        if output not in self.outputs:
            self.renamed[output] = source
            return
        current = self.final(source)
        made_here = any(current in node.output for node in self.nodes)
        if made_here and current not in self.outputs:
            self.taken_over[current] = output
        else:
            self.nodes.append(helper.make_node("Identity", [source], [output], self.fresh(f"{output}/identity")))

    def target(self, site: str, output: str, suffix: str) -> str:
        """Return the name of a site's new tensor: the graph output's if it is one, else one that names the site."""
        if output in self.outputs:
            return output
        name = f"{site}/{suffix}"
        if output != name:  # a mark made from an export has the name already
            self.renamed[output] = name = self.fresh(name)
        return name

    def add(self, op: str, inputs: Sequence[str], output: str, name: str, **options: Any) -> NodeProto:
        """Add a node with one output."""
        node = helper.make_node(op, inputs, [output], name, **options)
        self.nodes.append(node)
        return node

    def values(self, name: str) -> LargeTensor:
        """Return a stored tensor of any size."""
        return self.large[name] if name in self.large else as_stored(self.stored[name])

    def initializer(self, value: Array | LargeTensor, name: str) -> str:
        """Add an initializer; return its name."""
        fresh = self.fresh(name)
        if isinstance(value, LargeTensor) and is_large(value.dims):
            self.large[fresh] = value
            self.graph.initializer.append(value.stub(fresh))
        else:
            array = value.value() if isinstance(value, LargeTensor) else value
            self.graph.initializer.append(numpy_helper.from_array(array, fresh))
        return fresh

    def once(self, source: str, fingerprint: bytes, values: LargeTensor, suffix: str) -> str:
        """Return the initializer derived from `source` in this way; a second site of the same tensor shares it.

        Further changes of a tensor are numbered in front of the suffix: opened again, each is a tensor of its own.
        """
        key = (source, fingerprint)
        if key not in self.reused:
            earlier = sum(known == source for known, _ in self.reused)
            self.reused[key] = self.initializer(values, f"{source}_{earlier}{suffix}" if earlier else source + suffix)
        return self.reused[key]

    def row(self, site: str, dtype: str, form: str, saved: int = 0) -> None:
        """Add the row of a site to the report."""
        self.rows.append({"site": site, "dtype": dtype, "form": form, "zero_point_bytes_saved": saved})


def write_site(dequantize: NodeProto, site: str, encoding: Encoding, kind: str) -> None:
    """Write a site into the metadata of its DequantizeLinear; what its codes imply (their dtype) is left out."""
    set_metadata(dequantize, site=site)
    if encoding.dtype.name != encoding.dtype.container:
        set_metadata(dequantize, dtype=encoding.dtype.name)
    if kind:
        set_metadata(dequantize, kind=kind)


def type_of_mark(mark: NodeProto) -> str:
    """Return the float type of the tensor that a mark marks: float32, float16, bfloat16 or float64."""
    return str(attributes(mark).get("dtype", FLOAT32))


def array_type(dtype: str) -> np.dtype[Any]:
    """Return the NumPy (or ml_dtypes) type of a float type."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(FLOAT_CODES[dtype]))


def pair_type(at: GraphEditor, dtype: str, encoding: Encoding) -> str:
    """Return the float type of the pair that quantizes a tensor: its own if that holds every scale, else float32."""
    if dtype not in at.pair_types or not encoding.dtype.is_integer or encoding.dtype.narrows_container:
        return FLOAT32
    with np.errstate(over="ignore"):
        narrow = encoding.scale.astype(array_type(dtype)).astype(np.float32)
    return dtype if np.array_equal(narrow, encoding.scale) else FLOAT32


def scales_as(scale: Floats, dtype: str) -> Array:
    """Return scales in the float type of their pair."""
    return scale.astype(array_type(dtype), copy=False)


def widen(at: GraphEditor, site: str, source: str, dtype: str) -> str:
    """Cast a tensor to float32 for its pair; return the new tensor, or the given one where it is float32."""
    if dtype == FLOAT32:
        return source
    wide = at.fresh(f"{site}/float32")
    set_metadata(at.add("Cast", [source], wide, f"{site}/widen", to=FLOAT_CODES[FLOAT32]), cast_of=site)
    return wide


def dequantize_to(at: GraphEditor, site: str, inputs: list[str], name: str, dtype: str, **options: Any) -> NodeProto:
    """Add the DequantizeLinear of a site whose result is the tensor `name`, cast to a type if that is not float32."""
    wide = name if dtype == FLOAT32 else at.fresh(f"{site}/dequantized32")
    dequantize = at.add("DequantizeLinear", inputs, wide, f"{site}/dequantize", **options)
    if dtype != FLOAT32:
        set_metadata(at.add("Cast", [wide], name, f"{site}/narrow", to=FLOAT_CODES[dtype]), cast_of=site)
    return dequantize
