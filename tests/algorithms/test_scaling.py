"""`equalize`, `smooth_quant` and `awq` at both doors: exact in float, and what they are for."""

import numpy as np
import pytest
import torch
from onnx import helper
from qdq_models import make_model
from scaling_models import DOORS, Block, Chain, data, in_float, inputs, sim_at, simulated, stored, uneven
from torch import nn

import qsdk
from qsdk import ConfigError, DataError, calibrate, w4a8, w8a8, w8a16, weight_only
from qsdk.core.layers.expected_means import FoldedNorm

both = pytest.mark.parametrize("door", DOORS)
PER_TENSOR = w8a8().override("*", per_channel=False)


def off(one, other):
    return float(np.abs(one - other).max() / np.abs(other).max())


def rows(report):
    return {row["group"]: row for row in report.rows}


def channels(weight, axis):
    return np.abs(weight).max(axis=tuple(i for i in range(weight.ndim) if i != axis))


@pytest.mark.spread(1)
@both
def test_equalize_keeps_the_float_output_and_makes_ranges_equal(door):
    model = uneven(Chain())
    model.middle.weight.data.fill_(1.0)  # so that first and last alone are uneven
    with torch.no_grad():
        model.first.weight[2] = 0
    sim = sim_at(door, model, PER_TENSOR)
    x = inputs(model, 4)
    exact = in_float(sim, x)
    report = qsdk.equalize(sim, absorb_bias=False, progress=False)
    assert off(in_float(sim, x), exact) <= 1e-5
    alive = np.arange(6) != 2
    made = channels(stored(sim, "first:weight"), 0)
    between = channels(stored(sim, "middle:weight"), 0)
    read = channels(stored(sim, "last:weight"), 1)
    np.testing.assert_allclose(made[alive], between[alive], rtol=2e-3)
    np.testing.assert_allclose(between, read, rtol=2e-3)
    # the paper's cube root of the three ranges
    before = [channels(t.detach().numpy(), axis) for t, axis in ((model.first.weight, 0), (model.last.weight, 1))]
    np.testing.assert_allclose(made[alive], np.cbrt(before[0] * 1.0 * before[1])[alive], rtol=2e-3)
    np.testing.assert_array_equal(stored(sim, "first:weight")[2], 0)
    assert set(rows(report)) == {"x:input", "first -> middle", "middle -> last"}
    assert rows(report)["x:input"]["reason"] == "it is an input of the model"


@pytest.mark.slow
def test_equalized_ranges_of_two_layers_are_the_root_of_their_product():
    model = uneven(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3)))
    sim = qsdk.quantize(model, torch.ones(1, 3, 8, 8), PER_TENSOR)
    qsdk.equalize(sim, progress=False)
    one, other = channels(model[0].weight.detach().numpy(), 0), channels(model[2].weight.detach().numpy(), 1)
    np.testing.assert_allclose(channels(stored(sim, "0:weight"), 0), np.sqrt(one * other), rtol=1e-5)
    np.testing.assert_allclose(channels(stored(sim, "2:weight"), 1), np.sqrt(one * other), rtol=1e-5)


@pytest.mark.spread(1)
@both
def test_equalized_weights_with_one_scale_lose_less(door):
    torch.manual_seed(3)
    model, by = Chain().eval(), torch.tensor([0.02, 0.1, 0.5, 1, 4, 20])
    with torch.no_grad():  # the same function with uneven channels inside
        model.first.weight *= by.reshape(-1, 1, 1, 1)
        model.first.bias *= by
        model.middle.bias *= by
        model.last.weight /= by.reshape(1, -1, 1, 1)
    sim, batches = sim_at(door, model, w8a16().override("*", per_channel=False)), data(door, model)
    calibrate(sim, batches, progress=False)
    x = inputs(model, 16, seed=9)
    exact = in_float(sim, x)
    before = np.square(simulated(sim, x) - exact).mean()
    report = qsdk.equalize(sim, batches, progress=False)
    assert np.square(simulated(sim, x) - exact).mean() < before / 2
    assert report.summary["calibrated_again"] == "min_max"
    first = rows(report)["first -> middle"]
    assert first["spread_after"] < first["spread_before"] / 3


@both
def test_a_relu6_blocks_unless_it_may_become_a_relu(door):
    model = uneven(Chain(nn.ReLU6))
    sim, x = sim_at(door, model, PER_TENSOR), inputs(model, 4)
    exact = in_float(sim, x)
    report = qsdk.equalize(sim, progress=False)
    assert report.summary["scaled"] == 0
    assert sum("Clip at 6" in row["reason"] for row in report.rows) == 2
    np.testing.assert_array_equal(in_float(sim, x), exact)
    before = sim.snapshot(weights=True)
    report = qsdk.equalize(sim, relu6="relu", progress=False)
    assert (report.summary["scaled"], report.summary["relu6_as_relu"]) == (2, 2)
    plain = uneven(Chain(nn.ReLU))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert off(in_float(sim, x), plain(x).numpy()) <= 1e-5
    again = qsdk.equalize(sim, progress=False)  # they are ReLU for good
    assert (again.summary["scaled"], again.summary["relu6_as_relu"]) == (2, 0)
    sim.restore(before)
    np.testing.assert_array_equal(in_float(sim, x), exact)


@pytest.mark.slow
@both
def test_a_relu_that_was_a_relu6_is_saved_and_exported(door, tmp_path):
    model = uneven(Chain(nn.ReLU6))
    sim, batches, x = sim_at(door, model, PER_TENSOR), data(door, model), inputs(model, 4)
    calibrate(sim, batches, progress=False)
    qsdk.equalize(sim, batches, relu6="relu", progress=False)
    expected = simulated(sim, x)
    qsdk.save(sim, tmp_path / "sim.qsdk")
    found = qsdk.load(tmp_path / "sim.qsdk", model if door == "torch" else None)
    np.testing.assert_array_equal(simulated(found, x), expected)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", batches, progress=False).summary["passed"]
    qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx")


@pytest.mark.spread(1)
@both
def test_high_biases_move_on_where_nothing_is_padded(door):
    model = uneven(Chain())
    with torch.no_grad():
        model.middle.bias[:3] += 50
    sim, batches = sim_at(door, model, PER_TENSOR), data(door, model)
    x = inputs(model, 8)
    exact = in_float(sim, x)
    report = qsdk.equalize(sim, batches, progress=False)
    found = rows(report)
    assert found["first -> middle"]["absorbed"] == 0  # it is read with padding
    assert found["middle -> last"]["absorbed"] >= 3
    assert off(in_float(sim, x), exact) <= 1e-5
    apart = sim_at(door, model, PER_TENSOR)
    qsdk.equalize(apart, batches, absorb_bias=False, progress=False)
    lower = stored(apart, "middle:bias") - stored(sim, "middle:bias")
    assert (lower[:3] > 1).all()
    assert (lower >= 0).all()


def test_high_biases_stay_in_front_of_a_transposed_convolution_whose_borders_have_fewer_taps():
    draw = np.random.default_rng(0).normal
    shapes = {"first.weight": (4, 3, 1, 1), "last.weight": (4, 5, 3, 3), "last.bias": (5,)}
    stored_tensors = {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()} | {
        "first.bias": np.full(4, 50, np.float32)
    }
    nodes = [
        helper.make_node("Conv", ["x", "first.weight", "first.bias"], ["first_y"], "first"),
        helper.make_node("Relu", ["first_y"], ["act_y"], "act"),
        helper.make_node("ConvTranspose", ["act_y", "last.weight", "last.bias"], ["y"], "last"),
    ]
    model = make_model(nodes, {"x": ["n", 3, 6, 6]}, {"y": ["n", 5, 8, 8]}, stored_tensors)
    sim, x = qsdk.quantize(model, None, PER_TENSOR), inputs(Chain(), 4)
    exact = in_float(sim, x)
    report = qsdk.equalize(sim, [x.numpy()], progress=False)
    assert off(in_float(sim, x), exact) <= 1e-5
    assert rows(report)["first -> last"]["absorbed"] == 0


class SharedBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.bias = self.one.bias
        self.first.bias.data += 20  # above the ReLU for all data

    def forward(self, x):
        x = torch.relu(self.first(x))
        return 2 * self.one(x), self.other(x)


def test_high_biases_stay_where_two_layers_share_the_bias_that_would_take_them():
    torch.manual_seed(0)
    model, batches = SharedBias().eval(), [torch.randn(4, 8) for _ in range(3)]
    exact = model(batches[0])
    sim = qsdk.quantize(model, batches[0], PER_TENSOR)
    calibrate(sim, batches, progress=False)
    report = qsdk.equalize(sim, batches, progress=False)
    assert [row["absorbed"] for row in report.rows if not row["reason"]] == [0]
    for found, wanted in zip(sim.unwrap()(batches[0]), exact, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_without_data_a_folded_batch_norm_says_how_high_a_bias_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()
    with torch.no_grad():
        model[1].bias.copy_(torch.tensor([9.0, 0.5, 4.0, -2.0]))
    sim = qsdk.quantize(model, torch.ones(1, 3, 8, 8), PER_TENSOR)
    biases = stored(sim, "0:bias").copy()
    report = qsdk.equalize(sim, progress=False, iterations=1)
    factors = channels(stored(sim, "3:weight"), 1) / channels(model[3].weight.detach().numpy(), 1)
    lowered = biases / factors - stored(sim, "0:bias")
    np.testing.assert_allclose(lowered * factors, [6.0, 0, 1.0, 0], atol=1e-4)  # beta - 3 gamma
    assert report.rows[0]["absorbed"] == 2
    assert "0" not in sim.folded_norms


@pytest.mark.slow
def test_what_folded_batch_norms_say_is_scaled_too():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    sim = qsdk.quantize(uneven(model), torch.ones(1, 3, 8, 8), PER_TENSOR)
    before = sim.folded_norms["0"]
    assert isinstance(before, FoldedNorm)
    biases = stored(sim, "0:bias").copy()
    qsdk.equalize(sim, absorb_bias=False, progress=False)
    factors = biases / stored(sim, "0:bias")
    np.testing.assert_allclose(sim.folded_norms["0"].mean, before.mean / factors, rtol=1e-4)
    np.testing.assert_allclose(sim.folded_norms["0"].std, before.std / factors, rtol=1e-4)


# --- SmoothQuant and AWQ ------------------------------------------------------------------------------------------


def with_outliers():
    """Both norms give one channel that is 20 times as large as the others, and its readers' weights are as small."""
    torch.manual_seed(1)
    model = Block().eval()
    with torch.no_grad():
        for norm in (model.norm1, model.norm2):
            norm.weight[3] *= 20
        for layer in (model.q, model.k, model.gate):
            layer.weight[:, 3] /= 20
    return model


GROUPS = {"norm1 -> q, k, v", "q x k", "v -> o", "norm2 -> gate, up", "up -> down"}


@pytest.mark.slow
@both
@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_smooth_quant_finds_every_group_of_a_block_and_gets_closer(door, alpha):
    model = with_outliers()
    sim, batches, x = sim_at(door, model, w8a8()), data(door, model, 8), inputs(model, 16, seed=9)
    calibrate(sim, batches, method="percentile", percentile=99.999, progress=False)
    exact = in_float(sim, x)
    before = np.square(simulated(sim, x) - exact).mean()
    report = qsdk.smooth_quant(sim, batches, alpha=alpha, progress=False)
    assert {row["group"] for row in report.rows if not row["reason"]} == GROUPS
    assert off(in_float(sim, x), exact) <= 1e-5
    assert np.square(simulated(sim, x) - exact).mean() < before / 2
    assert report.summary["calibrated_again"] == "percentile"
    assert (sim.methods.method, sim.methods.percentile) == ("percentile", 99.999)
    if alpha == "auto":
        assert all(row["error_after"] <= row["error_before"] for row in report.rows if not row["reason"])


def test_a_product_of_two_layers_is_smoothed_to_equal_channels_and_judged_by_both_grids():
    model = uneven(Block())
    sim, batches = sim_at("torch", model, w8a8()), data("torch", model, 8)
    calibrate(sim, batches, progress=False)

    def channels_of(block):
        """Queries and keys of both heads, [rows, 8]."""
        with torch.no_grad():
            y = torch.cat([block.norm1(x) for x in batches]).reshape(-1, 8)
            return [layer(y).double() for layer in (block.q, block.k)]

    def noise(x):
        step = (x.max().clip(0) - x.min().clip(max=0)) / 255
        return float((x - (x / step).round() * step).square().mean() / x.square().mean(0).sum())

    before = channels_of(model)
    row = rows(qsdk.smooth_quant(sim, batches, alpha=0.5, progress=False))["q x k"]
    assert row["reason"] == ""
    after = channels_of(sim.unwrap())
    ratios = after[0].abs().amax(0) / after[1].abs().amax(0)  # one number for all channels, which share a scale
    np.testing.assert_allclose(ratios, ratios[0].expand(8), rtol=1e-3)
    for sides, error in ((before, row["error_before"]), (after, row["error_after"])):
        assert error == pytest.approx(sum(map(noise, sides)), rel=0.3)


@pytest.mark.spread(1)
@both
def test_awq_lowers_the_error_of_weights_and_clipping_lowers_it_again(door):
    model = with_outliers()
    config, x = weight_only("int4", block_size=4), inputs(model, 32, seed=9)
    errors = {}
    for name in ("nearest", "scaled", "clipped"):
        sim, batches = sim_at(door, model, config), data(door, model)
        calibrate(sim, batches, progress=False)
        exact = in_float(sim, x)
        if name != "nearest":
            report = qsdk.awq(sim, batches, clip=name == "clipped", progress=False)
            assert {row["group"] for row in report.rows if not row["reason"]} == GROUPS - {"q x k"}
            assert all(row["error_after"] <= row["error_before"] for row in report.rows if not row["reason"])
            assert off(in_float(sim, x), exact) <= 1e-5
        errors[name] = np.square(simulated(sim, x) - exact).mean()
    assert report.summary["clipped"] > 0
    assert report.summary["error_after_clipping"] < report.summary["error_before_clipping"]
    assert errors["scaled"] < errors["nearest"] / 2
    assert errors["clipped"] < errors["scaled"]


class Reader(nn.Module):
    """Cross attention: queries and keys read other rows of one packed weight."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, x):
        return self.attention(self.norm(x), x, x, need_weights=False)[0]


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_awq_clips_the_rows_of_a_packed_weight_that_one_layer_reads(dtype):
    torch.manual_seed(0)
    batches = [torch.randn(2, 7, 16, dtype=dtype) for _ in range(4)]
    sim = qsdk.quantize(Reader().eval().to(dtype), batches[0], w4a8())
    calibrate(sim, batches, progress=False)
    rows_of = [f"attention:in_proj_weight_{part}" for part in ("q", "kv")]
    before = {site: sim.encodings[site].scale for site in rows_of}
    report = qsdk.awq(sim, batches, progress=False)
    assert report.summary["clipped"] == 3  # and the projection of the output
    assert report.summary["error_after_clipping"] < report.summary["error_before_clipping"]
    for site in rows_of:
        assert (sim.encodings[site].scale < 0.95 * before[site]).any()


@pytest.mark.slow
@both
def test_two_runs_give_the_same_bits(door):
    model = with_outliers()
    found = []
    for _ in range(2):
        sim, batches = sim_at(door, model, w8a8()), data(door, model)
        calibrate(sim, batches, progress=False)
        qsdk.smooth_quant(sim, batches, alpha="auto", progress=False)
        found.append(simulated(sim, inputs(model, 4)))
    np.testing.assert_array_equal(*found)


def test_an_alpha_of_one_leaves_no_spread_in_the_inputs():
    model = with_outliers()
    report = qsdk.smooth_quant(sim_at("onnx", model, w8a8()), data("onnx", model), alpha=1.0, progress=False)
    moved = [row for row in report.rows if not row["reason"]]
    assert {row["group"] for row in moved} == GROUPS
    np.testing.assert_allclose([row["spread_after"] for row in moved], 1, rtol=1e-5)
    assert max(row["spread_before"] for row in moved) > 5


# --- what does not fit --------------------------------------------------------------------------------------------


@pytest.mark.spread(1)
@both
def test_an_uncalibrated_sim_stays_uncalibrated(door):
    model = with_outliers()
    sim = sim_at(door, model, w8a8())
    report = qsdk.smooth_quant(sim, data(door, model), progress=False)
    assert not any(sim.ready().values())
    assert report.summary["calibrated_again"].startswith("no")


@pytest.mark.slow
@both
def test_a_frozen_encoding_blocks_its_groups(door):
    model = with_outliers()
    sim, batches = sim_at(door, model, w8a8()), data(door, model)
    calibrate(sim, batches, progress=False)
    sim.freeze("k:weight")
    before = stored(sim, "k:weight").copy()
    report = qsdk.smooth_quant(sim, batches, progress=False)
    reasons = {row["group"]: row["reason"] for row in report.rows}
    assert "the encoding of k:weight is frozen" in reasons["norm1 -> q, k, v"]
    assert "the encoding of k:weight is frozen" in reasons["q x k"]
    assert reasons["v -> o"] == ""
    np.testing.assert_array_equal(stored(sim, "k:weight"), before)


class Broken(list):
    """Batches that end in an interrupt the second time."""

    times = 0

    def __iter__(self):
        yield from super().__iter__()
        self.times += 1
        if self.times == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
@both
@pytest.mark.parametrize("verb", ["equalize", "smooth_quant", "awq"])
def test_an_interrupt_leaves_the_sim_bit_for_bit_as_it_was(door, verb):
    model = uneven(Chain(nn.ReLU6)) if verb == "equalize" else with_outliers()
    sim, batches, x = sim_at(door, model, PER_TENSOR), data(door, model), inputs(model, 4)
    calibrate(sim, batches, progress=False)
    before = simulated(sim, x), in_float(sim, x), sim.encodings
    options = {"relu6": "relu"} if verb == "equalize" else {}
    with pytest.raises(KeyboardInterrupt):
        getattr(qsdk, verb)(sim, Broken(batches), progress=False, **options)
    np.testing.assert_array_equal(simulated(sim, x), before[0])
    np.testing.assert_array_equal(in_float(sim, x), before[1])
    assert sim.encodings == before[2]


def test_options_that_do_not_exist_are_refused():
    model = Chain().eval()
    sim, batches = sim_at("torch", model, w8a8()), data("torch", model)
    with pytest.raises(ConfigError, match=r"alpha=1\.5; give a number from 0 to 1, or 'auto'"):
        qsdk.smooth_quant(sim, batches, alpha=1.5)
    with pytest.raises(ConfigError, match="relu6='relu7'; give 'keep' or 'relu'"):
        qsdk.equalize(sim, relu6="relu7")
    with pytest.raises(ConfigError, match="grid=0; at least one value"):
        qsdk.awq(sim, batches, grid=0)
    with pytest.raises(DataError, match="the data holds no batch"):
        qsdk.smooth_quant(sim, [], progress=False)
    calibrate(sim, batches, progress=False)
    with pytest.raises(ConfigError, match="give data to calibrate it again"):
        qsdk.equalize(sim)


@pytest.mark.spread(1)
@both
def test_factors_stay_within_the_numbers_of_float16(door, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():  # the factors that equalize the weights are about 1e-3, and the bias is 1000
        model[0].weight.mul_(1e-4)
        model[0].bias.fill_(1000.0)
        model[2].weight.mul_(100.0)
    model.half()
    batches = [torch.randn(4, 8).half() for _ in range(3)]
    exact = model(batches[0]).float()
    source = model
    if door == "onnx":
        source = tmp_path / "half.onnx"
        torch.onnx.export(model, (batches[0],), source, dynamo=True, verbose=False)
        batches = [batch.numpy() for batch in batches]
    sim = qsdk.quantize(source, batches[0] if door == "torch" else None, PER_TENSOR)
    calibrate(sim, batches, progress=False)
    report = qsdk.equalize(sim, batches, absorb_bias=False, progress=False)
    assert 0.0 < min(row["smallest_factor"] for row in report.rows if not row["reason"]) < 0.1
    found = sim(batches[0]) if door == "torch" else torch.from_numpy(sim.run(batches[0])[0])
    assert found.isfinite().all()
    assert (found.float() - exact).abs().max() <= 0.03 * exact.abs().max()


class Memory(nn.Module):
    """Attends to a stored memory, whose keys and values are computed from nothing else."""

    def __init__(self):
        super().__init__()
        self.memory, self.attention = nn.Parameter(torch.randn(1, 3, 8)), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        """Give what is found."""
        memory = self.memory.expand(x.shape[0], -1, -1)
        return self.attention(x, memory, memory)[0]


@pytest.mark.parametrize(
    "verb", [qsdk.equalize, *(pytest.param(verb, marks=pytest.mark.slow) for verb in (qsdk.smooth_quant, qsdk.awq))]
)
def test_a_layer_of_a_stored_tensor_has_no_channels_to_scale(verb):
    torch.manual_seed(0)
    model, batches = Memory().eval(), [torch.randn(4, 5, 8) for _ in range(2)]
    sim = qsdk.quantize(model, batches[0], weight_only("int8"))
    calibrate(sim, batches, progress=False)
    verb(sim, batches, progress=False)
    exact = model(batches[0]).detach()
    assert (sim(batches[0]) - exact).abs().max() <= 0.03 * exact.abs().max()
