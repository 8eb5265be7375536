"""Hand a model of any size to ONNX Runtime: weights that lie in files are mapped from there, not copied."""

import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnx_backend.proto.external_data import bytes_of, point_to, reference
from onnx_backend.proto.graph_queries import input_names, names_in, unique
from onnx_backend.proto.nodes import copied, rename_inputs, replace_nodes, retain
from onnx_backend.proto.weightless import types_of
from onnx_backend.proto.write_file import SINGLE, spool_large_tensors
from onnx_backend.runtime.providers import CPU_ONLY, Providers
from onnx_backend.workarounds.kernel_casts import LACKING, ROUNDED, has_other_floats, insert_kernel_casts


def cast_bfloat16_edges(model: ModelProto) -> None:
    """Declare every bfloat16 input and output as float32 and cast it inside, in place; their names stay.

    Values of bfloat16 pass these Casts unchanged; other values are rounded, as a Cast in front of the model would.
    """
    graph, taken = model.graph, names_in(model.graph)
    _declare_outputs(model)
    outputs = _outputs(graph, taken)
    inputs = _inputs(graph, taken)
    replace_nodes(graph, [*inputs, *graph.node, *outputs])
    edges = {value.name for value in (*graph.input, *graph.output)}
    retain(graph.value_info, lambda value: value.name not in edges)


def _declare_outputs(model: ModelProto) -> None:
    """Declare the type of outputs that have none, as parts of a model may."""
    bare = [value for value in model.graph.output if not value.type.WhichOneof("value")]
    if bare:
        types = types_of(model)
        for value in bare:
            if types.get(value.name, ("", None))[0] == "bfloat16":
                value.type.tensor_type.elem_type = TensorProto.BFLOAT16


def _inputs(graph: GraphProto, taken: set[str]) -> list[NodeProto]:
    """Declare the inputs as float32, and return the Casts from them."""
    fed, casts, renamed = set(input_names(graph)), [], {}
    for value in graph.input:
        if value.name in fed and _declare_float32(value):
            renamed[value.name] = unique(f"{value.name}/bfloat16", taken)
            casts.append(helper.make_node("Cast", [value.name], [renamed[value.name]], to=TensorProto.BFLOAT16))
    rename_inputs(graph.node, renamed)
    return casts


def _outputs(graph: GraphProto, taken: set[str]) -> list[NodeProto]:
    """Declare the outputs as float32, and return the Casts to them."""
    inputs, casts, renamed = {value.name for value in graph.input}, [], {}
    for value in graph.output:
        if _declare_float32(value) and value.name not in inputs and value.name not in renamed:
            renamed[value.name] = unique(f"{value.name}/bfloat16", taken)
            casts.append(helper.make_node("Cast", [renamed[value.name]], [value.name], to=TensorProto.FLOAT))
    rename_inputs(graph.node, renamed)
    for node in graph.node:
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = renamed.get(tensor.name, tensor.name)
    return casts


def _declare_float32(value: ValueInfoProto) -> bool:
    """Declare a bfloat16 tensor as float32; return True if it was one."""
    found = bool(value.type.tensor_type.elem_type == TensorProto.BFLOAT16)
    if found:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return found


_FOLDER = "session.model_external_initializers_file_folder_path"


def session_of(
    model: ModelProto,
    options: ort.SessionOptions,
    *,
    disabled: tuple[str, ...] = (),
    most: int = SINGLE,
    providers: Providers = CPU_ONLY,
    rounds_float16: bool = False,
) -> ort.InferenceSession:
    """Open a session; exceptions of the runtime are passed on.

    Ops that lack a kernel for bfloat16 or float64 on the CPU compute in float32, on other providers too: any node may
    fall back to the CPU, and which kernels those have is not known here. Inputs and outputs in bfloat16, which the
    runtime's Python side neither takes nor gives, are float32 in the session, and cast inside. `most` bytes are handed
    over at once: of a larger model, large weights go by way of a temporary file. `rounds_float16` rounds the result of
    every op in float16, which the runtime does on the CPU only between some. The runtime never retries on other
    providers, which would run the disabled optimizers.
    """
    with handed_over(model, ROUNDED if rounds_float16 else LACKING, most) as (given, entries):
        for key, value in {**providers.session_entries(), **entries}.items():
            options.add_session_config_entry(key, value)
        return ort.InferenceSession(
            given, options, providers=providers.for_session(), disabled_optimizers=list(disabled), enable_fallback=0
        )


@contextmanager
def handed_over(
    model: ModelProto, dtypes: Collection[str] = LACKING, most: int = SINGLE
) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield the bytes of a model and the configuration entries for a session of it; see `session_of`."""
    if stored_bytes(model) <= most // 2 or model.ByteSize() <= most:
        yield _message(_with_kernels(model, dtypes))
        return
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:  # the runtime keeps its mapping of the file
        yield _message(_with_kernels(spool_large_tensors(model, {}, Path(folder) / "weights"), dtypes))


def stored_bytes(model: ModelProto) -> int:
    """Return the bytes of the stored tensors, almost all of a model; its exact size takes as long as to write it."""
    return sum(bytes_of(tensor.data_type, tensor.dims) for tensor in model.graph.initializer)


def _message(model: ModelProto) -> tuple[bytes, dict[str, str]]:
    if all(tensor.data_location != TensorProto.EXTERNAL for tensor in model.graph.initializer):
        return model.SerializeToString(), {}
    # the runtime takes only files below a folder of its own choice
    return _with_paths_from_root(model).SerializeToString(), {_FOLDER: Path.cwd().anchor}


def _with_kernels(model: ModelProto, dtypes: Collection[str]) -> ModelProto:
    """Return the model, or a changed copy, with a kernel for each of its ops, and without bfloat16 at its edges."""
    if not has_other_floats(model, dtypes):
        return model
    found = copied(model)
    cast_bfloat16_edges(found)
    insert_kernel_casts(found, dtypes)
    return found


def _with_paths_from_root(model: ModelProto) -> ModelProto:
    """Return a copy whose references are paths from the root."""
    found = copied(model)
    for tensor in found.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            file, offset, length = reference(tensor)
            point_to(tensor, file.relative_to(file.anchor).as_posix(), offset, length)
    return found
