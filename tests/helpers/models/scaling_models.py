"""Small networks with the same weights at both doors, for tests of equivalent scalings."""

import numpy as np
import torch
import torch.nn.functional as F
from onnx import helper
from qdq_models import make_model
from torch import Tensor, nn
from torch_models import seeded

from onnx_backend.data_passes.passes import with_sites_as_outputs
from onnx_backend.runtime.session import simulation_session
from qsdk import QuantConfig, quantize


class Chain(nn.Module):
    """Conv, activation, depthwise Conv, activation, Conv: [N, 3, 6, 6] to [N, 5, 6, 6]."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.act1 = nn.Conv2d(3, 6, 3, padding=1), activation()
        self.middle, self.act2 = nn.Conv2d(6, 6, 3, padding=1, groups=6), activation()
        self.last = nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act2(self.middle(self.act1(self.first(x)))))


class Block(nn.Module):
    """A decoder block without masks: norm, attention of 2 heads, norm, gated feed-forward; [N, 4, 8] to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).reshape(-1, 4, 2, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.5, -1)
        x = x + self.o(torch.matmul(scores, v).transpose(1, 2).reshape(-1, 4, 8))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def uneven(model: nn.Module, seed: int = 0) -> nn.Module:
    """The model in eval mode, its channels of very different size and its parameters all their own."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False):
            by = torch.exp(torch.empty(tensor.shape[0]).uniform_(-2, 2, generator=generator))
            tensor.data.normal_(0, 0.3, generator=generator)
            tensor.data.mul_(by.reshape(-1, *[1] * (tensor.ndim - 1)))
            if name == "bias":
                tensor.data.normal_(0, 0.3, generator=generator)
    return model.eval()


def chain_onnx(model: Chain):
    """The same as ONNX; a ReLU6 is a Clip with bounds of its own."""
    node, stored, nodes = helper.make_node, {}, []
    stored.update({name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()})
    six = isinstance(model.act1, nn.ReLU6)
    source = "x"
    for owner, act, more in (("first", "act1", {"pads": [1] * 4}), ("middle", "act2", {"pads": [1] * 4, "group": 6})):
        nodes.append(node("Conv", [source, f"{owner}.weight", f"{owner}.bias"], [f"{owner}_y"], owner, **more))
        bounds = [f"{act}.low", f"{act}.high"] if six else []
        stored.update({name: np.float32(value) for name, value in zip(bounds, (0, 6), strict=False)})
        nodes.append(node("Clip" if six else "Relu", [f"{owner}_y", *bounds], [f"{act}_y"], act))
        source = f"{act}_y"
    nodes.append(node("Conv", [source, "last.weight", "last.bias"], ["y"], "last"))
    return make_model(nodes, {"x": ["n", 3, 6, 6]}, {"y": ["n", 5, 6, 6]}, stored)


def block_onnx(model: Block):
    """The same as ONNX, with weights [in, out]."""
    node, nodes = helper.make_node, []
    stored = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    stored = {name: np.ascontiguousarray(value.T if value.ndim == 2 else value) for name, value in stored.items()} | {
        "half": np.float32(0.5),
        "heads": np.array([-1, 4, 2, 4]),
        "joined": np.array([-1, 4, 8]),
    }

    def linear(name, source):
        nodes.append(node("MatMul", [source, f"{name}.weight"], [f"{name}_m"], name))
        nodes.append(node("Add", [f"{name}_m", f"{name}.bias"], [f"{name}_y"], f"{name}/add"))
        return f"{name}_y"

    def norm(name, source):
        inputs = [source, f"{name}.weight", f"{name}.bias"]
        nodes.append(node("LayerNormalization", inputs, [f"{name}_y"], name, axis=-1))
        return f"{name}_y"

    def op(type, inputs, output, **more):
        nodes.append(node(type, inputs, [output], output, **more))
        return output

    y = norm("norm1", "x")
    heads = {}
    for name, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        split = op("Reshape", [linear(name, y), "heads"], f"{name}_split")
        heads[name] = op("Transpose", [split], f"{name}_heads", perm=perm)
    scores = op("Mul", [op("MatMul", [heads["q"], heads["k"]], "product"), "half"], "scores")
    mixed = op("MatMul", [op("Softmax", [scores], "probabilities", axis=-1), heads["v"]], "mixed")
    joined = op("Reshape", [op("Transpose", [mixed], "turned", perm=[0, 2, 1, 3]), "joined"], "attention")
    x = op("Add", ["x", linear("o", joined)], "x1")
    y = norm("norm2", x)
    gate = linear("gate", y)
    silu = op("Mul", [gate, op("Sigmoid", [gate], "sigmoid")], "silu")
    op("Add", [x, linear("down", op("Mul", [silu, linear("up", y)], "gated"))], "y")
    return make_model(nodes, {"x": ["n", 4, 8]}, {"y": ["n", 4, 8]}, stored)


DOORS = ("torch", "onnx")


def sim_at(door: str, model: nn.Module, config: QuantConfig):
    """A sim of a Chain or a Block."""
    example = inputs(model, 2)
    if door == "torch":
        return quantize(model, example, config)
    made = chain_onnx(model) if isinstance(model, Chain) else block_onnx(model)
    return quantize(made, None, config)


def inputs(model: nn.Module, count: int, seed: int = 0) -> Tensor:
    """What a Chain or a Block takes."""
    return seeded(count, *((3, 6, 6) if isinstance(model, Chain) else (4, 8)), seed=seed)


def data(door: str, model: nn.Module, batches: int = 2) -> list:
    """Batches of 8 in the form that a door takes."""
    found = [inputs(model, 8, seed) for seed in range(batches)]
    return found if door == "torch" else [x.numpy() for x in found]


def in_float(sim, x: Tensor) -> np.ndarray:
    """The output of a sim's float model."""
    if hasattr(sim, "model"):
        with sim.float_phase() as model, torch.no_grad():
            return model(x).numpy()
    model, tensors = with_sites_as_outputs(sim.traced().model)
    last = next(name for name, site in tensors.items() if site == final_site(sim))
    return simulation_session(model).run([last], {"x": x.numpy()})[0]


def final_site(sim) -> str:
    """The site of the output."""
    return sim.graph.tensors[sim.graph.outputs[0]].site


def simulated(sim, x: Tensor) -> np.ndarray:
    """The output of a sim."""
    return sim.run(x).numpy() if hasattr(sim, "model") else sim.run(x.numpy())[0]


def stored(sim, site: str) -> np.ndarray:
    """The values at a weight or bias site, output channels first."""
    found = sim.stored_floats([site])[site]
    return found if hasattr(sim, "model") or found.ndim != 2 else found.T
