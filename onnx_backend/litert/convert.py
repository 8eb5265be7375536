"""Write a Q/DQ model as a program of LiteRT: one walk, an op at a time, each from its row of the table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnx_backend.litert import elementwise, layers, moves, norms
from onnx_backend.litert.program import Grid, Program, Tensor
from onnx_backend.litert.writer import FOR_LITERT, Codes, Failed, Pending, Refused, Stored, Value, Writer
from onnx_backend.passes.fold_constants import evaluate
from onnx_backend.passes.static_sizes import propagate_static_sizes
from onnx_backend.proto.external_data import array
from onnx_backend.proto.graph_queries import consumers, initializers, nodes_reaching
from onnx_backend.proto.inputs import static_sizes, with_inferred_shapes
from onnx_backend.proto.nodes import attributes, constant_tensor, copied, is_constant, node_label, replace_nodes
from onnx_backend.proto.opsets import opset_of
from onnx_backend.qdq.read import QdqPair, qdq_pairs
from onnx_backend.single_ops.write import write_norms
from qsdk.core.errors import ExportError

_Row = Callable[[Writer, NodeProto, Mapping[str, Any]], Value | list[Value]]
_ROWS: Mapping[str, _Row] = MappingProxyType(
    {
        "Abs": elementwise.absolute,
        "Add": elementwise.binary,
        "AveragePool": layers.average_pool,
        "Clip": elementwise.bounds,
        "Concat": moves.concat,
        "Conv": layers.conv,
        "ConvTranspose": layers.conv_transpose,
        "DepthToSpace": moves.depth_to_space,
        "Div": elementwise.binary,
        "Dropout": moves.same,
        "Exp": elementwise.exp,
        "Expand": moves.expand,
        "Flatten": moves.reshape,
        "Gather": moves.gather,
        "Gelu": elementwise.gelu,
        "Gemm": layers.linear,
        "GlobalAveragePool": elementwise.reduce,
        "GlobalMaxPool": elementwise.reduce,
        "HardSigmoid": elementwise.hard_sigmoid,
        "HardSwish": elementwise.hard_swish,
        "Identity": moves.same,
        "IsNaN": elementwise.never,
        "LayerNormalization": norms.layer_norm,
        "LeakyRelu": elementwise.leaky_relu,
        "MatMul": layers.linear,
        "MaxPool": layers.max_pool,
        "Mul": elementwise.binary,
        "PRelu": elementwise.prelu,
        "Pad": moves.pad,
        "RMSNormalization": norms.layer_norm,
        "ReduceMax": elementwise.reduce,
        "ReduceMean": elementwise.reduce,
        "Relu": elementwise.bounds,
        "Reshape": moves.reshape,
        "Resize": moves.resize,
        "Sigmoid": elementwise.sigmoid,
        "Slice": moves.cut,
        "Softmax": elementwise.softmax,
        "Split": moves.split,
        "Squeeze": moves.reshape,
        "Sub": elementwise.binary,
        "Tanh": elementwise.tanh,
        "Transpose": moves.transpose,
        "Unsqueeze": moves.reshape,
        "Where": elementwise.where,
    }
)
#: ops that read and write images channels last
_IMAGES = frozenset({"AveragePool", "Conv", "ConvTranspose", "GlobalAveragePool", "MaxPool", "Resize", "DepthToSpace"})
#: ops in front of which an input may still choose its layout
_ANY_LAYOUT = frozenset({"Add", "Clip", "Concat", "DequantizeLinear", "Identity", "LeakyRelu", "Mul", "Pad", "Slice"})
_ANY_LAYOUT |= {"QuantizeLinear", "Relu", "Sigmoid", "Sub", "Tanh"}
_SIGNED = MappingProxyType({"uint8": ("int8", 128), "uint4": ("int4", 8), "uint16": ("int16", 1 << 15)})
_TYPES = ("int8", "int16")
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_PAIR = ("QuantizeLinear", "DequantizeLinear")
_LARGEST = 1 << 16  # elements of a value that is computed while the file is written


def convert(model: ModelProto) -> Program:
    """Return the program of a Q/DQ model with fixed sizes.

    Raises:
        ExportError: ops or encodings that the format cannot say, all of them by name, each with its remedy.
    """
    model = _folded(propagate_static_sizes(model))
    write_norms(model)
    inferred = with_inferred_shapes(model)
    sizes = static_sizes(inferred)
    shapes = {n: tuple(int(x) for x in s if x is not None) for n, s in sizes.items() if None not in s}
    w = Writer(shapes, frozenset(v.name for v in model.graph.input if v.type.tensor_type.elem_type in _INTEGERS))
    w.values.update({name: Stored(array(tensor)) for name, tensor in initializers(model.graph).items()})
    nodes = nodes_reaching(model.graph.node, [value.name for value in model.graph.output])
    refused: list[str] = []
    last, pairs = _channels_last(model), dict[str, QdqPair]()
    for pair in qdq_pairs(model):
        pairs[pair.dequantize.output[0]] = pair
        if pair.quantize is not None:
            pairs[pair.quantize.output[0]] = pair
    for node in nodes:
        try:
            found = _written(w, node, last, pairs.get(node.output[0]))
        except Refused as reason:
            found = Failed()
            if reason.reason:
                refused.append(f"  {node.op_type} {node_label(node)!r}: {reason.reason}; {reason.remedy}")
        except KeyError as missing:
            found = Failed()
            refused.append(f"  {node.op_type} {node_label(node)!r}: the size of {missing} is open; give shapes=")
        results = found if isinstance(found, list) else [found] * len(node.output)
        w.values.update(zip(node.output, results, strict=True))
    if not refused:
        refused = _finish(w, model, last)
    if refused:
        raise ExportError(
            f"format='tflite' cannot say {len(refused)} node{'s' if len(refused) > 1 else ''} of this model in "
            "integers:\n" + "\n".join(dict.fromkeys(refused))
        )
    return w.program


def _folded(model: ModelProto) -> ModelProto:
    """Return a model in which what follows from stored tensors alone is stored, such as the sizes of a Pad."""
    found, opsets = copied(model), {"": opset_of(model)}
    known = {name: array(tensor) for name, tensor in initializers(model.graph).items()}
    known |= {node.output[0]: array(constant_tensor(node)) for node in model.graph.node if is_constant(node)}
    kept = []
    for node in found.graph.node:
        reads_stored = node.input and all(name in known for name in node.input if name)
        values = evaluate(node, known, opsets, limit=_LARGEST) if reads_stored and node.op_type not in _PAIR else None
        if values is None:
            kept.append(node)
            continue
        known |= values
        found.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in values.items())
    replace_nodes(found.graph, kept)
    return found


def _written(w: Writer, node: NodeProto, last: Mapping[str, bool], pair: QdqPair | None) -> Value | list[Value]:
    if is_constant(node):
        return Stored(array(constant_tensor(node)))
    if node.domain not in ("", "ai.onnx"):
        raise Refused(f"it is an op of {node.domain}", "export the model without fusions of a runtime")
    if node.op_type == "QuantizeLinear":
        return _quantized(w, node, last, pair)
    if node.op_type == "DequantizeLinear":
        return _dequantized(w, node, pair)
    if node.op_type not in _ROWS:
        raise Refused("LiteRT has no integer kernel for it", "leave it out, or write it with ops that it has")
    return _ROWS[node.op_type](w, node, attributes(node))


def _grid_of(w: Writer, node: NodeProto, dtype: str) -> Grid:
    """Return the grid of a QuantizeLinear or DequantizeLinear, signed."""
    attrs = attributes(node)
    if int(attrs.get("block_size", 0)):
        raise Refused("its scales are those of blocks", "quantize per channel: block_size=None")
    scale = w.stored(node.input[1]).values.astype(np.float32).reshape(-1)
    zero = np.zeros(scale.size, np.int64)
    if len(node.input) > 2 and node.input[2]:
        zero = w.stored(node.input[2]).values.astype(np.int64).reshape(-1)
    signed, shift = _SIGNED.get(dtype, (dtype, 0))
    return Grid(signed, scale, zero - shift, int(attrs.get("axis", 1)) if scale.size > 1 else 0)


def _dequantized(w: Writer, node: NodeProto, pair: QdqPair | None) -> Value:
    value = w.values.get(node.input[0])
    if not isinstance(value, Stored):
        return Failed() if value is None else value
    if value.grid is not None:
        return value
    if value.values.dtype.name not in ("int8", "uint8", "int4", "uint4", "int16", "uint16", "int32"):
        raise Refused(f"its codes are {value.values.dtype.name}", FOR_LITERT)
    grid = _grid_of(w, node, value.values.dtype.name)
    shift = _SIGNED.get(value.values.dtype.name, ("", 0))[1]
    if grid.scale.size > 1:
        grid = replace(grid, axis=grid.axis % value.values.ndim)
    site, own = (node.input[0], None) if pair is None else (pair.site, pair.permutation)
    return Stored(value.values.astype(np.int64) - shift, grid, site, own)


def _quantized(w: Writer, node: NodeProto, last: Mapping[str, bool], pair: QdqPair | None) -> Value:
    zero = w.values.get(node.input[2]) if len(node.input) > 2 else None
    stated = int(attributes(node).get("output_dtype", 0))
    dtype = zero.values.dtype.name if isinstance(zero, Stored) else "uint8"
    dtype = TensorProto.DataType.Name(stated).lower() if stated else dtype
    grid = _grid_of(w, node, dtype)
    source = node.input[0]
    site, kind = (source, "") if pair is None else (pair.site, pair.kind)
    if grid.scale.size > 1 or grid.dtype not in _TYPES:
        what = f"a scale for each channel of {site}" if grid.scale.size > 1 else f"{grid.dtype} at {site}"
        raise Refused(f"activations have {what}", f"LiteRT has int8 and int16, one scale: {FOR_LITERT}")
    if pair is not None and pair.encoding.dtype.container != pair.encoding.dtype.name:
        raise Refused(f"activations of {pair.encoding.dtype} at {site}", FOR_LITERT)
    if grid.dtype == "int16" and grid.zero:
        raise Refused(
            f"{site} has 16 bits and a zero point",
            'with 16 bits LiteRT has none: w8a16(symmetric_activations=True).override("*", activation="int16")',
        )
    value = w.values.get(source)
    if isinstance(value, Stored):
        low, high = grid.bounds
        codes = np.clip(np.rint(value.floats() / grid.scale[0]) + grid.zero, low, high)
        number = w.store(codes, grid, site)
        w.note(site, "activation", number, codes.shape, tuple(range(codes.ndim)))
        return Stored(codes.astype(np.int64), grid, tensor=number)
    if value is None and source in w.inputs:
        found = w.requantized(w.inputs[source], grid, site)
    elif value is None:
        found = w.inputs[source] = _input(w, source, grid, channels_last=last.get(source, False))
    elif isinstance(value, Pending):
        found = w.settle(value, grid, site)
    else:
        found = w.requantized(w.codes(source, flat=True), grid, site)
    w.note(site, kind or "activation", found.tensor, found.before or found.shape, found.perm)
    return found


def _input(w: Writer, name: str, grid: Grid, *, channels_last: bool) -> Codes:
    shape = w.shapes[name]
    perm = (0, *range(2, len(shape)), 1) if channels_last else tuple(range(len(shape)))
    tensor = w.program.add(Tensor(name, tuple(shape[axis] for axis in perm), grid.dtype, grid))
    w.program.inputs.append(tensor)
    return Codes(tensor, shape, perm)


def _channels_last(model: ModelProto) -> dict[str, bool]:
    """Return for each input whether layers of images read it, which want its channels last."""
    readers = consumers(model.graph.node)
    found = {}
    for value in model.graph.input:
        waiting, seen, last = [value.name], {value.name}, False
        while waiting and not last:
            for node in readers.get(waiting.pop(), ()):
                last = last or node.op_type in _IMAGES
                new = [name for name in node.output if node.op_type in _ANY_LAYOUT and name not in seen]
                seen.update(new)
                waiting += new
        found[value.name] = last
    return found


def _finish(w: Writer, model: ModelProto, last: Mapping[str, bool]) -> list[str]:
    """Name the outputs, note the facts that the file keeps, and return what is wrong with the edges."""
    problems, edges = [], {}
    held = initializers(model.graph)
    by_name = {w.program.tensors[at].name: at for at in w.program.inputs}
    wanted = [value.name for value in model.graph.input if value.name not in held]
    for name in wanted:
        if name not in by_name:
            problems.append(f"  the input {name!r} is not quantized, or not read; quantize it, or leave it out")
    w.program.inputs = [by_name[name] for name in wanted if name in by_name]
    for at, name in zip(w.program.inputs, [n for n in wanted if n in by_name], strict=True):
        shape = w.shapes[name]
        edges[name] = {"tensor": at, "perm": [0, *range(2, len(shape)), 1] if last[name] else [*range(len(shape))]}
    outputs, found = {}, []
    for value in model.graph.output:
        try:
            codes = w.codes(value.name, flat=True)
            images = (0, *range(2, len(codes.shape)), 1)
            codes = codes if codes.perm == images and codes.before is None else w.plain(codes)
        except Refused as reason:
            problems.append(f"  the output {value.name!r}: {reason.reason}; {reason.remedy}")
            continue
        outputs[value.name] = {"tensor": codes.tensor, "perm": list(codes.perm)}
        found.append(codes.tensor)
    w.program.outputs = found
    w.program.facts = {"inputs": edges, "outputs": outputs, "sites": w.sites}
    _name_by_site(w.program, w.sites)
    return problems


def _name_by_site(program: Program, sites: Mapping[str, Mapping[str, Any]]) -> None:
    """Name tensors that several sites share by the first one; the names of the others are in the facts."""
    named: Sequence[tuple[str, int]] = [(site, int(facts["tensor"])) for site, facts in sites.items()]
    edges = {*program.inputs}
    for site, tensor in reversed(named):
        if tensor not in edges:
            program.tensors[tensor] = replace(program.tensors[tensor], name=site)
