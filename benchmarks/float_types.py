"""Every documented architecture in float32, float16 and bfloat16, through the whole road: does each step hold?

`python benchmarks/float_types.py [--config NAME] [--only TEXT] [--dtypes float16,bfloat16]`. Needs the `tests/helpers`
of a clone. Steps: quantize, calibrate, export, the default session of ONNX Runtime, parity, reopening and `to_integer`.
Prints a line for every model that fails at a step, and one JSON line: per dtype, how many models pass each step, and
how far the worst site of all is off in an ordinary session of ONNX Runtime, in steps or units in the last place.
"""

import argparse
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())

import numpy as np
import onnx
import onnxruntime as ort
import torch
from architectures import ARCHITECTURES, model_of
from torch import Tensor

import qsdk
from onnx_backend.runtime.session_input import session_of

CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w8a16": qsdk.w8a16(),
    "w4a16": qsdk.w4a16(),
    "w4a8": qsdk.w4a8(),
    "weight_only": qsdk.weight_only("int4", block_size=16),
}
STEPS = ("quantize", "calibrate", "export", "session", "parity", "reopen", "to_integer")


def inputs_in(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs with the floats in a dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def graph_text(path: str) -> str:
    """Return the nodes and stored numbers of a file as text."""
    model = onnx.load(path)
    return str(onnx.printer.to_text(model.graph))


def steps(name: str, dtype: torch.dtype, config: Any, folder: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each step of the road that holds, with its report."""
    made = ARCHITECTURES[name]
    model = model_of(name).to(dtype)
    batch = inputs_in(made.inputs(1, 2, 9), dtype)
    path = os.path.join(folder, "model.onnx")
    sim = qsdk.quantize(model, batch, config, in_place=True)
    yield "quantize", None
    qsdk.calibrate(sim, [batch], progress=False)
    yield "calibrate", None
    qsdk.export(sim, path)
    yield "export", None
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = session_of(onnx.load(path), options)  # the default level; it casts bfloat16 at the edges for Python
    feeds = {
        x.name: batch[x.name].float().numpy() if batch[x.name].is_floating_point() else batch[x.name].numpy()
        for x in session.get_inputs()
    }
    types = {"tensor(float16)": np.float16}
    feeds = {x.name: feeds[x.name].astype(types.get(x.type, feeds[x.name].dtype)) for x in session.get_inputs()}
    session.run(None, feeds)
    yield "session", None
    report = qsdk.check_parity(sim, path, [batch], progress=False)
    if not report.summary["passed"]:
        worst = sorted(report.rows, key=lambda row: -row["max_lsb"])[:4]
        raise AssertionError([(row["site"], row["kind"], row["max_lsb"], row.get("note", "")) for row in worst])
    yield "parity", report
    ordinary = qsdk.check_parity(sim, path, [batch], runtime="onnxruntime", progress=False)
    yield "ordinary session", ordinary
    reopened = qsdk.quantize(path, None)
    again = os.path.join(folder, "again.onnx")
    qsdk.export(reopened, again)
    if graph_text(path) != graph_text(again):
        raise AssertionError("opened and exported again, the file has other nodes or numbers")
    yield "reopen", None
    yield "to_integer", qsdk.to_integer(path, os.path.join(folder, "integer.onnx"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="w8a8", choices=CONFIGS)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtypes", default="float32,float16,bfloat16")
    parser.add_argument("--traceback", action="store_true")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in ARCHITECTURES if chosen.only in name]
    passed: dict[str, Counter[str]] = {}
    furthest: dict[str, tuple[float, str]] = {}
    for dtype in chosen.dtypes.split(","):
        counts = passed[dtype] = Counter()
        for name in names:
            done: list[str] = []
            with tempfile.TemporaryDirectory() as folder:
                try:
                    for step, report in steps(name, getattr(torch, dtype), CONFIGS[chosen.config], folder):
                        if step == "ordinary session":
                            off = (report.summary["activations_max_lsb"], name)
                            furthest[dtype] = max(furthest.get(dtype, off), off)
                        else:
                            done.append(step)
                except Exception as error:  # the table says which step failed, and how
                    print(
                        f"{dtype} {name}: after {done[-1:] or '-'}: {type(error).__name__}: {str(error)[:300]}",
                        flush=True,
                    )
                    if chosen.traceback:
                        traceback.print_exc()
            counts.update(done)
    counted = {dtype: {step: counts[step] for step in STEPS} for dtype, counts in passed.items()}
    facts = {"benchmark": "float_types", "config": chosen.config, "models": len(names), "passed": counted}
    print(json.dumps({**facts, "ordinary_session": furthest}))


if __name__ == "__main__":
    main()
