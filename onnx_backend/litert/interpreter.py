"""LiteRT's interpreter: a program run by its reference kernels or by those of an application, and cut at its sites."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_backend.litert.program import EXTRA, Program, to_bytes
from onnx_backend.runtimes.runner import installed_package
from qsdk.core.errors import ModelError

Array = npt.NDArray[Any]


class LiteRt:
    """A program in the installed interpreter; `reference` for its reference kernels, else XNNPACK's on one thread."""

    def __init__(self, program: Program, *, reference: bool) -> None:
        package = installed_package("ai_edge_litert.interpreter", EXTRA)
        kinds = package.OpResolverType
        self.program = program
        try:
            self._interpreter = package.Interpreter(
                model_content=to_bytes(program),
                num_threads=1,
                experimental_op_resolver_type=kinds.BUILTIN_REF if reference else kinds.AUTO,
                experimental_preserve_all_tensors=reference,
            )
            self._interpreter.allocate_tensors()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"LiteRT cannot open the file: {error}") from error

    def run(self, feeds: Sequence[Array], wanted: Sequence[int]) -> dict[int, Array]:
        """Return the codes of these tensors when the inputs have those; without `reference`, outputs alone."""
        for number, feed in zip(self.program.inputs, feeds, strict=True):
            tensor = self.program.tensors[number]
            self._interpreter.set_tensor(number, feed.astype(tensor.dtype).reshape(tensor.shape))
        try:
            self._interpreter.invoke()
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"LiteRT cannot run the file: {error}") from error
        return {number: self._interpreter.get_tensor(number) for number in wanted}


def cut(program: Program, sites: Sequence[int]) -> tuple[Program, Mapping[int, int]]:
    """Return a program whose ops read an input of its own in place of each of these tensors, which leave the model.

    What is returned besides has the number of the input by that of the tensor.
    """
    found = Program(list(program.tensors), [], list(program.inputs), [], program.facts)
    read = {number for op in program.ops for number in op.inputs}
    fed = {number: number for number in program.inputs}
    for number in sites:
        if number in read and number not in fed:
            tensor = program.tensors[number]
            fed[number] = found.add(replace(tensor, name=f"{tensor.name}/fed"))
            found.inputs.append(fed[number])
    found.ops = [replace(op, inputs=tuple(fed.get(number, number) for number in op.inputs)) for op in program.ops]
    made = {number for op in program.ops for number in op.outputs}
    found.outputs = [number for number in dict.fromkeys(sites) if number in made]
    return found, fed


def quantized(program: Program, number: int, values: Array) -> Array:
    """Return values as the codes of a tensor, in int64; an input of whole numbers is them itself."""
    grid = program.tensors[number].grid
    if grid is None:
        return np.asarray(values, np.int64)
    low, high = grid.bounds
    codes = np.rint(values.astype(np.float32) / grid.scale[0]).astype(np.float64) + grid.zero
    return np.asarray(np.nan_to_num(np.clip(codes, low, high), nan=low), np.int64)
