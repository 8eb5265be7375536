"""What `quantize` of a module costs over torch's own float export of it, and what the ways of tracing save.

One JSON line, by network, each the median of pairs that take turns, in processor time: `over_float_export` is the time
of a quantize in times of `torch.onnx.export(dynamo=True)` with the same dynamic axis and no optimization; `whole` is
that of a quantize that decomposes the whole program as torch does, and `anew` that of one that also looks up torch's
operators anew at every trace, both in times of the quantize as it is. `all`: the median and the worst of the networks,
without the decoder of 22 layers, which takes minutes.
"""

import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import qsdk
from torch_bridge.tracing import trace

PAIRS, DEEP_PAIRS = 5, 3


class Decoder(nn.Module):
    """The logits of a small LLaMA of this many layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=128, use_cache=False, **sizes))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of token ids [B, T]."""
        return self.model(input_ids=ids).logits


NETWORKS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "one layer": (lambda: nn.Linear(4, 4), torch.zeros(2, 4)),
    "the demo's network": (qsdk.demo.network, torch.zeros(2, 1, 28, 28)),
    "a transformer layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), torch.zeros(2, 8, 32)),
    "a decoder of 4 layers": (lambda: Decoder(4), torch.zeros(2, 8, dtype=torch.int64)),
}


def seconds(action: Callable[[], object]) -> float:
    """Return the processor time of an action."""
    start = time.process_time()
    action()
    return time.process_time() - start


def float_export(model: nn.Module, example: torch.Tensor) -> None:
    """Export a float module as torch does."""
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    with torch.no_grad():
        torch.onnx.export(
            model, (example,), dynamo=True, opset_version=21, dynamic_shapes=shapes, optimize=False, verbose=False
        )


def quantize_without(names: tuple[str, ...], model: nn.Module, example: torch.Tensor) -> None:
    """Quantize without these ways of `trace`."""
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(trace, name, nullcontext))
        qsdk.quantize(model, example)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    result: dict[str, dict[str, float]] = {}
    for name, (make, example) in NETWORKS.items():
        model = make().eval()
        ways = {
            "quantize": lambda m=model, x=example: quantize_without((), m, x),
            "float": lambda m=model, x=example: float_export(m, x),
            "whole": lambda m=model, x=example: quantize_without(("single_nodes_decomposed",), m, x),
            "anew": lambda m=model, x=example: quantize_without(
                ("single_nodes_decomposed", "operators_read_once"), m, x
            ),
        }
        seconds(ways["quantize"])
        rounds = [{way: seconds(action) for way, action in ways.items()} for _ in range(PAIRS)]
        result[name] = {
            "over_float_export": round(statistics.median(r["quantize"] / r["float"] for r in rounds), 2),
            "whole": round(statistics.median(r["whole"] / r["quantize"] for r in rounds), 2),
            "anew": round(statistics.median(r["anew"] / r["quantize"] for r in rounds), 2),
        }
    model, example = Decoder(22).eval(), torch.zeros(2, 8, dtype=torch.int64)
    deep = [
        seconds(lambda: quantize_without((), model, example)) / seconds(lambda: float_export(model, example))
        for _ in range(DEEP_PAIRS)
    ]
    over = [found["over_float_export"] for found in result.values()]
    result["all"] = {"median": round(statistics.median(over), 2), "worst": max(over)}
    result["a decoder of 22 layers"] = {"over_float_export": round(statistics.median(deep), 2)}
    print(json.dumps({"benchmark": "tracing", **result}), flush=True)


if __name__ == "__main__":
    main()
