"""How far modules of other libraries come: quantize, calibrate, export, session, parity, reopen, train, to_integer.

The modules of `foreign_catalogue.py`, with random weights, each in a process of its own. Install their libraries beside
qsdk first: `.venv/bin/pip install --no-deps --target FOLDER -r benchmarks/foreign_modules.txt`, then
`PYTHONPATH=FOLDER .venv/bin/python benchmarks/foreign_modules.py --out rows.jsonl`.
One JSON line per module: its `library`, the steps that it `passed` and those that `failed` with the start of the
error, and `sim_db`, `session_db`, `weights_lsb`, `activations_lsb`, `reopened_db`, `integer_lsb` and `integer_db`,
where each was reached. The last line of the standard output counts the modules that passed each step. `--only timm/res`
chooses by the start of names, `--table rows.jsonl` prints the rows of a file as a table of what does not go.
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from foreign_catalogue import catalogue
from foreign_makers import Foreign
from torch import Tensor, nn

import qsdk

STEPS = ("build", "quantize", "calibrate", "export", "session", "parity", "reopen", "train", "to_integer")
Row = dict[str, Any]


def tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in nested outputs, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors(item)]


def sqnr(wanted: list[np.ndarray], found: list[np.ndarray]) -> float:
    """Return the least signal-to-noise ratio of the outputs in dB, at most 200."""
    least = 200.0
    for a, b in zip(wanted, found, strict=True):
        noise, signal = float(np.square(a - b, dtype=np.float64).sum()), float(np.square(a, dtype=np.float64).sum())
        if not np.isfinite(noise):
            return float("nan")
        if noise:
            least = min(least, 10 * np.log10(max(signal, 1e-300) / noise))
    return round(least, 1)


def arrays(outputs: Any) -> list[np.ndarray]:
    """Return the outputs' floating-point tensors as arrays."""
    return [tensor.detach().numpy() for tensor in tensors(outputs)]


def runs(path: Path, inputs: list[Tensor]) -> list[np.ndarray]:
    """Return the floating-point outputs of the file in a default session."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = {node.name: tensor.numpy() for node, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [value for value in session.run(None, feeds) if value.dtype.kind == "f"]


def step(model: nn.Module, batch: Any) -> None:
    """Take one training step on the sum of squares of the outputs."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch)
    found = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
    sum(tensor.square().mean() for tensor in found).backward()
    optimizer.step()


class Road:
    """One module on its way; each step writes what it found into `row`."""

    def __init__(self, foreign: Foreign, folder: Path) -> None:
        self.foreign, self.folder, self.row = foreign, folder, dict[str, Any]()

    def build(self) -> None:
        """Make the module and its batches."""
        torch.manual_seed(0)
        self.model = self.foreign.make().eval()
        self.batches = [self.foreign.batch(seed) for seed in range(3)]
        self.inputs = list(self.batches[0].values() if isinstance(self.batches[0], dict) else self.batches[0])
        with torch.no_grad():
            self.float = arrays(self.run(self.model))

    def run(self, model: Callable[..., Any]) -> Any:
        """Call the model on the first batch."""
        return model(**self.batches[0]) if isinstance(self.batches[0], dict) else model(*self.batches[0])

    def quantize(self) -> None:
        """Wrap the module at W8A8."""
        self.sim = qsdk.quantize(self.model, self.batches[0], qsdk.w8a8())

    def calibrate(self) -> None:
        """Calibrate on three batches."""
        qsdk.calibrate(self.sim, self.batches, progress=False)
        with torch.no_grad():
            self.simulated = arrays(self.run(self.sim))
        self.row["sim_db"] = sqnr(self.float, self.simulated)

    def export(self) -> None:
        """Write the file."""
        self.path = self.folder / "model.onnx"
        qsdk.export(self.sim, str(self.path))

    def session(self) -> None:
        """Run the file where it will be deployed."""
        self.deployed = runs(self.path, self.inputs)
        self.row["session_db"] = sqnr(self.simulated, self.deployed)

    def parity(self) -> None:
        """Hold the file against the sim."""
        report = qsdk.check_parity(self.sim, str(self.path), self.batches[:1], progress=False).to_dict()["summary"]
        self.row |= {"weights_lsb": report["weights_max_lsb"], "activations_lsb": report["activations_max_lsb"]}
        if not report["passed"]:
            raise AssertionError(f"parity not passed: {report}")

    def reopen(self) -> None:
        """Open the file with the encodings that it has, and simulate it."""
        again = qsdk.quantize(str(self.path), None)
        found = again(*(tensor.numpy() for tensor in self.inputs))
        self.row["reopened_db"] = sqnr(self.simulated, [value for value in found if value.dtype.kind == "f"])
        if not self.row["reopened_db"] >= min(60.0, self.row.get("session_db", 60.0) - 1):
            raise AssertionError(f"the file opened again is {self.row['reopened_db']} dB from the sim")

    def train(self) -> None:
        """Take a training step, and see that the sim still exports."""
        with self.sim.training(learn_scales=True) as model:
            step(model, self.batches[0])
        qsdk.export(self.sim, str(self.folder / "trained.onnx"))

    def to_integer(self) -> None:
        """Convert the file to integers and run it on the batch."""
        out = self.folder / "model.int.onnx"
        found = qsdk.to_integer(str(self.path), str(out)).to_dict()["summary"]
        self.row["integer_lsb"] = found["max_lsb"]
        self.row["integer_db"] = sqnr(self.simulated, runs(out, self.inputs))


def travel(foreign: Foreign) -> Row:
    """Take the module through every step that it reaches; what follows a failed session, parity or training goes on."""
    row: Row = {"name": foreign.name, "library": foreign.library}
    failed: dict[str, str] = {}
    passed = []
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        road = Road(foreign, Path(folder))
        for name in STEPS:
            try:
                with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    getattr(road, name)()
                passed.append(name)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {' | '.join(str(error).split(chr(10))[:5])[:600]}"
                if "--trace" in sys.argv:
                    traceback.print_exc()
                if name in ("build", "quantize", "calibrate", "export"):
                    break
        row |= road.row
    seconds = round(time.process_time() - start, 1)
    return row | {"passed": passed, "failed": failed, "cpu_seconds": seconds}


def in_own_process(name: str, seconds: int) -> Row:
    """Return the module's row, measured in a fresh process."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"name": name, "failed": {"process": f"more than {seconds} s"}, "passed": []}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return {"name": name, "failed": {"process": f"exit {done.returncode}: {last[0][:300]}"}, "passed": []}
    return dict(json.loads(lines[-1]))


def table(rows: list[Row]) -> str:
    """Return how many modules pass each step, and the first error of each step that a module fails."""
    counts = Counter(step for row in rows for step in row["passed"])
    lines = ["| " + " | ".join(["modules", *STEPS]) + " |", "|" + "---|" * (len(STEPS) + 1)]
    lines += ["| " + " | ".join(str(n) for n in [len(rows), *(counts[step] for step in STEPS)]) + " |", ""]
    lines += ["| module | step | why |", "|---|---|---|"]
    for row in sorted(rows, key=lambda row: str(row["name"])):
        for name, why in row["failed"].items():
            short = re.sub(r"/\S*/(?:site-packages|foreign_libs)/", "", why.split("; ")[0].replace("|", " "))
            lines.append(f"| {row['name']} | {name} | {short[:240]} |")
    return "\n".join(lines)


def main() -> None:
    """Measure the chosen modules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="the start of the names")
    parser.add_argument("--one", help="measure one module in this process")
    parser.add_argument("--out", help="a file that takes each row as it is found, and whose names are not run again")
    parser.add_argument("--seconds", type=int, default=900, help="time limit of one module")
    parser.add_argument("--trace", action="store_true", help="print the traceback of every error")
    parser.add_argument("--table", help="print the rows of a file as a table")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in Path(options.table).read_text().splitlines()]))
        return
    if options.one:
        print(json.dumps(travel(catalogue()[options.one])))
        return
    out = Path(options.out) if options.out else None
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out and out.exists() else []
    done = {row["name"] for row in rows}
    for name in catalogue():
        if name.startswith(options.only) and name not in done:
            rows.append(in_own_process(name, options.seconds))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if out:
                with out.open("a") as stream:
                    stream.write(json.dumps(rows[-1]) + "\n")
    counts = Counter(step for row in rows for step in row["passed"])
    print(json.dumps({"modules": len(rows)} | {step: counts[step] for step in STEPS}))


if __name__ == "__main__":
    main()
