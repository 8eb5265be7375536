"""The verb `to_integer`."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Unpack

from onnx_backend.integer.files import write_integer
from onnx_backend.integer.firmware.files import require_firmware_path
from onnx_backend.proto import model_io
from qsdk.core.numerics.fixed_point import Rounding
from qsdk.core.report import Report
from qsdk.core.run_options import ProgressOptions, run_of
from qsdk.verbs.qdq_files import OnnxSource, opened_qdq


class ProgramOptions(ProgressOptions, total=False):
    """What `to_integer` takes beside the choices of the arithmetic."""

    firmware: str | os.PathLike[str] | None


def to_integer(
    model: OnnxSource,
    out: str | os.PathLike[str],
    *,
    target: Literal["standard", "onnxruntime", "portable"] = "standard",
    edges: Literal["float", "integer"] = "float",
    rounding: Rounding = "half_even",
    allow_float: Sequence[str] = (),
    shapes: Mapping[str, Sequence[int]] | None = None,
    data: Iterable[Any] | None = None,
    **options: Unpack[ProgramOptions],
) -> Report:
    """Convert a Q/DQ model to an integer-only one. Writes `out` and `<out>.certificate.json`.

    The result is run once. Where it computes on integers alone, ONNX Runtime and the NumPy reference must agree bit for
    bit. In the report, `max_lsb` of a row is the largest difference of that operation from the Q/DQ model on the same
    inputs (`operations_max_lsb`: of all, with float edges). `max_lsb` of the summary is that of the outputs, with the
    rounding noise of the whole network.

    Args:
        model: any Q/DQ model: a path, bytes or an onnx model.
        out: where to write.
        target: `standard` operators on integers; `onnxruntime` for speed in that runtime, by its quantized kernels,
            which requantize with constant float scales; `portable` for the same integers on every runtime, in int32.
        edges: `float` keeps float32 inputs and outputs; `integer` is for callers that quantize themselves.
        rounding: of requantization: `half_even` (as QuantizeLinear), or as a chip does it.
        allow_float: shell globs over node names and op types that may stay float; they are listed in the report.
        shapes: input name -> all of its sizes, for dynamic axes that an operation needs fixed (a mean, an LSTM).
        data: batches, the first for measuring and needed sizes; None for random ones, sized as quantize's example.
        options: `firmware`, a file that holds the network without ONNX: `.npz` (arrays and operations) or `.h` (C,
            batch of 1). `progress`: see `qsdk.options`.

    Raises:
        IntegerError: lists every node that has no integer form, with its reason and remedy.
        ConfigError: an unknown option, suffix of `firmware` or shape.
        FileFormatError: the model is unreadable or invalid.

    Examples:
        >>> import tempfile, torch, qsdk
        >>> folder, x = tempfile.mkdtemp(), torch.randn(64, 8)
        >>> _ = qsdk.calibrate(sim := qsdk.quantize(torch.nn.Linear(8, 4), x), [x], progress=False)
        >>> _ = qsdk.export(sim, folder + "/model.onnx")
        >>> qsdk.to_integer(folder + "/model.onnx", folder + "/integer.onnx").summary["float_tensors"]
        0
    """
    run = run_of(to_integer, options)
    firmware = options.get("firmware")
    require_firmware_path(firmware, out)
    forms: dict[str, Any] = {"target": target, "edges": edges, "rounding": rounding, "allow_float": allow_float}
    source = model_io.with_weights(opened_qdq(model))
    return write_integer(source, out, **forms, shapes=shapes, data=data, firmware=firmware, progress=run.progress)
