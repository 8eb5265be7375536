"""What `make demo` takes by the clock, and its floor: the same steps of stock libraries, run in the same way.

One JSON line, in seconds of this machine. `demo` is `qsdk demo` as a program of its own. The floor adds up:

- `imports and export`: a program that imports PyTorch and ONNX Runtime and lets PyTorch export the float network;
- `three passes in PyTorch`: the float network over the test images, for the demo's float and simulated rows;
- `Q/DQ session`: ONNX Runtime's over the file;
- `ConvInteger alone`: the products of the integer-only file, without anything between them.

Run it on a quiet machine.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import onnxruntime as ort
import torch
from floors_integer import alone

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained

BATCH = 100  # of the demo
EXPORT = """
import onnxruntime, torch
from qsdk.demo.model import load_pretrained
torch.onnx.export(load_pretrained(), (torch.zeros(2, 1, 28, 28),), "float.onnx", dynamo=True, verbose=False)
"""


def clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return round(time.perf_counter() - start, 2)


def program(*arguments: str, folder: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)


def floor(folder: Path) -> dict[str, float]:
    """Return the seconds of each part of the floor."""
    data, model = load(), load_pretrained()
    batches = torch.from_numpy(data.test_images).split(BATCH)
    sim = qsdk.quantize(model, batches[0][:2])
    qsdk.calibrate(sim, list(torch.from_numpy(data.calibration_images).split(BATCH)), progress=False)
    paths = folder / "model.onnx", folder / "integer.onnx"
    qsdk.export(sim, paths[0])
    qsdk.to_integer(*paths)
    session = ort.InferenceSession(paths[0], providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    products, results, _ = alone(paths[1], {name: batches[0].numpy()}, {"ConvInteger"})
    for result in results:
        products.end(result)
    run = products.run(folder)

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                model(batch)

    forward()
    return {
        "imports and export": clock(program("-c", EXPORT, folder=str(folder))),
        "three passes in PyTorch": clock(lambda: [forward() for _ in range(3)]),
        "Q/DQ session": clock(lambda: [session.run(None, {name: batch.numpy()}) for batch in batches]),
        "ConvInteger alone": clock(lambda: [run() for _ in batches]),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        parts = floor(Path(place))
        shown = "import sys; from qsdk.cli import main; sys.exit(main(['demo']))"
        demo = clock(program("-c", shown, folder=place))
    print(json.dumps({"benchmark": "demo_floor", "demo": demo, "floor": round(sum(parts.values()), 2), **parts}))


if __name__ == "__main__":
    main()
