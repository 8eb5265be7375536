"""Run a graph in PyTorch, with a visitor at every site: forward here, and backward by autograd."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from qsdk.algorithms.graph_in_torch.products import ATTENTION, LINEAR
from qsdk.algorithms.graph_in_torch.reductions import ELEMENTWISE, NORMS, REDUCTIONS
from qsdk.algorithms.graph_in_torch.shapes import INDEXING, SHAPES
from qsdk.algorithms.graph_in_torch.values import DTYPES, Kernels, as_tensor
from qsdk.algorithms.graph_in_torch.windows import POOLING, RESIZE, refuses_resize
from qsdk.core.arrays import Array
from qsdk.core.errors import ModelError
from qsdk.core.graph.graph import Graph, Op
from qsdk.core.numerics import affine
from qsdk.core.numerics.encoding import Encoding


def fake_quantize(x: Tensor, encoding: Encoding) -> Tensor:
    """Return a float tensor on the grid of an encoding, as `Encoding.fake_quantize` computes it, without gradients.

    The steps are in place, and the zero point is in the bounds: `clip(q + z, lo, hi) - z == clip(q, lo - z, hi - z)`.
    """
    values = x.detach().float()
    if not encoding.dtype.is_integer:
        return torch.from_numpy(encoding.fake_quantize(values.cpu().numpy())).to(x)
    scale, zero_point = (
        affine.align(torch.from_numpy(part).to(values), tuple(x.shape), encoding.axis, encoding.block_size)
        for part in (encoding.scale, encoding.zero_point)
    )
    on_grid: Tensor = (values / scale).round_()
    if encoding.axis is None:  # numbers as bounds are one fast kernel
        zero = float(encoding.zero_point[0])
        on_grid.clamp_(encoding.dtype.lo - zero, encoding.dtype.hi - zero)
    else:
        on_grid.clamp_(encoding.dtype.lo - zero_point, encoding.dtype.hi - zero_point)
    return on_grid.mul_(scale).to(x.dtype)


#: op type -> what computes it, as opsets 21 to 25 define it; older models are raised when they are opened
KERNELS: Kernels = MappingProxyType(
    {
        **ATTENTION,
        **ELEMENTWISE,
        **INDEXING,
        **LINEAR,
        **NORMS,
        **POOLING,
        **REDUCTIONS,
        **RESIZE,
        **SHAPES,
    }
)
#: how many outputs a kernel computes, where it is more than the first; Split has any number
_RESULTS = MappingProxyType({"Attention": 3, "TopK": 2})
#: what tells that the attributes of an op ask for what no kernel computes
_REFUSES: Mapping[str, Callable[[Mapping[str, Any]], bool]] = MappingProxyType(
    {
        "BatchNormalization": lambda given: given.get("training_mode") == 1,
        "Cast": lambda given: given["to"] not in DTYPES,
        "Resize": refuses_resize,
    }
)


def unsupported_ops(graph: Graph) -> list[str]:
    """Return the ops that cannot be evaluated, in order, each as its type and its name.

    Control flow, random numbers, sequences and strings are among them, other domains than ONNX's own, and forms of an
    op that its kernel does not take: an attribute, or a second output that is read.
    """
    return [_label(graph, op) for op in graph.ops if not _is_supported(graph, op)]


def run_graph(
    graph: Graph,
    stored: Mapping[str, Array | Tensor],
    feeds: Mapping[str, Array],
    at_site: Callable[[str, Tensor], Tensor],
) -> list[Tensor]:
    """Run a graph on the host; return its outputs in graph order, differentiable.

    16-bit floats are computed in float32. A tensor is let go when its last reader has run; what the backward pass
    needs stays with autograd.

    Args:
        graph: of a float model.
        stored: the values of its constants by name; a small one of the graph's own may be absent.
        feeds: its inputs by name.
        at_site: called once for every site, in order of execution, with the site and its tensor: inputs first, a
            stored tensor before its first reader. What it returns goes on in the tensor's place.
    """
    _require_supported(graph)
    readers = {tensor: max(found) for tensor, found in graph.consumers.items() if found}
    values: dict[int, Tensor] = {}

    def visit(index: int, value: Tensor) -> None:
        site = graph.tensors[index].site
        values[index] = value if site is None else at_site(site, value)

    def read(index: int) -> Tensor:
        if index not in values:  # a constant
            visit(index, _constant(graph, index, stored))
        return values[index]

    for index in graph.inputs:
        visit(index, as_tensor(feeds[graph.tensors[index].name], graph.tensors[index].dtype))
    for number, op in enumerate(graph.ops):
        found = _run(graph, op, [None if index is None else read(index) for index in op.inputs])
        for index, value in zip(op.outputs, found, strict=False):
            visit(index, value)
        for tensor in {*op.inputs, *op.outputs} - graph.output_set:
            if tensor is not None and readers.get(tensor, number) == number:
                values.pop(tensor, None)
    return [read(index) for index in graph.outputs]


def _constant(graph: Graph, index: int, stored: Mapping[str, Array | Tensor]) -> Tensor:
    tensor = graph.tensors[index]
    value = stored.get(tensor.name)
    value = tensor.value if value is None else value
    if value is None:
        raise ModelError(f"the stored tensor {tensor.name!r} has no value; give it with the others, by its name")
    return as_tensor(value, tensor.dtype)


def _run(graph: Graph, op: Op, inputs: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """Return the results of an op that its outputs name, in their order."""
    given = dict(op.attributes)
    if op.type == "Split" and len(inputs) == 1:
        given.setdefault("num_outputs", len(op.outputs))
    try:
        found = KERNELS[op.type](*inputs, **given)
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        raise ModelError(
            f"{_label(graph, op)} cannot be run in PyTorch: {error}; check its inputs and attributes"
        ) from error
    results = found if isinstance(found, tuple) else (found,)
    return [results[place] for place in _places(op) if place < len(results)]


def _require_supported(graph: Graph) -> None:
    missing = unsupported_ops(graph)
    if missing:
        raise ModelError(
            f"the graph cannot be run in PyTorch, which knows no {', '.join(missing)}; replace these ops in the model"
        )


def _is_supported(graph: Graph, op: Op) -> bool:
    kernel = KERNELS.get(op.type)
    if kernel is None or op.domain not in ("", "ai.onnx"):
        return False
    count = len(op.outputs) if op.type == "Split" else _RESULTS.get(op.type, 1)
    later = [tensor for tensor, place in zip(op.outputs, _places(op), strict=True) if place >= count]
    if any(graph.consumers[tensor] or tensor in graph.output_set for tensor in later):
        return False
    return _takes(kernel, op) and not (op.type in _REFUSES and _REFUSES[op.type](op.attributes))


def _takes(kernel: Callable[..., Any], op: Op) -> bool:
    """Return whether a kernel takes the op's attributes; torch's own functions have no signature, and take none."""
    try:
        _signature(kernel).bind(*op.inputs, **op.attributes)
    except ValueError:
        return not op.attributes
    except TypeError:
        return False
    return True


@cache  # reading one takes longer than many an op runs
def _signature(kernel: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(kernel)


def _places(op: Op) -> Sequence[int]:
    """Return the place of each output among the results of the op."""
    return op.places or range(len(op.outputs))


def _label(graph: Graph, op: Op) -> str:
    kind = f"{op.domain}.{op.type}" if op.domain not in ("", "ai.onnx") else op.type
    return f"{kind} {(op.name or graph.tensors[op.outputs[0]].name)!r}"
