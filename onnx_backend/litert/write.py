"""Write a Q/DQ model as a `.tflite` file, after it was compared with its simulation."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnx_backend.litert.convert import convert
from onnx_backend.litert.program import Program, to_bytes
from onnx_backend.proto.inputs import noted_example, open_inputs, with_shapes
from qsdk.core.atomic_files import write_bytes
from qsdk.core.errors import ConfigError, ExportError
from qsdk.core.report import Report


def fixed_sizes(model: ModelProto) -> dict[str, list[int]]:
    """Return all sizes of the inputs that have open axes: a batch of 1, and of the example what else is open."""
    example, found = noted_example(model), {}
    for name, sizes in open_inputs(model).items():
        known = example.get(name, [None] * len(sizes))
        wanted = [n if n is not None else 1 if axis == 0 else known[axis] for axis, n in enumerate(sizes)]
        if None in wanted:
            given = f'shapes={{"{name}": {tuple("?" if n is None else n for n in wanted)}}}'
            raise ConfigError(f"a .tflite file has one size of every input, and axes of {name!r} are open: {given}")
        found[name] = [int(n) for n in wanted if n is not None]
    return found


def write_tflite(
    model: ModelProto, path: str | os.PathLike[str], check: Callable[[Program], Report] | None = None
) -> Report:
    """Write a Q/DQ model as a file; `check` compares its program with the simulation first.

    Raises:
        ExportError: what the format cannot say, or a site of the file that is more than one step off.
    """
    program = convert(with_shapes(model, fixed_sizes(model), least=0))
    makers = {number: op.type for op in program.ops for number in op.outputs} | dict.fromkeys(program.inputs, "input")
    compared = None if check is None else check(program)
    lsb: dict[str, Any] = {} if compared is None else {row["site"]: row["max_lsb"] for row in compared.rows}
    rows = []
    for site, facts in program.facts["sites"].items():
        tensor = program.tensors[facts["tensor"]]
        row = {"site": site, "dtype": tensor.dtype, "form": makers.get(facts["tensor"], "stored")}
        rows.append({**row, **({"max_lsb": lsb[site]} if site in lsb else {})})
    if compared is not None and not compared.summary["passed"]:
        worst = max(compared.rows, key=lambda row: max(row["max_lsb"], row.get("xnnpack_max_lsb", 0)))
        raise ExportError(
            f"LiteRT computes something else than the simulation, first at {worst['site']} ({worst['max_lsb']} steps, "
            f"{compared.summary['differing_from_prediction']} codes differ from their prediction); the file was not "
            "written; export with check=False to look at it"
        )
    data = to_bytes(program)
    write_bytes(path, data)
    ops = sorted({op.type for op in program.ops})
    summary = {"paths": [str(Path(path))], "bytes": len(data), "ops": len(program.ops), "kinds": ops}
    edges = {
        name: {"layout": "as in ONNX" if one["perm"] == sorted(one["perm"]) else "channels last"}
        for name, one in {**program.facts["inputs"], **program.facts["outputs"]}.items()
    }
    layouts = {"layouts": {name: one["layout"] for name, one in edges.items()}}
    named = ("weights_max_lsb", "activations_max_lsb", "xnnpack_max_lsb", "differing_from_prediction", "sqnr_db")
    found = {} if compared is None else {name: compared.summary[name] for name in named}
    return Report("Export", rows, {**summary, **layouts, **found})
