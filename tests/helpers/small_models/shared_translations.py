"""Translations to ONNX that the tests of one process share: torch translates each captured program once.

`qsdk.quantize` captures a module (`torch.export.export`), then translates what was captured to ONNX
(`torch.onnx.export`). The translation takes most of the time, and tests capture the same small networks again and
again. Every test captures its own; only a translation of an equal program is taken from an earlier test, with the
test's own weights. What `key_of` names is all that a translation depends on.
"""

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from torch_bridge.workarounds.exporter_speed import operators_read_once

LARGEST = 2**20  # elements of the state of a program whose translation is kept
_OPS_OF_TORCH = {"aten", "prim", "prims", "onnx_symbolic", "higher_order"}

_translations: dict[str, Any] = {}


@contextmanager
def shared_translations() -> Iterator[None]:
    """Let `torch.onnx.export` translate each captured program once."""
    export = torch.onnx.export

    @functools.wraps(export)
    def translated(model: Any, *args: Any, **options: Any) -> Any:
        as_captured = isinstance(model, ExportedProgram) and not args and options.get("optimize") is False
        key = key_of(model, options) if as_captured else None  # optimizing would fold the weights into it
        if key is not None and key in _translations:
            return torch.onnx.ONNXProgram(_with_state(_translations[key], model), model)
        with operators_read_once():
            program = export(model, *args, **options)
        if key is not None:
            _translations[key] = _without_state(program.model, model)
        return program

    torch.onnx.export = translated
    try:
        yield
    finally:
        torch.onnx.export = export


@contextmanager
def own_translations() -> Iterator[None]:
    """Let `torch.onnx.export` translate all programs inside the block, whatever is shared around it."""
    shared = torch.onnx.export
    torch.onnx.export = getattr(shared, "__wrapped__", shared)
    try:
        yield
    finally:
        torch.onnx.export = shared


def key_of(program: ExportedProgram, options: Any) -> str | None:
    """A digest of all that the translation of a captured program depends on; None where it cannot be told."""
    modules = [module for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes]
    if any(isinstance(op, torch._ops.OpOverload) and op.namespace not in _OPS_OF_TORCH for op in targets):
        return None  # what a test registers another one may register with another meaning
    tensors = list(program.state_dict.values())
    if any(type(x) not in (Tensor, torch.nn.Parameter) or x.is_complex() for x in tensors):
        return None
    if sum(x.numel() for x in tensors) > LARGEST or not all(type(x) is Tensor for x in program.constants.values()):
        return None
    storages = [x.untyped_storage().data_ptr() for x in tensors]
    inputs, given = program.example_inputs or ((), {})
    parts = [
        program.graph_module.print_readable(print_output=False, include_stride=True, include_device=True),
        program.graph_signature,
        program.range_constraints,
        getattr(program, "_guards_code", None),
        [_form(leaf) for leaf in torch.utils._pytree.tree_leaves((inputs, given))],
        [
            (name, _form(x), x.requires_grad, storages.index(at))  # the first one at its place: what is tied
            for (name, x), at in zip(program.state_dict.items(), storages, strict=True)
        ],
        [(name, _form(x), _digest(x)) for name, x in program.constants.items()],
        sorted(options.items()),
        torch.get_default_dtype(),
    ]
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


def _form(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape, leaf.stride(), leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def _digest(x: Tensor) -> str:
    return hashlib.sha256(x.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def _without_state(model: Any, program: ExportedProgram) -> Any:
    kept = model.clone()
    for name, value in kept.graph.initializers.items():
        if name in program.state_dict:
            value.const_value = None
    return kept


def _with_state(kept: Any, program: ExportedProgram) -> Any:
    model = kept.clone()
    for name, value in model.graph.initializers.items():
        if name in program.state_dict:
            value.const_value = torch.onnx._internal.exporter._core.TorchTensor(program.state_dict[name], name=name)
    return model
