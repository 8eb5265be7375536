"""`qsdk parity`: does the file give, in the runtime's own session, what its simulation gives, site by site."""

import sys
from argparse import Namespace

from onnx_backend.data_passes.session_parity import check_session
from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from onnx_backend.qdq.quantized_parts import NOTHING_QUANTIZED, is_anything_quantized
from onnx_backend.sim import OnnxSim
from qsdk.commands.batches import chosen
from qsdk.commands.printing import show
from qsdk.core.errors import ConfigError, ModelError
from qsdk.verbs.qdq_files import opened_qdq
from qsdk.verbs.quantize import check_parity


def run(options: Namespace) -> int:
    """Compare a Q/DQ file in a session with its simulation, or with another file's; 1 where they differ."""
    opened_qdq(options.model)  # it is valid, and its encodings file is its own
    model = load(options.model)
    _require_choices(options)
    if not is_anything_quantized(model):
        raise ModelError(f"{options.model}: {NOTHING_QUANTIZED}")
    inputs = inputs_of(model)
    data = chosen(options, inputs)
    progress = sys.stderr.isatty() and not options.json
    if options.against:
        report = check_parity(OnnxSim.from_qdq(opened_qdq(options.against)), model, data, progress=progress)
    else:
        report = check_session(
            model,
            data,
            level=options.level,
            entries=dict(options.entry),
            least_sqnr_db=options.min_sqnr,
            least_float_sqnr_db=options.min_float_sqnr,
            float_model=load(options.float) if options.float else None,
            progress=progress,
        )
    show(report, as_json=options.json)
    return 0 if report.summary["passed"] else 1


def _require_choices(options: Namespace) -> None:
    """Refuse a gate that nothing would be held against.

    Raises:
        ConfigError: there is one.
    """
    if options.min_float_sqnr is not None and not options.float:
        raise ConfigError("--min-float-sqnr gates the distance from the float model; name it with --float FILE")
    given = [f"--{name}" for name in ("float", "min-sqnr") if getattr(options, name.replace("-", "_")) is not None]
    if options.against and given:
        raise ConfigError(f"--against compares two simulations, without a session; leave out {', '.join(given)}")
