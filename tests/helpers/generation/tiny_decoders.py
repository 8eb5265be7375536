"""Decoders of transformers at their smallest, sims of them, and generation from an exported file alone."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

import qsdk
from qsdk import QuantConfig, QuantSim

#: the argument and the output that hold a cache; transformers 5.24 has renamed them
CACHE = "cache" if "cache" in inspect.signature(hf.LlamaForCausalLM.forward).parameters else "past_key_values"
VOCABULARY = 128
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "head_dim": 8,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def decoder(kind: str, **changes: Any) -> nn.Module:
    """Return a decoder of a kind such as `Llama`, with random weights."""
    torch.manual_seed(0)
    config = getattr(hf, f"{kind}Config")(**{**_SIZES, **changes})
    return getattr(hf, f"{kind}ForCausalLM")(config).eval()


def gpt2() -> nn.Module:
    """Return a GPT-2, whose positions are embedded and whose layers are Conv1D."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()


def t5() -> nn.Module:
    """Return a T5: an encoder whose results every step of the decoder reads."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)).eval()


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: decoder("Llama"),
    "llama, eager attention": lambda: decoder("Llama", attn_implementation="eager"),
    "mistral, sliding window": lambda: decoder("Mistral", sliding_window=6),
    "qwen3": lambda: decoder("Qwen3"),
    "gemma2": lambda: decoder("Gemma2", sliding_window=6),
    "gpt2": gpt2,
}


def tokens(seed: int, batch: int = 1, length: int = 10) -> Tensor:
    """Return random tokens [batch, length]."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def plain_sim(model: nn.Module, config: QuantConfig | None = None) -> QuantSim:
    """Return a calibrated sim of a decoder whose example has nothing but tokens."""
    sim = qsdk.quantize(model, {"input_ids": tokens(0)}, config or qsdk.w8a8())
    qsdk.calibrate(sim, [{"input_ids": tokens(seed)} for seed in range(1, 4)], progress=False)
    return sim


def step_example(model: nn.Module, batch: int = 2, past: int = 5, step: int = 3) -> dict[str, Any]:
    """Return the arguments of one step: new tokens, mask, positions, and the cache of the tokens before."""
    ids, cache = tokens(0, batch, past + step), DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :past], **{CACHE: cache}, use_cache=True)
    positions = torch.arange(past, past + step)[None].repeat(batch, 1)
    return {
        "input_ids": ids[:, past:],
        "attention_mask": torch.ones_like(ids),
        "position_ids": positions,
        CACHE: cache,
    }


def session_of(path: str) -> ort.InferenceSession:
    """Return a session without the optimizers that change values."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def generate(session: ort.InferenceSession, ids: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Return the tokens with `count` more, each the most likely one, from an exported file alone."""
    batch, total = len(ids), ids
    caches = {one.name: one for one in session.get_inputs() if one.name.startswith("past_key_values")}
    types = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}
    feeds: dict[str, Any] = {
        name: np.zeros((batch, one.shape[1], 0, one.shape[3]), types[one.type]) for name, one in caches.items()
    }
    outputs = [one.name for one in session.get_outputs()]
    step = ids
    for _ in range(count):
        start = total.shape[1] - step.shape[1]
        feeds |= {"input_ids": step, "attention_mask": np.ones_like(total)}
        if "position_ids" in {one.name for one in session.get_inputs()}:
            feeds["position_ids"] = np.arange(start, total.shape[1])[None].repeat(batch, 0)
        results = dict(zip(outputs, session.run(None, feeds), strict=True))
        step = results["logits"][:, -1].argmax(-1)[:, None]
        total = np.concatenate([total, step], 1)
        feeds |= {name: results[name.replace("past_key_values", "present")] for name in caches}
    return total
