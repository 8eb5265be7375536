"""Marks: nodes with the name of a site, in a graph that is being exported."""

import torch
from torch import Tensor


def mark(x: Tensor, site: str) -> Tensor:
    """Write a site's name into the graph being exported: a node `qsdk::Quantizer(x){key=site}`."""
    return torch.onnx.ops.symbolic("qsdk::Quantizer", (x,), {"key": site}, dtype=x.dtype, shape=x.shape, version=1)
