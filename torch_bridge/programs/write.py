"""A sim as a program of torch.export: `quantized_decomposed` ops that hold its encodings, and weights as integers."""

import json
import operator
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from qsdk.core.atomic_files import write_atomically
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.numerics.dtypes import DType
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import WHOLE, Decision, Plan
from qsdk.core.report import Report
from qsdk.core.site import owner_of, port_of
from torch_bridge.calibrate import stored_values
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.parameters import to_torch_order
from torch_bridge.torch_values.pytree import argument_leaves
from torch_bridge.tracing.export_errors import export_error
from torch_bridge.tracing.trace import Captured, capture_marked
from torch_bridge.workarounds.decomposed_ops import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNELS,
    LIBRARY,
    QUANTIZE,
    QUANTIZE_CHANNELS,
)
from torch_bridge.workarounds.open_lengths import open_lengths

#: name of the entry of the file that says which site each dequantize op is of
SITES = "qsdk.sites.json"
#: read codes, of an activation or of a stored tensor
DEQUANTIZES = (DEQUANTIZE, DEQUANTIZE_CHANNELS)
_TYPES = {8: torch.int8, 16: torch.int16, 32: torch.int32}
_ATEN = torch.ops.aten
_RECURRENT: Mapping[str, Any] = {
    "LSTM": _ATEN.lstm.input,
    "GRU": _ATEN.gru.input,
    "RNN_TANH": _ATEN.rnn_tanh.input,
    "RNN_RELU": _ATEN.rnn_relu.input,
}
#: give back what they are given, where the dtype is the same
_COPIES = (
    _ATEN.to.dtype,
    _ATEN.to.dtype_layout,
    _ATEN.type_as.default,
    _ATEN.to.device,
    _ATEN.detach.default,
    _ATEN.alias.default,
)
#: give a list of tensors -> the place of their argument that is the axis
_SPLITS: Mapping[Any, int] = {
    **dict.fromkeys((_ATEN.split.Tensor, _ATEN.split_with_sizes.default, _ATEN.chunk.default), 2),
    _ATEN.unbind.int: 1,
}
#: have a weight and a bias behind their input
_CONV1D = (_ATEN.conv1d.default, _ATEN.conv_transpose1d.default)
_LAYERS = (*_CONV1D, _ATEN.linear.default, _ATEN.conv2d.default, _ATEN.conv_transpose2d.input)
_INTO = "model."  # what tracing puts in front of the paths of the model


@dataclass(frozen=True)
class _Codes:
    """A grid of integers as the ops take it: the container, and its bounds and zero points, shifted to be signed."""

    dtype: torch.dtype
    lo: int
    hi: int
    shift: int

    @classmethod
    def of(cls, dtype: DType) -> "_Codes":
        bits = 8 if dtype.bits <= 8 else 16 if dtype.bits <= 16 else 32
        shift = 0 if dtype.signed else 1 << (dtype.bits - 1)
        return cls(_TYPES[bits], int(dtype.lo) - shift, int(dtype.hi) - shift, shift)


def write_program(
    sim: QuantSim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    longest: Mapping[str, int],
    *,
    check: Callable[[Path], Report] | None,
) -> Report:
    """Write a sim as a file of `torch.export.save`; `check` compares it with the sim before an older one is replaced.

    Raises:
        ConfigError: a name in `longest` that is no open axis, or a length below the example's.
        ExportError: a site that the ops have no form for, or a program that computes something else.
    """
    refuse_unsayable(plan)
    if any(parameter.dtype == torch.float64 for parameter in sim.model.parameters()):
        raise ExportError("format='pt2e' has no float64: its ops take float32 and less; quantize model.float()")
    captured = capture_marked(sim.model, sim.runtime, sim.current_example)
    builder = ProgramBuilder(sim, plan, encodings, captured)
    program = builder.program(longest)
    facts: dict[str, Any] = {}
    noted = json.dumps({"version": 1, "sites": builder.order, "inputs": list(captured.inputs)})

    def write(staged: Path) -> None:
        with staged.open("wb") as file:
            torch.export.save(program, file, extra_files={SITES: noted})
        if check is not None:
            facts.update(_facts_of(check(staged)))
        facts["bytes"] = staged.stat().st_size

    target = Path(path)
    write_atomically(target, write)
    lsb = facts.pop("lsb", {})
    rows = [{**row, **({"max_lsb": lsb[row["site"]]} if row["site"] in lsb else {})} for row in builder.rows]
    return Report("Export", rows, {"paths": [str(target)], "needs": LIBRARY, **facts})


def _facts_of(parity: Report) -> dict[str, Any]:
    """Return what a comparison says of each site and of all; an ExportError for what is not the sim's."""
    rows = {row["site"]: row for row in parity.rows}
    wrong = max(rows, key=lambda site: float(rows[site]["max_lsb"]), default="")
    if not parity.summary["passed"] and "reason" in parity.summary:
        raise ExportError(f"the program is not the sim: {parity.summary['reason']}; the file was not written")
    if not parity.summary["passed"]:
        note = rows[wrong].get("note") or f"it is {rows[wrong]['max_lsb']} steps off the sim"
        raise ExportError(f"the program is not the sim at {wrong}: {note}; the file was not written")
    lsb = {site: row["max_lsb"] for site, row in rows.items()}
    return {"lsb": lsb, **{key: parity.summary[key] for key in ("weights_max_lsb", "activations_max_lsb", "sqnr_db")}}


def refuse_unsayable(plan: Plan) -> None:
    """Refuse a plan with a site that `quantized_decomposed` ops cannot say, by name."""
    for decision in plan.decisions.values():
        reason = ""
        if (
            decision.dynamic
            or decision.tied_dynamically
            or (decision.input_block == WHOLE and decision.op_type != "LSTM")
        ):
            reason = "its range is found while the model runs; leave out dynamic_activations"
        elif decision.input_block is not None:
            reason = 'its layer rounds its input in blocks; leave out compute="int8"'
        elif decision.spec is not None and decision.spec.dtype.kind == "minifloat":
            reason = f"{decision.spec.dtype} is no integer; choose int8 or int4 there"
        if reason:
            raise ExportError(f"format='pt2e' has no form for {decision.site}: {reason}, or float32 for it")


class ProgramBuilder:
    """The program of a sim: what torch captured, with ops in the place of marks, and integers for what is stored.

    Attributes:
        rows: of the report: site, dtype and form.
        order: the site of each dequantize op, in the order of the graph.
    """

    def __init__(self, sim: QuantSim, plan: Plan, encodings: Mapping[str, Encoding], captured: Captured) -> None:
        self._sim, self._plan, self._encodings, self._captured = sim, plan, encodings, captured
        self._stored = stored_values(sim)
        self._module = captured.program.module(check_guards=False)
        self._root = nn.Module()
        self._made: dict[str, fx.Node] = {}
        self._sites: dict[fx.Node, str] = {}
        self._read_at: dict[fx.Node, str] = {}
        self._own: set[fx.Node] = set()
        self._values: dict[fx.Node, Tensor] = {}
        self.rows: list[dict[str, Any]] = []
        self.order: list[str] = []

    def program(self, longest: Mapping[str, int]) -> ExportedProgram:
        """Return the program, whose open axes are at most so long."""
        graph = self._module.graph
        for node in list(graph.nodes):
            if node.op == "call_function" and str(node.target).startswith("onnx_symbolic."):
                with graph.inserting_before(node):
                    if "multi_out" in str(node.target):
                        self._put_recurrent_layer(graph, node)
                    else:
                        made = self._in_place_of(graph, node)
                        made.meta.setdefault("val", node.meta["val"])
                        node.replace_all_uses_with(made)
                graph.erase_node(node)
        self._set_edges(graph)
        _drop_copies(graph)
        _slice_in_place_of_splits(graph)
        for node in reversed(graph.nodes):
            if node.op in ("get_attr", "call_function") and not node.users and not node.is_impure():
                graph.erase_node(node)
        for node in graph.nodes:
            if node.target is torch.ops.aten.view.default:  # a mark is in one piece of memory, which its ops may not be
                node.target = torch.ops.aten.reshape.default
            if node.op == "get_attr":
                self._keep(node)
        _drop_unread(self._root, {str(node.target) for node in graph.nodes if node.op == "get_attr"})
        self._give_each_reader_its_own(graph)
        module = fx.GraphModule(self._root, graph)
        given = [x.clone() for x in _tensors(self._sim)]
        axes = dict(zip(self._captured.inputs, self._captured.shapes, strict=True))
        _require_lengths(longest, given, axes)
        result = _exported(module, given, axes, longest)
        for node in result.graph.nodes:
            node.meta.pop("stack_trace", None)  # it reveals this machine's paths
        kept = sum(node.target in DEQUANTIZES for node in result.graph.nodes)
        if kept != len(self.order):
            raise ExportError(f"torch kept {kept} of the {len(self.order)} dequantize ops; export as ONNX instead")
        return result

    def _in_place_of(self, graph: fx.Graph, node: fx.Node) -> fx.Node:
        """Return the node that stands for a symbolic one: a site's ops, or the op that torch has for an ONNX op."""
        inputs, op_type = node.args[0], node.args[1]
        assert isinstance(inputs, list | tuple)
        if op_type == "Identity":
            return inputs[0]  # type: ignore[return-value]
        if op_type == "BatchNormalization":
            epsilon = node.kwargs["attr_floats"][0]  # type: ignore[index]
            return graph.call_function(torch.ops.aten.batch_norm.default, (*inputs, False, 0.0, epsilon, False))
        if op_type != "Quantizer":
            raise ExportError(f"format='pt2e' has no form for the op {op_type}; leave it out, or export as ONNX")
        site, x = str(node.kwargs["attr_strs"][0]), inputs[0]  # type: ignore[index]
        decision = self._plan.decisions.get(site)
        if decision is None:
            return x  # type: ignore[return-value]
        made = self._of_site(graph, decision, x, node.meta["val"].dtype)  # type: ignore[arg-type]
        self._read_at[made] = site
        return made

    def _put_recurrent_layer(self, graph: fx.Graph, node: fx.Node) -> None:
        """Put torch's op of a recurrent layer in the place of ONNX's, with float weights that lie on their grids.

        Backends compute it in floats, and multiply there by stored weights alone.
        """
        inputs: Any = node.args[0]
        (x, w, r, biases, _, *states), op_type = inputs, str(node.args[1])
        owner, _, layer = _attribute(self._read_at[w]).rpartition("weight_ih")
        stored: dict[str, Tensor] = {}
        mode = f"RNN_{node.kwargs['attr_strs'][-1]}".upper() if op_type == "RNN" else op_type  # type: ignore[index]
        for read in (w, r):  # before the first call puts floats in the place of the codes
            if read not in self._values:
                self._values[read] = self._value(read)
        weights, recurrent = self._values[w], self._values[r]
        added = None if biases is None else self._value(biases)
        for direction, suffix in zip(range(len(weights)), ("", "_reverse"), strict=False):
            parts = {"weight_ih": weights[direction], "weight_hh": recurrent[direction]}
            if added is not None:
                parts |= dict(zip(("bias_ih", "bias_hh"), added[direction].chunk(2), strict=True))
            stored |= {f"{owner}{port}{layer}{suffix}": to_torch_order(x.float(), mode) for port, x in parts.items()}
        flat = [self._buffer(graph, name, part) for name, part in stored.items()]
        half = node.meta["val"][0].dtype
        given = [self._cast(graph, part, half, torch.float32) for part in (x, *states)]
        options = (added is not None, 1, 0.0, False, len(weights) == 2, False)
        made = graph.call_function(
            _RECURRENT[mode], (given[0], given[1:] if mode == "LSTM" else given[1], flat, *options)
        )
        for user in list(node.users):
            place = int(user.args[1])  # type: ignore[arg-type]
            part = self._cast(graph, graph.call_function(operator.getitem, (made, place)), torch.float32, half)
            if place == 0:  # [T, N, directions * H] to [T, directions, N, H]
                part = graph.call_function(_ATEN.unflatten.int, (part, -1, [len(weights), recurrent.shape[-1]]))
                part = graph.call_function(_ATEN.permute.default, (part, [0, 2, 1, 3]))
            part.meta.setdefault("val", user.meta["val"])
            user.replace_all_uses_with(part)
            graph.erase_node(user)
        for row in self.rows:
            if row["site"] in {self._read_at[w], self._read_at[r]} and row["form"].endswith("dequantize"):
                row["form"] = f"float values on the grid of {row['dtype']}"

    @staticmethod
    def _cast(graph: fx.Graph, x: fx.Node, before: torch.dtype, dtype: torch.dtype) -> fx.Node:
        return x if before == dtype else graph.call_function(_ATEN.to.dtype, (x, dtype))

    def _value(self, node: Any) -> Tensor:
        """Return the value of a node that depends on stored tensors alone."""
        if node.op == "get_attr":
            value = _held(self._root if node in self._own else self._module, str(node.target))
            assert value is not None
            return value.detach()
        if node.op != "call_function":
            raise ExportError("format='pt2e' has no form for a recurrent layer whose weights are computed from inputs")
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        result: Tensor = node.target(*args, **kwargs)
        return result

    def _of_site(self, graph: fx.Graph, decision: Decision, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        encoding, spec = self._encodings.get(decision.site), decision.spec
        if encoding is None or not decision.quantized:
            narrow = spec is not None and not spec.dtype.is_quantized and spec.dtype.name != "float32"
            self._add_row(decision, spec.dtype.name if narrow and spec else decision.tensor_type, "float")
            if not narrow or spec is None:
                return x
            cast = graph.call_function(torch.ops.aten.to.dtype, (x, getattr(torch, spec.dtype.name)))
            return graph.call_function(torch.ops.aten.to.dtype, (cast, dtype))
        if decision.kind in ("weight", "bias") and decision.site in self._stored:
            known = self._made.get(decision.site)
            if known is None:
                known = self._made[decision.site] = self._of_stored(graph, decision, encoding, dtype)
            return known
        self._add_row(decision, encoding.dtype.name, "quantize and dequantize")
        codes, channels = _Codes.of(encoding.dtype), encoding.axis is not None
        if encoding.block_size is not None:
            raise ExportError(f"format='pt2e' has no form for {decision.site}: blocks of an activation")
        grid = self._grid(graph, decision.site, encoding, codes)
        made = graph.call_function(QUANTIZE_CHANNELS if channels else QUANTIZE, (x, *grid))
        return self._dequantized(graph, decision.site, made, grid, dtype, channels=channels)

    def _of_stored(self, graph: fx.Graph, decision: Decision, encoding: Encoding, dtype: torch.dtype) -> fx.Node:
        site, values = decision.site, self._stored[decision.site]
        name = _attribute(site)
        if decision.kind == "bias":  # backends round a bias to int32 themselves, and these values keep their codes
            self._add_row(decision, encoding.dtype.name, "float values on the grid of int32")
            return self._buffer(graph, name, torch.from_numpy(np.array(values)).to(dtype))
        codes = _Codes.of(encoding.dtype)
        stored = encoding.quantize(values).astype(np.int64) - codes.shift
        integers = self._buffer(graph, name, torch.from_numpy(stored).to(codes.dtype))
        if encoding.block_size is None:
            self._add_row(decision, encoding.dtype.name, f"{str(codes.dtype).removeprefix('torch.')} and dequantize")
            grid = self._grid(graph, site, encoding, codes)
            return self._dequantized(graph, site, integers, grid, dtype, channels=encoding.axis is not None)
        self._add_row(decision, encoding.dtype.name, "int8, dequantized by plain ops: scales of blocks")
        return self._of_blocks(graph, site, integers, encoding, codes, values.shape, dtype)

    def _of_blocks(
        self,
        graph: fx.Graph,
        site: str,
        integers: fx.Node,
        encoding: Encoding,
        codes: _Codes,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> fx.Node:
        """Return the nodes that multiply codes with the scale of their block."""
        axis, size, ops = encoding.axis or 0, encoding.block_size or 1, torch.ops.aten
        length, name = shape[axis], _attribute(site)
        repeated = [np.repeat(x, size, axis).take(range(length), axis) for x in (encoding.scale, encoding.zero_point)]
        whole = length % size == 0
        if whole:  # the numbers of a block get an axis of their own, and its scale is stored once
            split = (*shape[:axis], length // size, size, *shape[axis + 1 :])
            integers = graph.call_function(ops.view.default, (integers, list(split)))
            repeated = [np.expand_dims(x, axis + 1) for x in (encoding.scale, encoding.zero_point)]
        scale = self._buffer(graph, f"{name}_scale", torch.from_numpy(repeated[0].astype(np.float32)))
        result = graph.call_function(ops.to.dtype, (integers, torch.float32))
        if encoding.zero_point.any() or codes.shift:
            zero = self._buffer(graph, f"{name}_zero_point", torch.from_numpy(repeated[1] - np.float32(codes.shift)))
            result = graph.call_function(ops.sub.Tensor, (result, zero))
        result = graph.call_function(ops.mul.Tensor, (result, scale))
        if whole:
            result = graph.call_function(ops.view.default, (result, list(shape)))
        return result if dtype == torch.float32 else graph.call_function(ops.to.dtype, (result, dtype))

    def _grid(self, graph: fx.Graph, site: str, encoding: Encoding, codes: _Codes) -> tuple[Any, ...]:
        """Return the arguments of an op behind its tensor: numbers, or tensors and the axis for channels."""
        behind = (codes.lo, codes.hi, codes.dtype)
        if encoding.axis is None:
            return float(encoding.scale[0]), int(encoding.zero_point[0]) - codes.shift, *behind
        name = _attribute(site)
        zero_points = torch.from_numpy(encoding.zero_point.astype(np.int64) - codes.shift)
        scale = self._buffer(graph, f"{name}_scale", torch.from_numpy(np.array(encoding.scale)))
        return scale, self._buffer(graph, f"{name}_zero_point", zero_points), encoding.axis, *behind

    def _dequantized(
        self, graph: fx.Graph, site: str, codes: fx.Node, grid: tuple[Any, ...], dtype: torch.dtype, *, channels: bool
    ) -> fx.Node:
        wanted: dict[str, Any] = {} if dtype == torch.float32 else {"out_dtype": dtype}
        made = graph.call_function(DEQUANTIZE_CHANNELS if channels else DEQUANTIZE, (codes, *grid), wanted)
        self._sites[made] = site
        return made

    def _give_each_reader_its_own(self, graph: fx.Graph) -> None:
        """Repeat dequantize ops so that each has one reader: a backend takes an op together with those before it."""
        for node, site in list(self._sites.items()):
            for reader in list(node.users)[1:]:
                with graph.inserting_after(node):
                    own = graph.call_function(node.target, node.args, dict(node.kwargs))  # type: ignore[arg-type]
                reader.replace_input_with(node, own)
                self._sites[own] = site
        self._give_each_call_its_own_tensors(graph)
        self.order = [self._sites[node] for node in graph.nodes if node in self._sites]

    def _give_each_call_its_own_tensors(self, graph: fx.Graph) -> None:
        """Copy what two calls of a layer read, where ExecuTorch takes one tensor for the other's.

        Its XNNPACK backend rounds a bias to int32 by the input of the call that it meets first, and its pass for Conv1d
        adds an axis to a weight once for each call (1.5.1).
        """
        for node in [node for node in graph.nodes if node.op == "get_attr"]:
            calls = [reader for reader in node.users if reader.target in _LAYERS and node in reader.args[2:3]]
            for made in node.users:
                calls += [made for one in made.users if one.target in _CONV1D and made in one.args[1:2]]
            number = 0
            for call in calls[1:]:
                value, number = _held(self._root, str(node.target)), number + 1
                while _held(self._root, name := f"{node.target}_{number}") is not None:  # a name of the model's own
                    number += 1
                assert value is not None
                with graph.inserting_before(call):
                    call.replace_input_with(node, self._buffer(graph, name, value.clone()))

    def _add_row(self, decision: Decision, dtype: str, form: str) -> None:
        self.rows.append({"site": decision.site, "dtype": dtype, "form": form})

    def _buffer(self, graph: fx.Graph, name: str, value: Tensor) -> fx.Node:
        _register(self._root, name, value.contiguous())
        node = graph.create_node("get_attr", name)  # `get_attr` of the graph warns until its module has it
        self._own.add(node)
        return node

    def _keep(self, node: fx.Node) -> None:
        """Keep a tensor of the model that the program reads in float, under its own name."""
        name = str(node.target)
        if node in self._own:
            return
        value = _held(self._module, name)
        assert value is not None
        node.target = name.removeprefix(_INTO)
        if _held(self._root, str(node.target)) is None:
            _register(self._root, str(node.target), value.detach())

    def _set_edges(self, graph: fx.Graph) -> None:
        """Give the program the model's own names of inputs, and one tensor as output where there is one."""
        graph.set_codegen(fx.graph.CodeGen())
        places = [node for node in graph.nodes if node.op == "placeholder"]
        for node, name in zip(places, self._captured.inputs, strict=True):
            node.target = node.name = name.replace(".", "_")
        output = next(node for node in graph.nodes if node.op == "output")
        leaves = output.args[0]
        if isinstance(leaves, list | tuple) and len(leaves) == 1:
            output.args = (leaves[0],)


def _drop_copies(graph: fx.Graph) -> None:
    """Drop ops that return what they are given, and checks: readers of a site behind one would share its dequantize op.

    A backend takes an Add with both of its dequantize ops, which is a cycle where one of them serves a norm before it.
    """
    for node in list(graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target in _COPIES:
            given: Any = node.args[0]
            before, after = given.meta.get("val"), node.meta.get("val")  # a cast that was put here has none
            if before is not None and after is not None and before.dtype == after.dtype:
                node.replace_all_uses_with(given)
                graph.erase_node(node)


def _slice_in_place_of_splits(graph: fx.Graph) -> None:
    """Put a slice in the place of each part of a split.

    ExecuTorch takes the first axis of what an op that returns a list gives for the length of the list, and fixes it.
    """
    for node in [node for node in graph.nodes if node.target in _SPLITS]:
        given, at, alone = node.args[0], _SPLITS[node.target], node.target is _ATEN.unbind.int
        axis: Any = node.args[at] if len(node.args) > at else node.kwargs.get("dim", 0)
        stops = [0, *accumulate(1 if alone else part.shape[axis] for part in node.meta["val"])]
        if not all(isinstance(stop, int) for stop in stops):
            continue  # of an open length, which a slice would have to compute
        for user in list(node.users):
            place: Any = user.args[1]
            target, ends = (_ATEN.select.int, (place,)) if alone else (_ATEN.slice.Tensor, stops[place : place + 2])
            with graph.inserting_before(user):
                user.replace_all_uses_with(graph.call_function(target, (given, axis, *ends)))
            graph.erase_node(user)
        graph.erase_node(node)


def _require_lengths(
    longest: Mapping[str, int], given: Sequence[Tensor], axes: Mapping[str, Mapping[int, str]]
) -> None:
    """Raise ConfigError for the longest length of no open axis, or one that the example is beyond."""
    sizes: dict[str, int] = {}
    for tensor, one in zip(given, axes.values(), strict=True):
        for axis, name in one.items():
            sizes[name] = max(tensor.shape[axis], sizes.get(name, 0))
    for name, most in longest.items():
        if name not in sizes:
            raise ConfigError(f"longest={{{name!r}: {most}}}: the open axes are {', '.join(sizes) or 'none'}")
        if most < sizes[name]:
            raise ConfigError(f"longest={{{name!r}: {most}}}: the example that the sim was made with has {sizes[name]}")


def _exported(
    module: nn.Module,
    given: Sequence[Tensor],
    axes: Mapping[str, Mapping[int, str]],
    longest: Mapping[str, int],
) -> ExportedProgram:
    """Return the program of a module whose inputs have dynamic axes of these names.

    Axes of one name are one length, or shapes would depend on two; where the model asks more of a length, such as that
    it is not 1, torch finds out by itself which lengths are equal.
    """
    names = [name for one in axes.values() for name in one.values()]
    problem: Exception = ValueError()
    shared = {
        name: Dim(f"length_{at}", max=longest.get(name))
        for at, name in enumerate(dict.fromkeys(names))
        if names.count(name) > 1
    }
    free = {name: Dim.DYNAMIC(max=longest.get(name)) for name in names}
    for known in (shared, {}) if shared else ({},):
        shapes = tuple({axis: known.get(name, free[name]) for axis, name in one.items()} for one in axes.values())
        try:
            with torch.no_grad(), open_lengths():
                return torch.export.export(module, tuple(given), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # torch raises what it likes
            problem = error
    raise export_error(problem, axes) from problem


def _attribute(site: str) -> str:
    owner = owner_of(site)
    return port_of(site) if owner == "self" else f"{owner}.{port_of(site)}".replace("/", ".")


def _register(root: nn.Module, name: str, value: Tensor) -> None:
    *owners, leaf = name.split(".")
    for owner in owners:
        if owner not in root._modules:
            root.add_module(owner, nn.Module())
        root = root.get_submodule(owner)
    root.register_buffer(leaf, value)


def _drop_unread(root: nn.Module, names: Set[str]) -> None:
    for name in [name for name, _ in root.named_buffers(remove_duplicate=False) if name not in names]:
        owner, _, leaf = name.rpartition(".")
        delattr(root.get_submodule(owner), leaf)


def _held(root: nn.Module, name: str) -> Tensor | None:
    *owners, leaf = name.split(".")
    for owner in owners:
        if owner not in root._modules:
            return None
        root = root.get_submodule(owner)
    value = getattr(root, leaf, None)
    return value if isinstance(value, Tensor) else None


def _tensors(sim: QuantSim) -> list[Tensor]:
    """Return the tensors of the sim's example, in the order in which the program takes them."""
    example = sim.current_example
    leaves = argument_leaves(sim.model.forward, example.args, example.kwargs)
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]
    return [x.float() if example.float32_edges and x.dtype in (torch.float16, torch.bfloat16) else x for x in tensors]
