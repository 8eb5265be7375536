"""Errors for models that cannot be traced: what happened, at which line of the user's code, and the remedy."""

import enum
import re
import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path as FilePath
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor

from qsdk.core.errors import ExportError, ModelError
from torch_bridge.torch_values.pytree import Path
from torch_bridge.tracing.dynamic_shapes import Axes

_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, range, enum.Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# the code that a user did not write
_BESIDE_TORCH = FilePath(torch.__file__).parents[1]
_INSIDE = (
    *(str(_BESIDE_TORCH / name) for name in ("torch/", "onnxscript/", "onnx_ir/", "onnx/")),
    *(str(FilePath(__file__).parents[1]), sysconfig.get_path("stdlib") + "/"),
)


def require_plain(leaves: Sequence[tuple[Path, Any]]) -> None:
    """Refuse arguments whose tensors a trace would not see."""
    for path, leaf in leaves:
        if leaf is not None and not isinstance(leaf, (Tensor, *_PLAIN)):
            what = type(leaf).__name__
            raise ExportError(
                f"the argument {'.'.join(path)} is a {what}, and the exported file would hold what is in it fixed; "
                f"quantize a module that takes tensors and makes the {what} of them in its forward"
            )


def require_tensors(outputs: Sequence[tuple[Path, Any]]) -> None:
    """Refuse a model that returns no tensor."""
    if not any(isinstance(leaf, Tensor) for _, leaf in outputs):
        kinds = ", ".join(dict.fromkeys(type(leaf).__name__ for _, leaf in outputs)) or "nothing"
        raise ExportError(f"the model gives no tensor ({kinds}); return the tensors that the exported file is to give")


def export_error(error: BaseException, axes: Mapping[str, Axes]) -> ExportError:
    """Return the error that explains why a model cannot be traced."""
    chain = _chain(error)
    text = "\n".join(str(link) for link in chain)
    where = _users_line(chain)
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", text)
    if missing is not None:
        remedy = "compute it with other ops, or leave it out of the model"
        return ExportError(f"torch has no ONNX form for {_users_name(chain, missing[1])}{where}; {remedy}")
    if "data-dependent" in text:
        return ExportError(
            f"the path through the model depends on the values of a tensor{where}, and a file holds one path; choose "
            "with torch.where, or take the decision out of the module that is quantized"
        )
    fixed = re.search(r"\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\]", text)
    if "Constraints violated" in text and fixed is not None:
        name = list(axes)[int(fixed[1])]
        axis = int(fixed[2])
        return fixed_axis_error(axes[name].get(axis, ""), axis, name)
    reason = next((line for line in str(chain[0]).splitlines() if line.strip()), type(error).__name__)
    return ExportError(
        f"torch cannot trace the model{where}: {type(chain[0]).__name__}: {reason}; write that part with tensor ops, "
        "so that torch.export takes the module, or leave it out of the model"
    )


def error_in_compiled_part(error: BaseException) -> ModelError | None:
    """Return the error for a function that compiles what it is given, as `torch.cond` does; None for any other error.

    A sim quantizes op by op as they are called, which torch's compiler neither sees nor repeats.
    """
    if type(error).__module__ != "torch._dynamo.exc":
        return None
    called = re.search(r"Higher Order Operator: (\S+)", str(error))
    what = f"{called[1]} compiles" if called else "the model has torch compile"
    return ModelError(
        f"{what} a part of the model as it runs{_users_line(_chain(error))}, where no op can be quantized; take the "
        "choice out of the module and quantize its branches as modules, write the part with tensor ops such as "
        "torch.where, or quantize the file that torch.onnx.export makes of the float model (branches stay float)"
    )


def fixed_axis_error(called: str, axis: int, name: str) -> ExportError:
    """Return the error for an axis that should be dynamic and that the code fixes."""
    return ExportError(
        f"the axis {called!r} (axis {axis} of {name}) cannot be dynamic, since the model's code fixes its length, by a "
        "loop over it, by int(), or by a reshape to a number; compute with x.shape there, or leave the axis out of "
        "dynamic_shapes"
    )


def _chain(error: BaseException) -> list[BaseException]:
    """Return the causes of an error, the first one first."""
    result = [error]
    while (cause := result[-1].__cause__ or result[-1].__context__) is not None and cause not in result:
        result.append(cause)
    return result[::-1]


def _users_line(chain: Sequence[BaseException]) -> str:
    """Return the innermost line of code that is neither torch's nor ours: ` at file:line (code)`, or nothing."""
    for error in chain:
        frames = traceback.extract_tb(error.__traceback__)
        for frame in reversed(frames):
            if not frame.filename.startswith((*_INSIDE, "<")):
                return f" at {frame.filename}:{frame.lineno} ({frame.line})"
    node = _node(chain)
    lines = (
        []
        if node is None
        else re.findall(r'File "(.+)", line (\d+), in .*\n\s*(.+)', node.meta.get("stack_trace") or "")
    )
    own = [line for line in lines if not line[0].startswith((*_INSIDE, "<"))]
    return f" at {own[-1][0]}:{own[-1][1]} ({own[-1][2]})" if own else ""


def _users_name(chain: Sequence[BaseException], traced: str) -> str:
    """Return the name of the function that was called, where the trace has another: `cumprod (prims.prod)`."""
    node = _node(chain)
    called = "" if node is None else node.meta.get("torch_fn", ("", ""))[1].rpartition(".")[2]
    return traced if not called or called == traced.rpartition(".")[2] else f"{called} ({traced} in its trace)"


def _node(chain: Sequence[BaseException]) -> torch.fx.Node | None:
    """Return the node of the trace at which the conversion failed, or None."""
    for error in chain:
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            if isinstance(node := frame.f_locals.get("node"), torch.fx.Node):
                return node
    return None


@dataclass(frozen=True)
class OutputForm:
    """The path, dtype and shape of a tensor that a model returns.

    An entry of the shape that is no int depends on the length of a dynamic axis.
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[Any, ...]

    def fits(self, traced: "OutputForm") -> bool:
        """Return whether a traced form agrees with this one."""
        known = [isinstance(length, int) for length in traced.shape]
        # a symbolic length is never compared: that would fix it in the trace
        same = len(known) == len(self.shape) and all(
            not static or a == b for a, b, static in zip(self.shape, traced.shape, known, strict=True)
        )
        return same and self.path == traced.path and self.dtype == traced.dtype

    def __str__(self) -> str:
        shape = ", ".join(str(length) for length in self.shape)
        return f"{'.'.join(self.path) or 'one output'}: {str(self.dtype).removeprefix('torch.')} [{shape}]"


def output_forms(outputs: Sequence[tuple[Path, Any]]) -> list[OutputForm]:
    """Return the forms of the tensors among a model's outputs."""
    return [OutputForm(path, leaf.dtype, tuple(leaf.shape)) for path, leaf in outputs if isinstance(leaf, Tensor)]


def require_same_outputs(eager: Sequence[OutputForm], traced: Sequence[OutputForm]) -> None:
    """Refuse a trace whose outputs differ in form from those of the module on the example."""
    for one, other in zip_longest(eager, traced):
        if one is None or other is None or not one.fits(other):
            raise ExportError(
                f"on the example the model gives {one or 'nothing more'} and its trace {other or 'nothing more'}; its "
                "code decides by a length (squeeze() without an axis does) or by whether it is traced: write it so "
                "that it does not"
            )
