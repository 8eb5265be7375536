"""What converting a Q/DQ model to integers costs, and whether that grows in proportion to its operations.

One JSON line. The network is a chain of convolutions with Relu, additions and SiLU; `seconds` are those of a machine,
`growth` is the time of the network of twice the operations divided by the time of the one before it (2 is linear).
"""

import json
import sys
import time
from pathlib import Path

from onnx import ModelProto

from onnx_backend.integer.convert import convert

sys.path.extend(str(folder) for folder in (Path(__file__).parents[1] / "tests" / "helpers").iterdir())
from integer_models import Net

OPERATIONS = (75, 150, 300, 600)
CHANNELS = 64


def chain(operations: int) -> ModelProto:
    net = Net()
    x = net.qdq(net.input([1, CHANNELS, 16, 16]), 0.031, 117)
    for _ in range(operations // 5):  # Conv, Relu, Sigmoid, Mul, Add
        weight, scale = net.weight((CHANNELS, CHANNELS, 3, 3), 0, low=1e-4, high=1e-3)
        y = net.op("Conv", x, weight, net.bias(CHANNELS, 0.031, scale), pads=[1] * 4)
        y = net.qdq(net.op("Relu", y), 0.027, 0)
        y = net.qdq(net.op("Mul", y, net.op("Sigmoid", y)), 0.029, 3)
        x = net.qdq(net.op("Add", x, y), 0.031, 117)
    net.output(x, [1, CHANNELS, 16, 16])
    return net.model()


def main() -> None:
    seconds = {}
    for target in ("standard", "onnxruntime"):
        for operations in OPERATIONS:
            model = chain(operations)
            best = float("inf")
            for _ in range(3):
                start = time.perf_counter()
                convert(model, target=target)
                best = min(best, time.perf_counter() - start)
            seconds[f"{target} {operations}"] = round(best, 2)
    growth = {
        target: [round(seconds[f"{target} {2 * n}"] / seconds[f"{target} {n}"], 2) for n in OPERATIONS[:-1]]
        for target in ("standard", "onnxruntime")
    }
    row = {"benchmark": "integer_conversion", "seconds": seconds, "growth": growth, "targets": {"standard 300": 5.0}}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
