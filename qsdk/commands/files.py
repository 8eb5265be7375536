"""The commands that read a quantized model: inspect and to-integer."""

from argparse import Namespace

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from qsdk.commands.batches import batches_of_options
from qsdk.commands.outputs import require_output
from qsdk.commands.printing import show
from qsdk.verbs.qdq_files import inspect
from qsdk.verbs.quantize import to_integer


def run_inspect(options: Namespace) -> int:
    """Show the encodings of a Q/DQ model."""
    show(inspect(options.model), as_json=options.json)
    return 0


def run_to_integer(options: Namespace) -> int:
    """Convert a Q/DQ model to an integer-only one."""
    require_output(options.out)
    report = to_integer(
        options.model,
        options.out,
        target=options.target,
        edges=options.edges,
        rounding=options.rounding,
        shapes=dict(options.shape),
        allow_float=options.allow_float,
        firmware=options.firmware,
        data=batches_of_options(options, inputs_of(load(options.model))) if options.data or options.random else None,
    )
    show(report, as_json=options.json)
    return 0
