"""Activations in blocks of narrow floats, with scales that are found while the model runs; see also `compressed`."""

from pathlib import Path

import pytest
import torch
from qdq_models import mlp
from torch import nn

import qsdk
from qsdk.core.numerics.dtypes import BLOCK_FORMATS, nvfp4
from torch_bridge.quantizers.quantizer import fake_quantize_dynamic_blocks


class Block(nn.Module):
    """A residual block whose sum, product of activations and convolution no linear layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down, self.head = nn.Linear(64, 96), nn.Linear(96, 64), nn.Linear(64, 48)
        self.conv = nn.Conv1d(5, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.head(self.conv(x) * torch.sigmoid(x @ x.mT).mean(-1, keepdim=True))


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Block().eval(), torch.randn(2, 5, 64) * torch.logspace(-2, 2, 5)[:, None]


def calibrated(config: qsdk.QuantConfig, **options):
    model, x = model_and_input()
    sim = qsdk.quantize(model, x, config)
    qsdk.calibrate(sim, [x], progress=False, **options)
    return sim, model, x


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_a_linear_layer_reads_is_in_blocks_and_nothing_else(name: str) -> None:
    sim, model, x = calibrated(qsdk.block_scaled(name))
    form = BLOCK_FORMATS[name]
    rows = {row["site"]: row for row in sim.coverage().rows}
    read = ("norm:output", "relu.0:output", "mul.0:output")
    for site in read:
        assert rows[site]["granularity"] == f"per block of {form.block_size} (last axis), dynamic"
        assert (rows[site]["state"], rows[site]["dtype"]) == ("quantized", form.dtype.name)
    others = [row for row in rows.values() if row["kind"] in ("activation", "input", "output")]
    assert {row["state"] for row in others if row["site"] not in read} == {"float"}
    why = f"no quantized linear layer reads it, and blocks of {name} are for what one sums over"
    assert why in sim.explain("add.0:output")
    assert rows["up:bias"]["state"] == "float"
    with torch.no_grad():
        weight = sim.quantizers["up:weight"](model.up.weight)
        peak = model.norm(x).abs().max().reshape(1) if name == "nvfp4" else None
        by_hand = nn.functional.linear(fake_quantize_dynamic_blocks(model.norm(x), form, peak), weight, model.up.bias)
        seen = []
        handle = sim.model.up.register_forward_hook(lambda module, args, result: seen.append(result))
        sim(x)
        handle.remove()
    norm = sim.quantizers["norm:weight"]
    assert norm.spec.dtype.name in ("int8", "float4e2m1", "float8e4m3fn")  # a norm's own weight moves what is read
    assert (seen[0] - by_hand).square().mean() < 0.02 * by_hand.square().mean()


def test_nvfp4_needs_one_number_per_tensor_and_the_others_no_data() -> None:
    model, x = model_and_input()
    assert "norm:output" in qsdk.quantize(model, x, qsdk.block_scaled("nvfp4")).ready()
    sim = qsdk.quantize(model, x, qsdk.block_scaled("mxfp8"))
    assert "norm:output" not in sim.ready()
    qsdk.calibrate(sim, [], progress=False)
    assert sim(x).isfinite().all()
    sim, model, x = calibrated(qsdk.block_scaled("nvfp4"), method="mse")  # of one grid: it would clip
    norm = sim.quantizers["norm:weight"](model.norm.weight.detach())
    largest = nn.functional.layer_norm(x, (64,), norm, model.norm.bias).abs().max()
    assert sim.encodings["norm:output"].high.item() == pytest.approx(largest.item(), rel=2e-2)


def test_both_ways_to_ask_are_one_and_later_rules_win() -> None:
    named = qsdk.w8a8().override("*", weight="nvfp4", activation="nvfp4")
    assert named == qsdk.w8a8().override("*", weight="nvfp4", dynamic_activations="nvfp4")
    assert qsdk.QuantConfig(dynamic_activations="mxfp8").activation == BLOCK_FORMATS["mxfp8"]
    assert qsdk.QuantConfig.from_dict(named.to_dict()) == named
    assert qsdk.load_config("nvfp4") == qsdk.block_scaled()
    for last in ("float4e2m1", "int8", "float32"):
        sim = qsdk.quantize(
            *model_and_input(), named.override("up", activation="float32").override("norm", activation=last)
        )
        spec = sim.plan.decisions["norm:output"].spec
        assert (spec is None) == (last == "float32")
        assert spec is None or (spec.dtype.name == last and not spec.dynamic)
    with pytest.raises(qsdk.ConfigError, match="unknown format 'fp4' of blocks; choose one of mxfp4"):
        qsdk.block_scaled("fp4")  # type: ignore[arg-type]


def test_a_rule_for_what_no_linear_layer_reads_is_refused() -> None:
    model, x = model_and_input()
    with pytest.raises(qsdk.ConfigError, match=r"has no effect: add\.0:output stays float32: no quantized linear"):
        qsdk.quantize(model, x, qsdk.block_scaled().override("add.0", activation="mxfp4"))


def test_gradients_reach_the_float_weights_and_no_scale_is_learned() -> None:
    sim, _, x = calibrated(qsdk.block_scaled("nvfp4"))
    with sim.training(learn_scales=True) as trained:
        trained(x).square().mean().backward()
        learned = [name for name, _ in trained.named_parameters() if "log2" in name]
        assert trained.up.weight.grad.abs().max() > 0
    assert not any("norm_output" in name or "up.weight" in name for name in learned)


def test_an_onnx_file_is_refused_by_name_on_both_sides(tmp_path: Path) -> None:
    sim, _, _ = calibrated(qsdk.block_scaled("mxint8"))
    message = r'has blocks of mxint8 whose scales are found while the model runs.*format="compressed-tensors"'
    with pytest.raises(qsdk.ExportError, match=message):
        qsdk.export(sim, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(qsdk.ExportError, match=message):
        qsdk.quantize(mlp(), None, qsdk.block_scaled("mxint8"))
    with pytest.raises(qsdk.ConfigError, match="activation=nvfp4 cannot be had in the dialect tensorrt"):
        qsdk.block_scaled("nvfp4").for_dialect("tensorrt")


def test_a_saved_sim_comes_back(tmp_path: Path) -> None:
    sim, model, x = calibrated(qsdk.block_scaled(nvfp4.name))
    qsdk.save(sim, tmp_path / "sim.pt")
    again = qsdk.load(tmp_path / "sim.pt", model)
    assert torch.equal(again(x), sim(x))
    assert again.encodings == sim.encodings
