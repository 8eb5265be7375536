"""The models that llama.cpp computes as transformers does: their names, what is stored otherwise, and their facts.

Source: what llama.cpp reads of a file (`src/llama-model.cpp`, `src/models/`) and computes without being told.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qsdk.core.errors import ExportError

Facts = dict[str, int | float | str]


@dataclass(frozen=True)
class Architecture:
    """What one architecture of llama.cpp does otherwise than the class of transformers.

    Attributes:
        name: of `gguf.MODEL_ARCH_NAMES`.
        activation: what its MLP applies; other activations are refused.
        pairs: whether the halves of a head that a rotary embedding turns together are neighbours, so that the rows of
            query and key projections are stored in another order.
        norm_offset: what a norm adds to its weight.
        full_attention: each so-manieth layer attends to all tokens, the others to a window; None where all attend to
            all.
        unrotated: each so-manieth layer has no rotary embedding; None where all have one.
        reads: keys of a config beside the usual ones -> names of facts.
    """

    name: str
    activation: str = "silu"
    pairs: bool = False
    norm_offset: float = 0.0
    full_attention: int | None = None
    unrotated: int | None = None
    reads: Mapping[str, str] | None = None


_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_GRANITE = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"} | {
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}
_GELU = "gelu_pytorch_tanh"
#: `model_type` of a config of transformers -> architecture
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", pairs=True),
    "mistral": Architecture("llama", pairs=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", _GELU, norm_offset=1.0),
    "gemma2": Architecture("gemma2", _GELU, norm_offset=1.0, full_attention=2, reads=_SOFTCAPS),
    "gemma3_text": Architecture("gemma3", _GELU, norm_offset=1.0, full_attention=6, reads=_SOFTCAPS),
    "phi3": Architecture("phi3"),
    "olmo2": Architecture("olmo2"),
    "smollm3": Architecture("smollm3", pairs=True, unrotated=4),
    "granite": Architecture("granite", pairs=True, reads=_GRANITE),
    "starcoder2": Architecture("starcoder2", _GELU),
}

_USUAL = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "norm_epsilon": "attention.layer_norm_epsilon",
}


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the architecture of llama.cpp that computes what a config of transformers describes.

    Raises:
        ExportError: there is none, or llama.cpp would compute something else; the message says what.
    """
    kind = str(config.get("model_type"))
    found = ARCHITECTURES.get(kind)
    if found is None:
        raise ExportError(f"no form of a {kind} model in GGUF is known; {', '.join(ARCHITECTURES)} have one")
    for what, wanted, held in _computed_otherwise(config, found):
        raise ExportError(f"llama.cpp computes a {kind} model with {what} {wanted}, and this one has {held}")
    return found


def _computed_otherwise(config: Mapping[str, Any], found: Architecture) -> Iterator[tuple[str, Any, Any]]:
    """Yield what llama.cpp takes for granted of a model, and what this one has in its place."""
    activation = config.get("hidden_activation") or config.get("hidden_act")
    if activation != found.activation:
        yield "the activation", found.activation, activation
    heads, width = config["num_attention_heads"], _head_width(config)
    given = config.get("query_pre_attn_scalar")
    # the 27B models of Gemma 2 and 3, which llama.cpp knows by their number of layers
    wanted = config["hidden_size"] / heads if config["num_hidden_layers"] in (46, 62) else width
    if given is not None and given != wanted:
        yield "query_pre_attn_scalar", wanted, given
    layers = range(config["num_hidden_layers"])
    rotated = config.get("no_rope_layers")
    if found.unrotated is not None and rotated != [int((layer + 1) % found.unrotated != 0) for layer in layers]:
        yield "no rotation in every layer of", found.unrotated, rotated
    if found.full_attention is not None:
        full = ["full_attention" if (n + 1) % found.full_attention == 0 else "sliding_attention" for n in layers]
        if config.get("layer_types") != full:
            yield "layers of types", full, config.get("layer_types")
    for kind, rope in _ropes(config).items():
        known = ("default", "linear", "llama3") if kind == "full_attention" else ("default",)
        if rope.get("rope_type", "default") not in known:
            yield "a rotary embedding of type", " or ".join(known), rope["rope_type"]


def facts_of(config: Mapping[str, Any], found: Architecture) -> Facts:
    """Return what a file says of a model, by the names that follow that of the architecture."""
    result: Facts = {}
    for key, name in {**_USUAL, **(found.reads or {})}.items():
        if config.get(key) is not None:
            result[name] = config[key]
    width, rope = _head_width(config), _ropes(config)["full_attention"]
    result |= {"attention.key_length": width, "attention.value_length": width}
    result["rope.dimension_count"] = int(width * rope.get("partial_rotary_factor", 1.0))
    result["rope.freq_base"] = float(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        result |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    window = config.get("sliding_window")
    if found.full_attention is not None:
        result["attention.sliding_window"] = int(config["sliding_window"])
        if (local := _ropes(config).get("sliding_attention")) is not None:
            result["rope.freq_base_swa"] = float(local["rope_theta"])
    elif found.name == "phi3":
        result["attention.sliding_window"] = int(window or 0)
    elif window is not None and config.get("use_sliding_window", True):
        # llama.cpp attends to all tokens here, which is the same until the window is full
        result["context_length"] = min(int(window), int(result["context_length"]))
    if found.name == "phi3":
        result["rope.scaling.original_context_length"] = int(config["original_max_position_embeddings"])
    return result


def _head_width(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _ropes(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of rotary embeddings by type of layer."""
    given = config["rope_parameters"]
    return dict(given) if "full_attention" in given else {"full_attention": given}


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of a projection with the two halves of each head, which are turned together, as neighbours."""
    shape = weight.shape
    halves = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return halves.transpose(1, 2).reshape(shape)


def rope_factors(config: Mapping[str, Any]) -> Tensor | None:
    """Return by what the frequencies of a rotary embedding are divided, where the type `llama3` asks for that.

    Source: `_compute_llama3_parameters` of transformers.
    """
    rope, width = _ropes(config)["full_attention"], _head_width(config)
    if rope.get("rope_type") != "llama3":
        return None
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float64) / width))
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share: Tensor = ((turns - low) / (high - low)).clamp(0, 1)  # 1 for frequencies that stay
    factors: Tensor = 1 / ((1 - share) / rope["factor"] + share)
    return factors.float()
