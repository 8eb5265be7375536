"""Sims of ONNX files on another execution provider than the CPU's: `python on_other_provider.py NAME FOLDER NETWORK`.

Run with a build of ONNX Runtime that has the provider first on the path. Prints JSON: the largest relative difference
of a scale from that of the CPU, the nodes that fell back, parity, and how far the simulated outputs are from the CPU's.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "models"))

import numpy as np
import onnxruntime as ort
from foreign_nets import cnn, transformer
from onnx import ModelProto

import qsdk

VERBS = ("seq_mse", "adaround", "gptq")


def on_provider(model: ModelProto, batches: list[Any], name: str, folder: Path) -> dict[str, Any]:
    """Quantize a model on the CPU and on a provider, and compare."""
    sims = []
    for providers in (None, [name, "CPUExecutionProvider"]):
        sim = qsdk.quantize(model, None, qsdk.w8a8(), providers=providers)
        qsdk.calibrate(sim, batches, progress=False)
        sims.append(sim)
    cpu, other = sims
    scales = [np.max(np.abs(other.encodings[site].scale / cpu.encodings[site].scale - 1)) for site in cpu.encodings]
    placed = other.placement().summary
    left, right = (np.concatenate([np.ravel(sim.run(x)[0]) for x in batches]) for sim in sims)
    for verb in VERBS:
        getattr(qsdk, verb)(other, batches, progress=False)
    path = folder / "model.onnx"
    qsdk.export(other, path)
    parity = qsdk.check_parity(other, path, batches, progress=False).summary
    steps = {key: parity[key] for key in ("weights_max_lsb", "activations_max_lsb", "passed")}
    noise = float(((left - right) ** 2).sum() / (right**2).sum())
    return {"scales": float(max(scales)), "fell_back": placed["fell_back"], "nodes": placed["nodes"], **steps} | {
        "noise": noise
    }


def main(name: str, folder: str, network: str) -> None:
    """Print what `on_provider` finds for a network, and the version of ONNX Runtime."""
    model, shape = {"cnn": (cnn, (2, 3, 16, 16)), "transformer": (transformer, (2, 6, 16))}[network]
    rng = np.random.default_rng(0)
    batches = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
    found = on_provider(model(), batches, name, Path(folder))
    print(json.dumps({"onnxruntime": ort.__version__, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
