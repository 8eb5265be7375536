"""Accuracy with unfused BatchNorms in float16 beside integer layers, and what `mixed_precision` finds; in points.

One JSON line. The demo network on its 10,000 test images; MobileNetV2 calibrated on half of the 20 images that the
tests use and measured on the others, where one image is ten points, so the cosine similarity to float stands beside.
Targets: W8A8 within 1 point of float, W4A8 (weights rounded by AdaRound) within 3. The search starts from W4A8 on the
demo network, and from W8A8 with float16 norms on MobileNetV2. `python benchmarks/mixed_precision.py search` does the
search on MobileNetV2 alone, from W8A8.
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

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo

Predict = Callable[[Tensor], Tensor]
Drop = Callable[[object], dict[str, float]]


def logits(predict: Predict, batches: list[Tensor]) -> np.ndarray:
    with torch.no_grad():
        return np.concatenate([predict(batch).numpy() for batch in batches])


def with_float_norms(config: qsdk.QuantConfig) -> qsdk.QuantConfig:
    return config.skip("*", dtype="float16", op_type="BatchNormalization")


def measured(
    model: nn.Module,
    calibration: list[Tensor],
    test: list[Tensor],
    labels: np.ndarray,
    search_from: qsdk.QuantConfig,
    max_drop: float,
) -> dict[str, object]:
    exact = logits(model, test)
    float_points = 100 * float((exact.argmax(1) == labels).mean())

    def drop(sim: object) -> dict[str, float]:
        found = logits(sim, test)
        cosine = float((exact * found).sum() / (np.linalg.norm(exact) * np.linalg.norm(found)))
        points = float_points - 100 * float((found.argmax(1) == labels).mean())
        return {"points_below_float": round(points, 2), "cosine": round(cosine, 4)}

    rows: dict[str, object] = {"float": round(float_points, 2)}
    for name, config in (("w8a8", qsdk.w8a8()), ("w4a8", qsdk.w4a8())):
        sim = qsdk.quantize(model, calibration[0][:2], with_float_norms(config), fold_batch_norm=False)
        qsdk.calibrate(sim, calibration, progress=False)
        rows[f"{name}_float16_norms"] = drop(sim)
        if name == "w4a8":
            qsdk.adaround(sim, calibration, progress=False)
            rows["w4a8_float16_norms_adaround"] = drop(sim)
    rows["search"] = searched(model, calibration, search_from, drop, max_drop)
    return rows


def searched(
    model: nn.Module, calibration: list[Tensor], config: qsdk.QuantConfig, drop: Drop, max_drop: float
) -> dict[str, object]:
    """What `mixed_precision` raises so that the labels are the float model's on all but `max_drop` of the data."""
    sim = qsdk.quantize(model, calibration[0][:2], config, fold_batch_norm=not config.rules)
    qsdk.calibrate(sim, calibration, progress=False)
    candidates = sum(d.quantized and d.kind != "bias" and not d.tied_to for d in sim.plan.decisions.values())
    before, exact = drop(sim), logits(model, calibration).argmax(1)

    def metric(current: object) -> float:
        return float((logits(current, calibration).argmax(1) == exact).mean())

    report = qsdk.mixed_precision(sim, calibration[:2], metric, max_drop=max_drop, progress=False)
    chosen = next(row for row in report.rows if row["chosen"])
    return {
        "before": before,
        "after": drop(sim),
        "sites_raised": chosen["raised"],
        "of": candidates,
        "weight_bits": round(chosen["weight_bits"], 2),
        "activation_bits": round(chosen["activation_bits"], 2),
        "evaluations": report.summary["evaluations"],
        "met": report.summary["met"],
    }


def main() -> None:
    images, labels = zoo.imagenet_images()
    seen, unseen = [images[::2]], [images[1::2]]
    if "search" in sys.argv:
        exact = logits(mobilenet := zoo.mobilenet_v2(), unseen)

        def cosine(sim: object) -> dict[str, float]:
            found = logits(sim, unseen)
            return {"cosine": round(float((exact * found).sum() / np.linalg.norm(exact) / np.linalg.norm(found)), 4)}

        found = {"mobilenet_v2": {"search": searched(mobilenet, seen, qsdk.w8a8(), cosine, 0.1)}}
        print(json.dumps({"benchmark": "mixed precision, points", **found}))
        return
    data = load()
    calibration = list(torch.from_numpy(data.calibration_images).split(128))
    test = list(torch.from_numpy(data.test_images).split(500))
    demo = measured(load_pretrained(), calibration, test, data.test_labels, qsdk.w4a8(), 0.01)
    config = with_float_norms(qsdk.w8a8())
    mobilenet_v2 = measured(zoo.mobilenet_v2(), seen, unseen, labels[1::2].numpy(), config, 0.1)
    print(json.dumps({"benchmark": "mixed precision, points", "demo": demo, "mobilenet_v2": mobilenet_v2}))


if __name__ == "__main__":
    main()
