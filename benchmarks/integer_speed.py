"""Integer-only models beside ONNX Runtime's own sessions, in units of the float session of the same network.

One JSON line per number of threads (`--threads=1,2`, the default). The network is a trained YOLOv8n from the package
registries, quantized at W8A8 by qsdk (a SiLU is one step) and by onnxruntime.quantization (a Sigmoid and a Mul with a
quantizer each). Every round times all sessions in turn; ratios are taken per round, and their median is given.
`qdq` is the runtime's default session of the quantized file; the others are what `to_integer` makes of it, `a / qdq`
against that session. On x86 processors without VNNI that session saturates pairs of products in its int8 kernels; only
`onnxruntime signed` does the same.
"""

import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import qsdk

sys.path.insert(0, str(Path(__file__).parent))
from detectors import Reader, images

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from fetch import NUDENET, fetch

ROUNDS = 15
SIZE = 320
FORMS = {
    "standard": {},
    "qlinear": {"requantize": "qlinear"},
    "onnxruntime": {"target": "onnxruntime"},
    "onnxruntime signed": {"target": "onnxruntime", "weights": "signed"},
}
TARGETS = {"onnxruntime / qdq": 1.0, "onnxruntime": 0.6, "standard": {1: 2.0, 2: 2.7}, "qlinear": 0.9}


def quantized(folder: Path) -> dict[str, Path]:
    """Write the float network with fixed sizes and its two Q/DQ files."""
    model = onnx.load(fetch(NUDENET) / "nudenet" / "320n.onnx")
    for dim, size in zip(model.graph.input[0].type.tensor_type.shape.dim, (1, 3, SIZE, SIZE), strict=True):
        dim.dim_value = size
    paths = {name: folder / f"{name}.onnx" for name in ("raw", "float", "qsdk", "onnxruntime")}
    onnx.save(model, paths["raw"])
    quant_pre_process(str(paths["raw"]), str(paths["float"]), skip_symbolic_shape=True)
    batches = images(SIZE)[:8]
    sim = qsdk.quantize(paths["float"], None, qsdk.w8a8())
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, paths["qsdk"])
    quantize_static(paths["float"], paths["onnxruntime"], Reader(model.graph.input[0].name, batches), per_channel=True)
    return paths


def session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def ratios(sessions: dict[str, ort.InferenceSession], feeds: dict[str, np.ndarray]) -> dict[str, float]:
    rows: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, feeds)
    for _ in range(ROUNDS):
        taken = {}
        for name, session in sessions.items():
            start = time.perf_counter()
            session.run(None, feeds)
            taken[name] = time.perf_counter() - start
        for name, seconds in taken.items():
            rows[name].append(seconds / taken["float"])
    for name in [name for name in rows if "onnxruntime" in name.partition(" ")[2]]:
        quantized = rows[f"{name.partition(' ')[0]} qdq"]
        rows[f"{name} / qdq"] = [one / other for one, other in zip(rows[name], quantized, strict=True)]
    return {name: round(statistics.median(found), 3) for name, found in rows.items() if name != "float"}


def main(threads: list[int]) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths = quantized(folder)
        feeds = {onnx.load(paths["float"]).graph.input[0].name: images(SIZE)[0]}
        files, seconds = {}, {}
        for source in ("qsdk", "onnxruntime"):
            files[f"{source} qdq"] = paths[source]
            for form, options in FORMS.items():
                out = folder / f"{source}.{form.replace(' ', '.')}.onnx"
                start = time.perf_counter()
                qsdk.to_integer(paths[source], out, **options)
                seconds[f"{source} {form}"] = round(time.perf_counter() - start, 1)
                files[f"{source} {form}"] = out
        for count in threads:
            sessions = {"float": session(paths["float"], count)}
            sessions |= {name: session(path, count) for name, path in files.items()}
            found = ratios(sessions, feeds)
            row = {"benchmark": "integer_speed", "threads": count, **found, "targets": TARGETS}
            print(json.dumps(row), flush=True)
        print(json.dumps({"benchmark": "integer_speed", "seconds to convert and measure": seconds}))


if __name__ == "__main__":
    given = [argument.partition("=")[2] for argument in sys.argv[1:] if argument.startswith("--threads=")]
    main([int(count) for count in (given[-1] if given else "1,2").split(",")])
