"""The options of the commands that check or measure a model: validate, parity, compare, profile."""

from typing import Any

from qsdk.commands.options.shared import DIALECTS, RUNTIMES, TIMED, add_command, add_data, entry


def add_validate(commands: Any) -> None:
    """Add `qsdk validate`."""
    validate = add_command(
        commands,
        "validate",
        "check a quantized ONNX model (exit 1 on errors or if nothing is quantized, 2 if unreadable)",
        "qsdk validate model.onnx --json",
    )
    validate.add_argument("model")
    validate.add_argument("--dialect", choices=DIALECTS, help="check for this runtime (default: ONNX Runtime's CPU)")
    validate.add_argument("--strict", action="store_true", help="exit 1 on warnings too")
    validate.set_defaults(run="qsdk.commands.validate:run")


def add_parity(commands: Any) -> None:
    """Add `qsdk parity`."""
    parity = add_command(
        commands,
        "parity",
        "compare a Q/DQ file in ONNX Runtime's own session with its simulation, site by site (exit 1 if they differ)",
        "qsdk parity model.onnx --data test.npz --float float.onnx --min-float-sqnr 20",
    )
    parity.add_argument("model", help="a Q/DQ ONNX file")
    add_data(parity)
    parity.add_argument(
        "--level",
        choices=("none", "basic", "extended", "all"),
        default="all",
        help="graph optimization of the session (default: all, as the runtime's own default)",
    )
    parity.add_argument(
        "--entry",
        type=entry,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="configuration entry of the session, such as session.qdq_matmulnbits_accuracy_level=0",
    )
    parity.add_argument(
        "--min-sqnr", type=float, metavar="DB", help="what each float output must reach, against the simulation's"
    )
    parity.add_argument("--float", metavar="FILE", help="the float model, to say how far the outputs are from it")
    parity.add_argument(
        "--min-float-sqnr", type=float, metavar="DB", help="what each float output must reach, against that of --float"
    )
    parity.add_argument(
        "--runtime",
        choices=RUNTIMES,
        help="run the file there as an application would, with its fusions, in place of a session of --level",
    )
    parity.add_argument("--against", metavar="FILE", help="compare with the simulation of this Q/DQ file instead")
    parity.set_defaults(run="qsdk.commands.parity:run")


def add_compare(commands: Any) -> None:
    """Add `qsdk compare`."""
    compare = add_command(
        commands,
        "compare",
        "compare two forms of a network tensor by tensor, and name the first one that is off (exit 1 if there is one)",
        "qsdk compare float.onnx device_dump/ --data images.npz",
    )
    side = "an ONNX file (float, Q/DQ or integer-only), or a folder of dumped tensors (.npy, .raw, .bin)"
    compare.add_argument("a", help=side)
    compare.add_argument("b", help="another form of the same network")
    add_data(compare, required=False)
    compare.add_argument(
        "--name",
        type=entry,
        action="append",
        default=[],
        metavar="A=B",
        help="a tensor of a and the one of b that it is, where their names have nothing in common",
    )
    compare.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="the largest difference that counts as none, relative to the largest value of a tensor, such as 1e-2",
    )
    compare.set_defaults(run="qsdk.commands.compare:run")


def add_profile(commands: Any) -> None:
    """Add `qsdk profile`."""
    profile = add_command(
        commands,
        "profile",
        "show where the time of a model goes in a runtime: by layer, in integers, float or conversions",
        "qsdk profile model.onnx --against float.onnx --threads 4",
    )
    profile.add_argument("model", help="an ONNX file: float, Q/DQ or integer-only")
    add_data(profile, required=False)
    profile.add_argument(
        "--runtime",
        choices=TIMED,
        default="onnxruntime",
        help="that runs the model (default: onnxruntime)",
    )
    profile.add_argument("--threads", type=int, metavar="N", help="of the runtime (default: its own choice)")
    profile.add_argument("--repeats", type=int, default=20, metavar="N", help="runs that are timed (default: 20)")
    profile.add_argument("--against", metavar="FILE", help="a model to compare with, such as the float one")
    profile.set_defaults(run="qsdk.commands.profile:run")
