"""`qsdk parity`: does the file give, in the runtime's own session, what its simulation gives, site by site."""

import sys
from argparse import Namespace

from onnx_backend.inputs import inputs_of
from onnx_backend.model import load
from onnx_backend.session_parity import check_session
from onnx_backend.sim import OnnxSim
from qsdk.commands.batches import chosen
from qsdk.commands.printing import show
from qsdk.workflow import check_parity, opened_qdq


def run(options: Namespace) -> int:
    """Compare a Q/DQ file in a session with its simulation, or with another file's; 1 where they differ."""
    opened_qdq(options.model)  # it is valid, and its encodings file is its own
    model = load(options.model)
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
            float_model=load(options.float) if options.float else None,
            progress=progress,
        )
    show(report, as_json=options.json)
    return 0 if report.summary["passed"] else 1
