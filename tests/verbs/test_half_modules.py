"""Modules in float16, bfloat16 and float64 through every verb of the PyTorch side, beside their float32 twins.

A twin has the same weights, which float32 holds exactly, and sees the same batches. What a verb finds for the module is
therefore nearly what it finds for the twin.
"""

import copy
import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_models import randomized, seeded

import qsdk
from qsdk import QuantSim, w8a8
from qsdk.verbs.doors.choose import door_of
from torch_bridge.calibrate import stored_values
from torch_bridge.data_passes import captures
from torch_bridge.sim import plain_copy
from torch_bridge.torch_values.parameters import stored_tensor
from torch_bridge.walk.forward_pairs import LayerWeights

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [*HALVES, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


class Attention(nn.Module):
    """A block of a transformer: [N, 5, 16] to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


LAYERS = ("0:weight", "3:weight")  # of the perceptron
SHAPES: dict[Callable[[], nn.Module], tuple[int, ...]] = {mlp: (16, 16), conv_net: (4, 3, 6, 6), Attention: (4, 5, 16)}


def in_every_dtype(tensor: Tensor) -> Tensor:
    """A tensor of values that all dtypes of this file hold."""
    return tensor.bfloat16().half().float() if tensor.is_floating_point() else tensor


def module_of(net: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    """A module of the same values in each dtype."""
    torch.manual_seed(0)
    return randomized(net())._apply(in_every_dtype).to(dtype)


def batches_of(net: Callable[[], nn.Module], dtype: torch.dtype) -> list[Tensor]:
    return [in_every_dtype(seeded(*SHAPES[net], seed=seed)).to(dtype) for seed in range(3)]


@functools.cache
def calibrated_once(net: Callable[[], nn.Module], dtype: torch.dtype, weights: str) -> QuantSim:
    """The calibrated sim of a module; not to be changed."""
    batches = batches_of(net, dtype)
    sim = qsdk.quantize(module_of(net, dtype), batches[0], w8a8().override("*", weight=weights))
    assert isinstance(sim, QuantSim)
    qsdk.calibrate(sim, batches, progress=False)
    return sim


def sim_of(net: Callable[[], nn.Module], dtype: torch.dtype, weights: str = "int8") -> tuple[QuantSim, list[Tensor]]:
    """A calibrated sim of a module, and its batches."""
    return copy.deepcopy(calibrated_once(net, dtype, weights)), batches_of(net, dtype)


def sqnr(reference: Tensor, found: Tensor) -> float:
    """Signal to noise in dB."""
    error = (found.double() - reference.double()).square().sum()
    return float(10 * torch.log10(reference.double().square().sum() / error.clamp(min=1e-30)))


def quality(sim: QuantSim, net: Callable[[], nn.Module]) -> float:
    """How near the simulation is to the module in float64."""
    x = in_every_dtype(seeded(*SHAPES[net], seed=9))
    out = sim(x.to(next(sim.model.parameters()).dtype))
    with torch.no_grad():
        return sqnr(module_of(net, torch.float64)(x.double()), out)


def check(sim: QuantSim, dtype: torch.dtype) -> None:
    """The module kept its dtype, and all encodings are float32."""
    state = sim.model.state_dict()
    assert {v.dtype for n, v in state.items() if v.is_floating_point() and "qsdk_" not in n} == {dtype}
    assert {v.dtype for n, v in state.items() if "qsdk_" in n} == {torch.float32}


def mean_of(model: Any, batches: list[Tensor]) -> float:
    with torch.no_grad():
        return -float(torch.stack([model(x).double().square().mean() for x in batches]).mean())


def train(sim: QuantSim, batches: list[Tensor], **learning: Any) -> None:
    with sim.training(**learning) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-2, scale_lr=1e-2))
        for x in batches:
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


Verb = Callable[[QuantSim, list[Tensor]], Any]
VERBS: dict[str, tuple[Callable[[], nn.Module], str, Verb]] = {
    "moving_average": (mlp, "int8", lambda s, b: qsdk.calibrate(s, b, method="moving_average", progress=False)),
    "percentile": (mlp, "int8", lambda s, b: qsdk.calibrate(s, b, method="percentile", progress=False)),
    "mse": (mlp, "int8", lambda s, b: qsdk.calibrate(s, b, method="mse", weight_method="mse", progress=False)),
    "tf_enhanced": (mlp, "int8", lambda s, b: qsdk.calibrate(s, b, method="tf_enhanced", progress=False)),
    "entropy": (mlp, "int8", lambda s, b: qsdk.calibrate(s, b, method="entropy", progress=False)),
    "seq_mse": (Attention, "int4", lambda s, b: qsdk.seq_mse(s, b, progress=False)),
    "adaround": (conv_net, "int4", lambda s, b: qsdk.adaround(s, b, progress=False)),
    "gptq": (Attention, "int4", lambda s, b: qsdk.gptq(s, b, progress=False)),
    "smooth_quant": (Attention, "int8", lambda s, b: qsdk.smooth_quant(s, b, progress=False)),
    "awq": (Attention, "int4", lambda s, b: qsdk.awq(s, b, progress=False)),
    "equalize": (conv_net, "int8", lambda s, b: qsdk.equalize(s, b, progress=False)),
    "correct_bias": (conv_net, "int4", lambda s, b: qsdk.correct_bias(s, b, progress=False)),
    "reestimate": (conv_net, "int8", lambda s, b: qsdk.reestimate_batch_norm(s, b, progress=False)),
    "tune_blocks": (mlp, "int4", lambda s, b: qsdk.tune_blocks(s, b, iterations=10, progress=False)),
    "mixed_precision": (
        mlp,
        "int4",
        lambda s, b: qsdk.mixed_precision(s, b, lambda m: mean_of(m, b), max_drop=1e-3, progress=False),
    ),
    "training": (conv_net, "int8", lambda s, b: train(s, b, learn_scales=True, learn_zero_points=True)),
    "norms trained": (conv_net, "int8", lambda s, b: train(s, b, freeze_bn_after=2)),
}


@functools.cache
def after(name: str, dtype: torch.dtype) -> float:
    """The quality of a sim after a verb."""
    net, weights, verb = VERBS[name]
    sim, batches = sim_of(net, dtype, weights)
    verb(sim, batches)
    check(sim, dtype)
    assert sim(batches[0]).dtype == dtype
    return quality(sim, net)


ESTIMATORS = ("moving_average", "percentile", "mse", "tf_enhanced", "entropy")  # they never see float64
#: bfloat16, in which most checkpoints come, at every run; the other types with the slow tests
CASES = [
    pytest.param(name, dtype, marks=[] if dtype == torch.bfloat16 else pytest.mark.slow)
    for name in VERBS
    for dtype in (HALVES if name in ESTIMATORS else DTYPES)
]


@pytest.mark.spread(2)
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda part: str(part).removeprefix("torch."))
def test_a_verb_finds_what_it_finds_for_the_float32_twin(name: str, dtype: torch.dtype):
    """At most 3 dB worse, beside four times the noise that computing in the dtype has in the float module."""
    net, batches = VERBS[name][0], batches_of(VERBS[name][0], dtype)
    with torch.no_grad():
        exact = module_of(net, torch.float64)(batches[0].double())
        own = sqnr(exact, module_of(net, dtype)(batches[0]))
    noise = 2 * 10 ** (-after(name, torch.float32) / 10) + 4 * 10 ** (-own / 10)
    assert after(name, dtype) > -10 * math.log10(noise), "in dB"


# what solvers chose


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    """Site -> codes of the rounded weight that was written there."""
    result: dict[str, np.ndarray] = {}
    write = LayerWeights.write

    def noting(self: LayerWeights, site: str, *, weight: Any, **others: Any) -> None:
        write(self, site, weight=weight, **others)
        if weight is not None:
            result[site] = self._sim.quantizers[site].encoding().quantize(weight.float().numpy())

    monkeypatch.setattr(LayerWeights, "write", noting)
    return result


def require_codes(sim: QuantSim, chosen: dict[str, np.ndarray]) -> None:
    """The stored weights have these codes, and the simulation reads their values."""
    for site, codes in chosen.items():
        encoding, values = sim.encodings[site], stored_values(sim)[site]
        stored = stored_tensor(sim.model, site).detach().float().numpy()
        np.testing.assert_array_equal(encoding.quantize(stored), codes, err_msg=site)
        np.testing.assert_allclose(values, encoding.dequantize(codes), rtol=2**-8, err_msg=site)


@pytest.mark.spread(2)
@each_dtype
@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("solver", ["adaround", "gptq"])
def test_codes_are_those_that_the_solver_chose(
    dtype: torch.dtype, weights: str, solver: str, chosen: dict[str, np.ndarray]
):
    sim, batches = sim_of(mlp, dtype, weights)
    nearest = {site: sim.encodings[site].quantize(stored_tensor(sim.model, site).detach().float()) for site in LAYERS}
    getattr(qsdk, solver)(sim, batches, progress=False)
    assert set(chosen) == set(LAYERS)
    assert all((chosen[site] != nearest[site]).any() for site in LAYERS), "the solver did something"
    for convert in (lambda: None, sim.model.float, sim.model.bfloat16):
        convert()
        require_codes(sim, chosen)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_weights_near_the_least_number_of_float16_keep_their_values(weights: str, chosen: dict[str, np.ndarray]):
    net = module_of(mlp, torch.float16)
    with torch.no_grad():
        net[0].weight[2] *= 1e-6  # a channel that hardly speaks
    tiny = net[0].weight[2].clone()
    assert tiny.any()
    batches = batches_of(mlp, torch.float16)
    sim = qsdk.quantize(net, batches[0], w8a8().override("*", weight=weights))
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.seq_mse(sim, batches, progress=False)
    qsdk.gptq(sim, batches, progress=False)
    require_codes(sim, chosen)
    # whole steps, of which float16 loses none: no calibrated scale of 8 bits or fewer is smaller
    assert sim.encodings["0:weight"].scale[2] >= 2.0**-24
    assert torch.equal(sim.model[0].weight[2], tiny)


def test_codes_are_those_that_block_tuning_chose(chosen: dict[str, np.ndarray]):
    sim, _ = sim_of(mlp, torch.bfloat16, "int4")
    batches = [in_every_dtype(seeded(16, 16, seed=seed)).bfloat16() for seed in range(12)]
    qsdk.tune_blocks(sim, batches, iterations=60, progress=False)
    assert chosen
    require_codes(sim, chosen)


def test_a_layer_whose_codes_its_dtype_would_lose_is_left_with_the_reason():
    batches = batches_of(mlp, torch.bfloat16)
    sim = qsdk.quantize(module_of(mlp, torch.bfloat16), batches[0], w8a8().override("0", weight="int16"))
    qsdk.calibrate(sim, batches, progress=False)
    before = sim.model.state_dict()["0.weight"].clone()
    rows = {row["site"]: row["note"] for row in qsdk.gptq(sim, batches, progress=False).rows}
    assert "too few for the codes of symmetric int16; convert the model to float32" in rows["0:weight"]
    assert rows["3:weight"] == ""
    assert torch.equal(sim.model.state_dict()["0.weight"], before)
    sim.model.float()
    report = qsdk.gptq(sim, [x.float() for x in batches], progress=False)
    assert {row["site"]: row["note"] for row in report.rows}["0:weight"] == ""


# folding


@pytest.mark.slow
@each_dtype
def test_norms_are_folded_exactly_and_rounded_once(dtype: torch.dtype):
    sim, exact = (
        calibrated_once(conv_net, dtype, "int8"),
        calibrated_once(conv_net, torch.float64, "int8").model.state_dict(),
    )
    assert len(sim.folded) == 2
    for name in ("0.0.weight", "0.0.bias", "1.0.weight", "1.0.bias"):
        assert torch.equal(sim.model.state_dict()[name], exact[name].to(dtype)), name


# dtypes that change


@pytest.mark.spread(2)
@each_dtype
def test_a_calibrated_sim_changes_its_dtype(dtype: torch.dtype):
    sim, _ = sim_of(Attention, torch.float32)
    before, quantized = sim.encodings, quality(sim, Attention)
    sim.model.to(dtype)
    assert sim.encodings == before
    check(sim, dtype)
    assert quality(sim, Attention) == pytest.approx(quantized, abs=1.5)
    qsdk.adaround(sim, batches_of(Attention, dtype), progress=False)
    assert quality(sim, Attention) > quantized - 1.5


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_a_sim_changes_its_dtype_before_it_is_calibrated(convert: Callable[[nn.Module], nn.Module]):
    sim = qsdk.quantize(module_of(conv_net, torch.float32), batches_of(conv_net, torch.float32)[0])
    dtype = convert(sim.model)[0][0].weight.dtype
    batches = batches_of(conv_net, dtype)
    qsdk.calibrate(sim, batches, progress=False)
    check(sim, dtype)
    assert quality(sim, conv_net) > 25
    train(sim, batches, freeze_bn_after=1)
    check(sim, dtype)
    assert len(list(stored_values(sim))) == 6


@each_dtype
def test_learned_ranges_and_momentum_keep_their_digits_when_the_dtype_changes_in_training(dtype: torch.dtype):
    sim, batches = sim_of(mlp, torch.float32)
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=1e-2), momentum=0.9)
        for x in (*batches, *(x.to(dtype) for x in batches)):
            if x.dtype != next(model.parameters()).dtype:
                learned = {name: p.clone() for name, p in model.named_parameters() if "log2" in name}
                model.to(dtype)
                assert all(torch.equal(model.get_parameter(name), p) for name, p in learned.items())
                for weight in (p for p in model.parameters() if p.dtype == dtype):
                    optimizer.state[weight]["momentum_buffer"] = optimizer.state[weight]["momentum_buffer"].to(dtype)
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    check(sim, dtype)
    assert torch.isfinite(sim(batches[0].to(dtype))).all()


# training


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_master_weights_train_a_half_copy(dtype: torch.dtype):
    """The usual pattern: the optimizer steps float32 copies, which are written into the half module."""
    sim, batches = sim_of(mlp, dtype)
    target = [seeded(16, 8, seed=seed + 50) for seed in range(3)]
    with sim.training(learn_scales=True) as model:
        masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
        optimizer, losses = torch.optim.Adam(masters, lr=1e-2), []
        for _ in range(10):
            loss = sum(F.mse_loss(model(x).float(), y) for x, y in zip(batches, target, strict=True))
            loss.backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    check(sim, dtype)


# files, copies and values


@pytest.mark.slow
@each_dtype
def test_a_sim_survives_files_and_copies(dtype: torch.dtype, tmp_path: Path):
    sim, batches = sim_of(conv_net, dtype)
    qsdk.adaround(sim, batches, progress=False)
    expected = sim(batches[0])
    qsdk.save(sim, tmp_path / "sim.qsdk")
    loaded = qsdk.load(tmp_path / "sim.qsdk", module_of(conv_net, dtype))
    for other in (loaded, copy.deepcopy(sim)):
        assert torch.equal(other(batches[0]), expected)
        check(other, dtype)
    qsdk.save_encodings(sim, tmp_path / "sim.json", version="1.0.0")
    fresh = qsdk.quantize(plain_copy(sim, in_float=False), batches[0])  # the rounded weights are not in the encodings
    qsdk.load_encodings(fresh, tmp_path / "sim.json")
    assert torch.equal(fresh(batches[0]), expected)


@pytest.mark.spread(2)
@each_dtype
def test_a_sim_that_changed_its_dtype_survives_files(dtype: torch.dtype, tmp_path: Path):
    sim, _ = sim_of(mlp, torch.float32)
    sim.model.to(dtype)
    x = batches_of(mlp, dtype)[0]
    qsdk.save(sim, tmp_path / "sim.qsdk")
    loaded = qsdk.load(tmp_path / "sim.qsdk", module_of(mlp, dtype))
    assert torch.equal(loaded(x), sim(x))
    assert loaded.plan == sim.plan
    check(loaded, dtype)


@pytest.mark.slow
@each_dtype
def test_unwrap_returns_the_module_bit_for_bit_in_its_dtype(dtype: torch.dtype):
    model, (sim, batches) = module_of(Attention, dtype), sim_of(Attention, dtype)
    for name, value in sim.unwrap().state_dict().items():
        assert value.dtype == dtype
        assert torch.equal(value, model.state_dict()[name]), name
    assert torch.equal(sim.unwrap()(batches[0]), model(batches[0]))


@pytest.mark.spread(1)
@each_dtype
def test_arrays_hold_the_values_of_the_sim(dtype: torch.dtype):
    sim, batches = sim_of(Attention, dtype)
    encodings = sim.encodings

    def rounded(site: str, exact: Tensor) -> np.ndarray:
        return torch.from_numpy(encodings[site].fake_quantize(exact.float().numpy())).to(dtype).float().numpy()

    for site, value in stored_values(sim).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, rounded(site, stored_tensor(sim.model, site).detach()), err_msg=site)
    named = door_of(sim).stored_values()
    assert named
    assert {value.dtype for value in named.values()} == {np.dtype(np.float32)}
    (seen, outputs), *_ = captures(sim, batches, forward=None, progress=False)
    np.testing.assert_array_equal(outputs[0].astype(np.float64), sim(batches[0]).double().numpy())
    np.testing.assert_array_equal(seen["x"].astype(np.float32), batches[0].float().numpy())
    np.testing.assert_array_equal(seen["x:input"].astype(np.float32), rounded("x:input", batches[0]))


@each_dtype
@pytest.mark.parametrize("net", SHAPES)
def test_a_batch_in_another_dtype_is_an_error_that_names_both(net: Any, dtype: torch.dtype):
    sim, batches = sim_of(net, dtype)
    named = str(dtype).removeprefix("torch.")
    with pytest.raises(qsdk.DataError, match=rf"floats are float32 and the model computes in {named}: convert them"):
        sim(batches[0].float())
    with pytest.raises(qsdk.DataError, match=r"does not run on batch 0"):
        qsdk.calibrate(sim, [batches[0].float()], progress=False)


@pytest.mark.slow
def test_weight_only_int4_of_a_bfloat16_module_never_holds_the_model_in_float32():
    """Peak memory: 1.25 times the bfloat16 weights and one layer in float32, in 24 layers of 2048."""
    script = Path(__file__).parents[2] / "benchmarks" / "half_precision.py"
    printed = subprocess.run([sys.executable, script, "24"], check=True, capture_output=True, text=True).stdout
    assert json.loads(printed)["memory"]["ratio"] <= 1.25


class Turned(nn.Module):
    """A Linear and a call of its function that read transposed images, as in the head of SegFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x.flatten(2).transpose(1, 2))
        return F.linear(x.transpose(1, 2), self.weight, self.project.bias)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype)[6:])
def test_a_linear_layer_rounds_once_whatever_the_layout_of_what_it_reads(dtype: torch.dtype, tmp_path: Path):
    """Torch rounds twice where the input is not contiguous, and the file once; sums that cancel show it."""
    torch.manual_seed(0)
    model = Turned().eval().to(dtype)
    batches = [torch.randn(4, 8, 2, 4).to(dtype) for _ in range(4)]
    sim = qsdk.quantize(model, batches[0], qsdk.w8a16())
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", batches, progress=False)
    assert report.summary["passed"], report


class Gated(nn.Module):
    """A gate with a number that no narrow dtype holds, as in QuickGELU: the sigmoid magnifies its rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Joined(nn.Module):
    """Two layers whose results are turned and joined: [N, 3, 8] to [N, 16, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x).relu().transpose(1, 2) for layer in (self.one, self.other)], 1)


def test_what_is_joined_behind_moved_pairs_of_float16_loads_in_an_ordinary_session(tmp_path: Path):
    x = seeded(2, 3, 8).half()
    sim = qsdk.quantize(Joined().half().eval(), x, w8a8().override("*transpose*", activation="float32"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype)[6:])
def test_the_sim_computes_with_the_numbers_that_its_file_holds(dtype: torch.dtype, tmp_path: Path):
    batches = [torch.linspace(-12, 12, 4096).reshape(4, 1024).to(dtype)]
    sim = qsdk.quantize(Gated(), batches[0], qsdk.w8a16())
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", batches, progress=False)
    assert report.summary["passed"], report


@pytest.mark.parametrize("dtype", HALVES, ids=lambda dtype: str(dtype)[6:])
def test_linear_layers_keep_their_16_bits_in_an_ordinary_session(dtype: torch.dtype, tmp_path: Path):
    """ONNX Runtime would round what they read to 8 bits, which is hundreds of steps off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU()).eval().to(dtype)
    batches = [torch.randn(16, 32).to(dtype) for _ in range(2)]
    sim = qsdk.quantize(model, batches[0], qsdk.w8a16())
    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", batches, runtime="onnxruntime", progress=False)
    assert report.summary["activations_max_lsb"] <= 4, report
