"""Rotations that the model computes while it runs: the float model stays the same, and every later step takes them."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from rotated_models import APART, BUILD, GROUPED, exact, float_file, in_float, off
from torch import nn

import qsdk
from qsdk import FileFormatError, ModelError
from qsdk.algorithms.rotation.orthogonal import online_factors, turned_online
from qsdk.core.channel_maps.rotated_weights import find_online
from qsdk.verbs.doors.choose import door_of

KIND = "input of a layer, at run time"
LINEAR = replace(qsdk.w4a8(block_size=12), only_linear=True)


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("size", "factors"), [(1, 1), (36, 1), (64, 1), (96, 2), (768, 2), (5632, 2), (11008, 2), (67, 1)]
)
def test_factors_are_orthogonal_and_give_the_product_that_the_model_computes(size, factors):
    found = online_factors(size, 3)
    assert len(found) == factors
    for matrix in found:
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(len(matrix)), atol=1e-12)
    if size <= 768:
        whole = turned_online(np.eye(size), found)
        np.testing.assert_allclose(whole @ whole.T, np.eye(size), atol=1e-12)
        if factors == 2:  # the Kronecker product, its columns in another order
            first, second = found
            columns = np.arange(size).reshape(len(second), len(first)).T.reshape(-1)
            np.testing.assert_allclose(whole, np.kron(second, first)[:, columns], atol=1e-12)
    assert sum(map(len, found)) <= max(64, size // 10, size * (factors == 1))


def llama(size: int) -> nn.Module:
    """A Llama whose feed-forward parts have outliers in a channel, as those of trained ones."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**{**GROUPED, "intermediate_size": size}, **APART)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.up_proj.weight[3] *= 50
            layer.mlp.down_proj.weight[:, 3] /= 50
    return Logits(model)


class Logits(nn.Module):
    """The first output of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)[0]


IDS = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))


def both(model: nn.Module, x: torch.Tensor, config, folder):
    """The calibrated sims of a module, and of its float model as an ONNX file, with data for each."""
    sim = qsdk.quantize(model, (x,), config)
    of_file = qsdk.quantize(float_file(sim, folder / "float.onnx"), None, config)
    result = [(sim, [(x,)]), (of_file, [(x.numpy(),)])]
    for one, data in result:
        qsdk.calibrate(one, data, progress=False)
    return result


def online_rows(report):
    return [row for row in report.rows if row["kind"] == KIND]


def float_result(sim, x) -> np.ndarray:
    return exact(sim.unwrap(), x) if hasattr(sim, "unwrap") else in_float(sim, x)


def widest(sim, dtype: str) -> float:
    """The widest range of what rotations read, in 16 bits, or of what they give, in 8."""
    given = [e for site, e in sim.encodings.items() if ".rotation" in site or dtype == "uint16"]
    found = [e for e in given if e.dtype.name == dtype]
    return max(float(e.scale.max()) * (e.dtype.hi - e.dtype.lo) for e in found)


def simulated(sim, x) -> np.ndarray:
    return sim(x).detach().numpy() if hasattr(sim, "unwrap") else sim.run((x.numpy(),))[0]


@pytest.mark.parametrize(
    ("size", "config"),
    [
        (96, qsdk.w8a8()),
        pytest.param(36, qsdk.w8a8(), marks=pytest.mark.slow),
        pytest.param(96, LINEAR, marks=pytest.mark.slow),
    ],
    ids=["two factors", "one factor", "linear"],
)
def test_the_float_model_stays_and_every_later_step_takes_the_rotation(size, config, tmp_path):
    model = llama(size)
    wanted = exact(model, IDS)
    for door, (sim, data) in enumerate(both(model, IDS, config, tmp_path)):
        qsdk.rotate(sim, data, progress=False)
        report = qsdk.rotate(sim, data, online=True, progress=False)
        assert [(row["size"], row["reason"]) for row in online_rows(report)] == [(size, "")] * 2
        assert report.summary["at_run_time"] == 2
        assert off(float_result(sim, IDS), wanted) < 1e-5
        if not config.only_linear:  # the layer reads half the range at most: its input has outliers in a channel
            assert widest(sim, "uint8") < 0.5 * widest(sim, "uint16")
        again = qsdk.rotate(sim, data, online=True, progress=False)
        assert online_rows(again) == []
        path = tmp_path / f"{door}.onnx"
        qsdk.export(sim, path)
        summary = qsdk.check_parity(sim, path, data, progress=False).summary
        assert summary["passed"]
        assert summary["weights_max_lsb"] == 0
        assert summary["activations_max_lsb"] <= 1
        feeds = [(IDS.numpy(),)]
        assert qsdk.check_parity(qsdk.quantize(path), path, feeds, progress=False).summary["passed"]
        qsdk.save(sim, tmp_path / "sim.qsdk")
        loaded = qsdk.load(tmp_path / "sim.qsdk", *([] if door else [model]))
        np.testing.assert_array_equal(simulated(loaded, IDS), simulated(sim, IDS))
        with door_of(loaded).as_given() as changed:
            assert changed
            assert off(float_result(loaded, IDS), wanted) < 1e-5
        if not config.only_linear:
            integers = qsdk.to_integer(path, tmp_path / "integers.onnx", progress=False).summary
            assert integers["float_tensors"] == 0
            assert integers["operations_max_lsb"] <= 1


@pytest.fixture(scope="module")
def calibrated():
    """A model and its calibrated sim at W8A8."""
    model = llama(96)
    sim = qsdk.quantize(model, (IDS,), qsdk.w8a8())
    qsdk.calibrate(sim, [(IDS,)], progress=False)
    return model, sim


@pytest.mark.slow
def test_a_failure_leaves_the_sim_as_it_was(calibrated):
    sim = copy.deepcopy(calibrated[1])
    module, wanted, sites = sim.model, sim(IDS), list(sim.plan.decisions)
    with pytest.raises(qsdk.DataError):
        qsdk.rotate(sim, [(torch.zeros(2, 6, 3),)], online=True, progress=False)
    assert sim.model is module
    assert list(sim.plan.decisions) == sites
    assert torch.equal(sim(IDS), wanted)


class Stream(nn.Module):
    """A residual stream with a layer behind an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.up, self.down = (
            nn.Linear(8, 16),
            nn.RMSNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )
        self.last_norm, self.head = nn.RMSNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.head(self.last_norm(x))


def test_a_layer_of_a_frozen_weight_gets_no_rotation():
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    sim = qsdk.quantize(Stream(), (x,), qsdk.w8a8())
    qsdk.calibrate(sim, [(x,)], progress=False)
    sim.freeze("down:weight")
    report = qsdk.rotate(sim, [(x,)], online=True, progress=False)
    assert [row["reason"] for row in online_rows(report)] == ["", "the encoding of down:weight is frozen"]
    rotations = [name for name, _ in sim.model.named_modules() if name.endswith(".rotation")]
    assert rotations == ["enter.rotation"]


@pytest.mark.slow
def test_a_frozen_weight_keeps_its_input(calibrated):
    sim = copy.deepcopy(calibrated[1])
    sim.freeze("model.model.layers.0.mlp.down_proj:weight")
    report = qsdk.rotate(sim, [(IDS,)], online=True, progress=False)
    reasons = [row["reason"] for row in online_rows(report)]
    assert reasons == ["the encoding of model.model.layers.0.mlp.down_proj:weight is frozen", ""]


@pytest.mark.slow
def test_sites_of_a_rotation_read_16_bits_or_stay_float(calibrated):
    whole = copy.deepcopy(calibrated[1])
    qsdk.rotate(whole, [(IDS,)], online=True, progress=False)
    owner = "model.model.layers.0.mlp"
    dtypes = {row["site"]: str(row["dtype"]) for row in whole.coverage().rows}
    rotation = f"{owner}.down_proj.rotation"
    for site in (f"{owner}/mul.0:output", f"{rotation}/unflatten.0:output", f"{rotation}/matmul.0:output"):
        assert dtypes[site] == "uint16"
    assert dtypes[f"{rotation}/flatten.0:output"] == "uint8"  # the layer's input
    assert dtypes[f"{rotation}:first"] == dtypes[f"{rotation}:second"] == "int8"
    # elements of one magnitude are on a grid of 8 bits
    matrix = whole.model.get_submodule(rotation).first
    spread = whole.encodings[f"{rotation}:first"].scale * 127
    np.testing.assert_allclose(np.broadcast_to(spread, matrix.shape), matrix.abs().numpy(), rtol=1e-6)
    assert f"{rotation}/matmul.0:output' -> activation=uint16" in whole.explain(f"{rotation}/matmul.0:output")


@pytest.mark.slow
def test_weights_alone_need_no_rotation_at_run_time():
    sim = qsdk.quantize(llama(36), (IDS,), qsdk.weight_only("int4"))
    report = qsdk.rotate(sim, online=True, progress=False)
    assert [row["reason"] for row in online_rows(report)] == ["its input is not quantized"] * 2
    assert "at_run_time: 0" in str(report)


@pytest.mark.slow
def test_a_checkpoint_of_the_own_class_is_refused_and_another_model_is_not_loaded(calibrated, tmp_path):
    model, sim = calibrated[0], copy.deepcopy(calibrated[1])
    qsdk.rotate(sim, [(IDS,)], online=True, progress=False)
    with pytest.raises(ModelError, match=r"down_proj of this sim has a rotation in front of it"):
        sim.model.model.save_pretrained(tmp_path / "folder")
    with pytest.raises(RuntimeError, match=r"Unexpected key.*down_proj\.rotation\.first"):
        copy.deepcopy(model).load_state_dict(sim.unwrap().state_dict())
    qsdk.save(sim, tmp_path / "sim.qsdk")
    with pytest.raises(FileFormatError, match="rotates the inputs of layers that the module lacks"):
        qsdk.load(tmp_path / "sim.qsdk", nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_layers_behind_an_activation_are_found_in_other_architectures(name, tmp_path):
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    x = torch.randn(2, 3, 16, 16) if name == "vit" else IDS
    model = Logits(model)
    wanted = exact(model, x)
    for door, (sim, data) in enumerate(both(model, x, qsdk.w8a8(), tmp_path)):
        rows = online_rows(qsdk.rotate(sim, data, online=True, progress=False))
        assert len(rows) == 2
        unlike = name == "gpt2" and door == 0  # its modules are Conv1D of transformers, and no Linears
        assert [row["reason"].startswith("nothing can be put in front") for row in rows] == [unlike] * 2
        assert off(float_result(sim, x), wanted) < 1e-5


def test_a_layer_behind_a_layer_is_none_of_them():
    """A rotation between the two could be merged, so that none is computed."""
    model = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    sim = qsdk.quantize(model, torch.randn(4, 8), qsdk.w8a8())
    assert find_online(sim.graph, [], sim.plan) == []
    assert online_rows(qsdk.rotate(sim, online=True, progress=False)) == []
