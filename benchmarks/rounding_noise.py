"""How far two correct runs of one W8A8 simulation drift apart end to end, in dB of SQNR on the logits.

One JSON line. Site by site both agree within 1 LSB; end to end, one flipped rounding in a million grows with depth. So
the simulation against *itself* in another memory format is the yardstick for the simulation against ONNX Runtime.
With scales of four significant binary digits every sum is exact in float32, whatever its order: all three are one.
MobileNetV2's weights and images come from the package registries, as in the tests.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import torch

import qsdk
from onnx_backend.runtime.session import simulation_session
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
import zoo


def sqnr(reference: np.ndarray, other: np.ndarray) -> float | str:
    noise = float(np.square(reference - other).mean())
    return round(10 * float(np.log10(float(np.square(reference).mean()) / noise)), 1) if noise else "identical"


def drift(model: torch.nn.Module, images: torch.Tensor, config: qsdk.QuantConfig) -> dict[str, float | str]:
    sim = qsdk.quantize(model, images[:2], config)
    qsdk.calibrate(sim, [images], progress=False)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        qsdk.export(sim, Path(folder) / "model.onnx")
        session = simulation_session(onnx.load(Path(folder) / "model.onnx"))
        runtime = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
        simulated, in_float = sim(images).numpy(), model(images).numpy()
        again = sim(images.contiguous(memory_format=torch.channels_last)).numpy()
    return {
        "float_to_sim_db": sqnr(in_float, simulated),
        "sim_to_itself_in_channels_last_db": sqnr(simulated, again),
        "sim_to_runtime_db": sqnr(simulated, runtime),
    }


def main() -> None:
    networks = {
        "demo": (load_pretrained(), torch.from_numpy(load().calibration_images[:256])),
        "mobilenet_v2": (zoo.mobilenet_v2(), zoo.imagenet_images()[0]),
    }
    configs = {"w8a8": qsdk.w8a8(), "w8a8, scale_bits=4": qsdk.w8a8().override("*", scale_bits=4)}
    found = {
        name: {called: drift(model, images, config) for called, config in configs.items()}
        for name, (model, images) in networks.items()
    }
    print(json.dumps({"benchmark": "rounding noise end to end", **found}))


if __name__ == "__main__":
    main()
