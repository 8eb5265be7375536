"""Attention in a sim is made of its ops, computes what torch computes, and has a site at each of them."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_models import calibrated, seeded, sim_of
from zoo_models import distinct

from qsdk import ModelError, QuantSim, calibrate, check_parity, export, w8a8
from torch_bridge.calibrate import stored_values
from torch_bridge.prepare import prepare
from torch_bridge.sites.attention import decomposition_of, multi_head_attention_forward, scaled_dot_product_attention


class Attention(nn.Module):
    """One nn.MultiheadAttention, as self-attention, with one source for key and value, or with three inputs."""

    def __init__(self, inputs: str = "self", need_weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.inputs, self.need_weights = inputs, need_weights
        self.attention = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x: Tensor, y: Tensor, z: Tensor, **options: Any) -> Any:
        if self.inputs == "self":
            y = z = x
        elif self.inputs == "cross":
            z = y
        result, weights = self.attention(x, y, z, need_weights=self.need_weights, **options)
        return (result, weights) if self.need_weights else result


class Scaled(nn.Module):
    """F.scaled_dot_product_attention of three Linears."""

    def __init__(self, heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.options, self.heads = options, heads
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4 * heads), nn.Linear(8, 4 * heads)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], -1, 4).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def decomposed(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """The float result of a wrapped model, whose functions run as their ops, and the sites that it reached."""
    example = {**dict(zip("xyz", args, strict=False)), **kwargs} if kwargs or len(args) > 1 else args[0]
    prepared = prepare(model, example, w8a8(), in_place=False, fold_batch_norm=True)
    with prepared.runtime.in_phase("visit", lambda _, x: x), torch.no_grad():
        return prepared.model(*args, **kwargs), list(prepared.eager_sites)


def assert_close(found: Any, wanted: Any) -> None:
    found, wanted = (value if isinstance(value, tuple) else (value,) for value in (found, wanted))
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        nan = other.isnan()
        assert torch.equal(one.isnan(), nan)
        error = (one - other).abs()[~nan].max() / other.abs()[~nan].max()
        assert float(error) <= 1e-6


def masks_of(kind: str, length: int, keys: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    if "padding" in kind:
        found["key_padding_mask"] = torch.zeros(3, keys, dtype=torch.bool)
        found["key_padding_mask"][1, keys - 2 :] = True
    if "bool" in kind:
        found["attn_mask"] = torch.ones(length, keys, dtype=torch.bool).triu(1)
    if "float" in kind:
        found["attn_mask"] = seeded(6, length, keys, seed=9)
    if "float padding" in kind:
        padding = found["key_padding_mask"]
        found["key_padding_mask"] = torch.zeros(padding.shape).masked_fill(padding, -math.inf)
    return found


@pytest.mark.spread(5)
@pytest.mark.parametrize("mask", ["", "padding", "bool", "float", "bool and padding", "float padding and float"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("inputs", ["self", "cross", "all"])
def test_multihead_attention_computes_what_torch_computes(inputs: str, need_weights: bool, mask: str):
    for first, bias, kv in itertools.product((False, True), (False, True), (False, True)):
        zero = first ^ bias ^ kv  # so that any three of the four meet in every combination
        options = {"batch_first": first, "bias": bias, "add_bias_kv": kv, "add_zero_attn": zero}
        model = distinct(Attention(inputs, need_weights, **options))
        keys = 4 if inputs == "self" else 5
        given_inputs = [seeded(3, n, 8, seed=n + i) for i, n in enumerate((4, keys, keys))]
        if not first:
            given_inputs = [x.transpose(0, 1).contiguous() for x in given_inputs]
        told = masks_of(mask, 4, keys)
        with torch.no_grad():
            wanted = model(*given_inputs, **told)
        assert_close(decomposed(model, *given_inputs, **told)[0], wanted)


def test_projections_of_other_widths_and_single_sequences():
    model = distinct(Attention("all", True, kdim=6, vdim=5))
    given_inputs = seeded(4, 3, 8), seeded(7, 3, 6), seeded(7, 3, 5)
    with torch.no_grad():
        wanted = model(*given_inputs)
        single = model(*(x[:, 0] for x in given_inputs))
    found, sites = decomposed(model, *given_inputs)
    assert_close(found, wanted)
    assert_close(decomposed(model, *(x[:, 0] for x in given_inputs))[0], single)
    named = [site for site in sites if site.startswith("attention:")]
    assert named == [f"attention:{part}" for part in (
        "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias_q", "in_proj_bias_k", "in_proj_bias_v",
    )]  # fmt: skip


def test_unaveraged_weights_and_causal_hint():
    model, x = distinct(Attention("self", True, batch_first=True)), seeded(2, 4, 8)
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    for options in ({"average_attn_weights": False}, {"attn_mask": causal, "is_causal": True}):
        with torch.no_grad():
            wanted = model(x, x, x, **options)
        assert_close(decomposed(model, x, x, x, **options)[0], wanted)
    model.need_weights = False
    with torch.no_grad():
        wanted = model(x, x, x, attn_mask=causal, is_causal=True)
    assert_close(decomposed(model, x, x, x, attn_mask=causal, is_causal=True)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["self", "cross", "all"])
def test_each_projection_has_a_weight_per_channel_and_its_bias(inputs: str):
    model = distinct(Attention(inputs))
    given_inputs = tuple(seeded(5, 2, 8, seed=i) for i in range(3))
    sim = calibrated(model, given_inputs)
    parts = {"self": [""], "cross": ["_q", "_kv"], "all": ["_q", "_k", "_v"]}[inputs]
    rows = {row["site"]: row for row in sim.coverage().rows}
    for part in parts:
        weight, bias = rows[f"attention:in_proj_weight{part}"], rows[f"attention:in_proj_bias{part}"]
        assert weight["granularity"] == "per channel (axis 0)"
        assert (weight["dtype"], bias["dtype"], bias["state"]) == ("int8", "int32", "quantized")
    # the parts read the rows of the module's own parameter
    values = np.concatenate([stored_values(sim)[f"attention:in_proj_weight{part}"] for part in parts])
    raw = model.attention.in_proj_weight.detach().numpy()
    assert np.abs(values - raw).max() <= np.abs(raw).max() / 200


@pytest.mark.slow
def test_no_row_of_attention_is_left_inside_a_function():
    sim = sim_of(distinct(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), seeded(2, 5, 8))
    rows = {row["site"]: row for row in sim.coverage().rows}
    for op in ("linear.0", "mul.0", "mul.1", "matmul.0", "softmax.0", "matmul.1", "linear.1"):
        assert rows[f"self_attn/{op}:output"]["state"] == "quantized", op
    assert not [row for row in rows.values() if "inside a module" in row["reason"] or not row["reason"]]
    assert sim.plan.decisions["self_attn/softmax.0:output"].spec.fixed_range == (0.0, 1.0)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"scale": 1.0}, {"scale": -0.5}])
def test_fused_attention_computes_what_torch_computes(options: dict[str, Any]):
    model, x = distinct(Scaled(**options)), seeded(3, 5, 8)
    if options.get("scale", 1) < 0:
        q = seeded(2, 3, 5, 4)
        weights = (q @ q.transpose(-1, -2) * options["scale"]).softmax(-1)
        assert_close(scaled_dot_product_attention(q, q, q, **options), weights @ q)
        return
    with torch.no_grad():
        wanted = model(x)
    assert_close(decomposed(model, x)[0], wanted)


@pytest.mark.parametrize("heads", [1, 2])
def test_grouped_queries(heads: int):
    model, x = distinct(Scaled(heads, enable_gqa=True)), seeded(3, 5, 8)
    with torch.no_grad():
        wanted = model(x)
    assert_close(decomposed(model, x)[0], wanted)


@given(st.sampled_from([(4, 5), (1, 4, 5), (3, 1, 4, 5), (3, 2, 1, 5)]), st.integers(0, 99), st.floats(0.05, 0.95))
def test_masks_broadcast_and_empty_rows_give_zero(shape: tuple[int, ...], seed: int, share: float):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    q, k, v = seeded(3, 2, 4, 6), seeded(3, 2, 5, 6, seed=1), seeded(3, 2, 5, 7, seed=2)
    added = torch.zeros(shape).masked_fill(~mask, -math.inf)
    for given_mask in (mask, added):
        wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=given_mask)
        found = scaled_dot_product_attention(q, k, v, attn_mask=given_mask)
        assert torch.isfinite(found).all()
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_acts_in_training_only():
    model, x = distinct(Attention("self", dropout=0.5)), seeded(4, 2, 8)
    sim = calibrated(model, (x, x, x))
    still = sim(x, x, x)
    assert torch.equal(still, sim(x, x, x))
    with sim.training():
        assert not torch.equal(sim.model(x, x, x), sim.model(x, x, x))
    torch.manual_seed(0)
    q = seeded(2, 4, 4)
    assert not torch.equal(scaled_dot_product_attention(q, q, q, dropout_p=0.5), scaled_dot_product_attention(q, q, q))


@pytest.mark.slow
def test_masks_do_not_ruin_ranges():
    model, x = distinct(Scaled()), seeded(3, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    sim = calibrated(model, (x, mask))
    ranges = [e for e in sim.encodings.values() if e.dtype.bits == 8]
    assert max(float(max(e.high.max(), -e.low.min())) for e in ranges) < 100
    with torch.no_grad():
        wanted = model(x, mask)
    noise = (sim(x, mask) - wanted).pow(2).sum()
    assert 10 * torch.log10(wanted.pow(2).sum() / noise) > 25


@pytest.mark.slow
def test_the_module_of_the_caller_stays_as_it_was():
    model, x = distinct(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)), seeded(2, 5, 8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(x)
    kind = type(model.self_attn)
    calibrated(model, x)(x)
    with torch.no_grad():
        assert torch.equal(model(x), wanted)
    assert type(model.self_attn) is kind
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def build_layers() -> list[tuple[str, nn.Module, tuple[Tensor, ...]]]:
    x, memory = seeded(2, 4, 8), seeded(2, 6, 8, seed=1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True, activation="gelu")
    return [
        ("encoder layer", nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (x,)),
        ("encoder", nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8), enable_nested_tensor=False), (x,)),
        ("decoder layer", nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), (x, memory)),
        ("transformer", nn.Transformer(8, 2, 1, 1, 16, batch_first=True), (memory, x)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "encoder layer",
        "decoder layer",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("encoder", "transformer")),
    ],
)
def test_layers_of_torch_are_simulated_and_exported(name: str, tmp_path):
    model, args = next((m, a) for n, m, a in build_layers() if n == name)
    distinct(model)
    with torch.no_grad():
        wanted = model(*args)
    prepared = prepare(model, args, w8a8(), in_place=False, fold_batch_norm=True)
    with prepared.runtime.in_phase("visit", lambda _, x: x), torch.no_grad():
        assert_close(prepared.model(*args), wanted)
    assert not [site for site in prepared.eager_sites if "multi_head" in site or "scaled_dot" in site]
    sim = calibrated(model, args)
    export(sim, tmp_path / "model.onnx")
    assert check_parity(sim, tmp_path / "model.onnx", [args], progress=False).summary["passed"]


@pytest.mark.slow
def test_simulation_is_the_same_compiled():
    model, x = distinct(Attention("self", batch_first=True)), seeded(2, 5, 8)
    sim: QuantSim = calibrated(model, (x, x, x))
    compiled = torch.compile(sim.model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, x, x), sim(x, x, x))


@pytest.mark.slow
def test_simulation_is_the_same_exported_and_trained():
    model, x = distinct(Attention("self", batch_first=True)), seeded(2, 5, 8)
    sim: QuantSim = calibrated(model, (x, x, x))
    wanted = sim(x, x, x)
    with torch.no_grad():
        assert torch.equal(torch.export.export(sim.model, (x, x, x)).module()(x, x, x), wanted)
    with sim.training(learn_scales=True) as trained:
        trained(x, x, x).sum().backward()
        gradient = trained.attention.in_proj_weight.grad
    assert gradient is not None
    assert float(gradient.abs().min()) > 0


@pytest.mark.slow
def test_a_fully_padded_sequence_does_not_stop_calibration():
    model, x = (
        distinct(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)),
        seeded(3, 4, 8),
    )
    padding = torch.zeros(3, 4, dtype=torch.bool)
    padding[2] = True
    sim = sim_of(model, {"src": x, "src_key_padding_mask": padding})
    calibrate(sim, [{"src": x, "src_key_padding_mask": padding}], progress=False)
    assert torch.isfinite(sim(x, src_key_padding_mask=padding)).all()


def test_attention_that_cannot_be_quantized_is_refused_by_name():
    x, weight = seeded(4, 2, 8), seeded(24, 8)
    given_arguments = (x, x, x, 8, 2, weight, None, None, None, False, 0.0, seeded(8, 8), None)

    def read(name: str, packed: Tensor, part: str) -> Tensor:
        return packed

    def whole(name: str, computes: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return computes(x)

    with pytest.raises(ModelError, match=r"static_k or static_v.*project the keys and values inside"):
        multi_head_attention_forward(*given_arguments, read=read, static_k=x)
    with pytest.raises(ModelError, match="is_causal without attn_mask; give the causal mask"):
        multi_head_attention_forward(*given_arguments, read=read, is_causal=True)
    with pytest.raises(ModelError, match="queries of width 8, expected 6"):
        multi_head_attention_forward(x, x, x, 6, *given_arguments[4:], read=read)
    with pytest.raises(ModelError, match="attn_mask and is_causal; put the causal part in the mask"):
        scaled_dot_product_attention(x, x, x, torch.ones(2, 2), is_causal=True)
    with pytest.raises(ModelError, match=r"_native_multi_head_attention, a fused kernel.*call nn.MultiheadAttention"):
        decomposition_of(torch._native_multi_head_attention, read, whole)
    assert decomposition_of(torch.matmul, read, whole) is None
