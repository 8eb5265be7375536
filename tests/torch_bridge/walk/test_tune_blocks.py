"""Block-wise tuning: its blocks, its promises, and that it beats nearest rounding and adaround."""

import copy
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qsdk
from qsdk import ConfigError, ModelError, QuantSim, w4a8
from qsdk.demo.model import load_pretrained
from torch_bridge.tuning.block_tuning import BlockRun, Piece, split_held_back
from torch_bridge.tuning.find_blocks import find_blocks
from torch_bridge.tuning.importance import FLOOR, output_importance
from torch_bridge.walk.module_walk import Arguments, ModuleCall


class Layer(nn.Module):
    """Attention without heads and a feed-forward part, each beside a shortcut, called by keywords as decoders are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor]:
        scores = self.q(x) @ self.k(x).transpose(1, 2) + mask
        x = x + self.o(scores.softmax(-1) @ self.v(x))
        return (x + self.down(F.silu(self.up(x))),)


class Decoder(nn.Module):
    """Token ids [N, L] to logits, the head tied to the embedding."""

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        mask = torch.full((ids.shape[1], ids.shape[1]), -1e4).triu(1)
        for layer in self.layers:
            (x,) = layer(x, mask=mask)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=groups)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


def residuals() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), Residual(6), Residual(6, 6), nn.Flatten(), nn.Linear(6 * 36, 3)
    ).eval()


def images(batches: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 1, 6, 6, generator=generator) for _ in range(batches)]


def tokens(batches: int = 6, size: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(40, (size, 7), generator=generator) for _ in range(batches)]


def low_bits() -> qsdk.QuantConfig:
    return w4a8().override("*", weight="int3")


@cache
def _made(weight: str) -> QuantSim:
    return calibrated(residuals(), images(), w4a8().override("*", weight=weight))


def residual_sim(weight: str = "int3") -> QuantSim:
    """A sim of `residuals()` that is calibrated on `images()`; quantizing takes longer than tuning it."""
    return copy.deepcopy(_made(weight))


def calibrated(model: nn.Module, data: list[Tensor], config: qsdk.QuantConfig) -> QuantSim:
    sim = qsdk.quantize(model, data[0], config)
    qsdk.calibrate(sim, data, progress=False)
    return sim


def state(sim: QuantSim) -> dict[str, Tensor]:
    found = {name: x.clone() for name, x in sim.model.state_dict().items()}
    return found | {f"frozen {site}": torch.tensor(q.frozen) for site, q in sim.quantizers.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        assert torch.equal(x, other[name]), name


def missed(sim: QuantSim, model: nn.Module, data: list[Tensor]) -> float:
    with torch.no_grad():
        return float(sum((sim(x) - model(x)).square().mean() for x in data))


# ---- which modules are blocks


@pytest.mark.parametrize(
    ("model", "example", "expected", "left"),
    [
        (residuals(), images()[0], ["0", "2", "3", "5"], {}),
        (Decoder(), tokens()[0], ["layers.0", "layers.1", "layers.2"], {"embed": "no matrix", "head": "no block"}),
        (
            load_pretrained(),
            torch.zeros(2, 1, 28, 28),
            ["stem.0", "widen.0", "layer1", "layer2", "separable", "fork", "head"],
            {},
        ),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.zeros(2, 3), ["0", "2"], {}),
        (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 99)), torch.zeros(2, 3), ["0"], {"1": "larger"}),
    ],
)
def test_blocks_are_found_by_structure(model, example, expected, left) -> None:
    found = find_blocks(qsdk.quantize(model.eval(), example, w4a8()), None)
    assert sorted(found.modules) == sorted(expected)
    assert found.left.keys() == left.keys()
    for path, word in left.items():
        assert word in found.left[path]


def test_patterns_name_blocks_and_the_rest_is_left_with_a_note() -> None:
    sim = residual_sim()
    report = qsdk.tune_blocks(sim, images(), blocks=["3"], iterations=5, progress=False)
    assert [row["block"] for row in report.rows if row["seconds"] is not None] == ["3"]
    assert {row["block"] for row in report.rows if row["note"] == "no block: in no block"} == {
        "0",
        "2.first",
        "2.second",
        "5",
    }
    with pytest.raises(ConfigError, match="matches blocks='layer9'"):
        qsdk.tune_blocks(sim, images(), blocks=["layer9"], progress=False)
    with pytest.raises(ConfigError, match="is inside the block"):
        qsdk.tune_blocks(sim, images(), blocks=["3", "first"], progress=False)


# ---- what it gives


@pytest.mark.slow
@pytest.mark.parametrize("learn", [("rounding",), ("scales",), ("rounding", "scales")])
def test_each_kept_block_is_better_on_held_back_samples_and_the_network_on_new_data(learn) -> None:
    data, new = images(8), images(12)[8:]
    model, sim = residuals(), residual_sim()
    before = missed(sim, model, new)
    report = qsdk.tune_blocks(sim, data, learn=learn, iterations=40, batch_size=16, progress=False)
    for row in report.rows:
        assert row["error_after"] <= row["error_before"]
    assert report.summary["blocks"] >= 2  # which ones tuning helps is decided by float32, so by the processor too
    assert report.summary["passes"] > 0
    assert missed(sim, model, new) < 0.7 * before


@pytest.mark.slow
def test_block_tuning_is_better_than_adaround_at_few_bits() -> None:
    data, new = images(8, 16), images(12, 16)[8:]
    model, tuned, rounded = residuals(), residual_sim("int2"), residual_sim("int2")
    qsdk.tune_blocks(tuned, data, iterations=80, progress=False)
    qsdk.adaround(rounded, data, progress=False)
    assert missed(tuned, model, new) < missed(rounded, model, new)


@pytest.mark.slow
def test_rounded_weights_are_on_their_grids_and_frozen_and_within_a_step_and_a_half() -> None:
    data = images()
    model, sim = residuals(), residual_sim()
    report = qsdk.tune_blocks(sim, data, learn="rounding", iterations=20, progress=False)
    weights = {site: q for site, q in sim.quantizers.items() if q.decision.kind == "weight"}
    frozen = {site: quantizer for site, quantizer in weights.items() if quantizer.frozen}
    assert report.summary["blocks"] >= 2  # which ones it helps is decided by float32, so by the processor too
    assert len(frozen) >= 4
    for site, quantizer in frozen.items():
        stored, encoding = sim.stored_floats([site])[site], quantizer.encoding()
        np.testing.assert_array_equal(encoding.fake_quantize(stored), stored)
        raw = model.get_parameter(site.replace(":", ".")).detach().numpy()
        low, high = (end.reshape(-1, *[1] * (raw.ndim - 1)) for end in (encoding.low, encoding.high))
        inside = (raw > low) & (raw < high)
        assert np.abs((stored - raw)[inside]).max() <= 1.5001 * encoding.scale.max()


@pytest.mark.slow
def test_learning_scales_alone_changes_no_weight_and_freezes_nothing() -> None:
    data = images()
    model, sim = residuals(), residual_sim()
    before = {site: q.encoding() for site, q in sim.quantizers.items() if q.owns_encoding}
    qsdk.tune_blocks(sim, data, learn=("scales",), iterations=10, progress=False)
    for name, parameter in model.named_parameters():
        assert torch.equal(sim.model.get_parameter(name), parameter)
    changed = [site for site, encoding in before.items() if sim.quantizers[site].encoding() != encoding]
    assert any(site.endswith("weight") for site in changed)
    assert any(site.endswith("output") for site in changed)
    assert not any(q.frozen for q in sim.quantizers.values())


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits_and_another_seed_others() -> None:
    data, found = images(), []
    for seed in (3, 3, 4):
        sim = residual_sim()
        qsdk.tune_blocks(sim, data, iterations=6, drop=0.5, seed=seed, progress=False)
        found.append(state(sim))
    assert_same(found[0], found[1])
    assert any(not torch.equal(x, found[2][name]) for name, x in found[0].items())


@pytest.mark.slow
def test_a_memory_bound_changes_no_bit(monkeypatch) -> None:
    folders = []

    class Noted(tempfile.TemporaryDirectory[str]):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            folders.append(self.name)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Noted)
    data, found = images(), []
    for max_memory in (None, 1):
        assert folders == []
        sim = residual_sim()
        qsdk.tune_blocks(sim, data, iterations=3, max_memory=max_memory, progress=False)
        found.append(state(sim))
    assert folders  # what is beyond the bound goes to files
    assert not any(Path(folder).exists() for folder in folders)
    assert_same(*found)


# ---- all parameters, dropping, and weighting


@pytest.mark.slow
def test_all_parameters_of_blocks_are_learned_and_stay_free() -> None:
    data, new = images(8, 16), images(12, 16)[8:]
    model, free = residuals(), residual_sim("int2")
    before = missed(free, model, new)
    report = qsdk.tune_blocks(free, data, iterations=60, learn="all", progress=False)
    assert report.summary["blocks"] >= 3
    assert missed(free, model, new) < 0.5 * before
    assert not any(q.frozen for q in free.quantizers.values())
    stored = free.stored_floats(["2.first:weight", "2.first:bias"])
    raw = model[2].first
    assert not np.array_equal(stored["2.first:bias"], raw.bias.detach().numpy())
    weight, encoding = stored["2.first:weight"], free.quantizers["2.first:weight"].encoding()
    assert not np.array_equal(encoding.fake_quantize(weight), weight)
    assert np.abs(weight - raw.weight.detach().numpy()).max() > 0
    with free.training(learn_scales=True) as trained:  # training of the whole can follow
        trained(data[0]).square().mean().backward()
        assert trained[2].first.weight.grad is not None


@pytest.mark.parametrize("end", ["a second run", "an interruption"])
def test_a_checkpoint_of_all_parameters_continues_to_the_same_bits(tmp_path, end) -> None:
    data, found = images(), []
    how = {"learn": "all", "iterations": 3, "checkpoint": tmp_path / "solved", "progress": False}
    for attempt in range(2):
        sim = residual_sim("int2")
        before = state(sim)
        if attempt and end == "an interruption":
            steps = sorted((tmp_path / "solved").glob("step-*.npz"))
            steps[-1].unlink()
        qsdk.tune_blocks(sim, data, **how)
        found.append(state(sim))
    assert_same(*found)
    assert not torch.equal(before["2.first.bias"], found[1]["2.first.bias"])


def test_parameters_that_are_frozen_stay_when_all_are_learned() -> None:
    sim = residual_sim("int2")
    sim.freeze("2.first", values=True)
    before = state(sim)
    qsdk.tune_blocks(sim, images(), learn="all", iterations=5, progress=False)
    after = state(sim)
    for name in ("2.first.weight", "2.first.bias"):
        assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["2.second.bias"], after["2.second.bias"])


def test_dropping_leaves_activations_in_a_block_unquantized() -> None:
    sim, x = residual_sim("int2"), torch.randn(4, 6, 6, 6)
    run, generator = BlockRun(sim, sim.model.get_submodule("2")), torch.Generator().manual_seed(0)
    given = Arguments((x,), {})
    with torch.no_grad():
        quantized = run.run_quantized(given)[0]
        run.drop = 1.0, generator
        dropped = run.run_quantized(given)[0]
        run.drop = 0.5, generator
        between = run.run_quantized(given)[0]
        sites = [q for q in sim.quantizers.values() if q.decision.kind in ("weight", "bias")]
        raw = residuals()[2]
        for part in ("first", "second"):
            for q in sites:
                owner, _, port = q.site.partition(":")
                if owner == f"2.{part}":
                    parameter = getattr(raw.get_submodule(part), port)
                    parameter.copy_(q(parameter))
        torch.testing.assert_close(dropped, raw(x), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(between, quantized, atol=1e-4)
        assert not torch.allclose(between, dropped, atol=1e-4)


def test_importance_is_the_squared_gradient_of_the_models_outputs_and_one_on_average() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).eval()
    with torch.no_grad():
        model[1].weight[:, 2:] = 0  # two of the four outputs of the first block matter to nobody
    data = [torch.randn(64, 5) for _ in range(16)]
    sim = calibrated(model, data, w4a8())
    found = output_importance(sim, data, ["0", "1"], None, torch.Generator().manual_seed(0))
    (first,), (last,) = found["0"], found["1"]
    exact = model[1].weight.detach().square().sum(0)
    torch.testing.assert_close(first, FLOOR + (1 - FLOOR) * exact / exact.mean(), rtol=0.15, atol=1e-6)
    torch.testing.assert_close(last, torch.ones(3))
    assert all(p.grad is None for p in sim.model.parameters())


def test_importance_of_texts_of_different_lengths_is_that_of_channels() -> None:
    torch.manual_seed(0)
    data = [torch.randint(40, (2, length)) for length in (7, 5)]
    sim = calibrated(Decoder().eval(), data, w4a8())
    found = output_importance(sim, data, ["layers.0"], None, torch.Generator().manual_seed(0))
    assert found["layers.0"][0].shape == (1, 16)
    qsdk.tune_blocks(sim, data, weighting="fisher", iterations=2, progress=False)


def test_fisher_weighting_judges_a_block_by_what_matters_behind_it() -> None:
    rows = [
        {
            row["block"]: row
            for row in qsdk.tune_blocks(residual_sim(), images(), iterations=2, weighting=w, progress=False).rows
        }
        for w in ("equal", "fisher")
    ]
    assert rows[0]["2"]["error_before"] != pytest.approx(rows[1]["2"]["error_before"], rel=1e-3)
    assert rows[0]["5"]["error_before"] == pytest.approx(rows[1]["5"]["error_before"], rel=1e-3)


# ---- any sim


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        w4a8(block_size=4).override("layers.0.q", weight="int8").skip("layers.1.up", dtype=qsdk.float16),
        w4a8().override("*", weight="uint4"),
        qsdk.w4a16(block_size=8).override("layers.2.*", weight="float8e4m3fn"),
    ],
)
def test_a_decoder_with_blocks_of_scales_float16_and_mixed_precision(config) -> None:
    torch.manual_seed(0)
    model, data = Decoder().eval(), tokens()
    sim = calibrated(model, data, config)
    table = sim.stored_floats(["embed:weight"])["embed:weight"]
    report = qsdk.tune_blocks(sim, data, iterations=15, batch_size=4, progress=False)
    assert [row["block"] for row in report.rows][:3] == ["layers.0", "layers.1", "layers.2"]
    for row in report.rows[:3]:
        assert row["error_after"] <= row["error_before"], row
    assert report.summary["blocks"] >= 1
    np.testing.assert_array_equal(sim.stored_floats(["embed:weight"])["embed:weight"], table)


def test_block_tuning_leaves_frozen_sites() -> None:
    data = images()
    sim = residual_sim()
    sim.freeze("2*")
    before = state(sim)
    qsdk.tune_blocks(sim, data, iterations=10, progress=False)
    after = state(sim)
    same = {name for name, x in before.items() if torch.equal(x, after[name])}
    assert {"2.first.weight", "2.second.weight"} <= same
    assert "3.first.weight" not in same


def test_a_block_that_got_worse_stays_as_it_was() -> None:
    sim = residual_sim("int8")
    before = state(sim)
    report = qsdk.tune_blocks(sim, images(), learn=("rounding",), lr=1e3, iterations=2, progress=False)
    assert {row["note"] for row in report.rows} == {"kept as it was: the error on held-back samples did not fall"}
    assert all(row["error_after"] == row["error_before"] for row in report.rows)
    assert_same(before, state(sim))


class Shared(nn.Module):
    """A block that is called twice, and two blocks that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(8) for _ in range(3))
        self.blocks[2].up.weight = self.blocks[1].up.weight

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(5, 5)
        for block in (self.blocks[0], self.blocks[0], self.blocks[1], self.blocks[2]):
            (x,) = block(x, mask=mask)
        return x


@pytest.mark.slow
def test_modules_called_twice_or_shared_between_blocks_are_skipped() -> None:
    torch.manual_seed(0)
    data = [torch.randn(16, 5, 8) for _ in range(8)]
    sim = calibrated(Shared().eval(), data, low_bits())
    before = state(sim)
    report = qsdk.tune_blocks(sim, data, iterations=40, progress=False)
    rows = {row["block"]: row for row in report.rows}
    assert "several times" in rows["blocks.0"]["note"]
    after = state(sim)
    for name in before:
        if name.startswith(("blocks.0.", "blocks.1.up.weight", "blocks.2.up.weight")):
            assert torch.equal(before[name], after[name]), name
    assert not torch.equal(before["blocks.1.down.weight"], after["blocks.1.down.weight"])


class Remembers(Layer):
    """What it gives depends on what it was given before, as with a cache."""

    def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor]:
        self.calls = getattr(self, "calls", 0) + 1
        return (super().forward(x, mask=mask)[0] * self.calls,)


def test_a_block_that_does_not_repeat_itself_is_left_with_a_note() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    model.layers[1].__class__ = Remembers
    data = tokens(1)
    sim = qsdk.quantize(model, data[0], low_bits())
    qsdk.calibrate(sim, data, progress=False)
    report = qsdk.tune_blocks(sim, data, blocks=["layers.1"], iterations=5, progress=False)
    assert "does not give what it gave in the model" in report.rows[0]["note"]


# ---- what must not happen


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failed_or_interrupted_tuning_leaves_the_sim_as_it_was(monkeypatch, error) -> None:
    data = images()
    sim = residual_sim()
    sim.model.train()
    before, threads = state(sim), threading.active_count()
    steps, original = [], torch.optim.Adam.step

    def step(self, *args):
        steps.append(1)
        if len(steps) > 12:
            raise error
        return original(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    with pytest.raises(error):
        qsdk.tune_blocks(sim, data, iterations=5, progress=False)
    assert len(steps) == 13  # two blocks were finished
    assert_same(before, state(sim))
    assert all(module.training for module in sim.model.modules())
    assert not any(p.grad is not None for p in sim.model.parameters())
    assert threading.active_count() == threads
    assert not any("log2" in name for name, _ in sim.model.named_parameters())


@pytest.mark.slow
def test_the_callers_gradients_modes_and_random_numbers_are_untouched() -> None:
    data = images()
    sim = residual_sim()
    sim.model.eval()
    random = torch.get_rng_state()
    names = [name for name, _ in sim.model.named_parameters()]
    with torch.no_grad():
        qsdk.tune_blocks(sim, data, iterations=3, progress=False)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in sim.model.parameters())
    assert [name for name, _ in sim.model.named_parameters()] == names
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in sim.model.modules())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learn": ("biases",)}, "learn="),
        ({"learn": ()}, "learn="),
        ({"iterations": 0}, "iterations=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"drop": 2.0}, "drop=2.0"),
        ({"weighting": "hessian"}, "weighting='hessian' is unknown"),
    ],
)
def test_options_that_do_not_exist_are_refused(options, message) -> None:
    sim = residual_sim()
    with pytest.raises(ConfigError, match=message):
        qsdk.tune_blocks(sim, images(), progress=False, **options)


def test_one_iteration_of_one_sample_is_the_least() -> None:
    report = qsdk.tune_blocks(residual_sim(), images(), iterations=1, batch_size=1, progress=False)
    assert report.rows


def test_block_tuning_of_an_onnx_file_is_refused_with_a_remedy(tmp_path) -> None:
    path = tmp_path / "m.onnx"
    sim = residual_sim()
    qsdk.export(sim, path)
    with pytest.raises(ModelError, match="quantize the nn"):
        qsdk.tune_blocks(qsdk.quantize(path, None, None), images(), progress=False)


# ---- resuming


def test_an_interrupted_run_goes_on_from_its_checkpoint_with_the_same_result(tmp_path, monkeypatch) -> None:
    data, folder = images(), tmp_path / "run"
    whole, sim = residual_sim(), residual_sim()
    straight = qsdk.tune_blocks(whole, data, iterations=5, progress=False)
    steps, original = [], torch.optim.Adam.step

    def step(self, *args):
        steps.append(1)
        if len(steps) == 12:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    with pytest.raises(KeyboardInterrupt):
        qsdk.tune_blocks(sim, data, iterations=5, progress=False, checkpoint=folder)
    resumed = qsdk.tune_blocks(sim, data, iterations=5, progress=False, checkpoint=folder)
    assert len(steps) == 12 + 10  # two of the four blocks were left to do
    assert_same(state(whole), state(sim))
    for key in ("block", "error_before", "error_after", "note"):
        assert [row[key] for row in resumed.rows] == [row[key] for row in straight.rows]
    with pytest.raises(ConfigError, match="iterations: 5 there, 6 here"):
        qsdk.tune_blocks(residual_sim(), data, iterations=6, progress=False, checkpoint=folder)
    with pytest.raises(ConfigError, match="other data"):
        qsdk.tune_blocks(residual_sim(), [2 * x for x in data], iterations=5, progress=False, checkpoint=folder)


# ---- samples


def piece(size: int, rows: bool = True) -> Piece:
    return Piece(None, torch.arange(size) if rows else None, size, frozenset())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "rows", "judged"),
    [
        ([64, 64], True, 16),
        ([8] * 8, True, 8),
        ([1] * 16, True, 2),
        ([4], True, 1),
        ([1, 1], True, 1),
        ([4] * 3, False, 4),
    ],
)
def test_one_sample_in_eight_is_held_back(sizes, rows, judged) -> None:
    learn, judge = split_held_back([piece(n, rows) for n in sizes], torch.Generator().manual_seed(0))
    assert sum(p.size for p in judge) == judged
    assert sum(p.size for p in learn) == sum(sizes) - judged
    if rows and len(sizes) == 1:
        assert not set(learn[0].rows.tolist()) & set(judge[0].rows.tolist())


def test_a_single_sample_judges_itself() -> None:
    learn, judge = split_held_back([piece(1)], torch.Generator().manual_seed(0))
    assert learn is judge


def test_the_error_of_a_block_is_a_share_of_its_float_outputs_energy() -> None:
    class Off(BlockRun):
        def run_quantized(self, arguments: Arguments) -> list[Tensor]:
            return [arguments.args[0]]

    wanted = 10 * torch.ones(4, 3)
    call = ModuleCall(0, Arguments((wanted,), {}), Arguments((wanted * 1.5,), {}), wanted)
    run = Off(None, nn.Identity())  # type: ignore[arg-type]
    assert run.error([Piece(call, None, 4, frozenset())] * 2) == 0.25
