"""What networks are worth at their tasks in other runtimes, beside their simulation, and how far each site is off.

One JSON line per network, config and runtime; names on the command line choose among them (all networks in `w8a8` and
`w7a8`, on OpenVINO and the emulation of Qualcomm's HTP), `--batches=20` takes that many batches of a network. The
config is that `for_dialect` of the runtime, and the file is written in it, at the sizes of the batches.

`points` of 100 are those of integer_metrics.py: `float`, `simulated`, `runtime` and `onnxruntime` (its default session
of the file in its own dialect); `runtime - simulated` is to be within 0.5. `differs` is the percentage of decisions
that are others than the simulation's: where a share p of n decisions differs, the points have a standard error of about
100 * sqrt(p / n). `max_lsb` is the largest difference at any site, each fed with the simulation's own values;
`beyond_one` lists the operators that are more than one step off, with the largest of each, `in_table` how many sites
export listed as computed otherwise, and `on_cpu` the operators that QNN left to ONNX Runtime.
"""

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

import qsdk
from onnx_backend.runtime.session import simulation_session
from onnx_backend.runtimes.registry import RUNTIMES, open_in
from torch_bridge.sim import QuantSim

sys.path.insert(0, str(Path(__file__).parent))
from integer_metrics import NETWORKS, Array, Case, Feed, Run

#: weights of 7 bits cannot overflow the 16-bit sums of processors without VNNI
CONFIGS = {"w8a8": qsdk.w8a8(), "w7a8": qsdk.w8a8().override("*", weight="int7")}
#: silero's LSTM and what it reads, as OpenVINO wants them
RECURRENT = {"weight": "float32", "bias": "float32", "activation": "uint16", "optional": True}
CONFIGS["recurrent"] = qsdk.w8a8().override("*", op_type="LSTM", **RECURRENT)
for name in ("/Relu_3", "/Transpose"):
    CONFIGS["recurrent"] = CONFIGS["recurrent"].override(name, activation="uint16", optional=True)
BATCHES = 20
TARGETS = {"max_lsb": 1, "runtime - simulated": 0.5}
MEASURED = [runtime.name for runtime in RUNTIMES.values() if runtime.table is not None]


class Quantized:
    """A case with its sim."""

    def __init__(self, name: str, config: qsdk.QuantConfig, folder: Path) -> None:
        self.path, self.config, self.sim = folder / "model.onnx", config, None
        self.case: Case = NETWORKS[name](self._quantize)

    def _quantize(self, model: Any, calibration: Sequence[Any]) -> Path:
        self.sim = qsdk.quantize(model, calibration[0], self.config)
        qsdk.calibrate(self.sim, calibration, progress=False)
        qsdk.export(self.sim, self.path)
        return self.path

    def batch(self, feed: Feed) -> Any:
        """A batch as the sim takes it."""
        return {n: torch.from_numpy(v) for n, v in feed.items()} if isinstance(self.sim, QuantSim) else feed


def first_output(run: Any) -> Run:
    return lambda feed: run(feed)[0]


def decided(case: Case, run: Run, feeds: Sequence[Feed]) -> Array:
    return np.concatenate([case.decide(run(feed)) for feed in feeds])


def off_by_operator(sim: Any, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The operators with an output more than one step off, and the largest difference of each."""
    found: dict[str, float] = {}
    for row in rows:
        decision = sim.plan.decisions.get(row["site"])
        if decision is not None and row["max_lsb"] > 1:
            found[decision.op_type] = max(found.get(decision.op_type, 0), round(row["max_lsb"], 1))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def in_runtime(made: Quantized, runtime: str, feeds: Sequence[Feed], folder: Path) -> dict[str, Any]:
    path, case = folder / f"{runtime}.onnx", made.case
    sizes = {name: value.shape for name, value in feeds[0].items()}
    exported = qsdk.export(made.sim, path, dialect=runtime, shapes=sizes).summary
    parity = qsdk.check_parity(made.sim, path, [made.batch(feeds[0])], runtime=runtime, progress=False)
    runner = open_in(runtime, onnx.load(path))
    start = time.perf_counter()
    found = decided(case, first_output(runner.run), feeds)
    row = {
        "max_lsb": parity.summary["activations_max_lsb"],
        "beyond_one": off_by_operator(made.sim, parity.rows),
        "first_off": parity.summary.get("first_off"),
        "in_table": len(exported.get("computed_otherwise", [])),
        "sqnr_db": round(parity.summary["sqnr_db"], 1),
        "seconds": round(time.perf_counter() - start, 1),
    }
    if runtime == "qnn":
        row["on_cpu"] = sorted({op_type for _, op_type in runner.fell_back()})
    return {**row, "decided": found}


def results(name: str, configs: Sequence[str], runtimes: Sequence[str], most: int) -> Iterator[dict[str, Any]]:
    for config in configs:
        for runtime in runtimes:
            row = {"benchmark": "runtime_metrics", "network": name, "config": config, "runtime": runtime}
            with tempfile.TemporaryDirectory() as place:
                try:
                    yield {**row, **compared(name, CONFIGS[config].for_dialect(runtime), runtime, most, Path(place))}
                except qsdk.QsdkError as error:
                    yield {**row, "refused": str(error)[:400]}


def compared(name: str, config: qsdk.QuantConfig, runtime: str, most: int, folder: Path) -> dict[str, Any]:
    """What a network decides in floats, simulated, in a runtime, and in ONNX Runtime's default session."""
    made = Quantized(name, config, folder)
    case, feeds = made.case, made.case.feeds[:most]
    default, simulation = open_in("onnxruntime", onnx.load(made.path)), simulation_session(onnx.load(made.path))
    runs = {
        "float": case.original,
        "simulated": first_output(lambda feed: simulation.run(None, feed)),
        "onnxruntime": first_output(default.run),
    }
    forms = {form: decided(case, run, feeds) for form, run in runs.items()}
    facts = in_runtime(made, runtime, feeds, folder)
    forms["runtime"] = facts.pop("decided")
    counted = slice(None) if case.counted is None else case.counted[: len(forms["simulated"])]
    differs = {
        form: round(100 * float((forms[form] != forms["simulated"])[counted].mean()), 2)
        for form in ("runtime", "onnxruntime")
    }
    points = {form: round(case.points(values), 2) for form, values in forms.items()}
    gain = round(points["runtime"] - points["simulated"], 2)
    row = {"metric": case.metric, "decisions": int(forms["simulated"][counted].size), "points": points}
    return {**row, "runtime - simulated": gain, "differs": differs, **facts, "targets": TARGETS}


def main() -> None:
    warnings.simplefilter("ignore")
    most = next((int(given.partition("=")[2]) for given in sys.argv if given.startswith("--batches=")), BATCHES)
    networks = [name for name in sys.argv if name in NETWORKS] or list(NETWORKS)
    configs = [name for name in sys.argv if name in CONFIGS] or ["w8a8", "w7a8"]
    runtimes = [name for name in sys.argv if name in MEASURED] or MEASURED
    for name in networks:
        for row in results(name, configs, runtimes, most):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
