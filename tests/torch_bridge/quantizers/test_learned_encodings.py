"""Gradients of weights, scales and zero points, and what an optimizer may do to them."""

import copy
import io
import math
import pickle
import shutil
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import INTEGERS, Case, cases
from torch import Tensor, nn
from torch_models import EncoderModel, calibrated, randomized, seeded

import torch_bridge.sim
from qsdk import ConfigError, w4a8, w8a8
from qsdk.core.numerics import affine
from torch_bridge.quantizers.fake_quant import (
    CompiledKernels,
    FakeQuantGrid,
    _backward,
    _forward,
    compiled_kernels,
    fake_quantize,
)

EAGER = CompiledKernels(_forward, _backward)  # what is compiled, without the compiler


def relaxed(
    x: Tensor, scale: Tensor, zero_point: Tensor, grid: FakeQuantGrid, at: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """The soft relaxation around a point: rounding errors and the side of the grid's ends are those found there."""
    ratio = at[0] / at[1]
    levels = ratio.round()
    error = levels - ratio  # of float32, where it is decided on which side a value falls
    low, high = grid.lo - at[2], grid.hi - at[2]
    x, scale, zero_point = x.double(), scale.double(), zero_point.double()
    inside = x if grid.clipped_only else (x / scale + error.double()) * scale
    y = torch.where(levels > high, (grid.hi - zero_point) * scale, inside)
    return torch.where(levels < low, (grid.lo - zero_point) * scale, y)


def operands(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, scale and zero point aligned with x, and a gradient of the result."""
    e, shape = case.encoding, case.x.shape
    pair = [torch.from_numpy(np.asarray(p, np.float32)) for p in (e.scale, e.zero_point)]
    scale, zero_point = (affine.align(p, shape, e.axis, e.block_size) for p in pair)
    gradient = np.random.default_rng(case.x.size).standard_normal(shape).astype(np.float32)
    return torch.from_numpy(case.x), scale, zero_point, torch.from_numpy(gradient)


def gradients(function: Any, gradient: Tensor, *values: Tensor) -> list[Tensor]:
    leaves = [value.detach().clone().requires_grad_() for value in values]
    result = function(*leaves)
    result.backward(gradient.to(result.dtype))
    return [leaf.grad for leaf in leaves]


def close(found: Tensor, wanted: Tensor, sizes: Tensor) -> bool:
    return bool(((found - wanted).abs() <= 2e-5 * sizes + 1e-6).all())


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(cases(INTEGERS, fillings=("random", "ties")), st.booleans(), st.booleans())
def test_gradients_of_weight_scale_and_zero_point_are_those_of_the_relaxation(case: Case, pact: bool, keeps: bool):
    """Inside, clipped and at the ends, per tensor, channel and block; ties among them."""
    x, scale, zero_point, gradient = operands(case)
    grid = FakeQuantGrid(case.encoding.dtype.lo, case.encoding.dtype.hi, 0.5, clipped_only=pact, keeps_result=keeps)
    found = gradients(lambda *v: fake_quantize(*v, grid), gradient, x, scale, zero_point)
    wanted = gradients(lambda *v: relaxed(*v, grid, (x, scale, zero_point)), gradient, x, scale, zero_point)
    levels = (x / scale).round()
    inside = (levels >= grid.lo - zero_point) & (levels <= grid.hi - zero_point)
    assert torch.equal(found[0], gradient * inside)
    per_scale = (gradient.abs() * ((x / scale).abs() + 2)).sum_to_size(scale.shape)
    assert close(found[1], wanted[1] * 0.5, per_scale)
    assert close(found[2], wanted[2] * 0.5, (gradient.abs() * scale).sum_to_size(scale.shape))


@pytest.mark.parametrize("pact", [False, True])
@pytest.mark.parametrize(("lo", "hi", "zero"), [(0, 255, 0), (0, 15, 5), (-8, 7, 0), (0, 65535, 32768)])
def test_gradients_are_finite_differences_of_the_relaxation(lo: int, hi: int, zero: int, pact: bool):
    scale, zero_point = torch.tensor([0.3]), torch.tensor([float(zero)])
    x = torch.tensor([lo - 3.3, lo + 0.7, 0.2, 1.4, hi - 0.6, hi + 2.2]).sub(zero).mul(0.3)
    grid, gradient = FakeQuantGrid(lo, hi, clipped_only=pact), torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0, 0.7])
    found = gradients(lambda *v: fake_quantize(*v, grid), gradient, x, scale, zero_point)
    for position, step in ((1, 1e-6), (2, 1e-4)):
        ends = []
        for sign in (1, -1):
            moved = [x.double(), scale.double(), zero_point.double()]
            moved[position] = moved[position] + sign * step
            ends.append((relaxed(*moved, grid, (x, scale, zero_point)) * gradient.double()).sum())
        assert float(found[position]) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-4)
    for i in range(len(x)):
        shifted = [(x.double() + sign * 1e-6 * torch.eye(len(x))[i]) for sign in (1, -1)]
        up, down = (relaxed(v, scale, zero_point, grid, (x, scale, zero_point)) for v in shifted)
        expected = float((up - down)[i]) / 2e-6 * float(gradient[i])
        assert float(found[0][i]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


# a ReLU that the quantizer does on the way


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(
    cases([dtype for dtype in INTEGERS if dtype.bits <= 16], fillings=("random", "ties")),
    st.sampled_from([math.inf, 6.0, 0.75]),
    st.booleans(),
    st.booleans(),
)
def test_a_rectifying_quantizer_is_a_relu_and_a_quantizer(case: Case, ceiling: float, pact: bool, compiled: bool):
    x, scale, zero_point, gradient = operands(case)
    if scale.numel() != 1 or not case.encoding.dtype.lo <= float(zero_point) <= case.encoding.dtype.hi:
        return  # it takes one scale, and 0 is on every grid
    grid = FakeQuantGrid(case.encoding.dtype.lo, case.encoding.dtype.hi, clipped_only=pact)
    one = grid._replace(fuses_relu=True, ceiling=ceiling, kernels=EAGER if compiled else None)
    relu = F.relu if ceiling == math.inf else lambda v: F.hardtanh(v, 0.0, ceiling)

    def together(v: Tensor, s: Tensor) -> Tensor:
        return fake_quantize(v, s, zero_point, one)

    def apart(v: Tensor, s: Tensor) -> Tensor:
        return fake_quantize(relu(v), s, zero_point, grid)

    assert torch.equal(together(x, scale), apart(x, scale))
    found, wanted = gradients(together, gradient, x, scale), gradients(apart, gradient, x, scale)
    assert torch.equal(found[0], wanted[0])
    assert close(found[1], wanted[1], (gradient.abs() * ((x / scale).abs() + 2)).sum_to_size(scale.shape))


class Relus(nn.Module):
    """ReLUs in all spellings, one written over its input, one whose result is written over."""

    def __init__(self):
        super().__init__()
        self.fcs = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
        self.relu, self.relu6 = nn.ReLU(), nn.ReLU6()
        self.in_place, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.fcs[0](x))
        x = F.relu(self.fcs[1](x))
        x = self.in_place(self.fcs[2](x))
        x = self.relu6(self.fcs[3](x) * 4)
        x = torch.relu(self.fcs[4](x))
        x += 1
        return self.drop(F.relu6(self.fcs[5](x)))


@pytest.mark.slow
@pytest.mark.parametrize("learn_scales", [False, True])
def test_models_train_as_if_every_relu_ran_by_itself(learn_scales: bool, monkeypatch: pytest.MonkeyPatch):
    sim = calibrated(randomized(Relus()), seeded(32, 6))
    found = []
    for rectifies in (True, False):
        if not rectifies:
            monkeypatch.setattr("torch_bridge.quantizers.quantizer.Quantizer.quantize_relu", lambda *_: None)
        own = copy.deepcopy(sim)
        calls: list[int] = []
        with own.training(learn_scales=learn_scales) as model:
            torch.manual_seed(0)
            x = seeded(16, 6, seed=4).requires_grad_()
            model.relu.register_forward_hook(lambda *_, calls=calls: calls.append(1))
            y = model(x)
            y.square().sum().backward()
            found.append((y.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}))
        assert calls == [1]
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert len(found[0][2]) == len(found[1][2])
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(gradient, found[1][2][name], rtol=1e-3, atol=1e-5, msg=name)
    # `x += 1` and the Dropout write over what these give; the latter is the output as well
    assert {s for s, q in sim.quantizers.items() if not q.keeps_result} == {"relu.1:output", "relu6.0:output"}


# what an optimizer may do


def train(sim: Any, example: Tensor, rate: float, steps: int = 4, **options: Any) -> list[Tensor]:
    losses = []
    with sim.training(learn_scales=True, **options) as model:
        optimizer = torch.optim.SGD(sim.parameter_groups(lr=0.0, scale_lr=rate))
        for _ in range(steps):
            loss = model(example).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        model(example)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("rate", [10.0, 1e3, 1e20, -1e20])
def test_learned_ranges_contain_zero_and_zero_points_are_whole(rate: float):
    torch.manual_seed(2)  # of ten, five move a zero point at every rate
    sim = calibrated(EncoderModel(), seeded(6, 6))
    before = sim.encodings
    train(sim, seeded(6, 6, seed=3), rate, learn_zero_points=True)
    moved = 0
    for site, encoding in sim.encodings.items():
        zero = encoding.zero_point
        assert (encoding.scale > 0).all(), site
        assert np.isfinite(encoding.scale).all(), site
        assert ((zero >= encoding.dtype.lo) & (zero <= encoding.dtype.hi)).all(), site
        assert (encoding.fake_quantize(np.zeros(1, np.float32)) == 0).all() if zero.size == 1 else True
        if sim.plan.decisions[site].spec.symmetric:
            assert np.array_equal(zero, before[site].zero_point), site
        moved += not np.array_equal(zero, before[site].zero_point)
    assert moved > 0


@pytest.mark.slow
def test_zero_points_are_learned_only_where_asked_and_in_their_group():
    sim = calibrated(EncoderModel(), seeded(6, 6))
    with sim.training(learn_zero_points=True) as model:
        names = [name for name, _ in model.named_parameters() if "qsdk" in name]
        asymmetric = [q for q in sim.quantizers.values() if q.owns_encoding and not q.decision.spec.symmetric]
        assert len(names) == len(asymmetric) > 0
        assert all(name.endswith("_zero_point_shift") for name in names)
        groups = sim.parameter_groups(lr=0.1, scale_lr=0.2)
        assert len(groups[1]["params"]) == len(names)
        assert groups[1]["weight_decay"] == 0.0
    with sim.training(learn_scales=True) as model:
        assert not any("shift" in name for name, _ in model.named_parameters())


@pytest.mark.slow
def test_a_learned_zero_point_finds_a_range_that_is_off():
    """Activations between 2 and 6 on a grid of 0 to 4: the error falls only if the range moves and grows."""
    sim = calibrated(nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), seeded(16, 4), w4a8())
    sim = calibrated(nn.Identity(), torch.rand(64, 4) - 0.1, w8a8().override("*", activation="uint4"))
    x = torch.rand(64, 4) * 2 - 1
    losses = []
    with sim.training(learn_scales=True, learn_zero_points=True) as model:
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=0.0, scale_lr=0.02))
        for _ in range(80):
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    encoding = sim.encodings["input:input"]
    assert encoding.zero_point[0] >= 6
    assert float((torch.from_numpy(encoding.fake_quantize(x.numpy())) - x).square().mean()) < 0.1 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("rate", [0.05, 3.0])
def test_scales_of_few_digits_are_learned_with_these_digits(bits: int, rate: float):
    config = w8a8().override("*", scale_bits=bits)
    sim = calibrated(EncoderModel(), seeded(6, 6), config)
    before = sim.encodings
    with sim.training(learn_scales=True) as model:
        optimizer = torch.optim.Adam(sim.parameter_groups(lr=0.0, scale_lr=rate))
        for _ in range(3):
            model(seeded(6, 6, seed=3)).square().sum().backward()
            optimizer.step()
            seen = sim.encodings
    assert sim.encodings == seen
    own = [site for site, q in sim.quantizers.items() if q.owns_encoding]
    for site in own:
        mantissa = np.frexp(sim.encodings[site].scale)[0] * 2**bits
        assert np.array_equal(mantissa, np.rint(mantissa)), site
    changed = [site for site in own if before[site] != sim.encodings[site]]
    assert (len(changed) > len(own) / 2) == (rate > 1 or bits > 1)  # an exponent has to move by half


@pytest.mark.slow
def test_pact_moves_only_ranges_that_clip():
    sim = calibrated(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), seeded(64, 6))
    before = sim.encodings
    train(sim, seeded(64, 6), 1.0, gradient="pact")
    still = {site for site in before if before[site] == sim.encodings[site]}
    assert {"0:weight", "2:weight", "input:input", "1:output"} <= still  # min-max ranges clip nothing
    train(sim, seeded(64, 6) * 3, 1.0, gradient="pact")
    assert before["1:output"].scale > sim.encodings["1:output"].scale  # the sum of squares would rather see less
    train(sim, seeded(64, 6), 1.0, gradient="lsq")
    assert all(not np.array_equal(before[s].scale, sim.encodings[s].scale) for s in ("0:weight", "input:input"))


def test_an_unknown_gradient_is_named():
    sim = calibrated(nn.Linear(3, 3), seeded(2, 3))
    with (
        pytest.raises(ConfigError, match=r"gradient='sgd' is unknown; choose lsq or pact"),
        sim.training(gradient="sgd"),
    ):
        pass


# compiled kernels


@pytest.fixture(scope="module", params=["as written", pytest.param("compiled", marks=pytest.mark.slow)])
def kernels(request: pytest.FixtureRequest) -> CompiledKernels:
    if request.param == "as written":
        return EAGER
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        pytest.skip("torch.compile needs a C++ compiler, and there is none on the path")
    found = compiled_kernels()
    assert found is not None
    return found


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_compiled_kernels_are_bit_identical_forward_and_as_exact_backward(
    kernels: CompiledKernels, layout: torch.memory_format
):
    x = seeded(4, 16, 24, 24, scale=2).contiguous(memory_format=layout)
    x[0, 0, 0, :4] = torch.tensor([0.0, -0.0, 0.125, -0.125])
    gradient = seeded(4, 16, 24, 24, seed=1)
    scale, zero_point = torch.tensor([0.05]), torch.tensor([11.0])
    for grid in (
        FakeQuantGrid(0, 255),
        FakeQuantGrid(0, 15),
        FakeQuantGrid(0, 255, fuses_relu=True, ceiling=3.0),
        FakeQuantGrid(-128, 127, clipped_only=True),
    ):
        found, wanted = (
            [
                fake_quantize(x, scale, zero_point, one),
                *gradients(lambda v, s, one=one: fake_quantize(v, s, zero_point, one), gradient, x, scale),
            ]
            for one in (grid._replace(kernels=kernels), grid)
        )
        assert torch.equal(found[0], wanted[0])
        assert torch.equal(found[1], wanted[1])
        torch.testing.assert_close(found[2], wanted[2], rtol=1e-3, atol=1e-3)


def test_a_model_trains_with_compiled_kernels_as_without(kernels: CompiledKernels, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_bridge.sim, "compiled_kernels", lambda: kernels)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.LazyLinear(4))
    model(seeded(32, 3, 24, 24))
    sim = calibrated(model, seeded(32, 3, 24, 24))
    results = []
    for compiled in (False, True):
        own = copy.deepcopy(sim)
        with own.training(learn_scales=True, compile_kernels=compiled) as model:
            used = {q.kernels for q in own.quantizers.values()}
            assert used == ({kernels} if compiled else {None})
            loss = model(seeded(32, 3, 24, 24)).square().mean()
            loss.backward()
            copied = pickle.load(io.BytesIO(pickle.dumps(copy.deepcopy(own.model))))
            results.append((loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
            with torch.no_grad():
                assert torch.equal(copied(seeded(32, 3, 24, 24)), model(seeded(32, 3, 24, 24)))
        assert all(q.kernels is None for q in own.quantizers.values())
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_without_a_compiler_training_goes_on(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no C++ compiler found")

    compiled_kernels.cache_clear()
    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    try:
        sim = calibrated(nn.Linear(3, 3), seeded(2, 3))
        block = sim.training(compile_kernels=True)
        with pytest.warns(UserWarning, match=r"torch.compile does not work here \(no C\+\+ compiler found\)"):
            model = block.__enter__()
        model(seeded(2, 3)).sum().backward()
        assert model.weight.grad.abs().sum() > 0
        block.__exit__(None, None, None)
    finally:
        compiled_kernels.cache_clear()


class InPlaceResidual(nn.Module):
    """`out += identity` behind a BatchNorm, as torchvision writes it, and a gradient penalty's smooth part."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


@pytest.mark.spread(1)
@pytest.mark.parametrize("freeze_bn_after", [None, 10])
def test_a_residual_sum_in_place_behind_a_folded_batch_norm_can_be_trained(freeze_bn_after: int | None):
    sim = calibrated(randomized(InPlaceResidual()), seeded(4, 4, 6, 6))
    with sim.training(learn_scales=True, freeze_bn_after=freeze_bn_after) as model:
        model(seeded(4, 4, 6, 6)).square().sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.slow
def test_a_gradient_can_be_differentiated_again():
    """A gradient penalty trains the weights through the gradient of the input."""
    sim = calibrated(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)), seeded(16, 6))
    with sim.training(learn_scales=True) as model:
        x = seeded(16, 6).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((slope.square().sum(1) + 1e-12).sqrt() - 1).square().mean().backward()  # a clipped output has no slope
        assert model[0].weight.grad.abs().sum() > 0
        assert torch.isfinite(model[0].weight.grad).all()
