"""What a simulated forward of a sim with quantized weights alone costs over the float forward of the same module.

One JSON line: by preset and number of tokens, the ratio of processor times, the median of pairs that take turns. The
decoder has two LLaMA layers of width 1024. Rounding the weights costs the same for any number of tokens; the float
forward grows with it. Target: at most 1.3 at 512 tokens.
"""

import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qsdk

PAIRS = 5
TOKENS = (64, 256, 512)
CONFIGS = {"int8 per channel": qsdk.weight_only("int8"), "int4 in blocks of 32": qsdk.weight_only(block_size=32)}


def seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=1000, use_cache=False, **sizes)).eval()
    rows: dict[str, dict[int, float]] = {}
    for name, config in CONFIGS.items():
        sim = qsdk.quantize(model, {"input_ids": torch.zeros(1, 8, dtype=torch.int64)}, config)
        qsdk.calibrate(sim, [], progress=False)
        rows[name] = {}
        for count in TOKENS:
            ids = torch.randint(0, 1000, (1, count))
            with torch.no_grad():
                pairs = [
                    (seconds(lambda m=sim.model, i=ids: m(input_ids=i)), seconds(lambda i=ids: model(input_ids=i)))
                    for _ in range(PAIRS + 1)
                ]
            rows[name][count] = round(statistics.median(ours / float_ for ours, float_ in pairs[1:]), 2)
    print(json.dumps({"benchmark": "weight_only_forward", **rows}))


if __name__ == "__main__":
    main()
