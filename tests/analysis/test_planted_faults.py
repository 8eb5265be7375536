"""Faults planted into one form of a network: `compare` names the first tensor that they change."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from compared_nets import demo, exported, residual, transformer, with_node, with_stored
from onnx import ModelProto, helper
from torch import Tensor, nn

import qsdk

pytestmark = pytest.mark.slow  # `test_compare_sides.py` plants one fault into every kind of side


class Network:
    """A network in all its forms: module, float ONNX, sim and Q/DQ file."""

    def __init__(self, made: tuple[nn.Module, Tensor], folder: Any) -> None:
        self.module, self.x = made
        self.onnx = exported(self.module, self.x)
        self.sim = qsdk.quantize(self.module, self.x)
        qsdk.calibrate(self.sim, [self.x], progress=False)
        qsdk.export(self.sim, folder / "model.onnx")
        self.file = onnx.load(folder / "model.onnx")

    def first_off(self, a: Any, b: Any) -> str | None:
        return qsdk.compare(a, b, [self.x], progress=False).summary["first_off"]

    def changed_module(self, change: Callable[[Any], None]) -> nn.Module:
        module = copy.deepcopy(self.module)
        with torch.no_grad():
            change(module)
        return module


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Network]:
    made = {"demo": demo, "transformer": transformer, "residual": residual}
    return {name: Network(make(), tmp_path_factory.mktemp(name)) for name, make in made.items()}


@pytest.mark.parametrize("network", ["demo", "transformer", "residual"])
def test_nothing_is_off_between_the_forms_of_a_network(nets: dict[str, Network], network: str) -> None:
    net = nets[network]
    forms = [net.module, net.onnx, net.sim, net.file]
    assert {net.first_off(a, b) for a in forms for b in forms} == {None}


def set_attribute(name: str, value: Any) -> Callable[[onnx.NodeProto], None]:
    def change(node: onnx.NodeProto) -> None:
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def into_identity(node: onnx.NodeProto) -> None:
    node.op_type = "Identity"
    del node.attribute[:]


def swap_rows(values: np.ndarray) -> np.ndarray:
    values[[1, 4]] = values[[4, 1]]
    return values


def scale_one(values: np.ndarray) -> np.ndarray:
    values[3] *= 2
    return values


def float_weight_of(model: ModelProto, output: str) -> str:
    """Return the stored tensor that the MatMul in front of a biased result reads."""
    made = {name: node for node in model.graph.node for name in node.output}
    product = next(made[name] for name in made[output].input if name in made and made[name].op_type == "MatMul")
    return product.input[1]


@pytest.mark.parametrize(
    ("network", "tensor", "change", "site"),
    [
        ("demo", "layer1.act:output/scale", lambda s: s * 1.5, "layer1.act:output"),
        ("demo", "layer2.first.0:weight/scale", scale_one, "layer2.first.0:output"),
        ("demo", "fork.wide.0.weight_quantized", swap_rows, "fork.wide.0:output"),
        ("demo", "separable.pointwise.0.weight_quantized", np.zeros_like, "separable.pointwise.0:output"),
        ("demo", "layer2.second.0:output/zero_point", lambda z: z - 20, "layer2.second.0:output"),
        ("transformer", "0.act:output/scale", lambda s: s * 0.25, "0.act:output"),
        ("transformer", "1.attention.key.bias_quantized", lambda b: b + 9000, "1.attention.key:output"),
        ("transformer", "0.up.weight_quantized", lambda w: w[:, ::-1], "0.up:output"),
        ("residual", "2.0.conv2.weight_quantized", lambda w: w[:, :, ::-1], "2.0.conv2:output"),
        ("residual", "5.bias_quantized", np.zeros_like, "5:output"),
    ],
)
def test_fault_in_a_file_is_found_against_sim_and_module(
    nets: dict[str, Network], network: str, tensor: str, change: Callable[[np.ndarray], np.ndarray], site: str
) -> None:
    net = nets[network]
    faulty = with_stored(net.file, tensor, change)
    assert net.first_off(net.sim, faulty) == site
    turned = qsdk.compare(faulty, net.sim, [net.x], progress=False)
    assert next(row["other"] for row in turned.rows if row["off"]) == site


@pytest.mark.parametrize(
    ("network", "tensor", "change", "site"),
    [
        ("demo", "layer2.first.0:weight/scale", scale_one, "layer2.first.1"),
        ("demo", "fork.wide.0.weight_quantized", swap_rows, "fork.wide.1"),
        ("demo", "separable.pointwise.0.weight_quantized", np.zeros_like, "separable.pointwise.0"),
        ("demo", "layer1.act:output/scale", lambda s: s * 0.3, "layer1.act"),
        ("transformer", "0.act:output/scale", lambda s: s * 0.25, "0.act"),
        ("transformer", "1.attention.key.bias_quantized", lambda b: b + 9000, "1.attention.key"),
        ("transformer", "0.up.weight_quantized", lambda w: w[:, ::-1], "0.up"),
        ("residual", "2.0.conv2.weight_quantized", lambda w: w[:, :, ::-1], "2.0.norm2"),
        ("residual", "2.1.relu1:output/scale", lambda s: s * 4, "2.1.relu1"),
    ],
)
def test_fault_in_a_file_is_found_among_the_rounding_against_the_float_module(
    nets: dict[str, Network], network: str, tensor: str, change: Callable[[np.ndarray], np.ndarray], site: str
) -> None:
    net = nets[network]
    if tensor.endswith("relu1:output/scale"):  # in the DequantizeLinear alone: both together are only a coarser grid
        faulty = with_stored(net.file, tensor, change)
        faulty.graph.initializer.add().CopyFrom(next(t for t in net.file.graph.initializer if t.name == tensor))
        faulty.graph.initializer[-1].name = "as before"
        faulty = with_node(faulty, "2.1.relu1:output/quantized", lambda node: node.input.__setitem__(1, "as before"))
    else:
        faulty = with_stored(net.file, tensor, change)
    assert net.first_off(net.module, faulty) == site


@pytest.mark.parametrize(
    ("network", "output", "change", "site"),
    [
        ("transformer", "softmax", set_attribute("axis", 2), "0.attention/softmax.0:output"),
        ("transformer", "layer_norm_2", set_attribute("epsilon", 0.3), "1.norm1:output"),
        ("transformer", "gelu_1", into_identity, "1.act:output"),
        ("residual", "relu_3", into_identity, "2.1.relu1:output"),
        ("residual", "getitem_3", set_attribute("pads", [0, 0, 2, 2]), "2.0.conv2:output"),
        ("residual", "add", lambda node: node.input.__setitem__(0, "relu_1"), "2.0/add.0:output"),
        ("demo", "max_pool2d", lambda node: setattr(node, "op_type", "AveragePool"), "stem.3:output"),
    ],
)
def test_fault_in_a_float_file_is_found_against_the_sim(
    nets: dict[str, Network], network: str, output: str, change: Callable[[onnx.NodeProto], None], site: str
) -> None:
    net = nets[network]
    model = net.onnx
    if output == "max_pool2d":  # AveragePool knows no dilations and no order of storage
        model = with_node(model, output, lambda node: _keep_attributes(node, ("kernel_shape", "strides")))
    assert net.first_off(net.sim, with_node(model, output, change)) == site


def _keep_attributes(node: onnx.NodeProto, names: tuple[str, ...]) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name in names]
    del node.attribute[:]
    node.attribute.extend(kept)


@pytest.mark.parametrize(
    ("network", "output", "change"),
    [
        ("transformer", "layer_norm_1", set_attribute("epsilon", 1e-3)),
        ("transformer", "softmax_1", set_attribute("axis", 2)),
        ("residual", "relu_1", into_identity),
        ("residual", "getitem_9", set_attribute("pads", [2, 2, 0, 0])),
    ],
)
def test_fault_between_two_float_files_is_found(
    nets: dict[str, Network], network: str, output: str, change: Callable[[onnx.NodeProto], None]
) -> None:
    net = nets[network]
    assert net.first_off(net.onnx, with_node(net.onnx, output, change)) == output


@pytest.mark.parametrize(
    ("network", "change", "site"),
    [
        (
            "transformer",
            lambda m: m[0].attention.out.weight.copy_(m[0].attention.out.weight.T.clone()),
            "0.attention.out",
        ),
        ("transformer", lambda m: m[1].down.bias.add_(0.01), "1.down"),
        ("transformer", lambda m: setattr(m[1].norm2, "eps", 1e-3), "1.norm2"),
        ("residual", lambda m: m[2][1].norm1.running_var.fill_(1), "2.1.norm1"),
        ("residual", lambda m: m[2][0].conv2.weight.zero_(), "2.0.conv2"),
        ("demo", lambda m: m.head.bias.roll(1, 0) is not None and m.head.bias.copy_(m.head.bias.roll(1, 0)), "head"),
    ],
)
def test_fault_in_a_module_is_found_against_the_module(
    nets: dict[str, Network], network: str, change: Callable[[Any], None], site: str
) -> None:
    net = nets[network]
    assert net.first_off(net.module, net.changed_module(change)) == site


def test_each_of_two_faults_is_marked_and_nothing_else(nets: dict[str, Network]) -> None:
    net = nets["demo"]
    faulty = with_stored(net.file, "layer1.second.0.weight_quantized", swap_rows)
    faulty = with_stored(faulty, "fork.narrow.0.weight_quantized", np.zeros_like)
    report = qsdk.compare(net.sim, faulty, [net.x], progress=False)
    assert [row["site"] for row in report.rows if row["off"]] == ["layer1.second.0:output", "fork.narrow.0:output"]
    assert report.summary["why"].endswith("steps of the grid, where 1 is to be expected")
