"""Tracing: from a wrapped model to ONNX bytes in which every site is marked, with stored tensors by name."""

import hashlib
import logging
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from qsdk.core.encodings.provenance import EXAMPLE, example_text
from qsdk.core.errors import ExportError, QsdkError
from qsdk.core.lazy_arrays import LazyArrays
from torch_bridge.sites.runtime import Runtime
from torch_bridge.torch_values.batches import Example
from torch_bridge.torch_values.parameters import PREFIX, STATE, held_tensor
from torch_bridge.torch_values.pytree import (
    CacheKey,
    Path,
    argument_leaves,
    is_cache,
    leaves_of,
    map_leaves,
    name_leaves,
)
from torch_bridge.tracing.dynamic_shapes import Axes, batch_axes, named_axes
from torch_bridge.tracing.export_errors import (
    OutputForm,
    export_error,
    fixed_axis_error,
    output_forms,
    require_plain,
    require_same_outputs,
    require_tensors,
)
from torch_bridge.workarounds.exporter_speed import known_values_taken, operators_read_once, single_nodes_decomposed
from torch_bridge.wrapping.wrapped_state import is_wrapped

LARGE = 4096  # a constant of more elements is referred to by name
#: dtypes that NumPy does not have: torch's integers of their bits, and the dtype of ml_dtypes
_BY_BITS: Mapping[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.bfloat16: (torch.int16, ml_dtypes.bfloat16),
    torch.float8_e4m3fn: (torch.uint8, ml_dtypes.float8_e4m3fn),
    torch.float8_e4m3fnuz: (torch.uint8, ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2: (torch.uint8, ml_dtypes.float8_e5m2),
    torch.float8_e5m2fnuz: (torch.uint8, ml_dtypes.float8_e5m2fnuz),
}


@dataclass(frozen=True)
class WeightsByName:
    """The stored tensors that are not in the bytes of a trace.

    `state` is name -> path of a parameter or buffer, `constants` name -> large constant of the trace.
    """

    state: Mapping[str, str]
    constants: Mapping[str, Tensor]

    def values_in(self, model: nn.Module) -> LazyArrays:
        """Return their values, read from the module at each access: on the CPU views, no copies."""
        names = (*self.state, *self.constants)
        return LazyArrays(names, lambda name: _as_array(self._tensor(model, name)))

    def _tensor(self, model: nn.Module, name: str) -> Tensor:
        if name in self.constants:
            return self.constants[name]
        owner, _, leaf = self.state[name].rpartition(".")
        return held_tensor(model.get_submodule(owner), leaf)


def detach_weights(program: torch.onnx.ONNXProgram, model: nn.Module) -> tuple[bytes, WeightsByName]:
    """Return the bytes of a traced model without its state and large constants, and the names of these."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    places = {path: tensor.data_ptr() for path, tensor in tensors}
    state: dict[str, str] = {}
    constants: dict[str, Tensor] = {}
    for value in program.model.graph.initializers.values():
        held: Any = value.const_value
        raw, name = getattr(held, "raw", None), str(value.name)
        if not isinstance(raw, Tensor):
            continue
        path = name if name in places else name.removesuffix("_stored")
        if places.get(path) == raw.data_ptr():
            state[name] = path
        elif raw.numel() > LARGE:
            constants[name] = raw
        else:
            continue
        value.const_value = type(held)(torch.empty(0, dtype=raw.dtype), name=value.name)
    return program.model_proto.SerializeToString(), WeightsByName(state, constants)


def _as_array(tensor: Tensor) -> npt.NDArray[Any]:
    local = tensor.detach().cpu()
    if local.dtype not in _BY_BITS:
        return np.asarray(local.numpy())
    bits, dtype = _BY_BITS[local.dtype]
    return np.asarray(local.view(bits).numpy().view(dtype))


OPSET = 21
_WITH_CACHE = (
    ", which reads all earlier tokens again at every step; to generate text, quantize with "
    'kv_cache="float32" or "int8" (--kv-cache): the file then takes and gives keys and values'
)
_SIZE = r"L\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]"  # as torch writes a length into its guards


Leaves = Sequence[tuple[Path, Any]]


@dataclass(frozen=True)
class Trace:
    """A traced model.

    `model` are ONNX bytes at opset 21 with a node `qsdk::Quantizer(x){key=site}` at every site, without stored tensors.
    """

    model: bytes
    stored: WeightsByName
    notes: Mapping[str, str]


def trace_marked(
    model: nn.Module, runtime: Runtime, example: Example, eager: Sequence[OutputForm] | None = None
) -> Trace:
    """Export a wrapped model on its example; where `eager` is given, the trace must have these outputs.

    The axes that `example.dynamic_shapes` names are dynamic; where it is None, the batch axis, if the model allows it.
    Outputs are named as in the module: `output`, `output_1` in a tuple, or a mapping's keys.
    """
    leaves = argument_leaves(model.forward, example.args, example.kwargs)
    require_plain(leaves)
    if example.dynamic_shapes is not None:
        return _export(model, runtime, example, eager, leaves, named_axes(leaves, example.dynamic_shapes))
    axes = batch_axes(leaves)
    try:
        return _export(model, runtime, example, eager, leaves, axes)
    except ExportError as error:
        if not axes:
            raise
        if example.has_cache:
            raise ExportError(
                f"{error}. The lengths of a step with a cache should be dynamic: give quantize an example of two new "
                "tokens at least, or dynamic_shapes={} for a file of the example's lengths"
            ) from error
        reason = f"the exported file takes only the example's length, because {error}"
    traced = _export(model, runtime, example, eager, leaves, {})
    return Trace(traced.model, traced.stored, {**traced.notes, "batch axis": reason})


@dataclass(frozen=True)
class Captured:
    """A model captured by torch.export, with a mark at every site.

    It takes tensors in the order of `inputs`, of which `shapes` has the dynamic axes, and returns a tuple of tensors.
    """

    program: ExportedProgram
    inputs: Sequence[str]
    shapes: Sequence[Axes]
    outputs: Sequence[tuple[Path, Any]]


def capture_marked(model: nn.Module, runtime: Runtime, example: Example) -> Captured:
    """Capture a wrapped model on its example, with the dynamic axes that `trace_marked` has."""
    leaves = argument_leaves(model.forward, example.args, example.kwargs)
    require_plain(leaves)
    named = example.dynamic_shapes
    axes = batch_axes(leaves) if named is None else named_axes(leaves, named)
    for tried in (axes, {}):
        try:
            with runtime.in_phase("mark"), _silenced_exporter(), torch.no_grad():
                captured = _captured(model, example, leaves, tried)
                _conditions(captured.program, captured.inputs, captured.shapes)
                return captured
        except QsdkError:
            if named is not None or not tried or example.has_cache:
                raise
        except Exception as error:  # tracing runs the user's code and much of torch, which raise what they like
            if named is not None or not tried or example.has_cache:
                raise export_error(error, {".".join(path): own for path, own in tried.items()}) from error
    raise AssertionError


def _captured(model: nn.Module, example: Example, leaves: Leaves, axes: Mapping[Path, Axes]) -> Captured:
    given = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    shapes = [dict(axes.get(path, {})) for path, _ in given]
    outputs: list[tuple[Path, Any]] = []
    flat = _TensorsOnly(model, example, outputs.extend)
    tensors = [_widened(tensor) if example.float32_edges else tensor for _, tensor in given]
    return Captured(_capture(flat, tensors, shapes), list(name_leaves(given)), shapes, outputs)


class _TensorsOnly(nn.Module):
    """A model that takes and returns nothing but tensors; other arguments keep their values of the example.

    `note` is called with the leaves of what the model returns, by path (torch restores attributes that a trace sets).
    """

    def __init__(self, model: nn.Module, example: Example, note: Callable[[Leaves], None]) -> None:
        super().__init__()
        self.model = model
        self.given, self.has_cache = (example.args, dict(example.kwargs)), example.has_cache
        self.widened = example.float32_edges
        self.note = note
        self.training = model.training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors among the model's outputs, with these in place of the example's."""
        rest = iter(tensors)
        args, kwargs = map_leaves(
            self.given, lambda _, leaf: _as(leaf, next(rest)) if isinstance(leaf, Tensor) else leaf
        )
        outputs = leaves_of(self.model(*args, **kwargs), caches=self.has_cache)
        require_tensors(outputs)
        self.note(outputs)
        # a separate output, also for an input or a weight that is returned, and for a tensor that is returned twice
        results = (leaf for _, leaf in outputs if isinstance(leaf, Tensor))
        return tuple(_identity(_widened(x) if self.widened else x) for x in results)


def _as(own: Tensor, x: Tensor) -> Tensor:
    """Return a tensor in the dtype of the model's own, without a trace of an op (and of its device) where it has it."""
    return x if x.dtype == own.dtype else x.to(own.dtype)


def _widened(x: Tensor) -> Tensor:
    """Return a tensor in half precision as float32: NumPy knows no bfloat16, so runtimes' Python sides have none."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _identity(x: Tensor) -> Tensor:
    return torch.onnx.ops.symbolic("Identity", (x,), dtype=x.dtype, shape=x.shape, version=OPSET)


def _export(
    model: nn.Module,
    runtime: Runtime,
    example: Example,
    eager: Sequence[OutputForm] | None,
    leaves: Leaves,
    axes: Mapping[Path, Axes],
) -> Trace:
    given = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    inputs = list(name_leaves(given))
    shapes = [dict(axes.get(path, {})) for path, _ in given]
    runtime.marked = []
    try:
        with runtime.in_phase("mark"), _silenced_exporter(), torch.no_grad():
            whole = _captured(model, example, leaves, axes)
            captured, outputs = whole.program, whole.outputs
            if eager is not None:
                require_same_outputs(eager, output_forms(outputs))
            conditions = _conditions(captured, inputs, shapes)
            with operators_read_once(), single_nodes_decomposed(), known_values_taken():
                program = torch.onnx.export(
                    captured, dynamo=True, opset_version=OPSET, dynamic_shapes=shapes, optimize=False, verbose=False
                )
    except QsdkError:
        raise
    except Exception as error:  # tracing runs the user's code and much of torch, which raise what they like
        raise export_error(error, dict(zip(inputs, shapes, strict=True))) from error
    assert program is not None
    notes = _notes(leaves, outputs, conditions)
    _name_tensors(program, inputs, _output_names(outputs, inputs))
    _drop_metadata(program)
    if any(shapes):
        sizes = {name: leaf.shape for name, (_, leaf) in zip(inputs, given, strict=True)}
        program.model.metadata_props[EXAMPLE] = example_text(sizes)
    return Trace(*detach_weights(program, model), notes)


def _capture(flat: _TensorsOnly, tensors: Sequence[Tensor], shapes: Sequence[Axes]) -> ExportedProgram:
    hints = {"tensors": tuple(dict.fromkeys(axes, Dim.DYNAMIC) for axes in shapes)} if any(shapes) else None
    # so that an axis that is one long in the example is dynamic like any other; torch.onnx.export does the same
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        # detached: torch marks a tensor as dynamic, and the next trace would find the mark
        return torch.export.export(flat, tuple(x.detach() for x in tensors), dynamic_shapes=hints, strict=False)


def _notes(leaves: Leaves, outputs: Leaves, conditions: Sequence[str]) -> dict[str, str]:
    """Return what the exported file lacks of the module."""
    result = {}
    for path, leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            result[f"argument {'.'.join(path)}"] = f"fixed at {leaf!r} in the exported file"
    for path, leaf in outputs:
        if leaf is not None and not isinstance(leaf, Tensor):
            lacking = f"a {type(leaf).__name__}, no tensor: not in the exported file"
            result[f"output {'.'.join(path)}"] = lacking + (_WITH_CACHE if is_cache(leaf) else "")
    if conditions:
        result["lengths"] = f"traced for {' and '.join(conditions)}; for others the module may take another path"
    return result


def _conditions(captured: ExportedProgram, inputs: Sequence[str], shapes: Sequence[Axes]) -> list[str]:
    """Return the conditions on the lengths of dynamic axes that the trace relies on, with the axes' names."""
    result = []
    size = re.compile(_SIZE)
    for guard in getattr(captured, "_guards_code", None) or ():
        pinned = re.fullmatch(rf"{_SIZE} == \d+", guard)
        if pinned is not None:
            place, axis = int(pinned[1]), int(pinned[2])
            raise fixed_axis_error(shapes[place].get(axis, ""), axis, inputs[place])
        named = size.sub(lambda place: shapes[int(place[1])].get(int(place[2]), place[0]), guard)
        # a guard on two axes is arithmetic that holds for any lengths the module takes
        if len({place[0] for place in size.finditer(guard)}) == 1:
            result.append(named)
    return list(dict.fromkeys(result))


def _output_names(outputs: Leaves, inputs: Sequence[str]) -> list[str]:
    """Return the outputs' names in the module; one that is also an input's name gets `_out`.

    Keys and values that a cache holds after the call are called `present.0.key`, as other tools call them.
    """
    tensors = [
        (("present", *path[1:]) if any(isinstance(key, CacheKey) for key in path[1:2]) else path, leaf)
        for path, leaf in outputs
        if isinstance(leaf, Tensor)
    ]
    paths = [path if path and not path[0].isdigit() else ("output", *path) for path, _ in tensors]
    free = [(*path, "out") if "_".join(path) in inputs else path for path in paths]
    return list(name_leaves(((path, None) for path in free), inputs))


def _name_tensors(program: torch.onnx.ONNXProgram, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs, and the stored tensors as in the model's state_dict; inner names give way."""
    graph = program.model.graph
    edges = {*inputs, *outputs}
    for value in list(graph.initializers.values()):
        name = str(value.name).removeprefix("model.")
        value.name = f"{name}_stored" if name in edges else name
    # torch names the result of `h.t()` `t`, even if a parameter has that name
    taken = {*edges, *(value.name for value in graph.initializers.values())}
    for node in graph.all_nodes():
        for value in node.outputs:
            name = str(value.name)
            while name in taken:
                name = f"{name}_inside"
            taken.add(name)
            value.name = name
    for value, name in zip((*graph.inputs, *graph.outputs), (*inputs, *outputs), strict=True):
        value.name = name


def _drop_metadata(program: torch.onnx.ONNXProgram) -> None:
    """Drop torch's notes at every node: stack traces reveal this machine's paths, and outweigh the nodes."""
    program.model.graph.metadata_props.clear()
    for nodes in (program.model.graph, *program.model.functions.values()):
        for node in nodes:
            node.metadata_props.clear()


@contextmanager
def _silenced_exporter() -> Iterator[None]:
    """Silence the exporter inside the block: it logs packages that are not installed and warns about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type, slice, range)
_OWN = frozenset({STATE, "_modules", "_parameters", "_buffers", "training"})
_BY_IDENTITY = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class _Identity:
    """A value that equals itself alone; it keeps the object alive, so that no other object takes its identity."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]


def fingerprint(model: nn.Module) -> Any:
    """Return a description of a model's modules, their attributes and hooks, and its state; compare with `==`.

    Equal descriptions of a model lead to the same trace, whatever the values of its parameters and buffers. What lies
    outside the model is not seen: a global that its code reads, a variable that a function closes over. Objects count
    by identity and by what they hold, so a copied model is described differently.
    """
    seen = {id(known) for known in (*model.modules(), *model.parameters(), *model.buffers())}
    modules = [
        (path, _Identity(_user_class(module)), [(name, _describe(x, seen)) for name, x in _attributes(module).items()])
        for path, module in model.named_modules()
    ]
    places = [(path, _Identity(module)) for path, module in model.named_modules(remove_duplicate=False)]
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    own = [(name, x) for name, x in tensors if not name.rpartition(".")[2].startswith(PREFIX)]
    state = [(name, first.setdefault(id(x), name), x.dtype, tuple(x.shape)) for name, x in own]
    return places, modules, state


def _user_class(module: nn.Module) -> type:
    """Return the user's class: the one that a wrapped module derives from, and that pickle knows by name."""
    return type(module).__mro__[1] if is_wrapped(module) else type(module)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OWN}


def _describe(value: Any, seen: set[int]) -> Any:
    """Return plain values for data and for what objects hold; never equal for what cannot be inspected.

    Each object is described once.
    """
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, _BY_IDENTITY) or id(value) in seen:
        return _Identity(value)
    if isinstance(value, weakref.ref):  # recurrent layers hold their weights so too
        return weakref.ref, _describe(value(), seen)
    seen.add(id(value))
    if isinstance(value, Tensor):
        small = value.tolist() if value.numel() <= LARGE else None  # a trace holds it as a constant of its own
        return _Identity(value), value._version, value.data_ptr(), repr(small)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()
    if isinstance(value, Mapping):
        return type(value), [[_describe(part, seen) for part in pair] for pair in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_describe(item, seen) for item in value]
    if isinstance(value, Set):
        return type(value), sorted(map(repr, value))
    if hasattr(value, "__dict__"):
        return _Identity(value), [(name, _describe(part, seen)) for name, part in vars(value).items()]
    return object()
