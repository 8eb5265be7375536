"""The verb that compares two forms of one network tensor by tensor: modules, sims, ONNX files, dumped tensors."""

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from onnx import ModelProto
from torch import nn

from onnx_backend.data_passes.named_values import OnnxValues
from onnx_backend.proto import model_io
from onnx_backend.qdq.fast_forms import with_pairs
from onnx_backend.runtime.feeds import batches_of
from onnx_backend.sim import OnnxSim
from qsdk.core.comparing.comparison import Comparison
from qsdk.core.comparing.folder import DumpedFolder
from qsdk.core.comparing.place import Side
from qsdk.core.errors import ConfigError
from qsdk.core.report import Report
from qsdk.core.run_options import DataOptions, Forward, run_of
from qsdk.verbs.doors.choose import Sim
from qsdk.verbs.doors.onnx_door import require_no_forward
from torch_bridge.data_passes import ModuleValues
from torch_bridge.sim import QuantSim
from torch_bridge.torch_values.batches import progress_over

Comparable = nn.Module | Sim | str | os.PathLike[str] | ModelProto


def compare(
    a: Comparable,
    b: Comparable,
    data: Iterable[Any] | None = None,
    *,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    **options: Unpack[DataOptions],
) -> Report:
    """Compare two forms of one network tensor by tensor, and name the first one in network order that is off.

    Each form is a module, a sim of either side, an ONNX file (float, Q/DQ or integer-only) or a folder of tensors that
    a device dumped. Tensors are matched by their names, however each tool spells them. Each batch runs twice: once from
    end to end, and once with the values of the other side in front of every tensor, so that an early difference does
    not hide where a later one arises. A tensor is off where its own ops differ by more than

    - one step of the grid, where both sides are quantized there;
    - 15 dB above the rounding of its grid and weights, or 20 dB SQNR by clipping, where one side is quantized and the
      other is float;
    - 1e-4 of its largest value, where both are float;
    - or `tolerance` of its largest value, where that is given.

    Args:
        a: a module, a sim, the path of an ONNX file or an onnx model, or the path of a folder.
        b: another form of the same network.
        data: batches, as for `calibrate`; may be None where both sides are folders.
        names: name on side a -> name on side b, for tensors that cannot be matched otherwise.
        tolerance: the largest difference that counts as none, relative to the largest value of a tensor.
        options: `forward`, `progress`; see `qsdk.options`.

    Returns:
        Rows in network order: `site` (the name on side a), `other` (on side b), `layout` (what lies otherwise: NHWC,
        axes of one), `max_difference`, `sqnr_db`, `max_lsb` (in steps, where a side is quantized), `own_sqnr_db` (with
        the same values in front), `off`. Summary: `first_off`, `why`, `matched`, `unmatched_a`, `unmatched_b`,
        `sqnr_db` (of the worst float output).

    Raises:
        ConfigError: a side that is none of these, a name in `names` that is not there, or no names in common.
        CalibrationError: a sim without encodings.
        DataError: no data, data that a side does not take, or a dump with fewer values than the other side has.
        FileFormatError: a file that cannot be read.

    Examples:
        >>> import torch, qsdk
        >>> x = torch.randn(8, 4)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> sim = qsdk.quantize(model, x)
        >>> _ = qsdk.calibrate(sim, [x], progress=False)
        >>> print(qsdk.compare(model, sim, [x], progress=False).summary["first_off"])
        None
    """
    run = run_of(compare, options)
    _require_tolerance(tolerance)
    sides = _side(a, "a", run.forward), _side(b, "b", run.forward)
    _feed_alike(sides, run.forward)
    comparison = Comparison(*sides, names)
    for batch, where in _batches(sides, data, run.progress):
        comparison.add(batch, where)
    return comparison.report(tolerance)


def _require_tolerance(tolerance: float | None) -> None:
    if tolerance is not None and not 0 <= tolerance < float("inf"):
        raise ConfigError(
            f"tolerance={tolerance!r} is no share of a tensor's largest value; give 0 or more, such as 1e-3"
        )


def _batches(
    sides: tuple[Side | DumpedFolder, Side | DumpedFolder], data: Iterable[Any] | None, progress: bool
) -> Iterator[tuple[Any, str]]:
    """Yield the batches, each with its name in messages; of two folders, once all there is."""
    folders = [isinstance(side, DumpedFolder) for side in sides]
    if data is not None and not all(folders):
        over = progress_over if any(isinstance(side, ModuleValues) for side in sides) else batches_of
        for number, batch in over(data, "compare", progress):
            yield batch, f"batch {number}"
    elif all(folders):
        yield None, "the dump"
    else:
        raise ConfigError("data= is missing: only two folders of dumped tensors can be compared without it")


def _side(given: Any, name: str, forward: Forward | None) -> Side | DumpedFolder:
    """Return a side of the comparison."""
    if isinstance(given, QuantSim | nn.Module):
        return ModuleValues(given, forward)
    if isinstance(given, OnnxSim):
        return OnnxValues(given.opened or given.qdq_model(), given.providers)
    if isinstance(given, str | os.PathLike) and Path(given).is_dir():
        return DumpedFolder(Path(given))
    if isinstance(given, str | os.PathLike | ModelProto):
        return OnnxValues(with_pairs(model_io.load(given)))
    raise ConfigError(
        f"side {name} is a {type(given).__name__}; give a module, a sim, an ONNX model or its path, or the path of a "
        "folder of dumped tensors"
    )


def _feed_alike(sides: tuple[Side | DumpedFolder, Side | DumpedFolder], forward: Forward | None) -> None:
    """Feed an ONNX model with the arguments with which the user's `forward` calls the module beside it."""
    modules = [side for side in sides if isinstance(side, ModuleValues)]
    if not modules:
        require_no_forward(forward)
    for side in sides:
        if forward is not None and isinstance(side, OnnxValues):
            side.arguments = partial(_arguments, side, modules[0])


def _arguments(model: OnnxValues, module: ModuleValues, batch: Any, where: str) -> Any:
    module.values(batch, where)
    called = module.arguments
    wanted = [place.name for place in model.places if place.given]
    return called if set(wanted) <= set(called) else tuple(called.values())
