"""What an adapter of rank 8 costs beside a quantized base: the file with it over that of the base alone. One JSON line.

`layers`: six Linear of 1024 with GELU, 128 rows, in ONNX Runtime, and the time of a swap of adapters, in ms. `genai`: a
decoder of 4 layers of 1024 with int4 weights in onnxruntime-genai, with adapters at all its layers, and at queries and
values alone, which is what peft adapts by default: a prompt of 128 tokens and a token behind it. Medians of interleaved
runs on one thread. `profile`: what a token spends in the nodes of the adapters of that decoder, over what it spends in
all others, and the bytes that they read over those of the base's products, from the runtime's own profile.
`python benchmarks/adapters.py layers`, `genai` or `profile` measures one.
"""

import copy
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import onnxruntime_genai as og
import torch
from generation import CONFIG, STEPS, opened, parameters, random_decoder
from peft import LoraConfig, get_peft_model
from torch import nn

import qsdk
from onnx_backend.proto.external_data import bytes_of

LAYERS, WIDTH, ROWS, RUNS = 6, 1024, 128, 40


def layers() -> dict[str, float]:
    """Measure six layers in a session."""
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
    return result


def genai() -> dict[str, dict[str, float]]:
    """Measure a decoder in onnxruntime-genai."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 4096}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    models = {"base": random_decoder(**sizes, **heads)}
    for words, names in (("all layers", "all-linear"), ("queries and values", ["q_proj", "v_proj"])):
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules=names, init_lora_weights=False)
        models[words] = get_peft_model(copy.deepcopy(models["base"]), adapters, adapter_name="own").eval()
    rows: dict[str, list[tuple[float, float]]] = {words: [] for words in models}
    with tempfile.TemporaryDirectory() as name:
        folder, generators = Path(name), dict[str, Any]()
        for words, model in models.items():
            sim = qsdk.quantize(model, {"input_ids": torch.arange(3, 19)[None]}, CONFIG)
            qsdk.calibrate(sim, [], progress=False)
            options = {} if words == "base" else {"adapters": "inputs"}
            qsdk.export(sim, folder / words, format="genai", check=False, **options)
            runtime = opened(folder / words, 1)
            own = None if words == "base" else og.Adapters(runtime)
            if own is not None:
                own.load(str(folder / words / "own.onnx_adapter"), "own")
            generators[words] = (runtime, own)
        for _ in range(9):
            for words, (runtime, own) in generators.items():
                rows[words].append(_seconds(runtime, own))
    return {
        words: {
            part: round(median(a[at] / b[at] for a, b in zip(rows[words], rows["base"], strict=True)), 3)
            for at, part in enumerate(("prompt", "token"))
        }
        for words in rows
        if words != "base"
    }


def profile() -> dict[str, float]:
    """Measure the nodes of adapters at all layers while tokens are generated, one thread."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 4096}
    base = random_decoder(**sizes, num_attention_heads=16, num_key_value_heads=8)
    adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", init_lora_weights=False)
    sim = qsdk.quantize(
        get_peft_model(base, adapters, adapter_name="own").eval(), {"input_ids": torch.arange(3, 19)[None]}, CONFIG
    )
    qsdk.calibrate(sim, [], progress=False)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        qsdk.export(sim, folder, format="genai", check=False, adapters="inputs")
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        kinds, reads = (
            _kinds_of_nodes(model),
            {tensor.name: bytes_of(tensor.data_type, tensor.dims) for tensor in model.graph.initializer},
        )
        config = og.Config(str(folder))
        options = {"intra_op_num_threads": 1, "enable_profiling": str(folder / "profile")}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        runtime = og.Model(config)
        _seconds(runtime, None)
        del runtime  # which writes the profile
        spent: dict[str, float] = {}
        for event in json.loads(next(folder.glob("profile*.json")).read_text()):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                kind = kinds.get(event["name"].removesuffix("_kernel_time"), "base")
                spent[kind] = spent.get(kind, 0.0) + event["dur"]
    found = {f"{kind}, over the base": round(spent[kind] / spent["base"], 3) for kind in ("low", "high", "sum")}
    read = {"base": 0, "adapters": 0}
    for node in model.graph.node:
        kind = kinds.get(node.name, "base")
        if kind != "sum" and node.op_type in ("MatMul", "MatMulNBits"):
            read["base" if kind == "base" else "adapters"] += sum(reads.get(tensor, 0) for tensor in node.input)
    return {**found, "bytes, over the base": round(read["adapters"] / read["base"], 3)}


def _kinds_of_nodes(model: onnx.ModelProto) -> dict[str, str]:
    """Return name -> what a node of an adapter is: the product to its rank, that from it, or the sum."""
    found, made = dict[str, str](), dict[str, str]()
    for node in model.graph.node:
        if node.op_type == "MatMul" and any("lora_A" in tensor for tensor in node.input):
            found[node.name] = "low"
        elif node.op_type == "MatMul" and any("lora_B" in tensor for tensor in node.input):
            found[node.name] = made[node.output[0]] = "high"
        elif node.op_type == "Add" and any(tensor in made for tensor in node.input):
            found[node.name] = "sum"
    return found


def _seconds(runtime: Any, adapters: Any) -> tuple[float, float]:
    """Return the processor's time of a prompt, and of a token behind it."""
    generator = og.Generator(runtime, parameters(runtime, ROWS + STEPS + 1))
    if adapters is not None:
        generator.set_active_adapter(adapters, "own")
    started = time.process_time()
    generator.append_tokens(np.random.default_rng(0).integers(3, 4000, (1, ROWS)).astype(np.int32))
    generator.get_logits()
    first = time.process_time()
    for _ in range(STEPS):
        generator.append_tokens(np.array([[7]], np.int32))
        generator.get_logits()
    return first - started, (time.process_time() - first) / STEPS


MEASURES: dict[str, Callable[[], Any]] = {"layers": layers, "genai": genai, "profile": profile}


def main() -> None:
    """Measure what is named, or all."""
    print(json.dumps({name: MEASURES[name]() for name in sys.argv[1:] or MEASURES}))


if __name__ == "__main__":
    main()
