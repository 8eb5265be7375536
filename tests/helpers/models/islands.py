"""One network with the same owners at both doors, for tests of what a sim of either door does with its own state."""

import copy
import functools

import numpy as np
import onnxruntime as ort
import torch
from onnx import helper
from qdq_models import make_model
from torch import Tensor, nn
from torch_models import randomized

import qsdk
from qsdk import QuantConfig, QuantSim, calibrate, load, quantize, w8a8

DOORS = ("torch", "onnx")
RNG = np.random.default_rng(5)
BATCHES = [RNG.normal(size=(4, 3, 6, 6)).astype(np.float32) for _ in range(2)]


class Islands(nn.Module):
    """Conv-BN-ReLU twice, their Concat pooled, then two Linear: [N, 3, 6, 6] to [N, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2, self.relu2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.fc1, self.relu3, self.fc2 = nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.bn1(self.conv1(x)))
        z = self.relu2(self.bn2(self.conv2(y)))
        return self.fc2(self.relu3(self.fc1(self.flat(self.pool(torch.cat([y, z], 1))))))


@functools.cache
def module() -> nn.Module:
    torch.manual_seed(3)
    return randomized(Islands())


def onnx_model():
    """The same network as a float ONNX model."""
    node, norm = helper.make_node, ("weight", "bias", "running_mean", "running_var")
    nodes = []
    for k, source in ((1, "x"), (2, "y1")):
        nodes += [
            node("Conv", [source, f"conv{k}.weight", f"conv{k}.bias"], [f"c{k}"], f"conv{k}", pads=[1] * 4),
            node("BatchNormalization", [f"c{k}", *(f"bn{k}.{name}" for name in norm)], [f"b{k}"], f"bn{k}"),
            node("Relu", [f"b{k}"], [f"y{k}"], f"relu{k}"),
        ]
    nodes += [
        node("Concat", ["y1", "y2"], ["cat"], "cat.0", axis=1),
        node("GlobalAveragePool", ["cat"], ["p"], "pool"),
        node("Flatten", ["p"], ["f"], "flat"),
        node("Gemm", ["f", "fc1.weight", "fc1.bias"], ["g1"], "fc1", transB=1),
        node("Relu", ["g1"], ["r3"], "relu3"),
        node("Gemm", ["r3", "fc2.weight", "fc2.bias"], ["out"], "fc2", transB=1),
    ]
    stored = {name: value.numpy() for name, value in module().state_dict().items() if value.is_floating_point()}
    return make_model(nodes, {"x": ["n", 3, 6, 6]}, {"out": ["n", 5]}, stored)


@functools.cache
def _calibrated(door: str, config: str, fold: bool):
    return _made(door, getattr(qsdk, config)(), fold)


def _made(door: str, config: QuantConfig, fold: bool, *, data: bool = True):
    model, example = (module(), torch.from_numpy(BATCHES[0])) if door == "torch" else (onnx_model(), None)
    sim = quantize(model, example, config, fold_batch_norm=fold)
    if data:
        calibrate(sim, batches(door), progress=False)
    return sim


def sim_at(door: str, config: QuantConfig | str = "w8a8", *, fold: bool = False, data: bool = True):
    """A sim of the network, calibrated unless `data` says otherwise, with its BatchNorms left unless `fold`."""
    if not isinstance(config, str) or not data:
        return _made(door, w8a8() if isinstance(config, str) else config, fold, data=data)
    sim = _calibrated(door, config, fold)
    if door == "torch":
        return copy.deepcopy(sim)
    fresh = _made(door, sim.config, fold, data=False)
    fresh.restore(sim.snapshot())
    return fresh


def batches(door: str):
    return [torch.from_numpy(batch) for batch in BATCHES] if door == "torch" else list(BATCHES)


def outputs(sim) -> np.ndarray:
    """What a sim of either door gives for the first batch."""
    found = sim.run(torch.from_numpy(BATCHES[0]) if isinstance(sim, QuantSim) else BATCHES[0])
    return found.numpy() if isinstance(found, Tensor) else found[0]


def in_runtime(path) -> np.ndarray:
    """What plain ONNX Runtime gives for the first batch."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: BATCHES[0]})[0]


def everything(sim):
    """All that a failed verb must leave as it was, but for the weights."""
    state = sim.snapshot()
    flags = {site: encoding.frozen for site, encoding in state.own.items()}
    return state.config, state.plan, dict(state.own), flags


def loaded(path, door: str):
    return load(path, Islands() if door == "torch" else None)


def dtypes(sim) -> dict[str, str]:
    """Site -> the name of the dtype that the plan gives it."""
    return {site: "float32" if d.spec is None else d.spec.dtype.name for site, d in sim.plan.decisions.items()}
