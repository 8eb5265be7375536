"""Files that `qsdk.export(format="gguf")` writes, read by the package `gguf` and computed by llama.cpp itself."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from llama_cpp import llama_cpp
from tiny_decoders import decoder, plain_sim, tokens
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn

import qsdk
from torch_bridge.gguf.architectures import in_pairs

WIDE = {"hidden_size": 64, "head_dim": 16, "num_hidden_layers": 1}
W4 = qsdk.weight_only("int4", block_size=32)
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0} | {
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases and a tied head": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama 3's rotary embedding": ("Llama", {"rope_parameters": _LLAMA3}),
    "a linear rotary embedding": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"num_hidden_layers": 2, "query_pre_attn_scalar": 16, "sliding_window": 6}),
    "gemma3": ("Gemma3", {"num_hidden_layers": 7, "query_pre_attn_scalar": 16, "sliding_window": 6}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}),
    "granite": ("Granite", _GRANITE),
    "starcoder2": ("Starcoder2", {}),
}
QUICK = ("llama", "qwen3")


def model_of(name: str) -> nn.Module:
    """Return a model whose norms and biases matter, and where a token attends to, which needs large weights."""
    kind, changes = MODELS[name]
    if kind == "Gemma3":
        torch.manual_seed(0)
        sizes = {"vocab_size": 128, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        model: nn.Module = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, **{**WIDE, **changes})).eval()
    else:
        model = decoder(kind, **{**WIDE, **changes})
    for key, value in model.named_parameters():
        if "norm" in key or key.endswith("bias"):
            nn.init.normal_(value.data, 0.1 if "norm" in key else 0.0, 0.3)
        elif "proj" in key:
            value.data.mul_(8)
    return model


def tensors_in(path: Path) -> dict[str, np.ndarray]:
    """Return the values of every tensor of a file."""
    return {one.name: gguf.dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}


def logits_of(path: Path, ids: torch.Tensor) -> np.ndarray:
    with llama_cpp(path) as opened:
        return opened.logits(ids[0].numpy())


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_llama_cpp_computes_what_the_sim_computes(name: str, tmp_path: Path):
    """With float weights, and a context longer than a window; llama.cpp keeps its cache in float16."""
    sim = plain_sim(model_of(name), qsdk.weight_only("float32"))
    report = qsdk.export(sim, tmp_path / "model.gguf", format="gguf")
    assert report.summary["types"].endswith(" F32")
    ids = tokens(5, length=40)
    expected = sim(input_ids=ids).logits[0].detach().numpy()
    found = logits_of(tmp_path / "model.gguf", ids)
    assert np.abs(found - expected).max() < 0.005 * np.abs(expected).max()


def test_every_type_gives_the_weights_of_the_sim_to_the_last_bit(tmp_path: Path):
    config = (
        W4.override("*k_proj", weight="int8")
        .override("*v_proj", weight="uint4")
        .override("*o_proj", weight="mxfp4")
        .override("*gate_proj", weight="int5")
        .override("*up_proj", weight="uint5")
        .override("*down_proj", weight="int2_strict", block_size=256)
        .skip("lm_head")
    )
    model = decoder("Llama", **WIDE, intermediate_size=256)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[:3] *= 1e-4  # scales below float16's normal numbers
    sim = plain_sim(model, config.for_dialect("gguf"))
    report = qsdk.export(sim, tmp_path / "model.gguf", format="gguf")
    forms = {row["site"].rpartition(".")[2]: row["form"].split(",")[0] for row in report.rows}
    assert [forms[f"{name}_proj:weight"] for name in ("q", "k", "v", "o", "gate", "up", "down")] == [
        *("Q4_0", "Q8_0", "Q4_1", "MXFP4", "Q5_0", "Q5_1", "TQ2_0")
    ]
    read, names = tensors_in(tmp_path / "model.gguf"), {row["site"]: row["form"].split(", ")[1] for row in report.rows}
    assert len(names) == len(read) == len(report.rows) == 12
    heads = {"q_proj": 4, "k_proj": 2}
    with torch.no_grad():
        for site, name in names.items():
            owner = site.removesuffix(":weight")
            weight = sim.model.get_submodule(owner).get_parameter("weight").detach()
            weight = sim.quantizers[site](weight) if site in sim.quantizers else weight
            if (count := heads.get(owner.rpartition(".")[2])) is not None:
                weight = in_pairs(weight, count)
            assert np.array_equal(read[name], weight.numpy()), site
    ids = tokens(6, length=20)
    found, expected = logits_of(tmp_path / "model.gguf", ids), sim(input_ids=ids).logits[0].detach().numpy()
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_codes_of_gptq_and_greedy_tokens(tmp_path: Path):
    sim = plain_sim(model_of("llama"), W4.for_dialect("gguf"))
    with torch.no_grad():
        before = sim.quantizers["lm_head:weight"](sim.model.lm_head.weight)
    qsdk.gptq(sim, [{"input_ids": tokens(seed, length=32)} for seed in range(1, 5)], progress=False)
    qsdk.export(sim, tmp_path / "model.gguf", format="gguf")
    with torch.no_grad():
        weight = sim.quantizers["lm_head:weight"](sim.model.lm_head.weight)
    assert not torch.equal(weight, before)
    assert np.array_equal(tensors_in(tmp_path / "model.gguf")["output.weight"], weight.numpy())
    ids = tokens(7, length=6)
    with llama_cpp(tmp_path / "model.gguf") as opened:
        told = ids[0].tolist()
        for _ in range(8):
            told.append(int(opened.logits(np.array(told))[-1].argmax()))
    with torch.no_grad():
        expected = ids
        for _ in range(8):
            expected = torch.cat([expected, sim(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    assert told == expected[0].tolist()


def test_a_checkpoint_in_bfloat16(tmp_path: Path):
    """Codes and scales are the sim's; what is float stays in its type, and the report says who multiplies in what."""
    decoder("Llama", **WIDE).to(torch.bfloat16).save_pretrained(tmp_path / "float")
    config = W4.for_dialect("gguf").skip("*embed_tokens")
    report = qsdk.quantize_checkpoint(
        tmp_path / "float", tmp_path / "model.gguf", config, format="gguf", progress=False
    )
    assert "the sim in bfloat16" in report.summary["products"]
    assert report.summary["paths"] == [str(tmp_path / "model.gguf")]
    kinds = {one.name: one.tensor_type.name for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert (kinds["token_embd.weight"], kinds["output.weight"], kinds["output_norm.weight"]) == ("BF16", "Q4_0", "F32")
    source = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.float32)
    ids = tokens(8, length=20)
    with torch.no_grad():
        expected = source(ids).logits[0].numpy()
    assert np.abs(logits_of(tmp_path / "model.gguf", ids) - expected).max() < 0.3 * np.abs(expected).max()


TEXTS = [
    "The quick brown fox jumps over the lazy dog 1234 times; don't it?",
    "  Two spaces\n\n\tand a tab.",
    "naïve café 🙂",
]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def bytes_tokenizer(*splits: Any, use_regex: bool = True) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS * 4, trainer)
    return made


def pieces_tokenizer() -> Tokenizer:
    """Return a tokenizer as those of Llama 2 and Mistral are converted: SentencePiece's pieces, bytes for the rest."""
    seen = Tokenizer(models.BPE())
    seen.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    seen.train_from_iterator(TEXTS * 4, trainers.BpeTrainer(vocab_size=120))
    learned = json.loads(seen.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{number:02X}>" for number in range(256)), *learned["vocab"]]
    vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
    merges = [tuple(one) for one in learned["merges"]]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: bytes_tokenizer(), "gpt2, gpt-2"),
        (lambda: bytes_tokenizer(pre_tokenizers.Split(Regex(SPLIT), "isolated"), use_regex=False), "gpt2, qwen2"),
        (lambda: bytes_tokenizer(pre_tokenizers.Digits(individual_digits=True)), "gpt2, smollm"),
        (pieces_tokenizer, "llama, default"),
    ],
    ids=["gpt-2", "qwen2", "smollm", "pieces"],
)
def test_llama_cpp_reads_texts_as_the_tokenizer_does(made: Any, said: str, tmp_path: Path):
    tokenizer = made()
    start = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=start)
    wrapped = hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    decoder("Llama", **WIDE, vocab_size=512).save_pretrained(tmp_path / "float")
    wrapped.save_pretrained(tmp_path / "float")
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "float").eval()
    sim = plain_sim(model, W4.for_dialect("gguf"))
    report = qsdk.export(sim, tmp_path / "model.gguf", format="gguf")
    assert report.summary["tokenizer"] == said
    with llama_cpp(tmp_path / "model.gguf") as opened:
        for text in TEXTS:
            assert opened.tokens(text) == tokenizer.encode(text, add_special_tokens=False).ids, text
            assert opened.tokens(text, special=True) == tokenizer.encode(text).ids
