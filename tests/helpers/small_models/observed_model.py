"""A small model whose activations are observed by one process or by several."""

import torch
import torch.multiprocessing
from onnx import TensorProto, helper, numpy_helper
from torch import nn


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False)).eval()


def onnx_model():
    convolution, _, last = module()
    weights = [convolution.weight, convolution.bias, last.weight]
    stored = [
        numpy_helper.from_array(w.detach().numpy(), name) for w, name in zip(weights, ("w", "b", "v"), strict=True)
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv"),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("Conv", ["r", "v"], ["y"], "last"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *s]) for name, s in (("x", [3, 8, 8]),)]
    out = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "net", ends, out, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
