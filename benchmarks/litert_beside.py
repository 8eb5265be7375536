"""Files of qsdk for LiteRT beside those of litert-torch and ai-edge-quantizer, int8 throughout on both sides.

They need `pip install litert-torch` (0.10), which brings jax and is no extra of qsdk. Both sides see the same
calibration images; theirs is `recipe.static_wi8_ai8()` with images channels last. One JSON line per network: percent of
10,000 test images that each file gets right in LiteRT (networks that are trained; `ours` is `calibrate`, `after verbs`
`adaround` behind it), dB of the output over that of the float model (others), `bytes` and `xnnpack` (processor time on
one thread, a median over rounds in which both run in turn) as ratios of ours to theirs. Names choose among them.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litert_torch
import numpy as np
import torch
from ai_edge_litert.interpreter import Interpreter
from ai_edge_quantizer import quantizer, recipe
from deployed_networks import NETWORKS as DEPLOYED
from deployed_networks import settled
from litert import ratio_of_times
from ptq_networks import NETWORKS, calibration, trained
from torch import Tensor, nn

import qsdk
from qsdk.demo.data import load

RANDOM = ("ResNet-18", "MobileNetV2", "EfficientNet-B0")
IMAGES = 10_000


def theirs(model: nn.Module, batches: list[Tensor], folder: Path) -> Path:
    """Write a network by their converter, and quantize the file by their quantizer."""
    given = [image[None].permute(0, 2, 3, 1).contiguous() for batch in batches for image in batch]
    whole, made = folder / "float.tflite", folder / "theirs.tflite"
    litert_torch.convert(litert_torch.to_channel_last_io(model, args=[0]), (given[0],)).export(str(whole))
    (signature, edges), *_ = Interpreter(str(whole)).get_signature_list().items()
    tool = quantizer.Quantizer(str(whole))
    tool.load_quantization_recipe(recipe.static_wi8_ai8())
    found = tool.calibrate({signature: [{edges["inputs"][0]: image.numpy()} for image in given]})
    tool.quantize(found).export_model(str(made), overwrite=True)
    return made


class Opened:
    """A file in the interpreter, with XNNPACK's kernels, that takes float images channels first."""

    def __init__(self, path: Path) -> None:
        self.run = Interpreter(str(path), num_threads=1)
        self.run.allocate_tensors()
        (self.given,), (self.made,) = self.run.get_input_details(), self.run.get_output_details()

    def __call__(self, images: Tensor) -> np.ndarray:
        """Return the outputs of images, one at a time."""
        (step, zero), (scale, point) = self.given["quantization"], self.made["quantization"]
        codes = np.clip(np.rint(images.permute(0, 2, 3, 1).numpy() / step) + zero, -128, 127).astype(np.int8)
        made = []
        for image in codes:
            self.run.set_tensor(self.given["index"], image[None])
            self.run.invoke()
            made.append(self.run.get_tensor(self.made["index"])[0])
        return (np.stack(made).astype(np.float32) - point) * scale


def ours(model: nn.Module, batches: list[Tensor], folder: Path) -> dict[str, Path]:
    sim = qsdk.quantize(model, batches[0], qsdk.w8a8().for_dialect("litert"))
    paths = {"ours": folder / "ours.tflite", "after verbs": folder / "verbs.tflite"}
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, paths["ours"], format="tflite", check=False)
    qsdk.adaround(sim, batches, progress=False)
    qsdk.export(sim, paths["after verbs"], format="tflite", check=False)
    return paths


def judged(name: str) -> tuple[nn.Module, list[Tensor], Callable[[Opened], float]]:
    """Return a network, its calibration images, and what judges a file of it."""
    if name in RANDOM:
        network = DEPLOYED[name]
        batches = [network.batch(8, seed)[0] for seed in range(4)]
        torch.manual_seed(0)
        model = settled(network.make(), (batches[0],))
        with torch.no_grad():
            wanted = model(batches[0]).flatten(1).numpy()
        noise = float(np.square(wanted).sum())
        return model, batches, lambda file: float(10 * np.log10(noise / np.square(file(batches[0]) - wanted).sum()))
    data = load()
    images, labels = torch.from_numpy(data.test_images[:IMAGES]), data.test_labels[:IMAGES]
    model = qsdk.demo.network() if name == "demo" else trained(name)
    return model.eval(), calibration(), lambda file: 100 * float((file(images).argmax(1) == labels).mean())


def measured(name: str) -> dict[str, Any]:
    model, batches, judge = judged(name)
    with tempfile.TemporaryDirectory() as held:
        paths = {"theirs": theirs(model, batches, Path(held)), **ours(model, batches, Path(held))}
        files = {key: Opened(path) for key, path in paths.items()}
        kept = {key: round(judge(file), 2) for key, file in files.items()}
        sizes = paths["ours"].stat().st_size / paths["theirs"].stat().st_size
        times = ratio_of_times(files["ours"].run.invoke, files["theirs"].run.invoke)
    unit = "dB" if name in RANDOM else "percent"
    return {"network": name, unit: kept, "bytes": round(sizes, 2), "xnnpack": round(times, 2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for chosen in sys.argv[1:] or ["demo", *NETWORKS, *RANDOM]:
        print(json.dumps(measured(chosen)), flush=True)
