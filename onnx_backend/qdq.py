"""From marks to QuantizeLinear and DequantizeLinear. The inverse is in `qdq_read`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx.inliner
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnx_backend.keep_apart import keep_apart
from onnx_backend.model import (
    array,
    at_opset,
    attributes,
    consumers,
    drop_unused_initializers,
    initializers,
    is_mark,
    lift_constants,
    load,
    names_in,
    producers,
    rename_inputs,
    replace_nodes,
    set_metadata,
    unique,
)
from onnx_backend.runtime_table import Dialect, form_of
from qsdk.core.dtypes import DTYPES, DType
from qsdk.core.encoding import Encoding, storage_type
from qsdk.core.errors import ExportError, ModelError
from qsdk.core.planning.plan import Decision, Plan
from qsdk.core.spec import Kind

_OPSET_OF_CONTAINER = {"int2": 25, "uint2": 25, "float4e2m1": 23}
_CAST_CODES = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
Array = npt.NDArray[Any]


def insert(
    model: ModelProto, plan: Plan, encodings: Mapping[str, Encoding], *, dialect: Dialect = "onnxruntime"
) -> tuple[ModelProto, list[dict[str, Any]]]:
    """Replace every mark by what the plan decided: Q/DQ, an integer initializer, a pair of casts, or nothing.

    Args:
        model: marked; it is not changed.
        plan: what is wanted at each site; a site it does not know stays float.
        encodings: of every quantized site, tied sites and biases included.
        dialect: `onnx` writes the pure form everywhere, `onnxruntime` what the installed runtime loads.

    Returns:
        The model, with graph inputs and outputs under their old names, and one row per site: `site`, `dtype`, `form`,
        `zero_point_bytes_saved`.

    Raises:
        ExportError: a site has no encoding, or one that cannot be written.
        ModelError: one site marks two tensors.
    """
    model = load(model)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    lift_constants(model)
    containers = {encoding.dtype.container for encoding in encodings.values()}
    model = at_opset(model, max(_OPSET_OF_CONTAINER.get(container, 21) for container in (*containers, "")))
    lowering = _Lowering(model, dialect)
    lowering.merge_marks()
    for node in list(model.graph.node):
        if is_mark(node):
            site = str(attributes(node)["key"])
            lowering.lower(node, site, plan.decisions.get(site), encodings)
        elif node.output[0] not in lowering.folded:
            lowering.nodes.append(node)
    lowering.finish()
    if dialect == "onnxruntime":
        keep_apart(model)
    return model, lowering.rows


class _Lowering:
    """The model under change: its new nodes, and which tensors took whose place."""

    def __init__(self, model: ModelProto, dialect: Dialect) -> None:
        self.model, self.graph, self.dialect = model, model.graph, dialect
        self.nodes: list[NodeProto] = []
        self.rows: list[dict[str, Any]] = []
        self.renamed: dict[str, str] = {}  # a mark's output -> what its readers read now
        self.taken_over: dict[str, str] = {}  # a producer's output -> the graph output it becomes
        self.roots: dict[str, str] = {}  # a mark's output -> the stored tensor behind it
        self.folded: set[str] = set()  # outputs of Transposes that went into an initializer
        self.stored = initializers(model.graph)
        self.taken = names_in(model.graph)
        self.outputs = {value.name for value in model.graph.output}
        self.readers: dict[str, list[NodeProto]] = {}
        self.makers = producers(model.graph.node)
        self.reused: dict[tuple[str, bytes], str] = {}  # (initializer, how) -> the one made of it

    def merge_marks(self) -> None:
        """Keep the first mark of each site; readers of the others read it."""
        first: dict[str, NodeProto] = {}
        renamed: dict[str, str] = {}
        kept = []
        for node in self.graph.node:
            rename_inputs([node], renamed)
            site = str(attributes(node)["key"]) if is_mark(node) else ""
            home = first.setdefault(site, node) if site else node
            if home is node:
                kept.append(node)
                continue
            if node.input[0] not in (home.input[0], home.output[0]):
                tensors = f"{home.input[0]!r} and {node.input[0]!r}"
                raise ModelError(f"the site {site} marks two tensors, {tensors}; give them sites of their own")
            if node.output[0] in self.outputs:
                kept.append(helper.make_node("Identity", [home.output[0]], [node.output[0]], f"{site}/again"))
            else:
                renamed[node.output[0]] = home.output[0]
        replace_nodes(self.graph, kept)
        self.readers = consumers(self.graph.node)

    def lower(self, mark: NodeProto, site: str, decision: Decision | None, encodings: Mapping[str, Encoding]) -> None:
        """Put what was decided in a mark's place."""
        source, output = mark.input[0], mark.output[0]
        root = self.roots.get(source, source)
        if root in self.stored:
            self.roots[output] = source = root
        if decision is None or decision.spec is None:
            self._bypass(source, output)
            self._row(site, "float32", "float")
        elif decision.spec.dtype.kind == "float":
            self._cast(site, decision.kind, decision.spec.dtype, source, output)
        elif site not in encodings:
            raise ExportError(f"the site {site} has no encoding; calibrate it, or export with uncalibrated='float'")
        elif source in self.stored:
            self._store(site, decision.kind, encodings[site], source, output)
        else:
            self._quantize(decision, encodings[site], source, output)

    def finish(self) -> None:
        """Let every reader see the new names, and drop what nothing reads any more."""
        for node in self.nodes:
            node.output[:] = [self.taken_over.get(name, name) for name in node.output]
        final = {name: self._final(name) for name in (*self.renamed, *self.taken_over)}
        rename_inputs(self.nodes, final)
        replace_nodes(self.graph, self.nodes)
        drop_unused_initializers(self.graph)
        made = {name for node in self.nodes for name in node.output} | {t.name for t in self.graph.initializer}
        kept = [value for value in self.graph.value_info if value.name in made]
        del self.graph.value_info[:]
        self.graph.value_info.extend(kept)
        imports = [entry for entry in self.model.opset_import if entry.domain != "qsdk"]
        del self.model.opset_import[:]
        self.model.opset_import.extend(imports)

    def _final(self, name: str) -> str:
        while name in self.renamed:
            name = self.renamed[name]
        return self.taken_over.get(name, name)

    def _bypass(self, source: str, output: str) -> None:
        if output not in self.outputs:
            self.renamed[output] = source
            return
        current = self._final(source)
        made_here = any(current in node.output for node in self.nodes)
        if made_here and current not in self.outputs:
            self.taken_over[current] = output
        else:
            self.nodes.append(
                helper.make_node("Identity", [source], [output], unique(f"{output}/identity", self.taken))
            )

    def _target(self, site: str, output: str, suffix: str) -> str:
        """The name of a site's new tensor: the graph output's if it is one, else one that says the site."""
        if output in self.outputs:
            return output
        name = f"{site}/{suffix}"
        if output != name:  # a mark made from an export has the name already
            self.renamed[output] = name = unique(name, self.taken)
        return name

    def _add(self, op: str, inputs: Sequence[str], output: str, name: str, **options: Any) -> NodeProto:
        node = helper.make_node(op, inputs, [output], name, **options)
        self.nodes.append(node)
        return node

    def _initializer(self, value: Array, name: str) -> str:
        fresh = unique(name, self.taken)
        self.graph.initializer.append(numpy_helper.from_array(value, fresh))
        return fresh

    def _row(self, site: str, dtype: str, form: str, saved: int = 0) -> None:
        self.rows.append({"site": site, "dtype": dtype, "form": form, "zero_point_bytes_saved": saved})

    # --- float16 and bfloat16 ---------------------------------------------------------------------------------

    def _cast(self, site: str, kind: Kind, dtype: DType, source: str, output: str) -> None:
        code = _CAST_CODES[dtype.name]
        if source in self.stored:
            with np.errstate(over="ignore"):
                narrow = array(self.stored[source]).astype(helper.tensor_dtype_to_np_dtype(code))
            middle = self._once(source, dtype.name.encode(), lambda: narrow, f"{source}_{dtype.name}")
        else:
            middle = unique(f"{site}/{dtype.name}", self.taken)
            first = self._add("Cast", [source], middle, f"{site}/cast", to=code)
            set_metadata(first, site=site, dtype=dtype.name, kind=kind)
        back = self._target(site, output, "float32")
        last = self._add("Cast", [middle], back, f"{site}/cast_back", to=TensorProto.FLOAT)
        set_metadata(last, site=site, dtype=dtype.name, kind=kind)
        self._row(site, dtype.name, "cast")

    def _once(self, source: str, how: bytes, make: Any, name: str) -> str:
        """The initializer made of `source` in this way; a second site of the same tensor shares it."""
        key = (source, how)
        if key not in self.reused:
            self.reused[key] = self._initializer(make(), name)
        return self.reused[key]

    # --- stored tensors ---------------------------------------------------------------------------------------

    def _store(self, site: str, kind: Kind, encoding: Encoding, source: str, output: str) -> None:
        values = array(self.stored[source])
        permutation = self._foldable(output, values.ndim)
        try:
            codes = encoding.quantize(values)
        except ValueError as error:
            raise ExportError(f"the encoding of {site} does not fit its shape {values.shape}: {error}") from error
        scale, zero_point, axis = encoding.scale, encoding.zero_point, encoding.axis
        if permutation is not None:
            codes = codes.transpose(permutation)
            if axis is not None:
                axis = permutation.index(axis % values.ndim)
            if encoding.block_size is not None:
                scale, zero_point = scale.transpose(permutation), zero_point.transpose(permutation)
            transposes = self.readers[output]
            self.folded.update(node.output[0] for node in transposes)
            for node in transposes[1:]:
                self.renamed[node.output[0]] = transposes[0].output[0]
            output = transposes[0].output[0]
        how = _fingerprint(encoding, permutation)
        stored = self._once(source, how, lambda: codes, f"{source}_quantized")
        inputs = [stored, *self._parameters(site, encoding, scale, zero_point, not encoding.symmetric)]
        name = self._target(site, output, "dequantized")
        dequantize = self._add("DequantizeLinear", inputs, name, f"{site}/dequantize", **_where(encoding, axis))
        set_metadata(dequantize, site=site, dtype=encoding.dtype.name, kind=kind)
        if permutation is not None:
            set_metadata(dequantize, perm=",".join(str(i) for i in permutation))
        saved = _zero_point_bytes(encoding) if encoding.symmetric else 0
        self._row(site, encoding.dtype.name, _stored_form(kind, encoding), saved)

    def _foldable(self, output: str, rank: int) -> list[int] | None:
        """The permutation that every reader of a stored tensor applies, or None if they differ or do not."""
        readers = self.readers.get(output, [])
        if rank < 2 or not readers or output in self.outputs:
            return None
        if any(node.op_type != "Transpose" or node.output[0] in self.outputs for node in readers):
            return None
        found = {tuple(attributes(node).get("perm") or reversed(range(rank))) for node in readers}
        return list(found.pop()) if len(found) == 1 else None

    # --- activations ------------------------------------------------------------------------------------------

    def _quantize(self, decision: Decision, encoding: Encoding, source: str, output: str) -> None:
        site, kind = decision.site, decision.kind
        form = form_of(encoding.dtype, encoding.symmetric, self.dialect)
        # what passes through is inside its grid already, and the runtime wants no node between MaxPool and an int8 Q
        if encoding.dtype.narrows_container and not decision.passes_through:
            source = self._clipped(site, encoding, source)
        options = _where(encoding, encoding.axis)
        inputs = self._parameters(site, encoding, encoding.scale, encoding.zero_point, form != "output_dtype")
        if form != "zero_point":
            code = helper.np_dtype_to_tensor_dtype(storage_type(encoding.dtype))
            attribute = {"output_dtype": int(code)}
        else:
            attribute = {}
        codes = unique(f"{site}/quantized", self.taken)
        quantize = self._add("QuantizeLinear", [source, *inputs], codes, f"{site}/quantize", **options, **attribute)
        name = self._target(site, output, "dequantized")
        dequantize = self._add("DequantizeLinear", [codes, *inputs], name, f"{site}/dequantize", **options)
        for node in (quantize, dequantize):
            set_metadata(node, site=site, dtype=encoding.dtype.name, kind=kind)
        text = {"output_dtype": "QDQ output_dtype", "zero_point": "QDQ zero point"}.get(
            form, "QDQ output_dtype and zero point"
        )
        self._row(site, encoding.dtype.name, text, _zero_point_bytes(encoding) if form == "output_dtype" else 0)

    def _clipped(self, site: str, encoding: Encoding, source: str) -> str:
        """The values inside the grid before they are rounded."""
        if encoding.axis is not None:
            raise ExportError(
                f"{site} is an activation of {encoding.dtype} per channel, which QuantizeLinear cannot hold inside its "
                "grid; make it per tensor, or choose a dtype of full width"
            )
        low = self._initializer(encoding.low.reshape(()), f"{site}/low")
        high = self._initializer(encoding.high.reshape(()), f"{site}/high")
        clipped = unique(f"{site}/clipped", self.taken)
        set_metadata(self._add("Clip", [source, low, high], clipped, f"{site}/clip"), site=site)
        return clipped

    def _parameters(
        self, site: str, encoding: Encoding, scale: Array, zero_point: Array, with_zero_point: bool
    ) -> list[str]:
        shape = () if encoding.axis is None else scale.shape
        found = [self._initializer(np.array(scale.reshape(shape), order="C"), f"{site}/scale")]
        if with_zero_point:
            typed = zero_point.reshape(shape).astype(storage_type(encoding.dtype))
            found.append(self._initializer(typed, f"{site}/zero_point"))
        return found


def _where(encoding: Encoding, axis: int | None) -> dict[str, int]:
    if axis is None:
        return {}
    return {"axis": axis} if encoding.block_size is None else {"axis": axis, "block_size": encoding.block_size}


def _fingerprint(encoding: Encoding, permutation: list[int] | None) -> bytes:
    facts = (encoding.dtype.name, encoding.axis, encoding.block_size, permutation)
    return repr(facts).encode() + encoding.scale.tobytes() + encoding.zero_point.tobytes()


def _zero_point_bytes(encoding: Encoding) -> int:
    return -(-encoding.scale.size * DTYPES[encoding.dtype.container].bits // 8)


def _stored_form(kind: Kind, encoding: Encoding) -> str:
    if kind == "bias" and encoding.dtype.name == "int32":
        return "int32 bias"
    return "integer initializer" if encoding.dtype.is_integer else "minifloat initializer"
