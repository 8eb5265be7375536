"""Accuracy with unfused BatchNorms in float16 beside integer layers, and what `mixed_precision` finds; in points.

One JSON line. The demo network on its 10,000 test images; MobileNetV2 on the 20 images that the tests use, where one
image is five points, so its cosine similarity to the float logits stands beside. Targets: W8A8 within 1 point of float,
W4A8 (weights rounded by AdaRound) within 3.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import zoo

Predict = Callable[[Tensor], Tensor]


def logits(predict: Predict, batches: list[Tensor]) -> np.ndarray:
    with torch.no_grad():
        return np.concatenate([predict(batch).numpy() for batch in batches])


def with_float_norms(model: nn.Module, config: qsdk.QuantConfig) -> qsdk.QuantConfig:
    return config.skip("*", dtype="float16", op_type="BatchNormalization")


def measured(model: nn.Module, calibration: list[Tensor], test: list[Tensor], labels: np.ndarray) -> dict[str, object]:
    exact = logits(model, test)
    float_points = 100 * float((exact.argmax(1) == labels).mean())

    def drop(sim: object) -> dict[str, float]:
        found = logits(sim, test)
        cosine = float((exact * found).sum() / (np.linalg.norm(exact) * np.linalg.norm(found)))
        points = float_points - 100 * float((found.argmax(1) == labels).mean())
        return {"points_below_float": round(points, 2), "cosine": round(cosine, 4)}

    rows: dict[str, object] = {"float": round(float_points, 2)}
    for name, config in (("w8a8", qsdk.w8a8()), ("w4a8", qsdk.w4a8())):
        sim = qsdk.quantize(model, calibration[0][:2], with_float_norms(model, config), fold_batch_norm=False)
        qsdk.calibrate(sim, calibration, progress=False)
        rows[f"{name}_float16_norms"] = drop(sim)
        if name == "w4a8":
            qsdk.adaround(sim, calibration, progress=False)
            rows["w4a8_float16_norms_adaround"] = drop(sim)
    sim = qsdk.quantize(model, calibration[0][:2], qsdk.w4a8())
    qsdk.calibrate(sim, calibration, progress=False)

    def metric(current: object) -> float:
        """Agreement with the float model on the calibration data, whose labels are not needed."""
        pairs = zip(logits(current, calibration), logits(model, calibration), strict=True)
        return float(np.mean([a.argmax() == b.argmax() for a, b in pairs]))

    report = qsdk.mixed_precision(sim, calibration[:2], metric, max_drop=0.01, progress=False)
    chosen = next(row for row in report.rows if row["chosen"])
    rows["search_from_w4a8"] = {
        **drop(sim),
        "sites_raised": chosen["raised"],
        "of": sum(d.quantized and d.kind != "bias" and not d.tied_to for d in sim.plan.decisions.values()),
        "weight_bits": round(chosen["weight_bits"], 2),
        "activation_bits": round(chosen["activation_bits"], 2),
        "evaluations": report.summary["evaluations"],
        "met": report.summary["met"],
    }
    return rows


def main() -> None:
    data = load()
    calibration = list(torch.from_numpy(data.calibration_images).split(128))
    demo = measured(
        load_pretrained(), calibration, list(torch.from_numpy(data.test_images).split(500)), data.test_labels
    )
    images, labels = zoo.imagenet_images()
    mobilenet = measured(zoo.mobilenet_v2(), list(images.split(10)), list(images.split(10)), labels.numpy())
    print(json.dumps({"benchmark": "mixed precision, points", "demo": demo, "mobilenet_v2": mobilenet}))


if __name__ == "__main__":
    main()
