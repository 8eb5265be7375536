"""`dynamic_activations="token"`: int8 with the range of each row, found while the model runs; see also `compressed`."""

from pathlib import Path

import pytest
import torch
from qdq_models import mlp
from torch import nn

import qsdk

CONFIG = qsdk.w8a8().override("*", dynamic_activations="token").for_dialect("compressed-tensors")


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16) * torch.logspace(-3, 3, 5)[:, None]
    x[1, 2] = 0
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), x


def by_hand(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return torch.where(scale > 0, (x / scale).round().clamp(-128, 127) * scale, x)


def test_every_row_has_its_own_scale_and_no_data_is_needed() -> None:
    model, x = model_and_input()
    sim = qsdk.quantize(model, x, CONFIG)
    row = next(row for row in sim.coverage().rows if row["site"] == "input:input")
    assert (row["dtype"], row["granularity"], row["state"]) == ("int8", "per token, dynamic", "quantized")
    assert sim.ready().keys() == {"0:weight", "2:weight"}
    qsdk.calibrate(sim, [], progress=False)
    with torch.no_grad():
        weights = [sim.quantizers[f"{at}:weight"](model[at].weight) for at in (0, 2)]
        hidden = torch.relu(nn.functional.linear(by_hand(x), weights[0], model[0].bias))
        wanted = nn.functional.linear(by_hand(hidden), weights[1], model[2].bias)
    torch.testing.assert_close(sim(x), wanted, rtol=1e-6, atol=0)
    alone = torch.cat([sim(row[None, None]) for row in x.flatten(0, 1)]).reshape(sim(x).shape)
    torch.testing.assert_close(alone, sim(x), rtol=1e-6, atol=0)  # one row does not know the others


def test_gradients_pass_straight_through() -> None:
    model, x = model_and_input()
    sim = qsdk.quantize(model, x, CONFIG)
    qsdk.calibrate(sim, [], progress=False)
    with sim.training() as trained:
        trained(x).square().mean().backward()
        assert all(parameter.grad.abs().max() > 0 for parameter in trained.parameters())


def test_an_onnx_file_has_no_quantizer_for_it(tmp_path: Path) -> None:
    model, x = model_and_input()
    sim = qsdk.quantize(model, x, CONFIG)
    qsdk.calibrate(sim, [], progress=False)
    message = r'has the range of each token, for which an ONNX file has no quantizer; .*format="compressed-tensors"'
    with pytest.raises(qsdk.ExportError, match=f"input:input {message}"):
        qsdk.export(sim, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
    with pytest.raises(qsdk.ExportError, match=message):
        qsdk.quantize(mlp(), None, qsdk.w8a8().override("*", dynamic_activations="token"))


def test_choices_that_do_not_exist_are_refused_and_files_keep_the_others(tmp_path: Path) -> None:
    with pytest.raises(qsdk.ConfigError, match=r"dynamic_activations='row' .* is none of True, False, 'token'"):
        qsdk.w8a8().override("*", dynamic_activations="row")  # type: ignore[arg-type]
    with pytest.raises(qsdk.ConfigError, match="is symmetric int8 or int4 per token, not symmetric uint16 per tensor"):
        qsdk.quantize(*model_and_input(), qsdk.w8a16().override("*", dynamic_activations="token"))
    CONFIG.save(tmp_path / "config.json")
    assert qsdk.load_config(tmp_path / "config.json") == CONFIG
