"""Tracing: a wrapped model to ONNX bytes in which every site stands as a mark."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from qsdk.core.errors import ExportError
from torch_bridge.batches import Example, merged_batch_axis
from torch_bridge.runtime import Runtime

OPSET = 21


def marked_onnx(model: nn.Module, runtime: Runtime, example: Example) -> bytes:
    """Export a wrapped model with a node `qsdk::Quantizer(x){key=site}` at every site, opset 21.

    The first axis of the inputs is dynamic (`batch`) where they agree on it and the model allows it.

    Raises:
        ExportError: torch cannot trace the model.
    """
    dynamic = _batch_axes(example) if merged_batch_axis(example) else None
    try:
        return _export(model, runtime, example, dynamic)
    except torch.onnx.OnnxExporterError as error:
        if dynamic is None:
            raise _refusal(error) from error
    try:
        return _export(model, runtime, example, None)
    except torch.onnx.OnnxExporterError as error:
        raise _refusal(error) from error


def _refusal(error: BaseException) -> ExportError:
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ExportError(f"torch.onnx.export cannot trace the model: {first}; make it traceable by torch.export first")


def _export(model: nn.Module, runtime: Runtime, example: Example, dynamic: Any) -> bytes:
    runtime.marked = []
    with runtime.in_phase("mark"), _quiet(), torch.no_grad():
        program = torch.onnx.export(
            model,
            example.args,
            kwargs=dict(example.kwargs) or None,
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=dynamic,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    _name_outputs(program)
    data: bytes = program.model_proto.SerializeToString()
    return data


def _name_outputs(program: torch.onnx.ONNXProgram) -> None:
    """Call the outputs what the module calls them: `output`, `output_1` in a tuple, or a mapping's keys.

    An output that the graph does not make (an input handed through) keeps its name.
    """
    exported = program.exported_program
    outputs = program.model.graph.outputs
    if exported is None:
        return
    spec = exported.call_spec.out_spec
    if spec is None or spec.num_leaves != len(outputs):
        return
    leaves, _ = tree_flatten_with_path(tree_unflatten(list(range(len(outputs))), spec))
    taken = {value.name for value in program.model.graph.inputs}
    for (path, _), value in zip(leaves, outputs, strict=True):
        if value.producer() is None or value.name in taken:
            continue
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
        name = "_".join(keys if keys and not keys[0].isdigit() else ["output", *keys])
        value.name = name if name not in taken else f"{name}_out"
        taken.add(value.name)


def _batch_axes(example: Example) -> Any:
    def axes(value: Any) -> Any:
        return {0: "batch"} if isinstance(value, Tensor) else None

    if example.kwargs:
        return {name: axes(value) for name, value in example.kwargs.items()}
    return tuple(axes(value) for value in example.args)


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter logs about packages that are not installed and warns about itself."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
