"""Hand-written modules, through torch's exporters and through the sim: the same supergroups at both doors."""

import io

import pytest
import torch
from torch import nn

import qsdk
from onnx_backend.opening.read_graph import read_graph
from onnx_backend.proto.model_io import load
from qsdk.core.patterns.find import match_supergroups
from qsdk.core.planning.make_plan import make_plan


class LayerNorm(nn.Module):
    """As papers write it; `var` decides how the variance is taken."""

    def __init__(self, var: str = "unbiased=False"):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(8) + 0.5), nn.Parameter(torch.rand(8))
        self.var = var

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        if self.var == "std":
            return self.gamma * (x - mean) / (x.std(-1, keepdim=True) + 1e-6) + self.beta
        if self.var == "unbiased":
            return (x - mean) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6) * self.gamma + self.beta
        if self.var == "pow":
            var = (x - mean).pow(2).mean(-1, keepdim=True)
        elif self.var == "difference":
            var = (x * x).mean(-1, keepdim=True) - mean * mean
        else:
            var = x.var(-1, keepdim=True, unbiased=False)
        return self.gamma * ((x - mean) * torch.rsqrt(var + 1e-5)) + self.beta


class ChannelsFirst(LayerNorm):
    def forward(self, x):
        centred = x - x.mean(1, keepdim=True)
        var = (centred**2).mean(1, keepdim=True)
        return self.gamma[:, None] * (centred / torch.sqrt(var + 1e-6)) + self.beta[:, None]


class RMSNorm(nn.Module):
    def __init__(self, plus: float = 0.0):
        super().__init__()
        self.gamma, self.plus = nn.Parameter(torch.rand(8)), plus

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.gamma + self.plus if self.plus else self.gamma) * h.to(x.dtype)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / 2.0**0.5))


def tanh_gelu(x):
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


def silu(x):
    return x * torch.sigmoid(x)


def hard_swish(x):
    return x * nn.functional.relu6(x + 3) / 6


def rope(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def rope_by_parts(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[..., :4], sin[..., :4]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rope_in_pairs(x, cos, sin):
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos + turned * sin


def masked(x, mask):
    return (x + (1.0 - mask) * torch.finfo(torch.float32).min).softmax(-1)


def filled(x, mask):
    return x.masked_fill(mask == 0, float("-inf")).softmax(-1)


X = torch.randn(2, 6, 8)
COS, SIN = torch.randn(6, 8), torch.randn(6, 8)
MASK = torch.tril(torch.ones(6, 8))
MODULES = {
    "LayerNorm": (lambda: LayerNorm(), (X,), "LayerNorm"),
    "LayerNorm pow": (lambda: LayerNorm("pow"), (X,), "LayerNorm"),
    "LayerNorm difference": (lambda: LayerNorm("difference"), (X,), "LayerNorm"),
    "channels first": (ChannelsFirst, (X.transpose(1, 2),), "LayerNorm"),
    "RMSNorm": (RMSNorm, (X,), "RMSNorm"),
    "RMSNorm plus 1": (lambda: RMSNorm(1.0), (X,), "RMSNorm"),
    "Gelu": (lambda: Function(gelu), (X,), "Gelu"),
    "Gelu by tanh": (lambda: Function(tanh_gelu), (X,), "Gelu"),
    "SiLU": (lambda: Function(silu), (X,), "SiLU"),
    "HardSwish": (lambda: Function(hard_swish), (X,), "HardSwish"),
    "RoPE": (lambda: Function(rope), (X, COS, SIN), "RoPE"),
    "RoPE in pairs": (lambda: Function(rope_in_pairs), (X, COS, SIN), "RoPE"),
    "MaskedSoftmax": (lambda: Function(masked), (X, MASK), "MaskedSoftmax"),
    "MaskedSoftmax filled": (lambda: Function(filled), (X, MASK), "MaskedSoftmax"),
}


def exported(module, example, opset: int, *, dynamo: bool):
    buffer = io.BytesIO()
    if dynamo:
        return torch.onnx.export(module, example, opset_version=opset, dynamo=True, verbose=False).model_proto
    torch.onnx.export(module, example, buffer, opset_version=opset, dynamo=False)
    return load(buffer.getvalue())


def assert_one_group(graph, name: str) -> None:
    found = match_supergroups(graph)
    assert {group.name for group in found.groups.values()} == {name}
    assert found.near_misses == ()
    plan = make_plan(graph, qsdk.w8a8())
    inner = [d for d in plan.decisions.values() if d.reason == f"inside {name}"]
    assert not any(d.quantized for d in inner)
    outputs = [d for d in plan.decisions.values() if d.kind == "output"]
    assert [d.reason for d in outputs] == [name]


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", MODULES)
def test_what_torch_exports_is_one_group(name):
    make, example, expected = MODULES[name]
    model = exported(make().eval(), example, 18, dynamo=True)
    assert_one_group(read_graph(model), expected)


@pytest.mark.spread(16)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("opset", [13, 17, 18])
@pytest.mark.parametrize("name", MODULES)
def test_what_torchscript_exports_is_one_group(name, opset):
    make, example, expected = MODULES[name]
    model = exported(make().eval(), example, opset, dynamo=False)
    assert_one_group(read_graph(model), expected)


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", MODULES)
def test_the_sim_of_a_module_has_the_same_group(name):
    make, example, expected = MODULES[name]
    sim = qsdk.quantize(make().eval(), example, qsdk.w8a8())
    rows = sim.coverage().to_dict()["rows"]
    computed = [row for row in rows if row["kind"] in ("activation", "output") and not row["site"].startswith("(")]
    whole = [row for row in computed if row["state"] != "float"]
    assert [row["reason"] for row in whole if row["kind"] == "output"] == [expected]
    weights = {
        row["site"].split(":")[1]: row["state"] for row in rows if row["kind"] == "weight" and ":" in row["site"]
    }
    if "gamma" in weights:
        assert weights["gamma"] == "quantized"
    if "beta" in weights:
        assert weights["beta"] == "float"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("var", "reason"),
    [
        ("std", "the epsilon is added after the Sqrt"),
        ("unbiased", "its variance is divided by N - 1, not by N"),
    ],
)
def test_lookalikes_that_torch_exports_say_why(var, reason):
    model = exported(LayerNorm(var).eval(), (X,), 18, dynamo=True)
    found = match_supergroups(read_graph(model))
    assert [str(miss) for miss in found.near_misses] == [f"LayerNorm-like, not fused: {reason}"]


@pytest.mark.slow
def test_rope_by_parts_with_cut_tables():
    model = exported(Function(rope_by_parts).eval(), (X, COS, SIN), 18, dynamo=True)
    assert "RoPE" in {group.name for group in match_supergroups(read_graph(model)).groups.values()}
