"""`qsdk compare`: two files, or folders of dumped tensors, tensor by tensor, with the first one that is off."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from qsdk.commands.batches import batches_of_options
from qsdk.commands.printing import show
from qsdk.verbs.analysis.compare import compare


def run(options: Namespace) -> int:
    """Compare both sides; return 1 where a tensor is off."""
    report = compare(
        options.a,
        options.b,
        _batches(options),
        names=dict(options.name),
        tolerance=options.tolerance,
    )
    show(report, as_json=options.json)
    return 0 if report.summary["first_off"] is None else 1


def _batches(options: Namespace) -> Iterator[Any] | None:
    """Return the batches by the names of the first file's inputs, or in their order where those of the other differ."""
    files = [path for path in (options.a, options.b) if not Path(path).is_dir()]
    if not files or not (options.data or options.random):
        return None
    inputs = [inputs_of(load(path)) for path in files]
    names = [[item.name for item in items] for items in inputs]
    batches = batches_of_options(options, inputs[0])
    same = all(sorted(known) == sorted(names[0]) for known in names)
    return (batch if same else tuple(batch[name] for name in names[0]) for batch in batches)
