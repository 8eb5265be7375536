"""`qsdk profile`: where the time of a file goes in a runtime, layer by layer."""

from argparse import Namespace

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from qsdk.commands.batches import batches_of_options
from qsdk.commands.printing import show
from qsdk.verbs.analysis.profile import profile


def run(options: Namespace) -> int:
    """Time a model, on the first batch of the data or on random values."""
    model = load(options.model)
    data = batches_of_options(options, inputs_of(model)) if options.data or options.random else None
    report = profile(
        model,
        data,
        runtime=options.runtime,
        threads=options.threads,
        repeats=options.repeats,
        shapes=dict(options.shape),
        against=options.against,
    )
    show(report, as_json=options.json)
    return 0
