"""Layers in ONNX Runtime: the default session of the exported file, and what `to_integer` makes of it, over float.

One JSON line per network: Linear layers of several shapes and batches, recurrent cells that the exporter unrolls,
LSTM and GRU, convolutions with a LeakyRelu or PRelu. `qdq` is the exported file in the runtime's default session,
`unsigned` that of `config.for_dialect("onnxruntime")`, `exact` the first with the session option that keeps processors
without VNNI from saturating, `pure` the file in dialect `onnx` (null where it does not load or run), `standard` and
`onnxruntime` are the integer-only targets. Every round times all sessions in turn, on one thread; ratios of processor
time to the float session are taken per round, and their median is given. Name networks to measure only those.
"""

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from torch import nn

import qsdk

ROUNDS = 15
LONG_ENOUGH = 0.01  # seconds of a measurement, reached by repeating short runs
TARGETS = {"standard": {}, "onnxruntime": {"target": "onnxruntime", "weights": "signed"}}
#: Recurrent layers whose length is open, so that their steps are a Scan in the integer-only file.
OPEN = tuple(f"{kind} {sizes}, open length" for sizes in ("64-128", "80-512") for kind in ("lstm", "gru"))
Shape = tuple[int, ...]


class Layered(nn.Module):
    """A recurrent layer and a Linear on every step, [N, T, features]."""

    def __init__(self, kind: str, features: int, hidden: int) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives [N, T, 10]."""
        return self.head(self.layer(x)[0])


class Unrolled(nn.Module):
    """A recurrent cell over the steps of [N, T, features], which the exporter unrolls."""

    def __init__(self, kind: str, features: int, hidden: int) -> None:
        super().__init__()
        self.cell, self.hidden = getattr(nn, kind)(features, hidden), hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gives the last hidden state, [N, hidden]."""
        state = x.new_zeros(x.shape[0], self.hidden)
        memory = state
        for step in x.unbind(1):
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(step, (state, memory))
            else:
                state = self.cell(step, state)
        return state


def linears(width: int, inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))


def convolutions(activation: Callable[[], nn.Module]) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), activation()]
    for _ in range(4):
        parts += [nn.Conv2d(32, 32, 3, padding=1), activation()]
    return nn.Sequential(*parts)


#: name -> network, shape of its input, integer targets that are measured
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Shape, tuple[str, ...]]] = {
    "linear 512-512, 1 row": (lambda: linears(512, 512), (1, 512), ("onnxruntime",)),
    "linear 512-512, 64 rows": (lambda: linears(512, 512), (64, 512), ("onnxruntime",)),
    "linear 768-3072, 16 rows": (lambda: linears(768, 3072), (16, 768), ("onnxruntime",)),
    "linear 64-64, 64 rows": (lambda: linears(64, 64), (64, 64), ("onnxruntime",)),
    "lstm cell 400-1024, 8 steps": (lambda: Unrolled("LSTMCell", 400, 1024), (1, 8, 400), ("onnxruntime",)),
    "gru cell 400-1024, 8 steps": (lambda: Unrolled("GRUCell", 400, 1024), (1, 8, 400), ("onnxruntime",)),
    "lstm 64-128, 16 steps": (lambda: Layered("LSTM", 64, 128), (1, 16, 64), tuple(TARGETS)),
    "gru 64-128, 16 steps": (lambda: Layered("GRU", 64, 128), (1, 16, 64), tuple(TARGETS)),
    OPEN[0]: (lambda: Layered("LSTM", 64, 128), (1, 16, 64), ("standard",)),
    OPEN[1]: (lambda: Layered("GRU", 64, 128), (1, 16, 64), ("standard",)),
    OPEN[2]: (lambda: Layered("LSTM", 80, 512), (1, 30, 80), ("standard",)),
    OPEN[3]: (lambda: Layered("GRU", 80, 512), (1, 30, 80), ("standard",)),
    "conv relu": (lambda: convolutions(nn.ReLU), (1, 3, 56, 56), ("onnxruntime",)),
    "conv leaky relu": (lambda: convolutions(lambda: nn.LeakyReLU(0.1)), (1, 3, 56, 56), tuple(TARGETS)),
    "conv prelu": (lambda: convolutions(lambda: nn.PReLU(32)), (1, 3, 56, 56), tuple(TARGETS)),
}


def session(path: Path, *, exact: bool = False) -> ort.InferenceSession | None:
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
    try:
        return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception:  # the runtime's own exception types are private
        return None


def written(
    make: Callable[[], nn.Module], shape: Shape, targets: tuple[str, ...], folder: Path, *, is_open: bool = False
) -> dict[str, Path]:
    """Write the float file, the Q/DQ file and its integer-only forms, with an open second axis if that is wanted."""
    sizes = {"x": {1: torch.export.Dim("length", min=2, max=512)}} if is_open else None
    torch.manual_seed(0)
    model, batches = make().eval(), [torch.randn(shape) for _ in range(4)]
    paths = {name: folder / f"{name}.onnx" for name in ("float", "qdq", "unsigned", "pure", *targets)}
    options = {"dynamo": True, "opset_version": 21, "external_data": False, "verbose": False}
    torch.onnx.export(model, (batches[0],), paths["float"], dynamic_shapes=sizes, **options)
    sim = qsdk.quantize(model, batches[0], dynamic_shapes=sizes)
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, paths["qdq"])
    qsdk.export(sim, paths["pure"], dialect="onnx")
    unsigned = qsdk.quantize(model, batches[0], qsdk.w8a8().for_dialect("onnxruntime"), dynamic_shapes=sizes)
    qsdk.calibrate(unsigned, batches, progress=False)
    qsdk.export(unsigned, paths["unsigned"])
    for target in targets:
        qsdk.to_integer(paths["qdq"], paths[target], data=[batches[0].numpy()], progress=False, **TARGETS[target])
    return paths


def does_run(opened: ort.InferenceSession, x: np.ndarray) -> bool:
    """Return False where a session loads but cannot run, as some do with `session.x64quantprecision`."""
    try:
        opened.run(None, {opened.get_inputs()[0].name: x})
    except Exception:  # the runtime's own exception types are private
        return False
    return True


def ratios(paths: dict[str, Path], shape: Shape) -> dict[str, float | None]:
    opened = {name: session(path) for name, path in paths.items()} | {"exact": session(paths["qdq"], exact=True)}
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    runs = {name: one for name, one in opened.items() if one is not None and does_run(one, x)}
    feeds = {name: {one.get_inputs()[0].name: x} for name, one in runs.items()}

    def seconds(name: str, times: int) -> float:
        start = time.process_time()
        for _ in range(times):
            runs[name].run(None, feeds[name])
        return (time.process_time() - start) / times

    seconds("float", 3)
    times = max(1, round(LONG_ENOUGH / seconds("float", 3)))
    rows: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        taken = {name: seconds(name, times) for name in runs}
        for name in runs:
            rows[name].append(taken[name] / taken["float"])
    medians = {name: round(statistics.median(found), 2) for name, found in rows.items() if name != "float"}
    return {name: medians.get(name) for name in opened if name != "float"}


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    for name, (make, shape, targets) in NETWORKS.items():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            paths = written(make, shape, targets, Path(place), is_open=name in OPEN)
            found = ratios(paths, shape)
        print(json.dumps({"benchmark": "onnx_layers", name: found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
