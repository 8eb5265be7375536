"""Models that accelerate's device_map has dispatched: a sim of one is that of the whole model."""

import warnings
from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from torch import Tensor, nn

import qsdk
from qsdk import ModelError

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    """Two layers that share a weight, and one of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
    model[2].weight = model[0].weight
    return model.eval()


def dispatched(folder: Path) -> nn.Module:
    """The first layers on the processor, the last on disk."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        places = {"0": "cpu", "1": "cpu", "2": "cpu", "3": "disk"}
        found: nn.Module = dispatch_model(network(), places, main_device="cpu", offload_dir=folder, force_hooks=True)
    return found


def result(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    sim = qsdk.quantize(model, X, "w4a8")
    qsdk.calibrate(sim, [X], progress=False)
    qsdk.gptq(sim, [X], progress=False)
    return sim(X), dict(sim.unwrap().state_dict())


def test_a_dispatched_model_gives_the_sim_of_the_whole_one(tmp_path: Path) -> None:
    model = dispatched(tmp_path)
    before, hooks = model(X), [vars(module).get("_hf_hook") for module in model.modules()]
    assert model[3].weight.is_meta
    (found, state), (wanted, whole) = result(model), result(network())
    assert torch.equal(found, wanted)
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in whole)
    # the given model is as it was
    assert model[3].weight.is_meta
    assert [vars(module).get("_hf_hook") for module in model.modules()] == hooks
    assert torch.equal(model(X), before)


def test_a_dispatched_model_is_not_quantized_in_place(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leave out in_place=True"):
        qsdk.quantize(dispatched(tmp_path), X, in_place=True)


def test_a_weight_that_nobody_holds_is_named(tmp_path: Path) -> None:
    model = dispatched(tmp_path)
    vars(model[3])["_hf_hook"].weights_map = None
    with pytest.raises(ModelError, match=r"3\.weight is on the meta device"):
        qsdk.quantize(model, X)


def test_a_model_on_several_devices_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dispatched(tmp_path)
    stored = vars(model[3])["_hf_hook"].weights_map
    monkeypatch.setattr("torch_bridge.wrapping.own_forward._whole", lambda value, like: Elsewhere(value))
    assert stored is not None
    with pytest.raises(ModelError, match="over cpu, far:0; load it on one device"):
        qsdk.quantize(model, X)


class Elsewhere(nn.Parameter):
    """A parameter that says that it is on another device."""

    @property
    def device(self) -> str:  # type: ignore[override]
        return "far:0"
