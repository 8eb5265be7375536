"""Attention as the ops it consists of: what a sim runs in the place of torch's fused functions.

`F.multi_head_attention_forward` and `F.scaled_dot_product_attention` reach the function mode as one function each.
These decompositions compute the same by ordinary torch functions, in the order in which `torch.onnx.export` writes
them, so that projections, scores, softmax and the weighted sum are sites in eager mode, in every trace and in the ONNX
file.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qsdk.core.errors import ModelError
from torch_bridge.sites.functional import decompose_std_mean

ReadPacked = Callable[[str, Tensor, str], Tensor]  # (name of a packed parameter, its value, part to read)
AsOneOp = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]  # (name of an op, function, input)


RoundInput = Callable[[str, Tensor], Tensor]  # (name of a weight, what is multiplied with it)


def _as_it_is(name: str, x: Tensor) -> Tensor:
    return x


def _as_separate_ops(name: str, computes: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return computes(x)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    as_one_op: AsOneOp = _as_separate_ops,
) -> Tensor:
    """Return the attention of `query` [..., L, E] to `key` [..., S, E] and `value` [..., S, V], as [..., L, V].

    Half of the scale goes to the query and half to the key, and a row that the mask leaves empty becomes 0, both as in
    torch's own math kernel. `as_one_op` runs several functions as one op with one site: the softmax has the same site
    with a mask and without, since models leave a mask of ones out in eager mode and keep it in a trace.
    """
    if is_causal and attn_mask is not None:
        raise ModelError("scaled_dot_product_attention got attn_mask and is_causal; put the causal part in the mask")
    if enable_gqa:
        key, value = (_repeat_heads(part, query.shape[-3]) for part in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    half = math.sqrt(abs(factor))
    keys = key.transpose(-2, -1)
    if factor != 1.0:
        query, keys = query * math.copysign(half, factor), keys * half
    scores = torch.matmul(query, keys)
    mask = _causal_mask(query, key) if is_causal else attn_mask
    if mask is not None:
        scores = scores + _mask_of_included(mask, query.dtype)
    weights = F.softmax(scores, dim=-1) if attn_mask is None else as_one_op("softmax", _softmax_without_nan, scores)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    return torch.matmul(weights, value)


def _softmax_without_nan(scores: Tensor) -> Tensor:
    weights = F.softmax(scores, dim=-1)
    return torch.where(torch.isnan(weights), 0.0, weights)


def _repeat_heads(heads: Tensor, count: int) -> Tensor:
    """Return [..., H, S, E] with every head repeated so that there are `count`; copies of a head are neighbours.

    The ops are those of models that repeat heads themselves under a mask and leave it to torch without one.
    """
    *outer, own, length, width = heads.shape
    if own == count:
        return heads
    spread = heads[..., None, :, :].expand(*outer, own, count // own, length, width)
    return spread.reshape(*outer, count, length, width)


def _causal_mask(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()


def _mask_of_included(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask to be added to scores; in a bool mask, True takes part."""
    return torch.where(mask, 0.0, -math.inf).to(dtype) if mask.dtype == torch.bool else mask


@dataclass(frozen=True, eq=False)
class _AttentionCall:
    """The arguments of `F.multi_head_attention_forward`, in its order and with its defaults."""

    query: Tensor
    key: Tensor
    value: Tensor
    embed_dim_to_check: int
    num_heads: int
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    add_zero_attn: bool
    dropout_p: float
    out_proj_weight: Tensor
    out_proj_bias: Tensor | None
    training: bool = True
    key_padding_mask: Tensor | None = None
    need_weights: bool = True
    attn_mask: Tensor | None = None
    use_separate_proj_weight: bool = False
    q_proj_weight: Tensor | None = None
    k_proj_weight: Tensor | None = None
    v_proj_weight: Tensor | None = None
    static_k: Tensor | None = None
    static_v: Tensor | None = None
    average_attn_weights: bool = True
    is_causal: bool = False


def multi_head_attention_forward(
    *args: Any,
    read: ReadPacked,
    as_one_op: AsOneOp = _as_separate_ops,
    round_input: RoundInput = _as_it_is,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return what `F.multi_head_attention_forward` returns: [L, N, E] or [L, E] in and out.

    `read` returns the packed projection, or the part of it that one op reads, through its site; for `as_one_op` see
    `scaled_dot_product_attention`. `round_input` returns what a weight is multiplied with.
    """
    call = _AttentionCall(*args, **kwargs)
    query, key, value, padding = call.query, call.key, call.value, call.key_padding_mask
    batched = query.dim() == 3
    if not batched:
        query, key, value = _add_batch_axis(query, key, value)
        padding = None if padding is None else padding.unsqueeze(0)
    length, batch, width = query.shape
    heads = call.num_heads
    _require_supported(call, width)
    hint = call.is_causal and padding is None and not call.need_weights
    if call.use_separate_proj_weight:
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        q, k, v = _project_separately(query, key, value, weights, call.in_proj_bias, read, round_input)
    else:
        q, k, v = _project(query, key, value, call.in_proj_weight, call.in_proj_bias, read, round_input)
    mask = None if hint else _merge_masks(call.attn_mask, padding, batch, heads, q.dtype)
    if call.bias_k is not None and call.bias_v is not None:
        k, v = torch.cat([k, call.bias_k.repeat(1, batch, 1)]), torch.cat([v, call.bias_v.repeat(1, batch, 1)])
        mask = _add_key(mask)
    q, k, v = (_to_heads_first(part, batch, heads) for part in (q, k, v))
    if call.add_zero_attn:
        k, v = (torch.cat([part, part.new_zeros(part.shape[0], 1, part.shape[2])], 1) for part in (k, v))
        mask = _add_key(mask)
    dropped = call.dropout_p if call.training else 0.0
    if call.need_weights:
        attended, shares = _attend_with_weights(q, k, v, mask, dropped)
        joined = attended.transpose(0, 1).reshape(length * batch, width)
        shares = shares.view(batch, heads, length, k.shape[1])
        shares = shares.mean(dim=1) if call.average_attn_weights else shares
    else:
        shares = None
        q, k, v = (part.view(batch, heads, part.shape[1], part.shape[2]) for part in (q, k, v))
        split = None if mask is None else _split_by_head(mask, batch, heads)
        attended = scaled_dot_product_attention(q, k, v, split, dropped, hint, as_one_op=as_one_op)
        joined = attended.permute(2, 0, 1, 3).contiguous().view(batch * length, width)
    result = F.linear(round_input("out_proj.weight", joined), call.out_proj_weight, call.out_proj_bias)
    result = result.view(length, batch, result.shape[1])
    if not batched:
        return result.squeeze(1), None if shares is None else shares.squeeze(0)
    return result, shares


def _add_batch_axis(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return [L, E] as [L, 1, E]; equal inputs stay one tensor, because they are projected together."""
    wide = query.unsqueeze(1)
    wide_key = wide if key is query else key.unsqueeze(1)
    return wide, wide_key, wide_key if value is key else value.unsqueeze(1)


def _require_supported(call: _AttentionCall, width: int) -> None:
    if call.static_k is not None or call.static_v is not None:
        raise ModelError(
            "multi_head_attention_forward got static_k or static_v, which qsdk cannot quantize; project the keys and "
            "values inside, or call F.scaled_dot_product_attention on them"
        )
    if call.is_causal and call.attn_mask is None:
        raise ModelError("multi_head_attention_forward got is_causal without attn_mask; give the causal mask itself")
    if width != call.embed_dim_to_check or width % call.num_heads:
        raise ModelError(
            f"multi_head_attention_forward got queries of width {width}, expected {call.embed_dim_to_check}, a "
            f"multiple of its {call.num_heads} heads; check embed_dim and num_heads"
        )


def _project(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    read: ReadPacked,
    round_input: RoundInput,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, projected by one packed weight [3E, E].

    Inputs that are the same tensor are projected together.
    """
    assert weight is not None

    def linear(x: Tensor, part: str) -> Tensor:
        rounded = round_input(f"in_proj_weight_{part}" if part else "in_proj_weight", x)
        return F.linear(rounded, read("in_proj_weight", weight, part), _bias(bias, part, read))

    if query is key and key is value:
        q, k, v = _unpack(linear(query, ""), 3)
        return q, k, v
    if key is value:
        k, v = _unpack(linear(key, "kv"), 2)
        return linear(query, "q"), k, v
    return linear(query, "q"), linear(key, "k"), linear(value, "v")


def _bias(bias: Tensor | None, part: str, read: ReadPacked) -> Tensor | None:
    return None if bias is None else read("in_proj_bias", bias, part)


def _unpack(packed: Tensor, parts: int) -> list[Tensor]:
    """Return the parts of [L, N, parts * E], by the moves that torch itself makes."""
    length, batch, width = packed.shape
    stacked = packed.view(length, batch, parts, width // parts).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
    return [stacked[index] for index in range(parts)]


def _project_separately(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weights: Sequence[Tensor | None],
    bias: Tensor | None,
    read: ReadPacked,
    round_input: RoundInput,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each projected by its own weight (inputs of different widths)."""
    projected = []
    for x, weight, part in zip((query, key, value), weights, "qkv", strict=True):
        assert weight is not None
        projected.append(F.linear(round_input(f"{part}_proj_weight", x), weight, _bias(bias, part, read)))
    q, k, v = projected
    return q, k, v


def _merge_masks(
    mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Return one float mask [1 or N*H, L or 1, S] for both masks; in bool masks here, True is left out, as in torch."""
    if mask is not None:
        mask = _mask_of_excluded(mask, dtype)
        mask = mask.unsqueeze(0) if mask.dim() == 2 else mask
    if padding is None:
        return mask
    length = padding.shape[1]
    padding = _mask_of_excluded(padding, dtype).view(batch, 1, 1, length).expand(-1, heads, -1, -1)
    padding = padding.reshape(batch * heads, 1, length)
    return padding if mask is None else mask + padding


def _mask_of_excluded(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, -math.inf, 0.0).to(dtype) if mask.dtype == torch.bool else mask


def _add_key(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else F.pad(mask, (0, 1))


def _split_by_head(mask: Tensor, batch: int, heads: int) -> Tensor:
    if mask.shape[0] == 1:
        return mask.unsqueeze(0)
    return mask.view(batch, heads, -1, mask.shape[-1])


def _to_heads_first(part: Tensor, batch: int, heads: int) -> Tensor:
    """Return [L, N, E] as [N * heads, L, E / heads]."""
    return part.view(part.shape[0], batch * heads, part.shape[2] // heads).transpose(0, 1)


def _attend_with_weights(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Return the attention and its weights [N * heads, L, S]; a row that the mask leaves empty is NaN, as in torch."""
    scores = torch.bmm(q * math.sqrt(1.0 / q.shape[-1]), k.transpose(-2, -1))
    if mask is not None:
        scores = mask + scores
    weights = F.softmax(scores, dim=-1)
    if dropout_p > 0.0:
        weights = F.dropout(weights, dropout_p)
    return torch.bmm(weights, v), weights


def decomposition_of(
    func: Callable[..., Any], read: ReadPacked, as_one_op: AsOneOp, round_input: RoundInput = _as_it_is
) -> Callable[..., Any] | None:
    """Return the function to run in the place of a fused function of torch, or None if it is not fused."""
    if func is F.scaled_dot_product_attention:
        return functools.partial(scaled_dot_product_attention, as_one_op=as_one_op)
    if func is F.multi_head_attention_forward:
        return functools.partial(multi_head_attention_forward, read=read, as_one_op=as_one_op, round_input=round_input)
    if func is torch._native_multi_head_attention or func is torch._transformer_encoder_layer_fwd:
        raise ModelError(
            f"the model calls {func.__name__}, a fused kernel whose inner tensors cannot be quantized; call "
            "nn.MultiheadAttention or F.scaled_dot_product_attention instead"
        )
    return decompose_std_mean(func)
