"""Exported models in which one stored number or one op is another one, and how a parity report names the place."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from onnx import AttributeProto, ModelProto, NodeProto, helper, numpy_helper
from qdq_models import convnet
from torch import nn

import qsdk
from onnx_backend.proto.external_data import array
from onnx_backend.proto.model_io import load
from onnx_backend.proto.nodes import metadata

REPLACED = {
    "Relu": "Abs",
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "Add",
    "Div": "Mul",
    "Sigmoid": "Tanh",
    "Tanh": "Sigmoid",
} | {
    "Softmax": "LogSoftmax",
    "Gelu": "Relu",
    "Erf": "Tanh",
    "MaxPool": "AveragePool",
    "GlobalAveragePool": "GlobalMaxPool",
    "ReduceMean": "ReduceSum",
    "Sqrt": "Abs",
    "Clip": "Sum",
}
UNDROPPED = ("Identity", "Constant", "Sum", "QuantizeLinear", "DequantizeLinear", "Cast")  # else no valid file is left
ORDERED = ("Sub", "Div", "MatMul", "Pow")


@dataclass(frozen=True)
class Corruption:
    """One change of a model.

    Attributes:
        label: what is changed.
        names: how a report may call the place: node, site or stored tensor.
        model: the corrupted one.
    """

    label: str
    names: frozenset[str]
    model: ModelProto


@dataclass(frozen=True)
class Exported:
    """A sim, what it exports, and data."""

    sim: Any
    model: ModelProto
    data: list[Any]


def corruptions(model: ModelProto, rng: np.random.Generator) -> Iterator[Corruption]:
    """Every op of a model and every stored tensor, each changed once in each way there is, in random order."""
    ways: list[Callable[[], Corruption | None]] = []
    for index in range(len(model.graph.initializer)):
        ways.append(lambda index=index: _number(model, index, rng))
    for index, node in enumerate(model.graph.node):
        if node.op_type in REPLACED:
            ways.append(lambda index=index: _other_op(model, index))
        if node.op_type in ORDERED and node.input[0] != node.input[1]:
            ways.append(lambda index=index: _swapped(model, index))
        if len(node.output) == 1 and node.op_type not in UNDROPPED:
            ways.append(lambda index=index: _dropped(model, index))
        for place, attribute in enumerate(node.attribute):
            if _counts(model, node, attribute):
                ways.append(lambda index=index, place=place: _attribute(model, index, place))
    for way in rng.permutation(len(ways)):
        found = ways[way]()
        if found is not None and found.model.SerializeToString() != model.SerializeToString():
            yield found


def _names(model: ModelProto, *nodes: NodeProto) -> frozenset[str]:
    """The names of nodes, of their tensors, of the sites that quantize these and of what reads these."""
    touched = {name for node in nodes for name in (*node.input, *node.output) if name}
    near = [node for node in model.graph.node if touched & {*node.input[:1], *node.output}]
    sites = {metadata(node).get("qsdk.site", "") for node in (*near, *nodes)}
    owners = {
        metadata(node).get("qsdk.site", "")
        for other in near
        for node in model.graph.node
        if node.input[:1] == other.output[:1]
    }
    outputs = {f"{value.name}:output" for value in model.graph.output if value.name in touched}
    made = {name for node in nodes for name in node.output}
    readers = {node.name for node in model.graph.node if made & set(node.input)}
    return frozenset({*touched, *readers, *(node.name for node in nodes), *sites, *owners, *outputs} - {""})


def _number(model: ModelProto, index: int, rng: np.random.Generator) -> Corruption | None:
    tensor = model.graph.initializer[index]
    values = array(tensor).copy()
    if not values.size:
        return None
    place = tuple(int(rng.integers(n)) for n in values.shape)
    old = values[place]
    if values.dtype.kind == "b":
        values[place] = not old
    elif values.dtype.kind in "iu" or values.dtype.name in ("int4", "uint4", "int2", "uint2"):
        values[place] = int(old) + (1 if int(old) < 1 else -1)
    else:
        values[place] = type(old)(1.5) * old if np.isfinite(float(old)) and float(old) else type(old)(0.5)
    changed = load(model)
    changed.graph.initializer[index].CopyFrom(numpy_helper.from_array(values, tensor.name))
    readers = [node for node in model.graph.node if tensor.name in node.input]
    names = _names(model, *readers) | {tensor.name} | _sited(tensor.name)
    return Corruption(f"{tensor.name}{list(place)}: {old} -> {values[place]}", names, changed)


def _sited(name: str) -> frozenset[str]:
    owner, _, last = name.rpartition(".")
    return frozenset({f"{owner}:{last}"})


def _other_op(model: ModelProto, index: int) -> Corruption:
    changed = load(model)
    node = changed.graph.node[index]
    old, node.op_type = node.op_type, REPLACED[node.op_type]
    return Corruption(f"{node.name}: {old} -> {node.op_type}", _names(model, model.graph.node[index]), changed)


def _swapped(model: ModelProto, index: int) -> Corruption:
    changed = load(model)
    node = changed.graph.node[index]
    node.input[0], node.input[1] = node.input[1], node.input[0]
    return Corruption(f"{node.name}: inputs swapped", _names(model, model.graph.node[index]), changed)


def _dropped(model: ModelProto, index: int) -> Corruption:
    changed = load(model)
    node = changed.graph.node[index]
    fresh = helper.make_node("Identity", [node.input[0]], list(node.output), node.name)
    old = node.op_type
    node.CopyFrom(fresh)
    return Corruption(f"{node.name}: {old} dropped", _names(model, model.graph.node[index]), changed)


def _counts(model: ModelProto, node: NodeProto, attribute: AttributeProto) -> bool:
    """Whether an attribute is a number that says what is computed: not a scalar scale's axis, which says nothing."""
    if attribute.type not in (AttributeProto.INT, AttributeProto.FLOAT, AttributeProto.INTS):
        return False
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        dims = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
        return attribute.name == "axis" and bool(dims.get(node.input[1]))
    return attribute.name not in ("stash_type", "allowzero", "storage_order") and (
        attribute.type != AttributeProto.INTS or len(attribute.ints) > 0
    )


def _attribute(model: ModelProto, index: int, place: int) -> Corruption:
    changed = load(model)
    node = changed.graph.node[index]
    attribute = node.attribute[place]
    if attribute.type == AttributeProto.INT:
        attribute.i = attribute.i + 1 if attribute.i < 1 else attribute.i - 1
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = attribute.f * 1.5 if attribute.f else 0.5
    else:
        attribute.ints[-1] += 1
    return Corruption(f"{node.name}: another {attribute.name}", _names(model, model.graph.node[index]), changed)


# --- the models -------------------------------------------------------------------------------------------------------


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.wide = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = nn.functional.max_pool2d(x + torch.sigmoid(self.wide(x)), 2)
        return self.head(torch.clamp(x.mean((2, 3)), max=4.0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.second(x)))) / 1.5 - 0.25


def _without_activations() -> Any:
    return qsdk.w8a8().override("*", activation="float32")


#: name -> what is quantized, the shape of its input, and how
CONFIGS: Mapping[str, tuple[Callable[[], Any], tuple[int, ...], Callable[[], Any]]] = {
    "convnet w8a8": (convnet, (4, 3, 8, 8), qsdk.w8a8),
    "convnet, weights alone": (convnet, (4, 3, 8, 8), _without_activations),
    "convnet, float inside": (convnet, (4, 3, 8, 8), lambda: qsdk.w8a8().skip("deconv", dtype="float16").skip("gemm")),
    "images w8a8": (Images, (4, 3, 8, 8), qsdk.w8a8),
    "images w8a16": (Images, (4, 3, 8, 8), qsdk.w8a16),
    "images, float16 inside": (Images, (4, 3, 8, 8), lambda: qsdk.w8a8().skip("wide", dtype="float16")),
    "images, float inside": (Images, (4, 3, 8, 8), lambda: qsdk.w8a8().skip("wide").skip("head")),
    "block w8a8": (Block, (2, 5, 8), qsdk.w8a8),
    "block w4a8": (Block, (2, 5, 8), qsdk.w4a8),
    "block, weights alone": (Block, (2, 5, 8), lambda: qsdk.weight_only("int4", block_size=4)),
    "images, weights alone": (Images, (4, 3, 8, 8), lambda: qsdk.weight_only("int8")),
}


def exported(name: str, path: str) -> Exported:
    """Quantize and export one of the models."""
    made, shape, config = CONFIGS[name]
    torch.manual_seed(0)
    model, data = made(), [torch.randn(*shape) for _ in range(2)]
    if isinstance(model, nn.Module):
        sim = qsdk.quantize(model.eval(), data[0], config())
    else:
        data = [batch.numpy() for batch in data]
        sim = qsdk.quantize(model, None, config())
    qsdk.calibrate(sim, data, progress=False)
    qsdk.export(sim, path)
    return Exported(sim, load(path), data)


def verdict(case: Exported, corruption: Corruption) -> str:
    """How parity takes a corrupted file.

    "found" with its place, "elsewhere" (found, and the place not named), "refused" (no valid file any more, which the
    validator says) or "missed".
    """
    try:
        report = qsdk.check_parity(case.sim, corruption.model, case.data, progress=False)
    except qsdk.QsdkError:
        return "refused"
    if report.summary["passed"]:
        return "missed"
    wrong = [row for row in report.rows if row["max_lsb"] > (0 if row["kind"] in ("weight", "bias", "constant") else 1)]
    told = [f"{row['site']} {row.get('note', '')}" for row in wrong]
    # of a weight in another form than a pair, the site is the part of a name in front of "/"
    names = {*corruption.names, *(name.partition("/")[0] for name in corruption.names if ":" in name)} - {""}
    return "found" if any(name in text for text in told for name in names) else "elsewhere"
