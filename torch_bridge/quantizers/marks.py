"""Marks: nodes with the name of a site, in a graph that is being exported."""

from typing import Any

import torch
from torch import Tensor


def mark(x: Tensor, site: str) -> Tensor:
    """Write a site's name into the graph being exported: a node `qsdk::Quantizer(x){key=site}`.

    It has an attribute `dtype` where the tensor is not float32.
    """
    facts: dict[str, Any] = (
        {"key": site} if x.dtype == torch.float32 else {"key": site, "dtype": str(x.dtype).removeprefix("torch.")}
    )
    return torch.onnx.ops.symbolic("qsdk::Quantizer", (x,), facts, dtype=x.dtype, shape=x.shape, version=1)
