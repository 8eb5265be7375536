"""Files for LiteRT: codes that differ from their prediction, steps from the sim, bytes, and time in XNNPACK.

One JSON line per network of image_networks.py and token_networks.py in tests/helpers/models; names choose among them.
`differing` counts the codes of all tensors of LiteRT's reference kernels that are not as predicted: the target is 0.
`steps` and `steps in xnnpack` are the largest distance of a site from the sim, each fed with its values: at most 1.
`bytes / onnx` is the size over that of the same sim as a Q/DQ file. `xnnpack / onnxruntime` is the median over rounds
of the ratio of processor times on one thread, both in turn, of one sample: it says something of large networks alone.

`litert_beside.py` compares with the files of litert-torch.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter

import qsdk

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers" / "models"))
from image_networks import NETWORKS, network
from token_networks import token_network

TOKENS = ("vit", "text", "encoder")
ROUNDS, RUNS = 25, 20
TARGET = {"differing": 0, "steps": 1, "steps in xnnpack": 1}


def processor_time(run: Callable[[], object]) -> float:
    start = time.process_time()
    for _ in range(RUNS):
        run()
    return time.process_time() - start


def speed(folder: Path, x: np.ndarray) -> float:
    """Return the time of LiteRT over that of ONNX Runtime, a median of ratios."""
    interpreter = Interpreter(model_path=str(folder / "m.tflite"), num_threads=1)
    interpreter.allocate_tensors()
    for one in interpreter.get_input_details():
        interpreter.set_tensor(one["index"], np.zeros(one["shape"], one["dtype"]))
    session = qsdk.session(folder / "m.onnx", threads=1)
    feeds = {session.get_inputs()[0].name: x[:1]}
    return ratio_of_times(interpreter.invoke, lambda: session.run(None, feeds))


def ratio_of_times(left: Callable[[], object], right: Callable[[], object]) -> float:
    """Return the processor time of one over that of the other, a median of rounds in which both run."""
    ratios = []
    for _ in range(ROUNDS):
        there = processor_time(left)
        ratios.append(there / processor_time(right))
    return statistics.median(ratios)


def measured(name: str) -> dict[str, object]:
    model, x = token_network(name) if name in TOKENS else network(name)
    sim = qsdk.quantize(model, x, qsdk.w8a8().for_dialect("litert"))
    qsdk.calibrate(sim, [x], progress=False)
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        written = qsdk.export(sim, folder / "m.tflite", format="tflite", check=False).summary
        onnx = qsdk.export(sim, folder / "m.onnx", check=False).summary
        found = qsdk.check_parity(sim, folder / "m.tflite", [x], progress=False).summary
        return {
            "network": name,
            "differing": found["differing_from_prediction"],
            "predicted": found["predicted"],
            "steps": found["activations_max_lsb"],
            "steps in xnnpack": found["xnnpack_max_lsb"],
            "bytes / onnx": round(written["bytes"] / onnx["bytes"], 2),
            "xnnpack / onnxruntime": round(speed(folder, x.numpy()), 2),
            "target": TARGET,
        }


if __name__ == "__main__":
    for chosen in sys.argv[1:] or [*NETWORKS, *TOKENS]:
        print(json.dumps(measured(chosen)), flush=True)
