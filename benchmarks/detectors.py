"""Class scores of detectors at W8A8 by default, in dB of SQNR, beside onnxruntime's own static quantization.

One JSON line. `small` is the test suite's detector with the head of YOLOv8 and random weights; `nudenet` is a trained
YOLOv8n from the package registries, on the tests' 20 ImageNet images (not what it was trained for: its scores are small
there). In both, boxes in pixels and scores in 0..1 meet in one Concat that leaves the model. Target: scores >= 25 dB.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from PIL import Image

import qsdk

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
from detector import trained_like
from fetch import FOOLBOX, NUDENET, fetch

Arrays = list[np.ndarray]


class Reader(CalibrationDataReader):
    """Feeds the other quantizer."""

    def __init__(self, name: str, batches: Arrays) -> None:
        self.batches = iter({name: batch} for batch in batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Give the next batch."""
        return next(self.batches, None)


def sqnr(exact: np.ndarray, found: np.ndarray) -> float:
    return round(float(10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum())), 1)


def measured(path: Path, batches: Arrays, folder: Path) -> dict[str, dict[str, float]]:
    session = ort.InferenceSession(path)
    name = session.get_inputs()[0].name
    exact = np.concatenate([session.run(None, {name: batch})[0] for batch in batches])

    def row(found: np.ndarray) -> dict[str, float]:
        return {"boxes_db": sqnr(exact[:, :4], found[:, :4]), "scores_db": sqnr(exact[:, 4:], found[:, 4:])}

    rows = {}
    for method in ("min_max", "tf_enhanced"):
        sim = qsdk.quantize(path, None, qsdk.w8a8())
        qsdk.calibrate(sim, batches, method=method, progress=False)
        rows[f"qsdk {method}"] = row(np.concatenate([sim.run(batch)[0] for batch in batches]))
    prepared, quantized = folder / "prepared.onnx", folder / "quantized.onnx"
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    quantize_static(prepared, quantized, Reader(name, batches), per_channel=True)
    theirs = ort.InferenceSession(quantized)
    rows["onnxruntime"] = row(np.concatenate([theirs.run(None, {name: batch})[0] for batch in batches]))
    return rows


def images(size: int) -> Arrays:
    found = []
    for path in sorted((fetch(FOOLBOX) / "foolbox" / "data").glob("imagenet_*")):
        with Image.open(path) as file:
            pixels = np.asarray(file.convert("RGB").resize((size, size)), np.float32) / 255
        found.append(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]))
    return found


def main() -> None:
    warnings.simplefilter("ignore")  # the exporter and the other quantizer warn about themselves
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))
        torch.onnx.export(
            trained_like(), (batch,), folder / "small.onnx", dynamo=True, external_data=False, verbose=False
        )
        small = measured(folder / "small.onnx", [batch.numpy()], folder)
        nudenet = measured(fetch(NUDENET) / "nudenet" / "320n.onnx", images(320), folder)
    print(json.dumps({"benchmark": "detectors at W8A8, dB", "small": small, "nudenet": nudenet, "target": 25}))


if __name__ == "__main__":
    main()
