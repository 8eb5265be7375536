"""What an adapter of rank 8 costs beside a quantized base: six Linear of 1024 with GELU, 128 rows, in ONNX Runtime.

The file with adapters as inputs, fed from a `.onnx_adapter` file, over the file of the base alone: the median of
interleaved runs on one thread; and the time of a swap of adapters, in ms. One JSON line.
"""

import copy
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import onnxruntime as ort
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import qsdk

LAYERS, WIDTH, ROWS, RUNS = 6, 1024, 128, 40


def main() -> None:
    torch.manual_seed(0)
    ort.set_default_logger_severity(3)
    base = nn.Sequential(*(part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU()))).eval()
    names = [str(2 * layer) for layer in range(LAYERS)]
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, target_modules=names, init_lora_weights=False)).eval()
    configs = {"w8a8": qsdk.w8a8(), "w8a8 for ONNX Runtime": qsdk.w8a8().for_dialect("onnxruntime")}
    configs |= {"int4": qsdk.weight_only("int4", block_size=32, compute="int8")}
    x, result = torch.randn(ROWS, WIDTH), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        for words, config in configs.items():
            sessions = []
            for model, file, options in ((base, "base", {}), (adapted, "model", {"adapters": "inputs"})):
                sim = qsdk.quantize(model, x, config)
                qsdk.calibrate(sim, [x], progress=False)
                qsdk.export(sim, f"{folder}/{file}.onnx", check=False, **options)
                sessions.append(qsdk.session(f"{folder}/{file}.onnx", threads=1))
            adapter, with_adapter = ort.LoraAdapter(), ort.RunOptions()
            begin = time.perf_counter()
            adapter.Load(str(Path(folder) / "model.default.onnx_adapter"))
            with_adapter.add_active_adapter(adapter)
            result[f"{words}, ms of a swap"] = round(1e3 * (time.perf_counter() - begin), 3)
            feeds = [{session.get_inputs()[0].name: x.numpy()} for session in sessions]
            spent: tuple[list[float], list[float]] = ([], [])
            for _ in range(RUNS):
                for session, feed, own, times in zip(sessions, feeds, (None, with_adapter), spent, strict=True):
                    begin = time.process_time()
                    session.run(None, feed, own)
                    times.append(time.process_time() - begin)
            result[f"{words}, over the base"] = round(median(spent[1]) / median(spent[0]), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
