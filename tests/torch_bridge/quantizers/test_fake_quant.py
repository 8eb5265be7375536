"""Fake quantization on torch tensors: the one formula bit for bit, LSQ's gradients, and scales that are learned."""

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import FLOAT8, INTEGERS, MINIFLOATS, Case, cases, minifloat_values, same_bits
from torch import Tensor, nn
from torch_models import ConvNet, EncoderModel, calibrated, seeded, sim_of

from qsdk import CalibrationError, DType, Encoding, QuantSim, calibrate, float4e2m1, int8, int32
from qsdk.core.numerics import affine
from qsdk.core.numerics.dtypes import DTYPES
from qsdk.core.numerics.spec import PerBlock, PerChannel, PerTensor, Spec
from qsdk.core.planning.plan import Decision
from torch_bridge.quantizers import fake_quant
from torch_bridge.quantizers.fake_quant import FakeQuantGrid, cast, fake_quantize, fake_quantize_minifloat
from torch_bridge.quantizers.quantizer import Quantizer

FLOAT32 = {"deadline": None, "max_examples": 300}


def torch_operands(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x, scale and zero point, the last two aligned with x."""
    e = case.encoding
    shape = case.x.shape
    scale = affine.align(torch.from_numpy(e.scale), shape, e.axis, e.block_size)
    zero_point = affine.align(torch.from_numpy(e.zero_point.astype(np.float32)), shape, e.axis, e.block_size)
    return torch.from_numpy(case.x), scale, zero_point


@pytest.mark.slow
@settings(**FLOAT32)
@given(cases(INTEGERS))
def test_integers_equal_the_core_bit_for_bit(case: Case):
    x, scale, zero_point = torch_operands(case)
    grid = case.encoding.dtype.lo, case.encoding.dtype.hi
    found = fake_quantize(x, scale, zero_point, FakeQuantGrid(*grid))
    aligned = (case.spread(case.encoding.scale), case.spread(case.encoding.zero_point).astype(np.float32))
    with np.errstate(over="ignore"):
        expected = affine.fake_quantize(case.x, *aligned, *grid)
    assert same_bits(found.numpy(), expected)
    assert same_bits(found.numpy(), case.encoding.fake_quantize(case.x))
    assert found.data_ptr() != x.data_ptr()


@pytest.mark.slow
@settings(**FLOAT32)
@given(cases(INTEGERS))
def test_the_differentiable_form_has_the_same_values(case: Case):
    x, scale, zero_point = torch_operands(case)
    grid = case.encoding.dtype.lo, case.encoding.dtype.hi
    plain = fake_quantize(x, scale, zero_point, FakeQuantGrid(*grid))
    for tracked in (fake_quantize(x.requires_grad_(), scale, zero_point, FakeQuantGrid(*grid, 0.5)),):
        assert tracked.requires_grad
        assert same_bits(tracked.detach().numpy(), plain.numpy())


@pytest.mark.slow
@settings(**FLOAT32)
@given(cases(MINIFLOATS))
def test_minifloats_equal_ml_dtypes_bit_for_bit(case: Case):
    x, scale, _ = torch_operands(case)
    dtype = case.encoding.dtype
    found = fake_quantize_minifloat(x, scale, dtype).numpy()
    assert same_bits(found, case.encoding.fake_quantize(case.x))
    spread = case.spread(case.encoding.scale)
    with np.errstate(over="ignore"):
        stored = (case.x / spread).clip(dtype.lo, dtype.hi).astype(ML_DTYPES[dtype.name])
        expected = stored.astype(np.float32) * spread
    assert same_bits(found, expected)


ML_DTYPES = {
    "float8e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "float8e5m2": ml_dtypes.float8_e5m2,
    "float8e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "float4e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("dtype", MINIFLOATS, ids=str)
def test_every_value_and_every_midpoint_of_a_minifloat(dtype: DType):
    grid = minifloat_values(dtype)
    middles = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(np.float32(m), np.float32(side)) for m in middles for side in (-np.inf, np.inf)]
    x = np.concatenate([grid, middles, near]).astype(np.float32)
    expected = x.astype(ML_DTYPES[dtype.name]).astype(np.float32)
    assert same_bits(cast(torch.from_numpy(x), dtype).numpy(), expected)
    assert set(np.abs(expected)) == set(np.abs(grid.astype(np.float32)))


def test_float4_ties_go_to_the_even_code():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(cast(ties, float4e2m1), expected)
    assert torch.equal(cast(-ties, float4e2m1), -expected)


@pytest.mark.parametrize("dtype", [DTYPES["float16"], DTYPES["bfloat16"]], ids=str)
def test_float_casts_are_torchs_own_and_straight_through(dtype: DType):
    x = seeded(40, scale=3).requires_grad_()
    quantizer = Quantizer(Decision("x:input", "Input", "input", Spec(dtype), ""), nn.Module(), "qsdk_x", nn.Module())
    y = quantizer(x)
    assert torch.equal(y, x.to(getattr(torch, dtype.name)).float())
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(40))


@pytest.mark.parametrize("shape", [(70, 1), (1, 40)])
def test_a_large_tensor_is_quantized_in_pieces_to_the_same_bits(shape: tuple[int, int], monkeypatch: Any):
    x, scale, zero_point = seeded(70, 40, scale=3), seeded(*shape).abs() + 0.01, torch.full(shape, 3.0)
    whole = fake_quantize(x, scale, zero_point, FakeQuantGrid(-8, 7))
    monkeypatch.setattr(fake_quant, "_PIECE", 100)
    pieces = fake_quantize(x, scale, zero_point, FakeQuantGrid(-8, 7))
    assert same_bits(pieces.numpy(), whole.numpy())
    assert same_bits(pieces.numpy(), affine.fake_quantize(*(t.numpy() for t in (x, scale, zero_point)), -8, 7) + 0)


# a quantizer is its encoding


def quantizer_of(spec: Spec, encoding: Encoding, shape: tuple[int, ...]) -> Quantizer:
    module = nn.Module()
    quantizer = Quantizer(Decision("m:weight", "Gemm", "weight", spec, "", shape=shape), module, "qsdk_w", module)
    quantizer.set_encoding(encoding)
    return quantizer


@pytest.mark.slow
@settings(**FLOAT32)
@given(cases((*INTEGERS, *FLOAT8, float4e2m1)))
def test_a_quantizer_computes_the_formula_of_its_encoding(case: Case):
    e = case.encoding
    granularity = PerTensor() if e.axis is None else PerChannel(e.axis)
    if e.axis is not None and e.block_size is not None:
        granularity = PerBlock(e.axis, e.block_size)
    quantizer = quantizer_of(Spec(e.dtype, granularity), e, case.x.shape)
    assert quantizer.encoding() == e
    assert same_bits(quantizer(torch.from_numpy(case.x)).numpy(), e.fake_quantize(case.x))


@pytest.mark.slow
@settings(**FLOAT32)
@given(cases(INTEGERS, ("channel",)), st.sampled_from(["block", "element"]))
def test_blocks_as_long_as_the_axis_are_channels_and_of_one_are_elements(case: Case, kind: str):
    e = case.encoding
    axis = e.axis % case.x.ndim
    length = case.x.shape[axis]
    x = torch.from_numpy(case.x)
    if kind == "element":
        ones = Encoding(e.dtype, np.full(case.x.shape, 0.5), np.zeros(case.x.shape), axis, 1)
        plain = Encoding(e.dtype, [0.5], [0])
        assert torch.equal(
            quantizer_of(Spec(e.dtype, PerBlock(axis, 1)), ones, case.x.shape)(x),
            quantizer_of(Spec(e.dtype), plain, case.x.shape)(x),
        )
        return
    other = 0 if axis else case.x.ndim - 1
    if case.x.ndim == 1 or other == axis:
        return
    # one block along `axis` is one scale per index of every other axis; make all but `other` the same
    shape = tuple(1 if i == axis else n for i, n in enumerate(case.x.shape))
    scales = np.random.default_rng(length).uniform(0.1, 2, case.x.shape[other]).astype(np.float32)
    spread = np.broadcast_to(scales.reshape([-1 if i == other else 1 for i in range(case.x.ndim)]), shape)
    blocks = Encoding(e.dtype, spread, np.zeros(shape), axis, length)
    channels = Encoding(e.dtype, scales, np.zeros(scales.shape), other)
    assert torch.equal(
        quantizer_of(Spec(e.dtype, PerBlock(axis, length)), blocks, case.x.shape)(x),
        quantizer_of(Spec(e.dtype, PerChannel(other)), channels, case.x.shape)(x),
    )


# gradients


def test_gradients_of_a_four_bit_range():
    x = torch.tensor([-9, -3.4, 0.3, 6.6, 8], requires_grad=True)
    low, high = torch.tensor(-8.0, requires_grad=True), torch.tensor(7.0, requires_grad=True)
    y = fake_quantize(x, (high - low) / 15, torch.tensor(0.0), FakeQuantGrid(-8, 7))
    assert torch.equal(y.detach(), torch.tensor([-8.0, -3.0, 0.0, 7.0, 7.0]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0]))
    assert float(low.grad) == pytest.approx(0.0333, abs=5e-5)
    assert float(high.grad) == pytest.approx(-0.0333, abs=5e-5)


@pytest.mark.slow
def test_the_gain_of_a_quantizer_is_lsqs():
    """Section 2.2: 1 / sqrt(elements per scale * largest level)."""
    sim = calibrated(nn.Linear(6, 4, bias=False), seeded(3, 6))
    quantizer = sim.quantizers["self:weight"]
    with sim.training(learn_scales=True):
        raw = sim.model._parameters["weight"]
        quantizer(raw).sum().backward()
        log_scale = sim.model._parameters[quantizer.log_scale_name]
        scale = quantizer.scale_and_zero_point()[0].detach()
        plain = scale.clone().reshape(4, 1).requires_grad_()
        fake_quantize(raw.detach(), plain, torch.zeros(4, 1), FakeQuantGrid(-128, 127)).sum().backward()
        expected = plain.grad.reshape(4) / np.sqrt(6 * 127) * scale * np.log(2)
        torch.testing.assert_close(log_scale.grad, expected, rtol=1e-4, atol=1e-7)


def test_minifloat_gradients_pass_straight_through_inside_the_range():
    x = torch.tensor([-1000.0, -448.0, -3.3, 0.4, 448.0, 500.0], requires_grad=True)  # its ends are +-448
    fake_quantize_minifloat(x, torch.tensor(1.0), DTYPES["float8e4m3fn"]).sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 0.0]))


def test_a_mask_of_the_smallest_float_has_no_nan():
    x = torch.tensor([[0.0, torch.finfo(torch.float32).min, -torch.inf]], requires_grad=True)
    scale = torch.tensor(0.1, requires_grad=True)
    y = fake_quantize(x, scale, torch.tensor(100.0), FakeQuantGrid(0, 255))
    assert torch.allclose(y, torch.tensor([[0.0, -10.0, -10.0]]))
    y[:, :2].sum().backward()
    assert x.grad[0, :2].tolist() == [1.0, 0.0]


# learning scales


@pytest.fixture(scope="module")
def trained_on() -> QuantSim:
    return calibrated(EncoderModel(), seeded(6, 6))


@pytest.fixture
def sim(trained_on: QuantSim) -> QuantSim:
    return copy.deepcopy(trained_on)


def step(sim: QuantSim, **options: Any) -> None:
    optimizer = torch.optim.SGD(sim.parameter_groups(**options))
    sim.model(seeded(6, 6, seed=2)).square().sum().backward()
    optimizer.step()


@pytest.mark.slow
def test_scales_are_learned_inside_the_block_and_fixed_after_it(sim: QuantSim):
    before = sim.encodings
    with sim.training(learn_scales=True) as model:
        assert model is sim.model
        assert model.training
        names = [name for name, _ in model.named_parameters() if name.endswith("_log2")]
        assert len(names) == sum(q.owns_encoding for q in sim.quantizers.values())
        step(sim, lr=0.01, scale_lr=50.0)
        moved = sim.encodings
    assert not sim.model.training
    assert not any("log2" in name for name in sim.model.state_dict())
    assert sim.encodings == moved
    owning = [site for site, q in sim.quantizers.items() if q.owns_encoding]
    assert [site for site in owning if before[site] == moved[site]] == []
    assert all(np.array_equal(before[s].zero_point, moved[s].zero_point) for s in owning)
    out = sim(seeded(6, 6))
    assert torch.equal(sim(seeded(6, 6)), out)
    assert not any(buffer.requires_grad for buffer in sim.model.buffers())


def test_a_training_block_without_a_step_changes_nothing(sim: QuantSim):
    before, output = sim.encodings, sim(seeded(6, 6))
    with sim.training(learn_scales=True) as model:
        model(seeded(6, 6)).sum().backward()
    assert sim.encodings == before
    assert torch.equal(sim(seeded(6, 6)), output)


def test_without_learn_scales_only_weights_are_trained(sim: QuantSim):
    before = sim.encodings
    raw = {n: p.detach().clone() for n, p in sim.model.named_parameters()}
    with sim.training() as model:
        assert model.training
        assert len(sim.parameter_groups(lr=0.1)) == 1
        step(sim, lr=0.1)
    assert not sim.model.training
    owning = [site for site, q in sim.quantizers.items() if q.owns_encoding]
    assert all(sim.encodings[site] == before[site] for site in owning)
    assert all(not torch.equal(p, raw[n]) for n, p in sim.model.named_parameters())


@pytest.mark.parametrize("rate", [1e3, 1e9, 1e30])
@pytest.mark.parametrize("sign", [1, -1])
def test_scales_stay_positive_under_a_huge_step(sim: QuantSim, rate: float, sign: int):
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.0, scale_lr=rate))
        (sign * model(seeded(6, 6, seed=2)).square().sum()).backward()
        optimizer.step()
        assert torch.isfinite(model(seeded(6, 6))).all()
    for site, encoding in sim.encodings.items():
        assert (encoding.scale > 0).all(), site
        assert np.isfinite(encoding.scale).all(), site
    assert torch.isfinite(sim(seeded(6, 6))).all()


class Stopped(BaseException):
    """Not an Exception."""


@pytest.mark.parametrize("error", [ValueError("loss"), Stopped()], ids=["exception", "interrupt"])
def test_a_block_that_raises_leaves_eval_mode_and_fixed_ranges(sim: QuantSim, error: BaseException):
    seen = []

    def interrupted() -> None:
        with sim.training(learn_scales=True):
            step(sim, lr=0.01)
            seen.append(sim.encodings)
            raise error

    before = sim.encodings
    with pytest.raises(type(error)):
        interrupted()
    moved = seen[0]
    assert moved != before
    assert not sim.model.training
    assert sim.encodings == moved
    assert not any("log2" in name for name, _ in sim.model.named_parameters())
    with sim.training(learn_scales=True):
        step(sim, lr=0.01)
    assert sim.encodings != moved


def test_learning_without_encodings_is_refused_and_names_the_site():
    sim = sim_of(ConvNet(), seeded(2, 3, 6, 6))
    with pytest.raises(CalibrationError, match=r"has no encoding yet"), sim.training(learn_scales=True):
        pass
    assert not any("log2" in name for name, _ in sim.model.named_parameters())
    assert not sim.model.training
    calibrate(sim, [seeded(2, 3, 6, 6)], progress=False)


def test_a_frozen_scale_has_no_gradient_and_the_optimizer_leaves_it(sim: QuantSim):
    sim.freeze("encoder.fc1")
    sim.freeze("sigmoid.0")
    before = sim.encodings
    with sim.training(learn_scales=True) as model:
        learned = {name for name, _ in model.named_parameters() if name.endswith("_log2")}
        assert not any(name.startswith("encoder.fc1.qsdk") for name in learned)
        step(sim, lr=0.0, scale_lr=50.0)
        frozen = [s for s, q in sim.quantizers.items() if q.frozen]
        assert frozen == ["encoder.fc1:weight", "sigmoid.0:output"]
        for site in frozen:
            scale, zero_point = sim.quantizers[site].scale_and_zero_point()
            assert not scale.requires_grad
            assert not zero_point.requires_grad
    owning = [site for site, q in sim.quantizers.items() if q.owns_encoding]
    assert [site for site in owning if sim.encodings[site] == before[site]] == frozen


def test_parameter_groups_split_weights_and_scales(sim: QuantSim):
    with sim.training(learn_scales=True) as model:
        weights, scales = sim.parameter_groups(lr=0.1, scale_lr=0.003)
        assert (weights["lr"], scales["lr"], scales["weight_decay"]) == (0.1, 0.003, 0.0)
        names = {id(p): n for n, p in model.named_parameters()}
        assert all(names[id(p)].endswith("_log2") for p in scales["params"])
        assert not any(names[id(p)].endswith("_log2") for p in weights["params"])
        assert {id(p) for g in (weights, scales) for p in g["params"]} == set(names)
        assert len(weights["params"]) + len(scales["params"]) == len(names)
        assert sim.parameter_groups(lr=0.1)[1]["lr"] == 0.1
        torch.optim.AdamW(sim.parameter_groups(lr=0.1, scale_lr=0.003), weight_decay=0.5)


@pytest.mark.slow
def test_tied_sites_are_learned_through_their_home():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.fc(x), x], 1)

    sim = calibrated(Model(), seeded(3, 4))
    with sim.training(learn_scales=True):
        sim.model(seeded(3, 4)).square().sum().backward()
        step_on = [p for n, p in sim.model.named_parameters() if n.endswith("_log2")]
        assert len(step_on) == sum(q.owns_encoding for q in sim.quantizers.values())
        torch.optim.SGD(step_on, lr=0.1).step()
    for site, decision in sim.plan.decisions.items():
        if decision.tied_to:
            assert sim.encodings[site] == sim.encodings[decision.tied_to]


@pytest.mark.slow
def test_biases_are_quantized_with_the_learned_scales():
    sim = calibrated(nn.Linear(6, 4), seeded(3, 6))
    with sim.training(learn_scales=True):
        step(sim, lr=0.0, scale_lr=1.0)
    encodings = sim.encodings
    expected = encodings["input:input"].scale * encodings["self:weight"].scale
    assert np.array_equal(encodings["self:bias"].scale, expected)
    assert encodings["self:bias"].dtype == int32
    assert encodings["self:weight"].dtype == int8
