"""Agreement of other runtimes with the simulation: each network in the dialect of each runtime that is installed.

One JSON line. Per network, config and runtime: `max_lsb` and `mean_lsb` over all sites, each fed with the simulation's
own values, and the `worst` three; `first_off`; `sqnr_db` of the outputs end to end against the simulation, beside
`onnxruntime_sqnr_db`, that of ONNX Runtime's default session of the default dialect; the part of the pictures of the
`same` class; how many ops the table of the runtime lists (`in_table`); for `qnn` the op types on the CPU.
`python benchmarks/runtimes.py demo mobilenet_v2 w8a8` measures a few. Targets: at most 1 LSB per site, or an op that
the tables of `onnx_backend/runtimes/` list; end to end at least the agreement of ONNX Runtime's kernels.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import qsdk
from onnx_backend.runtimes.qnn import QnnRunner
from onnx_backend.runtimes.registry import RUNTIMES, open_in
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained
from torch_bridge.sim import QuantSim

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo
import zoo_text
from fetch import NUDENET, fetch

Network = tuple[
    nn.Module | Path, list[Any], Any
]  # a module or an ONNX file, batches to calibrate on, and a batch to measure on
MEASURED = [runtime.name for runtime in RUNTIMES.values() if runtime.table is not None]


def demo() -> Network:
    images = torch.from_numpy(load().calibration_images)
    return load_pretrained(), [images[:256]], images[256:320]


def mobilenet_v2() -> Network:
    images, _ = zoo.imagenet_images()
    return zoo.mobilenet_v2(), [images[:12]], images[12:16]


def efficientnet_lite0() -> Network:
    images, _ = zoo.imagenet_images(lite=True)
    return zoo.efficientnet_lite0(), [images[:12]], images[12:16]


def mini_lm() -> Network:
    texts, _ = zoo_text.reviews(24)
    batches = zoo_text.sentences(texts, size=4)
    return zoo_text.mini_lm(attention="eager"), batches[:4], batches[5]


def yolov8n() -> Network:
    images, _ = zoo.imagenet_images()
    mean, deviation = (torch.tensor(part)[:, None, None] for part in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    sized = nn.functional.interpolate((images * deviation + mean).clamp(0, 1), size=(320, 320), mode="bilinear")
    batches = [{"images": image[None].numpy()} for image in sized]
    return fetch(NUDENET) / "nudenet" / "320n.onnx", batches[:8], batches[10]


NETWORKS: dict[str, Callable[[], Network]] = {
    made.__name__: made for made in (demo, mobilenet_v2, efficientnet_lite0, yolov8n, mini_lm)
}
#: weights of 7 bits cannot overflow the 16-bit sums of processors without VNNI
CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w7a8": qsdk.w8a8().override("*", weight="int7"),
    "w8a16": qsdk.w8a16(),
}


def sqnr(got: np.ndarray, wanted: np.ndarray) -> float:
    noise = float(np.sum((got.astype(np.float64) - wanted) ** 2))
    return round(10 * float(np.log10(np.sum(wanted.astype(np.float64) ** 2) / noise)), 1) if noise else float("inf")


def measured(network: Network, config: qsdk.QuantConfig, runtime: str, folder: Path) -> dict[str, Any]:
    model, batches, test = network
    path = folder / "model.onnx"
    sim = qsdk.quantize(model, test, config.for_dialect(runtime))
    qsdk.calibrate(sim, batches, progress=False)
    summary = qsdk.export(sim, path, dialect=runtime).summary
    report = qsdk.check_parity(sim, path, [test], runtime=runtime, progress=False)
    rows = [row for row in report.rows if row["kind"] not in ("weight", "bias", "constant", "node", "output")]
    worst = sorted(rows, key=lambda row: -row["max_lsb"])[:3]
    facts = {
        "max_lsb": report.summary["activations_max_lsb"],
        "mean_lsb": round(float(np.mean([row["mean_lsb"] for row in rows])), 4),
        "worst": {row["site"]: row["max_lsb"] for row in worst},
        "first_off": report.summary.get("first_off"),
        "sqnr_db": round(report.summary["sqnr_db"], 1),
        "in_table": len(summary.get("computed_otherwise", [])),
    }
    feeds = fed(onnx.load(path), test)
    wanted = simulated(sim, test)
    facts["same"] = float((open_in(runtime, onnx.load(path)).run(feeds)[0].argmax(-1) == wanted.argmax(-1)).mean())
    qsdk.export(sim, path)
    facts["onnxruntime_sqnr_db"] = sqnr(open_in("onnxruntime", onnx.load(path)).run(feeds)[0], wanted)
    if runtime == "qnn":
        qsdk.export(sim, path, dialect="qnn")
        runner = QnnRunner(onnx.load(path))
        runner.run(feeds)
        facts["on_cpu"] = sorted({op for _, op in runner.fell_back()})
    return facts


def fed(model: onnx.ModelProto, batch: Any) -> dict[str, np.ndarray]:
    values = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)
    return {info.name: np.asarray(value) for info, value in zip(model.graph.input, values, strict=False)}


def simulated(sim: Any, batch: Any) -> np.ndarray:
    """The first output of the simulation."""
    if not isinstance(sim, QuantSim):
        return np.asarray(sim.run(batch)[0])
    with torch.no_grad():
        result = sim(**batch) if isinstance(batch, dict) else sim(*batch) if isinstance(batch, tuple) else sim(batch)
    return np.asarray(result[0] if isinstance(result, list | tuple) else result)


def results(names: list[str], configs: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            network = NETWORKS[name]()
            for config in configs:
                for runtime in MEASURED:
                    key = f"{name} {config} {runtime}"
                    try:
                        yield key, measured(network, CONFIGS[config], runtime, Path(folder))
                    except qsdk.QsdkError as error:
                        yield key, {"refused": str(error)[:300]}


def main() -> None:
    named = sys.argv[1:]
    networks = [name for name in named if name in NETWORKS] or list(NETWORKS)
    configs = [name for name in named if name in CONFIGS] or list(CONFIGS)
    found = {}
    for key, facts in results(networks, configs):
        print(f"{key}: {facts}", file=sys.stderr)
        found[key] = facts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
