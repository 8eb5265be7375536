"""What a function costs as one kernel of ONNX Runtime, over the same nodes one by one (docs/guides/fast.md).

One JSON line per row: `time` is the ratio of the shortest of many interleaved runs of processor time, one thread, in
ordinary sessions. Exported files are measured beside themselves without what export inserted to keep the function
whole or apart (`one kernel`), or beside the pure form of `dialect="onnx"` (`folded`: weights that the session
dequantizes once, masked scores without denormal numbers); graphs by hand compare a kernel of the runtime with the
nodes that export writes instead (`kernel`).
"""

import json
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import qsdk

ROUNDS = 60
Feed = dict[str, np.ndarray]


class GeluByErf(nn.Module):
    """X times the normal distribution function."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute it."""
        return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


class GeluByTanh(nn.Module):
    """Its approximation by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute it."""
        return 0.5 * x * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


class RmsNorm(nn.Module):
    """X over the root of its mean square, with gains."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(384) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Compute it as transformers does."""
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Recurrent(nn.Module):
    """An LSTM's outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(128, 256, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Compute it."""
        return self.cell(x)[0]


class Masked(nn.Module):
    """Shares of scores, of which those of later tokens are hidden."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute it for [heads, tokens, tokens]."""
        return torch.softmax(x + torch.full((64, 64), -torch.inf).triu(1), -1)


class Joined(nn.Module):
    """Joins four enlarged images and reads them by a convolution, as SegFormer's head does."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(3, 64, 8, stride=8) for _ in range(4))
        self.last = nn.Conv2d(256, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute it."""
        large = [nn.functional.interpolate(branch(x), scale_factor=4.0, mode="bilinear") for branch in self.branches]
        return self.last(torch.cat(large, 1))


def exported(model: nn.Module, example: Tensor, config: qsdk.QuantConfig, path: Path, dialect: str) -> onnx.ModelProto:
    sim = qsdk.quantize(model.eval(), example, config)
    qsdk.calibrate(sim, [example], progress=False)
    qsdk.export(sim, path, dialect=dialect, check=False)
    return onnx.load(path)


def one_by_one(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a file without the Sums of one tensor that export puts behind pairs."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    moved = {n.output[0]: n.input[0] for n in plain.graph.node if n.op_type == "Sum" and len(n.input) == 1}
    kept = [node for node in plain.graph.node if node.output[0] not in moved]
    for node in kept:
        node.input[:] = [moved.get(name, name) for name in node.input]
    del plain.graph.node[:]
    plain.graph.node.extend(kept)
    return plain


def graph(nodes: list[onnx.NodeProto], stored: dict[str, np.ndarray], shape: list[int]) -> onnx.ModelProto:
    """Return a model from x and z of one shape to y."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "z")]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    values = [numpy_helper.from_array(value, name) for name, value in stored.items()]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph(nodes, "graph", inputs, outputs, values), opset_imports=opsets, ir_version=10
    )


def skip_norm(*, apart: bool) -> onnx.ModelProto:
    """Return Add and LayerNormalization, which the runtime joins, or with a Sum of one tensor between them."""
    stored = {name: np.random.default_rng(0).normal(size=384).astype(np.float32) for name in ("scale", "bias")}
    between = [helper.make_node("Sum", ["s"], ["t"])] if apart else []
    norm = helper.make_node("LayerNormalization", ["t" if apart else "s", "scale", "bias"], ["y"])
    return graph([helper.make_node("Add", ["x", "z"], ["s"]), *between, norm], stored, [1, 64, 384])


def rotary(*, whole: bool) -> onnx.ModelProto:
    """Return RotaryEmbedding of 8 heads, 64 positions, 64 channels, or the nodes that stand for it."""
    angles = np.outer(np.arange(64), 1e4 ** (-np.arange(32) / 32)).astype(np.float32)
    cos, sin = np.cos(angles), np.sin(angles)
    add = helper.make_node("Add", ["r", "z"], ["y"])
    if whole:
        node = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["r"])
        return graph([node, add], {"cos": cos[None], "sin": sin[None]}, [1, 8, 64, 64])
    turned = {"cos": np.concatenate([cos, cos], -1), "sin": np.concatenate([sin, sin], -1)}
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=-1, num_outputs=2),
        helper.make_node("Neg", ["b"], ["c"]),
        helper.make_node("Concat", ["c", "a"], ["half"], axis=-1),
        helper.make_node("Mul", ["x", "cos"], ["p"]),
        helper.make_node("Mul", ["half", "sin"], ["q"]),
        helper.make_node("Add", ["p", "q"], ["r"]),
    ]
    return graph([*nodes, add], turned, [1, 8, 64, 64])


def session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ratio(one: onnx.ModelProto, other: onnx.ModelProto, rows: int = 64) -> float:
    """Return the shortest time of one model over another's, which computes nearly the same, for a number of rows."""
    runs = [session(one), session(other)]
    draw = np.random.default_rng(1)
    shapes = {value.name: [n if isinstance(n, int) else rows for n in value.shape] for value in runs[0].get_inputs()}
    feed = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    results = [run.run(None, feed)[0] for run in runs]
    assert np.abs(results[0] - results[1]).max() <= 0.05 * np.abs(results[1]).max(), "they compute something else"
    least = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for at, run in enumerate(runs):
            run.run(None, feed)  # warm caches
            start = time.process_time()
            for _ in range(5):
                run.run(None, feed)
            least[at] = min(least[at], time.process_time() - start)
    return round(least[0] / least[1], 2)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {"one kernel": {}, "folded": {}, "kernel": {}}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.onnx"
        for title, model in {"SiLU": nn.SiLU(), "GELU by erf": GeluByErf(), "GELU by tanh": GeluByTanh()}.items():
            whole = exported(model, torch.randn(64, 1024), qsdk.w8a8(), path, "onnxruntime")
            found["one kernel"][title] = ratio(whole, one_by_one(whole))
        whole = exported(RmsNorm(), torch.randn(64, 384), qsdk.w8a8(), path, "onnxruntime")
        found["one kernel"]["RMSNorm"] = ratio(whole, one_by_one(whole))
        whole = exported(nn.Softmax(-1), torch.randn(768, 64), qsdk.w8a8(), path, "onnxruntime")
        found["one kernel"]["Softmax of codes, in floats"] = ratio(whole, one_by_one(whole), rows=768)
        folded = {
            "Softmax of masked scores": (Masked(), torch.randn(12, 64, 64), qsdk.w8a8()),
            "GroupNorm, 8 channels a group": (nn.GroupNorm(32, 256), torch.randn(1, 256, 32, 32), qsdk.w8a8()),
            "GroupNorm, a channel a group": (nn.GroupNorm(256, 256), torch.randn(1, 256, 32, 32), qsdk.w8a8()),
            "Concat of floats": (Joined(), torch.randn(1, 3, 64, 64), qsdk.w8a8().for_dialect("onnxruntime")),
            "LSTM": (Recurrent(), torch.randn(1, 16, 128), qsdk.w8a8()),
            "Linear in blocks of 4 bits": (nn.Linear(512, 512), torch.randn(8, 512), qsdk.w4a8(block_size=32)),
        }
        for title, (model, example, config) in folded.items():
            files = [exported(model, example, config, path, dialect) for dialect in ("onnxruntime", "onnx")]
            found["folded"][title] = ratio(*files, rows=len(example))
    found["kernel"]["SkipLayerNormalization"] = ratio(skip_norm(apart=False), skip_norm(apart=True))
    found["kernel"]["RotaryEmbedding"] = ratio(rotary(whole=True), rotary(whole=False))
    for kind, rows in found.items():
        for title, value in rows.items():
            print(json.dumps({"benchmark": "fused_functions", "form": kind, "function": title, "time": value}))


if __name__ == "__main__":
    main()
