"""The commands on files: `qsdk inspect`, `qsdk to-integer` and `qsdk encodings`."""

from argparse import Namespace

from onnx_backend.proto.inputs import inputs_of
from onnx_backend.proto.model_io import load
from qsdk.commands.batches import batches_of_options
from qsdk.commands.printing import require_output, show
from qsdk.core.encodings.provenance import GRAPH
from qsdk.core.numerics.encoding import Encoding
from qsdk.core.report import Report
from qsdk.verbs.files import read_with, save_encodings
from qsdk.verbs.integer import to_integer
from qsdk.verbs.qdq_files import inspect


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


def run_show(options: Namespace) -> int:
    """Show the entries of a file, site by site."""
    stored, _ = read_with(options.source, options.model)
    rows = [
        {
            "site": site,
            "kind": stored.kinds.get(site, ""),
            "dtype": encoding.dtype.name,
            "granularity": _granularity(encoding),
            "smallest_scale": float(encoding.scale.min()),
            "largest_scale": float(encoding.scale.max()),
            "zero_point": int(encoding.zero_point.reshape(-1)[0]) if encoding.zero_point.size == 1 else None,
            "frozen": encoding.frozen,
        }
        for site, encoding in stored.encodings.items()
    ]
    floats = dict.fromkeys(("smallest_scale", "largest_scale", "zero_point"))
    for site, dtype in (stored.casts or {}).items():
        facts = {"site": site, "kind": stored.kinds.get(site, ""), "dtype": dtype.name, "granularity": "cast"}
        rows.append({**facts, **floats, "frozen": False})
    facts_of_file = {name: value for name, value in stored.provenance.items() if name != GRAPH}  # for programs
    show(Report("Encodings", rows, {"sites": len(rows), **facts_of_file}), as_json=options.json)
    return 0


def _granularity(encoding: Encoding) -> str:
    if encoding.axis is None:
        return "per tensor"
    if encoding.block_size is None:
        return f"per channel, axis {encoding.axis}"
    return f"blocks of {encoding.block_size}, axis {encoding.axis}"


def run_convert(options: Namespace) -> int:
    """Write encodings in another format. Facts that it cannot express are an error, or listed with `--allow-loss`."""
    require_output(options.out)
    report = save_encodings(
        options.source, options.out, version=options.to, model=options.model, allow_loss=options.allow_loss
    )
    show(report, as_json=options.json)
    return 0
