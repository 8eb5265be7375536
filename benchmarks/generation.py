"""Folders for onnxruntime-genai, beside those of its own model builder: speed, size and perplexity.

One JSON line. `decoder`: 8 layers of 512 with random weights, int4 in blocks of 32; tokens a second of ours over the
builder's, for decoding and for prompts of 128 and 512 tokens, on one and two threads (medians of interleaved rounds),
bytes of the folders, and nodes. `stories`: perplexity of stories15M on 64 stories that it has told itself, over that of
the float model, as each folder computes it: the builder's round to nearest, and ours to nearest, with the ranges of the
builder's k-quant and by gptq on 192 texts that the model wrote, with zero points and without, with 8 bits for the
embedding and with 4; bytes and tokens a second over the builder's. `tied`: what it means that an output layer that is
the embedding rounds its input to int8: decibels of that rounding alone, of the folder from the sim (codes of all layers
that turned add up), and tokens a second over those of a head in floats.
`experts`: two layers of 256 with 8 experts of 512, 2 of them for a token, int4: tokens a second with one QMoE a layer
over those of the nodes that it stands for, on one thread, with nodes and bytes of both folders.
`python benchmarks/generation.py decoder`, `stories`, `tied` or `experts` measures one. Targets: 1.0 or more of the
builder's speed, 1.02 or less of its bytes, gptq within 2 % of float.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime_genai as og
import torch
from onnxruntime.quantization.neural_compressor.weight_only import quant_tensor_k_quant_cpu
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

import qsdk
from onnx_backend.genai.experts import ExpertsWriter

sys.path += [str(Path(__file__).parents[1] / "tests" / "helpers" / name) for name in ("real", "generation")]

PROMPTS = (128, 512)
STEPS, ROUNDS = 48, 7
CONFIG = qsdk.weight_only("int4", block_size=32, kv_cache="float32", compute="int8")


def random_decoder(**changes: Any) -> LlamaForCausalLM:
    """Return a decoder of 8 layers of 512 with random weights, or one that differs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 32000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes})).eval()


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a checkpoint folder, with a tokenizer, which the builder asks for."""
    from tokenizers import Tokenizer, models  # the benchmark alone needs it

    model.save_pretrained(folder)
    words = {f"<{token}>": token for token in range(model.config.vocab_size)}
    names = {"bos_token": "<1>", "eos_token": "<2>", "pad_token": "<0>", "unk_token": "<0>"}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<0>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def build(source: Path, target: Path, *options: str) -> None:
    """Have the runtime's own builder write a folder of int4 weights."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(target)]
    command += ["-p", "int4", "-e", "cpu", "-c", str(target / "cache"), "--extra_options", *options]
    subprocess.run(command, check=True, capture_output=True)


def opened(folder: Path, threads: int) -> Any:
    """Return the model of a folder on some threads."""
    config = og.Config(str(folder))
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    return og.Model(config)


def parameters(model: Any, length: int) -> Any:
    """Return the parameters of a text of at most some tokens."""
    found = og.GeneratorParams(model)
    found.set_search_options(max_length=length, do_sample=False)
    return found


def seconds(model: Any, prompt: int) -> tuple[float, float]:
    """Return the time of a prompt, and of a token behind it."""
    generator = og.Generator(model, parameters(model, prompt + STEPS + 1))
    tokens = np.random.default_rng(0).integers(3, 4000, (1, prompt)).astype(np.int32)
    started = time.perf_counter()
    generator.append_tokens(tokens)
    generator.get_logits()
    first = time.perf_counter()
    for _ in range(STEPS):
        generator.append_tokens(np.array([[7]], np.int32))
        generator.get_logits()
    return first - started, (time.perf_counter() - first) / STEPS


def speed(theirs: Path, ours: Path, prompts: Sequence[int] = PROMPTS) -> dict[str, float]:
    """Return tokens a second of our folder over those of theirs."""
    found = {}
    for threads in (1, 2):
        models = [opened(folder, threads) for folder in (theirs, ours)]
        rows: dict[str, list[tuple[float, ...]]] = {}
        for _ in range(ROUNDS):
            for prompt in prompts:
                (prompt_a, step_a), (prompt_b, step_b) = (seconds(model, prompt) for model in models)
                rows.setdefault(f"prompt {prompt}", []).append((prompt_a, prompt_b))
                rows.setdefault("decode", []).append((step_a, step_b))
        for name, pairs in rows.items():
            found[f"{name}, threads {threads}"] = round(median(a for a, _ in pairs) / median(b for _, b in pairs), 3)
            if name == "decode":
                found[f"decode ms, threads {threads}"] = round(1e3 * median(b for _, b in pairs), 3)
    return found


def size(folder: Path) -> int:
    """Return the bytes of the model's files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.name.startswith("model.onnx"))


def count(folder: Path) -> int:
    """Return the nodes of the model in a folder."""
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    return sum(node.op_type != "Constant" for node in nodes)


def export(model: LlamaForCausalLM, folder: Path, config: Any = CONFIG, data: Any = (), verbs: Any = ()) -> Any:
    """Write our folder, and return the sim."""
    ids = torch.arange(3, 19)[None]
    sim = qsdk.quantize(model, {"input_ids": ids}, config)
    qsdk.calibrate(sim, data or [{"input_ids": ids}], progress=False)
    for verb in verbs:
        verb(sim, data, progress=False)
    qsdk.export(sim, folder, format="genai")
    return sim


def decoder(folder: Path) -> dict[str, Any]:
    """Measure the random decoder."""
    model = random_decoder()
    save(model, folder / "checkpoint")
    build(folder / "checkpoint", folder / "theirs", "int4_accuracy_level=4")
    everything = CONFIG.override("embed_tokens", weight="float32")  # as the builder has it
    export(model, folder / "ours", everything)
    export(model, folder / "small")
    names = ("theirs", "ours", "small")
    sizes = [size(folder / name) for name in names]
    facts = {"bytes": round(sizes[1] / sizes[0], 4), "bytes, embedding of 8 bits": round(sizes[2] / sizes[0], 4)}
    nodes = {"nodes": {name: count(folder / name) for name in names}}
    return {**nodes, **facts, **speed(folder / "theirs", folder / "small")}


def perplexity(folder: Path, texts: torch.Tensor) -> float:
    """Return the perplexity of texts by the folder of a decoder."""
    model, total = opened(folder, 2), 0.0
    for row in texts.numpy().astype(np.int32):
        generator = og.Generator(model, parameters(model, len(row) + 1))
        generator.append_tokens(row[None])
        logits = torch.from_numpy(np.asarray(generator.get_output("logits"))).float()[0, :-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.from_numpy(row[1:]).long()))
    return float(np.exp(total / len(texts)))


def k_quant(sim: Any, data: Any, *, progress: bool) -> None:
    """Give layers of 4 bits the ranges of the builder's k-quant, by its own function.

    Its builder writes no rows of an odd number of blocks, which a decoder of 288 has.
    """
    for site, quantizer in sim.quantizers.items():
        if quantizer.owns_encoding and quantizer.spec.dtype == qsdk.uint4:
            weight = sim.model.get_submodule(site.removesuffix(":weight")).weight.detach().numpy()
            _, scale, zero_point = quant_tensor_k_quant_cpu(weight, 4, 32)
            old = quantizer.encoding()
            own = {"scale": scale.reshape(old.scale.shape), "zero_point": zero_point.reshape(old.scale.shape)}
            quantizer.replace_encoding(replace(old, **own))


#: file -> dtype of layers, whether the table, which is the output layer too, has it or 8 bits, and verbs
STORIES: dict[str, tuple[str, bool, list[Any]]] = {
    "nearest": ("int4", False, []),
    "gptq": ("int4", False, [qsdk.gptq]),
    "k-quant, zero points": ("uint4", False, [k_quant]),
    "gptq, zero points": ("uint4", False, [qsdk.gptq]),
    "gptq, table of 4 bits": ("int4", True, [qsdk.gptq]),
    "k-quant, zero points, table of 4 bits": ("uint4", True, [k_quant]),
    "gptq, zero points, table of 4 bits": ("uint4", True, [qsdk.gptq]),
}


def stories(folder: Path) -> dict[str, Any]:
    """Measure stories15M."""
    import zoo_text  # downloads the model

    model = zoo_text.stories()
    told = zoo_text.told(zoo_text.NextToken(model), 64, 128, seed=2)
    heard = qsdk.train.generate_text(model, 192, 256, batch_size=64, seed=1, progress=False)
    data = [{"input_ids": part} for batch in heard for part in batch["input_ids"].split(4)]
    save(model, folder / "checkpoint")
    build(folder / "checkpoint", folder / "builder", "int4_accuracy_level=4")
    for name, (weight, table, verbs) in STORIES.items():
        config = qsdk.weight_only(weight, block_size=32).for_dialect("genai")
        if table:
            config = config.override("embed_tokens", weight=weight, block_size=32)
        export(model, folder / name, config, data=data, verbs=verbs)
    own, rows = qsdk.analysis.perplexity(model, told, batch_size=8), dict[str, Any]()
    for name in ("builder", *STORIES):
        over = perplexity(folder / name, told) / own
        rows[name] = {"over float": round(over, 4), "bytes": round(size(folder / name) / size(folder / "builder"), 4)}
        print(name, rows[name], file=sys.stderr, flush=True)
        rows[name] |= speed(folder / "builder", folder / name, PROMPTS[:1]) if name.startswith("gptq") else {}
    return {"float": round(own, 4), **rows}


def with_head_in_floats(source: Path, target: Path) -> None:
    """Write a folder whose output layer does not round its input."""
    shutil.copytree(source, target)
    model = onnx.load(target / "model.onnx", load_external_data=False)
    head = next(node for node in model.graph.node if "logits" in node.output)
    level = next(attribute for attribute in head.attribute if attribute.name == "accuracy_level")
    level.i = 0
    onnx.save(model, target / "model.onnx")


def tied(folder: Path) -> dict[str, Any]:
    """Measure a decoder whose output layer is its embedding, of 8 and of 4 bits."""
    found: dict[str, Any] = {}
    for bits in (8, 4):
        model = random_decoder(num_hidden_layers=2, vocab_size=4096, tie_word_embeddings=True)
        config = CONFIG.override("embed_tokens", weight=f"int{bits}", block_size=32)
        sim = export(model, folder / f"{bits}", config)
        with_head_in_floats(folder / f"{bits}", folder / f"{bits} in floats")
        tokens = torch.arange(3, 67)[None]
        last: list[torch.Tensor] = []
        sim.model.model.norm.register_forward_hook(lambda *call, last=last: last.append(call[-1]))
        with torch.no_grad():
            wanted = sim(input_ids=tokens).logits
            plain = last[-1] @ sim.quantizers["lm_head:weight"](sim.model.lm_head.weight).T
        runtime = opened(folder / f"{bits}", 1)
        generator = og.Generator(runtime, parameters(runtime, len(tokens[0]) + 1))
        generator.append_tokens(tokens.numpy().astype(np.int32))
        got = torch.from_numpy(np.asarray(generator.get_output("logits"))).float()
        facts = {"rounding alone, dB": decibels(wanted, plain), "folder from sim, dB": decibels(wanted, got)}
        models = [opened(folder / f"{bits} in floats", 1), runtime]
        steps = [[seconds(one, 8)[1] for one in models] for _ in range(3)]
        found[f"{bits} bits"] = facts | {"decode over floats": round(median(a / b for a, b in steps), 2)}
    return found


def experts(folder: Path) -> dict[str, Any]:
    """Measure a mixture of experts as one kernel a layer, and as its nodes."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=8, num_experts_per_tok=2)).eval()
    with patch.object(ExpertsWriter, "write", lambda self: 0):
        export(model, folder / "nodes")
    export(model, folder / "kernel")
    names = ("nodes", "kernel")
    models = [opened(folder / name, 1) for name in names]
    rounds = [[seconds(one, PROMPTS[0]) for one in models] for _ in range(3)]
    faster = [round(median(a[at] / b[at] for a, b in rounds), 1) for at in (0, 1)]
    facts = {"prompt 128 over nodes": faster[0], "decode over nodes": faster[1]}
    return facts | {"nodes": {n: count(folder / n) for n in names}, "bytes": {n: size(folder / n) for n in names}}


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Return the ratio of values to their difference."""
    return round(float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum())), 1)


MEASURES = {"decoder": decoder, "stories": stories, "tied": tied, "experts": experts}


def main() -> None:
    """Measure what is named, or all."""
    logging.disable(logging.WARNING)
    os.environ["HF_HUB_OFFLINE"] = "1"
    result = {}
    for name in sys.argv[1:] or MEASURES:
        with tempfile.TemporaryDirectory() as folder:
            result[name] = MEASURES[name](Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
