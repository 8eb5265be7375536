"""Float ONNX files of modules, and the plans of both doors."""

import logging
import warnings

import onnx
import torch
from torch import Tensor, nn
from zoo_models import ZOO

from onnx_backend.opening.from_trace import open_traced
from qsdk import QuantConfig, w8a8
from qsdk.core.graph.graph import Graph
from qsdk.core.planning.make_plan import make_plan
from qsdk.core.planning.plan import Plan
from torch_bridge.prepare import prepare
from torch_bridge.tracing.trace import trace_marked

CONFIG = w8a8()


def float_onnx(model: nn.Module, example: tuple[Tensor, ...], *, dynamic: bool = True) -> onnx.ModelProto:
    """What torch exports of the plain float module, optimized as by default, at opset 21."""
    # the tables of Bert and Gpt would be cut to constants at a fixed length; those of Llama have one
    longer = isinstance(model, (ZOO["bert"][0], ZOO["gpt"][0]))
    axes = tuple({0: "batch", 1: "length"} if longer else {0: "batch"} for _ in example)
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                model, example, dynamo=True, opset_version=21, verbose=False, dynamic_shapes=axes if dynamic else None
            )
    finally:
        logger.setLevel(level)
    assert program is not None
    return program.model_proto


def plan_of_module(model: nn.Module, example: tuple[Tensor, ...], config: QuantConfig = CONFIG) -> tuple[Graph, Plan]:
    """The graph and plan of the PyTorch door."""
    prepared = prepare(model, example, config, in_place=False, fold_batch_norm=True)
    traced = trace_marked(prepared.model, prepared.runtime, prepared.example)
    graph = open_traced(traced.model, traced.stored.values_in(prepared.model)).graph
    return graph, make_plan(graph, config)
