"""Integer-only models beside ONNX Runtime's own sessions, in units of the float session of the same network.

One JSON line per number of threads (`--threads=1,2`, the default). The network is a trained YOLOv8n from the package
registries, quantized at W8A8 by qsdk (a SiLU is one step) and by onnxruntime.quantization (a Sigmoid and a Mul with a
quantizer each); `--network=mini_lm` is MiniLM on 8 texts of 128 tokens, `--network=stories15m` a Llama on 4 texts of
128 tokens, both quantized by qsdk. Every round times all sessions in turn; ratios are taken per round, and their median
is given: of processor time for one thread, so that other programs do not count, of the clock on the wall for more.
`qdq` is the runtime's default session of the quantized file; the others are what `to_integer` makes of it, `a / qdq`
against that session. `default` says which weights `to_integer` writes on this processor: on x86 without VNNI the
kernels for int8 weights saturate pairs of products (in the session of the Q/DQ file too); unsigned ones are exact.
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
import torch
from onnxruntime.quantization import quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

import qsdk

sys.path.insert(0, str(Path(__file__).parent))
from detectors import Reader, images

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo_text
from fetch import NUDENET, fetch
from pretrained_road import travelled

Feeds = dict[str, np.ndarray]
Made = tuple[dict[str, Path], Feeds]
ROUNDS = 15
SIZE = 320
FORMS = {
    "standard": {},
    "onnxruntime": {"target": "onnxruntime"},
}
TARGETS = {"onnxruntime / qdq": 1.0, "onnxruntime": 0.6, "standard": {1: 2.0, 2: 2.7}}


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


def yolov8n(folder: Path) -> Made:
    paths = quantized(folder)
    return paths, {onnx.load(paths["float"]).graph.input[0].name: images(SIZE)[0]}


def mini_lm(folder: Path) -> Made:
    batches = zoo_text.sentences(zoo_text.reviews(32)[0], length=128, size=8)
    return _transformer(zoo_text.mini_lm(), batches, folder)


def stories15m(folder: Path) -> Made:
    model = zoo_text.NextToken(zoo_text.stories()).eval()
    return _transformer(model, [{"input_ids": zoo_text.told(model, 4, 128)}], folder)


def _transformer(model: torch.nn.Module, batches: list[dict[str, torch.Tensor]], folder: Path) -> Made:
    paths = {"float": folder / "float.onnx", "qsdk": travelled(model, batches, qsdk.w8a8(), folder).path}
    torch.onnx.export(model, (), paths["float"], kwargs=batches[0], dynamo=True, external_data=False, verbose=False)
    return paths, {name: tensor.numpy() for name, tensor in batches[0].items()}


NETWORKS = {"yolov8n": yolov8n, "mini_lm": mini_lm, "stories15m": stories15m}


def session(path: Path, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def ratios(sessions: dict[str, ort.InferenceSession], feeds: Feeds, threads: int) -> dict[str, float]:
    clock = time.process_time if threads == 1 else time.perf_counter  # threads that wait count as processor time
    rows: dict[str, list[float]] = {name: [] for name in sessions}
    for session in sessions.values():
        session.run(None, feeds)
    for _ in range(ROUNDS):
        taken = {}
        for name, session in sessions.items():
            start = clock()
            session.run(None, feeds)
            taken[name] = clock() - start
        for name, seconds in taken.items():
            rows[name].append(seconds / taken["float"])
    for name in [name for name in rows if "onnxruntime" in name.partition(" ")[2]]:
        quantized = rows[f"{name.partition(' ')[0]} qdq"]
        rows[f"{name} / qdq"] = [one / other for one, other in zip(rows[name], quantized, strict=True)]
    return {name: round(statistics.median(found), 3) for name, found in rows.items() if name != "float"}


def main(threads: list[int], network: str) -> None:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        paths, feeds = NETWORKS[network](folder)
        sizes = {name: value.shape for name, value in feeds.items()}
        files, seconds = {}, {}
        for source in [name for name in ("qsdk", "onnxruntime") if name in paths]:
            files[f"{source} qdq"] = paths[source]
            for form, options in FORMS.items():
                out = folder / f"{source}.{form.replace(' ', '.')}.onnx"
                start = time.perf_counter()
                qsdk.to_integer(paths[source], out, data=[feeds], shapes=sizes, **options)
                seconds[f"{source} {form}"] = round(time.perf_counter() - start, 1)
                files[f"{source} {form}"] = out
        named = {"benchmark": "integer_speed", "network": network}
        for count in threads:
            sessions = {"float": session(paths["float"], count)}
            sessions |= {name: session(path, count) for name, path in files.items()}
            found = ratios(sessions, feeds, count)
            of_default = {
                "standard": found["qsdk standard"],
                "onnxruntime": found["qsdk onnxruntime"],
                "onnxruntime / qdq": found["qsdk onnxruntime / qdq"],
            }
            row = {**named, "threads": count, **of_default, **found, "targets": TARGETS}
            print(json.dumps(row), flush=True)
        print(json.dumps({**named, "seconds to convert and measure": seconds}))


def option(name: str, default: str) -> str:
    found = [argument.partition("=")[2] for argument in sys.argv[1:] if argument.startswith(f"--{name}=")]
    return found[-1] if found else default


if __name__ == "__main__":
    main([int(count) for count in option("threads", "1,2").split(",")], option("network", "yolov8n"))
