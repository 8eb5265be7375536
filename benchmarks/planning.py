"""How long opening and planning an ONNX model takes, by its number of nodes: is it linear, and how long for 3,000.

One JSON line: seconds per node at 100, 1,000 and 10,000 nodes in units of the seconds per node at 1,000, and the
seconds for 3,000 nodes (target: under 2).
"""

import gc
import json
import time

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnx_backend.sim import OnnxSim
from qsdk.core.config.config import w8a8

SIZES = (100, 1_000, 3_000, 10_000)
ROUNDS = 5
BLOCK = 20  # nodes


def network(nodes: int) -> ModelProto:
    """Residual blocks of Conv, BatchNorm, SiLU, Concat, a decomposed LayerNorm, shape plumbing and a Linear."""
    rng = np.random.default_rng(0)
    made, stored = [], [numpy_helper.from_array(np.array([-1]), "last"), numpy_helper.from_array(np.array(0), "zero")]
    previous = "x"
    for index in range(nodes // BLOCK):
        block, tensors = _block(index, previous, rng)
        made += block
        stored += tensors
        previous = f"{index}/sum"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8, 16]) for name in ("x", previous)]
    graph = helper.make_graph(made, "network", values[:1], values[1:], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def _block(index: int, source: str, rng: np.random.Generator) -> tuple[list, list]:
    shapes = {
        "w": (8, 8, 3),
        "s": (8,),
        "b": (8,),
        "m": (8,),
        "v": (8,),
        "g": (16,),
        "fc": (16, 16),
        "two": (),
        "e": (),
    }
    tensors = [
        numpy_helper.from_array(np.abs(rng.normal(size=shape)).astype("f"), f"{index}/{n}")
        for n, shape in shapes.items()
    ]

    def node(op: str, inputs: str, output: str, **options):
        read = [name if name in ("last", "zero", "x") or "/" in name else f"{index}/{name}" for name in inputs.split()]
        return helper.make_node(op, read, [f"{index}/{output}"], f"{index}/{op}_{output}", **options)

    nodes = [
        node("Conv", f"{source} w", "conv", pads=[1, 1]),
        node("BatchNormalization", "conv s b m v", "norm"),
        node("Sigmoid", "norm", "gate"),
        node("Mul", "norm gate", "silu"),
        node("ReduceMean", "silu last", "mean"),
        node("Sub", "silu mean", "centred"),
        node("Mul", "centred centred", "square"),
        node("ReduceMean", "square last", "variance"),
        node("Add", "variance e", "safe"),
        node("Sqrt", "safe", "deviation"),
        node("Div", "centred deviation", "normal"),
        node("Mul", "normal g", "scaled"),
        node("MatMul", "scaled fc", "linear"),
        node("Shape", "silu", "shape"),
        node("Reshape", "linear shape", "same"),
        node("Transpose", "same", "turned", perm=[0, 2, 1]),
        node("Softmax", "turned", "soft"),
        node("Transpose", "soft", "back", perm=[0, 2, 1]),
        node("Relu", "back", "relu"),
        node("Add", f"relu {source}", "sum"),
    ]
    return nodes, tensors


def seconds(nodes: int) -> float:
    model = network(nodes)
    found = []
    for _ in range(ROUNDS):
        gc.collect()
        start = time.perf_counter()
        OnnxSim.from_float(model, w8a8())
        found.append(time.perf_counter() - start)
    return min(found)  # the machine is not ours alone


def main() -> None:
    seconds(BLOCK)
    found = {size: seconds(size) for size in SIZES}
    each = {size: took / size for size, took in found.items()}
    print(
        json.dumps(
            {
                "benchmark": "planning",
                "per_node_over_1000": {size: round(each[size] / each[1_000], 2) for size in (100, 1_000, 10_000)},
                "seconds_3000_nodes": round(found[3_000], 3),
                "target_seconds": 2.0,
            }
        )
    )


if __name__ == "__main__":
    main()
