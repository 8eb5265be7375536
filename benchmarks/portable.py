"""The portable integer target beside the standard one: time in ONNX Runtime, and integers that differ by runtime.

One JSON line per network; names on the command line choose among them (`demo`, the default, and those of
integer_metrics.py). `portable / standard` is the median over rounds of the ratio of processor times on one thread, both
sessions in turn; the target is at most 1.5 on the demo network. `differing` counts the output integers that are not
those of the standard target in ONNX Runtime, over whole batches behind integer edges: 0 is the target on every runtime.
IREE and tract are fetched, and left out where their wheels are for another Python. A text is what stopped a runtime.
"""

import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

import qsdk

sys.path.insert(0, str(Path(__file__).parent))
from integer_metrics import NETWORKS, w8a8_in

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
from every_runtime import onnxruntime, openvino
from fetch import fetch_runtimes

from onnx_backend.integer.reference.run import run_reference
from onnx_backend.runtimes.iree import IreeRunner
from onnx_backend.runtimes.tract import TractRunner

Feeds = Mapping[str, np.ndarray]
Run = Callable[[onnx.ModelProto, Feeds], list[np.ndarray]]
ROUNDS, BATCHES = 25, 2
MOST = 64  # rows of a batch
TARGET = {"portable / standard": 1.5, "differing": 0}


def codes(model: onnx.ModelProto, feeds: Feeds) -> dict[str, np.ndarray]:
    """Float inputs as the integers that a model with integer edges takes."""
    facts = {entry.key: entry.value for entry in model.metadata_props}
    found = {}
    for name, values in feeds.items():
        if f"qsdk.input.{name}.scale" not in facts:
            found[name] = values
            continue
        dtype, scale, zero = (facts[f"qsdk.input.{name}.{key}"] for key in ("dtype", "scale", "zero_point"))
        steps = np.rint(values / np.float32(scale)) + int(zero)
        info = np.iinfo(dtype)
        found[name] = np.clip(steps, info.min, info.max).astype(dtype)
    return found


def ratio(slow: onnx.ModelProto, fast: onnx.ModelProto, feeds: Feeds) -> float:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [ort.InferenceSession(m.SerializeToString(), options, ["CPUExecutionProvider"]) for m in (slow, fast)]
    found = []
    for _ in range(ROUNDS):
        times = []
        for session in sessions:
            start = time.process_time()
            session.run(None, dict(feeds))
            times.append(time.process_time() - start)
        found.append(times[0] / times[1])
    return statistics.median(found[3:])


def on_numpy(model: onnx.ModelProto, feeds: Feeds) -> list[np.ndarray]:
    found = run_reference(model, feeds)
    return [found[info.name] for info in model.graph.output]


def runtimes() -> Iterator[tuple[str, Run]]:
    yield from {"onnxruntime": onnxruntime, "openvino": openvino, "numpy": on_numpy}.items()
    yield "onnx.reference", lambda model, feeds: list(ReferenceEvaluator(model).run(None, dict(feeds)))
    if (sys.version_info[:2], sys.platform, platform.machine()) == ((3, 11), "linux", "x86_64"):
        sys.path.extend(fetch_runtimes())
        yield "iree", lambda model, feeds: IreeRunner(model).run(feeds)
        yield "tract", lambda model, feeds: TractRunner(model).run(feeds)


def differing(run: Run, model: onnx.ModelProto, wanted: list) -> int | str:
    try:
        return sum(
            int((one != other).sum())
            for feeds, expected in wanted
            for one, other in zip(run(model, feeds), expected, strict=True)
        )
    except qsdk.QsdkError as error:
        return str(error)


def measured(name: str, folder: Path) -> dict[str, object]:
    case = NETWORKS[name](w8a8_in(folder))
    given = [{key: value[:MOST] for key, value in feeds.items()} for feeds in case.feeds[:BATCHES]]
    sizes = {key: value.shape for key, value in given[0].items()}
    models, reports = {}, {}
    for target in ("standard", "portable"):
        start = time.perf_counter()
        options = {"target": target, "edges": "integer", "shapes": sizes}
        reports[target] = qsdk.to_integer(case.path, folder / f"{target}.onnx", **options)
        models[target] = onnx.load(folder / f"{target}.onnx")
        reports[f"{target} seconds"] = time.perf_counter() - start
    batches = [codes(models["standard"], feeds) for feeds in given]
    wanted = [(feeds, onnxruntime(models["standard"], feeds)) for feeds in batches]
    return {
        "portable / standard": round(ratio(models["portable"], models["standard"], batches[0]), 2),
        "differing": {key: differing(run, models["portable"], wanted) for key, run in runtimes()},
        "integers": sum(values.size for _, found in wanted for values in found),
        "nodes": {target: len(models[target].graph.node) for target in models},
        "conversion seconds": {t: round(reports[f"{t} seconds"], 1) for t in models},
        "certificate": reports["portable"].summary["same_integers_on"],
    }


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    for name in names or ["demo"]:
        with tempfile.TemporaryDirectory() as place:
            row = measured(name, Path(place))
        print(json.dumps({"benchmark": "portable", "network": name, **row, "target": TARGET}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
