"""Attention and rotary embeddings as single ops, which came with opset 23."""

import math
from types import MappingProxyType

import torch
from torch import Tensor

from qsdk.algorithms.graph_in_torch.values import Kernels

_FLAT = 3  # axes of [batch, places, hidden]; with the heads on an axis of their own there are four


def _by_head(x: Tensor, heads: int | None) -> Tensor:
    """Return a tensor as [batch, heads, places, size], also one given as [batch, places, hidden]."""
    return x.reshape(*x.shape[:2], heads or 1, -1).transpose(1, 2) if x.ndim == _FLAT else x


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    past_key: Tensor | None = None,
    past_value: Tensor | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and the keys and values with those of the past before them."""
    flat = q.ndim == _FLAT
    q, k, v = _by_head(q, q_num_heads), _by_head(k, kv_num_heads), _by_head(v, kv_num_heads)
    earlier = 0
    if past_key is not None and past_value is not None:
        earlier = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    group = q.shape[1] // k.shape[1]
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * factor
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(earlier)
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    y = torch.softmax(scores, -1) @ v.repeat_interleave(group, 1)
    return (y.transpose(1, 2).flatten(2) if flat else y), k, v


def _rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    places: Tensor | None = None,
    *,
    interleaved: int = 0,
    num_heads: int | None = None,
    rotary_embedding_dim: int = 0,
) -> Tensor:
    flat = x.ndim == _FLAT
    x = _by_head(x, num_heads)
    turned, kept = x.tensor_split([rotary_embedding_dim or x.shape[-1]], -1)
    if places is not None:
        cos, sin = cos[places.long()], sin[places.long()]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    one, other = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = [one * cos - other * sin, one * sin + other * cos]
    rotated = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    y = torch.cat([rotated, kept], -1)
    return y.transpose(1, 2).flatten(2) if flat else y


ATTENTION: Kernels = MappingProxyType({"Attention": _attention, "RotaryEmbedding": _rotary_embedding})
