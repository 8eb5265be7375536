"""The demo: a real network on real data, from float to integer-only, in one table."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

import qsdk
from qsdk.core.arrays import Array
from qsdk.core.atomic_files import write_text
from qsdk.demo.data import DemoData, load
from qsdk.demo.model import load_pretrained
from qsdk.progress import bar

_BATCH = 100  # activations stay in the caches


def run_demo(out: str | os.PathLike[str] | None = None) -> qsdk.Report:
    """Quantize the demo network, export it, prove parity, make it integer-only, and measure every step.

    Args:
        out: folder for the files, created if missing; also gets `results.json`. A new temporary folder if None.

    Returns:
        One row per form of the network: accuracy on the test split, bytes, agreement, seconds.

    Raises:
        ExportError: the folder cannot be written.
    """
    folder = _folder(out)
    data = load()
    model = load_pretrained()
    batches = [torch.from_numpy(batch) for batch in _batches(data.calibration_images)]
    results: dict[str, dict[str, Any]] = {}
    logits: dict[str, Array] = {}

    def measure(name: str, predict: Callable[[Array], Array], size: int) -> None:
        start = time.perf_counter()
        logits[name] = _predict(predict, data.test_images, name)
        seconds = time.perf_counter() - start
        accuracy = float((logits[name].argmax(1) == data.test_labels).mean())
        results[name] = {"accuracy": accuracy, "bytes": size, "seconds": round(seconds, 2)}

    measure("float", _torch_predictor(model), sum(4 * p.numel() for p in model.parameters()))
    sims = {}
    for name, config in (("sim_w8a8", qsdk.w8a8()), ("sim_w4a8", qsdk.w4a8())):
        sims[name] = qsdk.quantize(model, batches[0][:2], config)
        qsdk.calibrate(sims[name], batches)
        measure(name, _torch_predictor(sims[name]), _stored_bytes(sims[name]))
    sim = sims["sim_w8a8"]
    onnx_path, integer_path = folder / "model.onnx", folder / "model.int.onnx"
    qsdk.export(sim, onnx_path)
    parity = qsdk.check_parity(sim, onnx_path, batches[:1]).summary
    qsdk.to_integer(onnx_path, integer_path)
    measure("onnx_w8a8", _onnx_predictor(onnx_path), onnx_path.stat().st_size)
    measure("integer_w8a8", _onnx_predictor(integer_path), integer_path.stat().st_size)
    agreement = _agreement(parity, logits, float(sim.encodings["head:output"].scale[0]))
    facts = {key: parity[key] for key in ("weights_max_lsb", "activations_max_lsb")}
    if out is not None:
        write_text(folder / "results.json", json.dumps({**results, "parity": facts}, indent=1) + "\n")
    return _table(results, agreement, folder, data)


def _folder(out: str | os.PathLike[str] | None) -> Path:
    if out is None:
        return Path(tempfile.mkdtemp(prefix="qsdk-demo-"))
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise qsdk.ExportError(
            f"cannot create {folder}: {error.strerror}; choose a folder that can be written"
        ) from error
    return folder


def _batches(images: Array) -> Iterator[Array]:
    for start in range(0, len(images), _BATCH):
        yield images[start : start + _BATCH]


def _predict(predict: Callable[[Array], Array], images: Array, title: str) -> Array:
    batches = list(_batches(images))
    return np.concatenate([predict(batch) for batch in bar(batches, desc=title, leave=False)])


def _torch_predictor(model: nn.Module | Any) -> Callable[[Array], Array]:
    def predict(images: Array) -> Array:
        with torch.no_grad():
            logits: Array = model(torch.from_numpy(images)).numpy()
        return logits

    return predict


def _onnx_predictor(path: Path) -> Callable[[Array], Array]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def predict(images: Array) -> Array:
        return np.asarray(session.run(None, {name: images})[0])

    return predict


def _stored_bytes(sim: Any) -> int:
    """Return the bytes of weights and biases, stored as in the sim's plan, with their scales."""
    total = 0
    for site, decision in sim.plan.decisions.items():
        if decision.kind in ("weight", "bias"):
            bits = decision.spec.dtype.bits if decision.spec is not None else 32
            total += -(-int(np.prod(decision.shape)) * bits // 8)
            total += 4 * sim.encodings[site].scale.size if decision.quantized else 0
    return total


def _agreement(parity: Any, logits: dict[str, Array], scale: float) -> dict[str, str]:
    """Return how well each form agrees with the one it was made from. Free-running, rounding noise compounds."""

    def free_running(left: str, right: str) -> str:
        steps = np.rint(np.abs(logits[left] - logits[right]) / scale)
        return f"{(steps <= 1).mean():.2%} of logits within 1 LSB of {right}, largest {int(steps.max())}"

    site_by_site = f"weights {parity['weights_max_lsb']:.0f} LSB, activations {parity['activations_max_lsb']:.0f} LSB"
    return {
        "onnx_w8a8": f"site by site: {site_by_site}",
        "integer_w8a8": free_running("integer_w8a8", "sim_w8a8"),
    }


def _table(results: dict[str, dict[str, Any]], agreement: dict[str, str], folder: Path, data: DemoData) -> qsdk.Report:
    titles = {
        "float": "float",
        "sim_w8a8": "simulated W8A8",
        "sim_w4a8": "simulated W4A8",
        "onnx_w8a8": "ONNX W8A8 in ONNX Runtime",
        "integer_w8a8": "integer-only W8A8",
    }
    rows = [
        {
            "network": titles[name],
            "accuracy": f"{100 * facts['accuracy']:.2f} %",
            "bytes": facts["bytes"],
            "seconds": facts["seconds"],
            "agreement": agreement.get(name, ""),
        }
        for name, facts in results.items()
    ]
    title = f"Fashion-MNIST, {len(data.test_labels)} test images"
    return qsdk.Report(title, rows, {"files in": str(folder)})
