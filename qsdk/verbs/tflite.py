"""`export(sim, "model.tflite", format="tflite")`, and its comparison with the sim."""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnx_backend.litert.check import check, input_sites, opened
from onnx_backend.litert.program import Program
from onnx_backend.litert.write import fixed_sizes, write_tflite
from onnx_backend.proto.inputs import with_shapes
from qsdk.core.errors import ConfigError
from qsdk.core.report import Report
from qsdk.core.run_options import Run
from qsdk.verbs.doors.choose import Door, Sim, door_of
from qsdk.verbs.doors.parts import parts_of

LITERT = "litert"


def is_tflite(model: Any) -> bool:
    """Return whether a model is given as the path of a `.tflite` file."""
    return isinstance(model, str | os.PathLike) and Path(model).suffix.lower() == ".tflite"


def write_tflite_of(sim: Sim, model: ModelProto, path: str | os.PathLike[str], *, check: bool) -> Report:
    """Write the Q/DQ model of a sim as a `.tflite` file, and with `check` compare it with the sim first."""
    door = door_of(sim, Run(progress=False))

    def compared(program: Program) -> Report:
        sized = with_shapes(model, fixed_sizes(model), least=0)
        return _compared(door, program, door.simulated_example(sized))

    return write_tflite(model, path, compared if check else None)


def check_tflite(door: Door, path: str | os.PathLike[str], data: Iterable[Any], runtime: str | None) -> Report:
    """Compare a `.tflite` file with its sim; see `check_parity`."""
    if runtime not in (None, LITERT):
        raise ConfigError(f"runtime={runtime!r} does not read .tflite files; leave it out: LiteRT runs them")
    program = opened(Path(path))
    # the sim gets one part at a time: a site such as [steps * batch, width] does not say which rows are whose
    sizes = [program.facts["sites"][site]["shape"] for site in input_sites(program)]
    return _compared(door, program, door.simulated(parts_of(data, sizes)))


def check_in_litert(door: Door, model: ModelProto, data: Iterable[Any]) -> Report:
    """Compare what `format="tflite"` makes of a Q/DQ model with its sim; see `check_parity`."""
    with tempfile.TemporaryDirectory(prefix="qsdk-") as folder:
        path = Path(folder) / "model.tflite"
        write_tflite(model, path, None)
        return check_tflite(door, path, data, LITERT)


def _compared(door: Door, program: Program, runs: Iterable[Any]) -> Report:
    return check(program, runs, door.stored_at_sites(), door.sim.encodings)
