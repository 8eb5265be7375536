"""A detector in an ONNX file, quantized from a folder of pictures alone: no labels, no training code.

    pip install ".[images]"    # in a copy of the repository
    python examples/onnx_detector.py detector.onnx pictures --threshold 0.5 --out detector.int8.onnx

Both are yours: the float ONNX file, whose first input takes one picture, and a folder of pictures like those in use.
Without labels the float file is the reference. The number to watch is the agreement: of the values that are above
`--threshold` before or after quantization (scores of boxes, mostly), the share that is above it both times. Where it
is below `--wanted`, the layers that cost most get activations of 16 bits, one after the other.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from PIL import Image

import qsdk

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


def read_pictures(folder: Path, model: Path, divide: float, count: int, size: int | None = None) -> list[Any]:
    """Return pictures [1, channels, height, width], float32, in the size that the file takes, or of size x size."""
    if not model.is_file():
        raise SystemExit(f"there is no file {model}")
    axes = onnx.load(model, load_external_data=False).graph.input[0].type.tensor_type.shape.dim
    shape = [axis.dim_value or axis.dim_param or "?" for axis in axes]
    if len(shape) != 4 or shape[1] not in (1, 3) or (isinstance(shape[0], int) and shape[0] != 1):
        raise SystemExit(f"{model} takes {shape}; this program gives [1, 1 or 3 channels, height, width], one by one")
    channels, height, width = (one if isinstance(one, int) else size for one in shape[1:])
    if not height or not width:
        raise SystemExit(f"{model} takes pictures of any size; say which with --size, such as --size 640")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)[:count]
    if not paths:
        raise SystemExit(f"{folder} has no pictures; it needs some that look like those in use")
    found = []
    for path in paths:
        picture = Image.open(path).convert("RGB" if channels == 3 else "L").resize((width, height))
        pixels = np.asarray(picture, np.float32).reshape(height, width, channels) / np.float32(divide)
        found.append(pixels.transpose(2, 0, 1)[None])
    return found


def agreement(reference: list[list[Any]], found: list[list[Any]], threshold: float) -> float:
    """Return the share of values above the threshold that both have, of those that either has; 1 where none has."""
    both = either = 0
    for wanted, got in zip(reference, found, strict=True):
        for left, right in zip(wanted, got, strict=True):
            both += int(((left > threshold) & (right > threshold)).sum())
            either += int(((left > threshold) | (right > threshold)).sum())
    return both / either if either else 1.0


def main(given: argparse.Namespace) -> dict[str, float]:
    """Quantize, spend bits where they are needed, export; gives the agreement of each step."""
    pictures = read_pictures(Path(given.pictures), Path(given.model), given.divide, given.count, given.size)
    session = onnxruntime.InferenceSession(given.model, providers=["CPUExecutionProvider"])
    reference = [session.run(None, {session.get_inputs()[0].name: picture}) for picture in pictures]

    sim = qsdk.quantize(given.model, None, given.config)
    qsdk.calibrate(sim, pictures, method="mse", weight_method="min_max", progress=False)

    def measured() -> float:
        return agreement(reference, [sim.run(picture) for picture in pictures], given.threshold)

    found = {"calibrated": measured()}
    for row in qsdk.sensitivity(sim, pictures, progress=False).rows:
        if found[list(found)[-1]] >= given.wanted or len(found) > given.most:
            break
        if row["kind"] == "activations":
            sim.set_precision(row["layer"], activation="uint16")
            found[f"{row['layer']} in 16 bits"] = measured()

    qsdk.export(sim, given.out)
    parity = qsdk.check_parity(sim, given.out, pictures[:1], progress=False)
    if not parity.summary["passed"]:
        raise SystemExit(str(parity))
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="quantize a detector without labels")
    parser.add_argument("model", help="the float ONNX file")
    parser.add_argument("pictures", help="a folder of pictures that look like those in use")
    parser.add_argument("--count", type=int, default=64, help="how many pictures to read (64)")
    parser.add_argument("--size", type=int, help="width and height, where the file takes pictures of any size")
    parser.add_argument("--divide", type=float, default=255.0, help="what pixels of 0 to 255 are divided by (255)")
    parser.add_argument("--config", default="w8a8", help="w8a8, w4a8, w8a16 or w4a16 (w8a8)")
    parser.add_argument("--threshold", type=float, default=0.5, help="what counts as found (0.5)")
    parser.add_argument("--wanted", type=float, default=0.97, help="the agreement to reach (0.97)")
    parser.add_argument("--most", type=int, default=5, help="how many layers may get 16 bits (5)")
    parser.add_argument("--out", default="detector.int8.onnx", help="the file to write (detector.int8.onnx)")
    return parser.parse_args(words)


if __name__ == "__main__":
    for step, value in main(arguments()).items():
        print(f"{step}: {value:.3f}")
