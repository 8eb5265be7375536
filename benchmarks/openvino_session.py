"""OpenVINO's default session of Linears with stored integers for weights, beside the session that qsdk opens.

One JSON line. Per config of two Linears: the SQNR in dB of the outputs to the simulation, in a session with OpenVINO's
own properties (`default`), with floats in float32 alone (`float32`), and as qsdk runs files (`as_written`): without the
quantization to 8 bits, in groups of 32, that OpenVINO adds on processors with VNNI. More than 200 dB is exact.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import openvino
import torch
from torch import nn

import qsdk
from onnx_backend.runtimes.openvino import AS_WRITTEN

CONFIGS = {
    "w8a8": qsdk.w8a8(),
    "w4a8": qsdk.w4a8(),
    "w8a16": qsdk.w8a16(),
    "w4a16, blocks of 32": qsdk.w4a16(block_size=32),
    "int8 weights alone": qsdk.w8a8().override("*", activation="float32"),
}
SESSIONS = {
    "default": {},
    "float32": {"INFERENCE_PRECISION_HINT": "f32"},
    "as_written": dict(AS_WRITTEN),
}


def decibels(wanted: np.ndarray, found: np.ndarray) -> float:
    noise = float(np.square(found - wanted).sum())
    return round(10 * np.log10(float(np.square(wanted).sum()) / max(noise, 1e-24)), 1)


def main() -> None:
    torch.manual_seed(0)
    x = 3 * torch.randn(64, 256)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)).eval()
    found, core = {}, openvino.Core()
    for name, config in CONFIGS.items():
        sim = qsdk.quantize(model, x, config.for_dialect("openvino"))
        qsdk.calibrate(sim, [x], progress=False)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            qsdk.export(sim, path, dialect="openvino")
            wanted = sim(x).detach().numpy()
            sessions = {key: core.compile_model(path, "CPU", options) for key, options in SESSIONS.items()}
            found[name] = {
                key: decibels(wanted, next(iter(run([x.numpy()]).values()))) for key, run in sessions.items()
            }
    print(json.dumps({"benchmark": "openvino_session", **found}))


if __name__ == "__main__":
    main()
