"""Functions that `torch.jit.script` compiled: their code calls no function mode. Seen on torch 2.13."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

COMPILED_CALL: Any = torch.jit.ScriptFunction.__call__


def run_scripted_as_python_within(mode_class: type[TorchFunctionMode]) -> None:
    """Inside modes of this class, run scripted functions as the Python that they were made of, whose ops have sites.

    torch.export and torch.compile do so too.
    """

    def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the Python of a scripted function inside such a mode, what was compiled elsewhere."""
        python = getattr(function, "_torchdynamo_inline", None)  # None: loaded from a file
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if python is None or not any(isinstance(mode, mode_class) for mode in modes):
            return COMPILED_CALL(function, *args, **kwargs)
        return python(*args, **kwargs)

    torch.jit.ScriptFunction.__call__ = call  # type: ignore[method-assign, assignment]
