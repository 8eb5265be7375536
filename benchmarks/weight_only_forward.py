"""What a sim with quantized weights alone costs over the float module, and its file over the float file.

One JSON line. `file`: one Linear of 2048 in an ordinary session of ONNX Runtime, exported for it (`compute="int8"`), by
preset and number of rows: the ratio of the least processor times of many runs that take turns, on one thread. Targets:
0.35 for 1 row, 0.8 for 128. The others, for a simulated forward over the float forward of the same module: by preset
and number of tokens, the ratio of processor times, the median of pairs that take turns. The decoder has two LLaMA
layers of width 1024. Rounding the weights costs the same for any number of tokens; the float forward grows with it.
Target: at most 1.3 at 512 tokens.
"""

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import onnxruntime as ort
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import qsdk

PAIRS = 5
TOKENS = (64, 256, 512)
WIDTH, ROWS, RUNS = 2048, (1, 128), 60
CONFIGS = {"int8 per channel": qsdk.weight_only("int8"), "int4 in blocks of 32": qsdk.weight_only(block_size=32)}
COARSE = {"int4 in blocks of 128": qsdk.weight_only(block_size=128)}


def seconds(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def file_ratios(folder: Path) -> dict[str, dict[int, float]]:
    """Return preset -> rows -> time of the file of a Linear over that of the float file."""
    layer, example = torch.nn.Linear(WIDTH, WIDTH), torch.zeros(8, WIDTH)
    opened = {}
    for name, config in {"float": qsdk.weight_only("float32"), **CONFIGS, **COARSE}.items():
        sim = qsdk.quantize(layer, example, config.for_dialect("onnxruntime"))
        qsdk.calibrate(sim, [], progress=False)
        path = folder / f"{name}.onnx"
        qsdk.export(sim, path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        opened[name] = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: dict[str, dict[int, float]] = {name: {} for name in opened if name != "float"}
    for rows in ROWS:
        feeds = {"input": torch.randn(rows, WIDTH).numpy()}
        least = dict.fromkeys(opened, math.inf)
        for _ in range(RUNS):
            for name, session in opened.items():
                least[name] = min(least[name], seconds(lambda s=session, f=feeds: s.run(None, f)))
        for name in found:
            found[name][rows] = round(least[name] / least["float"], 2)
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        files = file_ratios(Path(folder))
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
    print(json.dumps({"benchmark": "weight_only_forward", "file": files, **rows}))


if __name__ == "__main__":
    main()
