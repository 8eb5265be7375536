"""`genai_config.json`: what onnxruntime-genai wants to know of a folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from onnx_backend.proto.graph_queries import declared_sizes, input_names
from qsdk.core.errors import ExportError

#: types of plain decoders that the runtime knows by name (0.18); all of them run alike
_TYPES = frozenset(
    {"gemma", "gemma2", "gptoss", "granite", "llama", "mistral", "nemotron", "olmo", "phi", "phi3", "phimoe"}
    | {"qwen2", "qwen3", "smollm3"}
)
_CACHE = "past_key_values."


@dataclass(frozen=True)
class DecoderFacts:
    """What a model's own config says of it, beside the graph.

    Attributes:
        type: `model_type` of transformers.
        positions: the most tokens that it reads.
        vocabulary: number of tokens.
        width: of its residual stream.
        search: how it generates: `do_sample`, `temperature`, `top_k`, `top_p`, `repetition_penalty`.
        tokens: `bos_token_id`, `eos_token_id`, `pad_token_id`, those that it has.
    """

    type: str
    positions: int
    vocabulary: int
    width: int
    search: Mapping[str, Any]
    tokens: Mapping[str, Any]


def genai_config(model: ModelProto, facts: DecoderFacts, filename: str, *, shares_buffers: bool) -> dict[str, Any]:
    """Return the config of a decoder file.

    Args:
        model: its inputs and outputs count.
        facts: of the model.
        filename: of the model file.
        shares_buffers: whether every layer appends to its cache in place.

    Raises:
        ExportError: the decoder takes no cache, or one whose layers differ in size.
    """
    fed = {*input_names(model.graph)}
    inputs = {value.name: value for value in model.graph.input if value.name in fed}
    caches = [name for name in inputs if name.startswith(_CACHE)]
    if not caches:
        raise ExportError(
            "format='genai' is for decoders that take and give back keys and values; choose kv_cache='float32' or "
            "'int8' in the config"
        )
    sizes = {tuple(declared_sizes(inputs[name].type)[axis] for axis in (1, 3)) for name in caches}
    if len(sizes) > 1 or None in next(iter(sizes)):
        raise ExportError(f"onnxruntime-genai has one size for the caches of all layers, and here are {sorted(sizes)}")
    ((kept, size),) = sizes
    named = {name: name for name in ("input_ids", "attention_mask", "position_ids") if name in inputs}
    named |= {"past_key_names": f"{_CACHE}%d.key", "past_value_names": f"{_CACHE}%d.value"}
    foreign = [name for name in inputs if name not in named and name not in caches]
    if foreign:
        raise ExportError(f"onnxruntime-genai feeds no input such as {foreign[0]!r}; quantize the decoder alone")
    results = {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": filename,
        "head_size": size,
        "hidden_size": facts.width,
        "inputs": named,
        "outputs": results,
        "num_attention_heads": facts.width // int(size or 1) if size else 1,
        "num_hidden_layers": len(caches) // 2,
        "num_key_value_heads": kept,
    }
    own = {"type": facts.type if facts.type in _TYPES else "llama", "vocab_size": facts.vocabulary}
    search = {"max_length": facts.positions, "past_present_share_buffer": shares_buffers, **facts.search}
    model_facts = {**facts.tokens, "context_length": facts.positions, "decoder": decoder, **own}
    return {"model": model_facts, "search": search}
