"""The editor of a model whose marks are being replaced: the nodes so far, and which tensor replaces which."""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper, numpy_helper

from onnx_backend.dialects.dialect import Dialect
from onnx_backend.proto.graph_queries import consumers, initializers, names_in, unique
from onnx_backend.proto.lazy_tensors import LargeTensor, as_stored
from onnx_backend.proto.nodes import (
    attributes,
    drop_unused_initializers,
    is_mark,
    rename_inputs,
    replace_nodes,
    set_metadata,
)
from onnx_backend.proto.weightless import is_large
from qsdk.core.errors import ModelError
from qsdk.core.numerics.encoding import Encoding

Array = npt.NDArray[Any]


class GraphEditor:
    """The editor of a marked model.

    Attributes:
        large: the stored tensors that the model has only stubs of, by name.
        explicit: every pair states its type by a zero point.
        nodes: the nodes of the new model.
        rows: one per site, for the report.
        renamed: a mark's output -> the tensor that its readers read now.
        taken_over: a producer's output -> the graph output it becomes.
        roots: a mark's output -> the stored tensor behind it.
        folded: outputs of Transposes that went into an initializer.
        stored: name -> stored tensor.
        taken: every name in use.
        outputs: of the graph.
        readers: tensor -> the nodes that read it.
        reused: (initializer, fingerprint of the change) -> the changed initializer.
    """

    def __init__(
        self, model: ModelProto, dialect: Dialect, large: dict[str, LargeTensor], *, explicit: bool = False
    ) -> None:
        self.model, self.graph, self.dialect, self.large = model, model.graph, dialect, large
        self.explicit = explicit
        self.nodes: list[NodeProto] = []
        self.rows: list[dict[str, Any]] = []
        self.renamed: dict[str, str] = {}
        self.taken_over: dict[str, str] = {}
        self.roots: dict[str, str] = {}
        self.folded: set[str] = set()
        self.stored = initializers(model.graph)
        self.taken = names_in(model.graph)
        self.outputs = {value.name for value in model.graph.output}
        self.readers: dict[str, list[NodeProto]] = {}
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
        kept = [value for value in self.graph.value_info if value.name in computed]
        del self.graph.value_info[:]
        self.graph.value_info.extend(kept)
        imports = [entry for entry in self.model.opset_import if entry.domain != "qsdk"]
        del self.model.opset_import[:]
        self.model.opset_import.extend(imports)

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
            self.nodes.append(
                helper.make_node("Identity", [source], [output], unique(f"{output}/identity", self.taken))
            )

    def target(self, site: str, output: str, suffix: str) -> str:
        """Return the name of a site's new tensor: the graph output's if it is one, else one that names the site."""
        if output in self.outputs:
            return output
        name = f"{site}/{suffix}"
        if output != name:  # a mark made from an export has the name already
            self.renamed[output] = name = unique(name, self.taken)
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
        fresh = unique(name, self.taken)
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
