"""`export(sim, "model.pt2", format="pt2e")`, and its comparison with the sim, in PyTorch or in ExecuTorch."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from onnx import ModelProto

from qsdk.core.errors import ConfigError, FileFormatError, ModelError
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.planning.plan import Plan
from qsdk.core.report import Report
from qsdk.core.run_options import Run
from qsdk.verbs.doors.choose import OnnxSim, QuantSim, Sim, door_of
from torch_bridge.programs.check import check, opened
from torch_bridge.programs.executorch import ExecuTorch
from torch_bridge.programs.write import write_program

EXECUTORCH = "executorch"


def is_program(model: Any) -> bool:
    """Return whether a model is given as the path of a program of PyTorch, or of ExecuTorch."""
    return isinstance(model, str | os.PathLike) and Path(model).suffix.lower() in (".pt2", ".pte")


def write_program_of(
    sim: QuantSim,
    plan: Plan,
    encodings: Mapping[str, Encoding],
    path: str | os.PathLike[str],
    longest: Mapping[str, int],
    *,
    check: bool,
) -> Report:
    """Write a sim as a program, and with `check` compare it with the sim on its example first."""

    def compared(staged: Path) -> Report:
        return _compared(sim, staged, door_of(sim, Run(progress=False)).simulated_example(ModelProto()), None)

    return write_program(sim, plan, encodings, path, longest, check=compared if check else None)


def check_program(sim: Sim, path: str | os.PathLike[str], data: Iterable[Any], runtime: str | None, run: Run) -> Report:
    """Compare a program with its sim; see `check_parity`."""
    if runtime not in (None, EXECUTORCH):
        raise ConfigError(f"runtime={runtime!r} does not read programs of PyTorch; choose {EXECUTORCH!r} or None")
    if Path(path).suffix.lower() == ".pte":
        raise FileFormatError(
            f"{path} holds no sites to compare; give the .pt2 file that it was made of, with runtime={EXECUTORCH!r}"
        )
    if isinstance(sim, OnnxSim):
        raise ModelError(f"{path} holds a module of PyTorch; compare it with the sim of that module")
    return _compared(sim, Path(path), door_of(sim, run).simulated(data), runtime)


def _compared(sim: QuantSim, path: Path, runs: Iterable[Any], runtime: str | None) -> Report:
    loaded = opened(path)
    return check(sim, loaded, runs, ExecuTorch(loaded) if runtime == EXECUTORCH else None)
