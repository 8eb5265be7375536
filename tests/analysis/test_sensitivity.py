"""`qsdk.sensitivity`: the estimate of one pass, the exact measurement, metrics, and what stays untouched."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained
from qsdk.verbs.analysis import noise
from qsdk.verbs.analysis.noise import LayerSites, OutputNoise, OutputWeights
from qsdk.verbs.analysis.sensitivity import sensitivity_report
from qsdk.verbs.doors.choose import door_of


class Branches(nn.Module):
    """A trunk with a shortcut, a shared layer, and a gate that the model computes without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.gate = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = y + torch.relu(self.shared(torch.relu(self.shared(y))))
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(y))
        return self.last(y * gate)


def calibrated(model, batches, config):
    sim = qsdk.quantize(model, batches[0], config)
    qsdk.calibrate(sim, batches, progress=False)
    return sim


def by_row(report):
    return {(row["layer"], row["kind"]): row for row in report.rows}


def ranks(values):
    return np.argsort(np.argsort(values))


@pytest.fixture(scope="module")
def demo():
    images = torch.from_numpy(load().calibration_images[:64])
    return calibrated(load_pretrained(), list(images.split(16)), qsdk.w4a8()), list(images.split(16))


@pytest.fixture
def branches():
    torch.manual_seed(0)
    batches = [torch.randn(64, 12) for _ in range(2)]
    return calibrated(Branches().eval(), batches, qsdk.w4a8()), batches


@pytest.mark.slow
def test_the_estimate_ranks_layers_as_measuring_each_does(demo):
    sim, batches = demo
    estimated = by_row(qsdk.sensitivity(sim, batches, progress=False))
    measured = by_row(qsdk.sensitivity(sim, batches, exact=True, progress=False))
    assert estimated.keys() == measured.keys()
    pairs = np.array([(estimated[key]["sqnr_db"], row["sqnr_db"]) for key, row in measured.items()])
    assert np.corrcoef(ranks(pairs[:, 0]), ranks(pairs[:, 1]))[0, 1] > 0.93
    assert np.median(np.abs(pairs[:, 0] - pairs[:, 1])) < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "used"),
    [([16] * 4, [13]), ([16] * 6, [16, 4]), ([48], [10]), ([300], [32]), ([16, 16], [16, 16]), ([3], [3])],
)
def test_the_estimate_reads_the_data_once_and_a_fifth_of_its_rows_unless_they_are_few(demo, sizes, used):
    sim, calls = demo[0], []
    images = torch.from_numpy(load().calibration_images[: sum(sizes)])

    def forward(model, batch):
        calls.append(len(batch))
        return model(batch)

    report = qsdk.sensitivity(sim, iter(images.split(sizes)), forward=forward, progress=False)
    assert calls == [rows for count in used for rows in (count, count)]  # in float and in the simulation
    assert (report.summary["samples"], report.summary["samples_given"]) == (sum(used), sum(sizes))


@pytest.mark.parametrize("rows", [[64], [32, 32, 32], [4] * 5])
@pytest.mark.parametrize("weight", ["int3", "int8"])
def test_of_a_small_network_the_estimate_is_close(rows, weight):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.ReLU())]
    batches = [torch.randn(count, 16) for count in rows]
    sim = calibrated(nn.Sequential(*layers, nn.Linear(16, 4)).eval(), batches, qsdk.w8a8().override("*", weight=weight))
    measured = by_row(qsdk.sensitivity(sim, batches, exact=True, progress=False))
    for key, row in by_row(qsdk.sensitivity(sim, batches, progress=False)).items():
        assert row["sqnr_db"] == pytest.approx(measured[key]["sqnr_db"], abs=2.0 if weight == "int8" else 2.5), key


def test_a_row_that_rests_on_few_random_signs_or_is_beyond_first_order_says_so():
    rows = {
        "few": {"few:weight": (1.0, 0.5)},  # power and its variance
        "many": {"many:weight": (1.0, 0.01)},
        "sums": {"sums:weight": (0.9, 0.01), "sums:bias": (0.1, 0.005)},
        "strong": {"strong:weight": (40.0, 0.1)},
        "measured": {"measured:weight": (40.0, 0.0)},
    }
    noise = OutputNoise(signal=100.0)
    for sites in rows.values():
        noise.alone |= {site: power for site, (power, _) in sites.items()}
        noise.variance |= {site: variance for site, (_, variance) in sites.items()}
    layers = [LayerSites(name, "weights", tuple(sites), "int8") for name, sites in rows.items()]
    report = sensitivity_report(layers, noise, {}, {})
    assert {row["layer"] for row in report.rows if row["note"] == "estimate is uncertain"} == {"few", "strong"}
    assert "note" not in sensitivity_report([layers[1]], noise, {}, {}).rows[0]


def test_an_output_counts_by_its_elements_and_not_by_its_unit():
    weights, large, small = OutputWeights(), np.ones((2, 100), np.float32), np.full((2, 5), 3, np.float32)
    weights.learn([[large, small]])
    assert weights.power([large, small]) == pytest.approx(210)
    assert weights.power_of_changes([[large * 1.5, small]], [[large, small]]) == pytest.approx(0.25 * 200)
    assert weights.power_of_changes([[large, small * 1.5]], [[large, small]]) == pytest.approx(0.25 * 10)


def test_what_remains_without_a_layer_keeps_what_is_in_the_stored_values():
    layers = [LayerSites(name, "weights", (f"{name}:weight",), "int8") for name in ("a", "b")]
    noise = OutputNoise(signal=100.0, all_quantized=6.0, stored=1.0, alone={"a:weight": 4.0, "b:weight": 1.0})
    report = sensitivity_report(layers, noise, {}, {})
    assert [row["layer"] for row in report.rows] == ["a", "b"]
    assert [row["sqnr_db_without"] for row in report.rows] == pytest.approx([10 * math.log10(50), 10 * math.log10(20)])
    assert [row["share"] for row in report.rows] == [0.8, 0.2]
    assert report.summary["rows_with_80_percent"] == 1


@pytest.mark.slow
def test_of_few_pictures_at_3_bits_a_row_that_is_far_off_says_so():
    images = [torch.from_numpy(load().calibration_images[:128])]
    sim = calibrated(load_pretrained(), images, qsdk.w8a8().override("*", weight="int3"))
    exact = by_row(qsdk.sensitivity(sim, images, exact=True, progress=False))
    for seed in (0, 1000):
        report = qsdk.sensitivity(sim, images, progress=False, seed=seed)
        assert report.summary["samples"] < 32
        assert sum("uncertain" in row.get("note", "") for row in report.rows) < len(report.rows) / 3
        for key, row in by_row(report).items():
            if not row.get("note"):
                assert row["sqnr_db"] == pytest.approx(exact[key]["sqnr_db"], abs=3.5), key


def test_a_row_that_costs_nothing_says_so_in_a_word():
    torch.manual_seed(0)
    x, model = torch.randn(16, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-127, 128, (8, 8)) / 64).fill_diagonal_(127 / 64)
    sim = calibrated(model, [x], qsdk.weight_only("int8"))
    report = qsdk.sensitivity(sim, [x], progress=False)
    assert by_row(report)["0", "weights"]["sqnr_db"] == 200.0  # a number for programs
    (line,) = [line for line in str(report).splitlines() if line.startswith("0 ")]
    assert line.split()[3] == "exact"
    assert "200" not in report._repr_html_()


@pytest.mark.slow
def test_a_model_of_a_fixed_number_of_rows_gets_them_all(branches, monkeypatch):
    monkeypatch.setattr(noise, "_LITTLE", 0)

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(12, 5)

        def forward(self, x):
            return self.layer(x.reshape(16, -1)[:, :12])

    x, calls = torch.randn(16, 12), []
    sim = calibrated(Fixed().eval(), [x], qsdk.w8a8())

    def forward(model, batch):
        calls.append(len(batch))
        return model(batch)

    report = qsdk.sensitivity(sim, [x], forward=forward, progress=False)
    assert calls[-2:] == [16, 16]
    assert set(calls[:-2]) == {4}
    assert report.rows[0]["sqnr_db"] == qsdk.sensitivity(sim, [x], progress=False).rows[0]["sqnr_db"]


class Gated(nn.Module):
    """Its second output is 0 for every row that starts below 0, its third always."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.one(x), self.two(x) * (x[:, :1] > 0), self.one(x).relu() * 0.0


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_an_output_that_starts_at_0_counts_and_one_that_is_always_0_is_named(exact):
    torch.manual_seed(0)
    batches = [torch.randn(24, 6) for _ in range(4)]
    batches[0][:, 0] = -batches[0][:, 0].abs()
    sim = calibrated(Gated().eval(), batches, qsdk.w4a8())
    report = qsdk.sensitivity(sim, batches, exact=exact, progress=False)
    assert by_row(report)["two", "weights"]["share"] > 0.1
    assert report.summary["not_counted"] == ["output 2: it is 0 in all batches used"]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A float file and the sim of the same values on either side, with one set of ranges."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 6)).eval()
    batches, path = [torch.randn(16, 3, 8, 8) for _ in range(2)], tmp_path_factory.mktemp("both") / "float.onnx"
    torch.onnx.export(
        model, (batches[0],), path, dynamo=True, verbose=False, input_names=["x"], dynamic_shapes=({0: "n"},)
    )
    fed = [{"x": batch.numpy()} for batch in batches]
    osim = qsdk.quantize(path, None, qsdk.w4a8())
    qsdk.calibrate(osim, fed, progress=False)
    return calibrated(model, batches, qsdk.w4a8()), batches, osim, fed


@pytest.mark.slow
@pytest.mark.parametrize("exact", [False, True])
def test_both_sides_say_the_same(both, exact):
    sim, batches, osim, fed = both
    ours = [row["sqnr_db"] for row in qsdk.sensitivity(sim, batches, exact=exact, progress=False).rows]
    theirs = qsdk.sensitivity(osim, fed, exact=exact, progress=False)
    assert theirs.summary["method"] == ("measured" if exact else "estimated")
    assert [row["sqnr_db"] for row in theirs.rows] == pytest.approx(ours, abs=0.02)


@pytest.mark.slow
def test_an_opened_file_can_be_asked_and_keeps_its_session(both, tmp_path):
    sim, batches, _, _ = both
    fed = [batch.numpy() for batch in batches]
    qsdk.export(sim, tmp_path / "model.onnx")
    opened = qsdk.quantize(tmp_path / "model.onnx", None)
    before, session = opened.run(fed[0])[0], opened._session
    report = qsdk.sensitivity(opened, fed, exact=True, metric=lambda s: float(s.run(fed[0])[0].sum()), progress=False)
    assert opened._session is session
    assert np.array_equal(opened.run(fed[0])[0], before)
    ours = qsdk.sensitivity(sim, batches, exact=True, progress=False)
    kinds = [[row["sqnr_db"] for row in report.rows if row["kind"] == kind] for kind in ("weights", "activations")]
    assert min(kinds[0]) > 100  # stored in the file on their grid
    wanted = [row["sqnr_db"] for row in ours.rows if row["kind"] == "activations"]
    assert sorted(kinds[1]) == pytest.approx(sorted(wanted), abs=8.0)  # behind coarser weights


@pytest.mark.slow
def test_exact_rows_are_those_of_a_sim_with_one_layer_quantized(branches):
    sim, batches = branches
    report = by_row(qsdk.sensitivity(sim, batches, exact=True, progress=False))
    with torch.no_grad():
        exact = torch.cat([sim.unwrap()(x) for x in batches])
    for layer in ("first", "shared", "last"):
        everything_else = qsdk.w4a8().override("*", weight="float32", activation="float32", bias="float32")
        alone = calibrated(sim.unwrap(), batches, everything_else.override(layer, weight="int4"))
        noise = torch.cat([alone(x) for x in batches]) - exact
        db = 10 * np.log10(float(exact.square().sum() / noise.square().sum()))
        assert report[layer, "weights"]["sqnr_db"] == pytest.approx(db, abs=0.05)  # int32 biases add a little


@pytest.mark.parametrize("exact", [True, False])
def test_the_summary_has_the_ratio_of_the_whole_simulation(exact):
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)), [torch.randn(32, 12)]
    sim = calibrated(model, batches, qsdk.w4a8())
    with torch.no_grad():
        wanted, found = model(batches[0]), sim(batches[0])
    db = 10 * np.log10(float(wanted.square().sum() / (found - wanted).square().sum()))
    report = qsdk.sensitivity(sim, batches, exact=exact, progress=False)
    assert report.summary["sqnr_db"] == pytest.approx(db, abs=0.05)


@pytest.mark.slow
def test_all_but_one_is_the_reverse(branches):
    sim, batches = branches
    report = qsdk.sensitivity(sim, batches, exact=True, progress=False)
    worst = report.rows[0]
    assert worst["kind"] == "weights"
    assert worst["sqnr_db"] < report.rows[-1]["sqnr_db"]
    assert worst["sqnr_db_without"] > report.summary["sqnr_db"] + 1.0


@pytest.mark.slow
def test_a_layer_behind_no_grad_is_estimated(branches):
    sim, batches = branches
    report = qsdk.sensitivity(sim, batches, progress=False)
    exact = by_row(qsdk.sensitivity(sim, batches, exact=True, progress=False))
    assert report.summary["method"] == "estimated"
    for key, row in by_row(report).items():
        assert row["sqnr_db"] == pytest.approx(exact[key]["sqnr_db"], abs=2.0), key


@pytest.mark.slow
def test_a_model_without_gradients_is_measured(branches):
    sim, batches = branches
    frozen = calibrated(WithoutGradients(sim.unwrap()).eval(), batches, qsdk.w4a8())
    report = qsdk.sensitivity(frozen, batches, progress=False)
    assert "has no gradients" in report.summary["method"]
    exact = by_row(qsdk.sensitivity(frozen, batches, exact=True, progress=False))
    for key, row in by_row(report).items():
        assert row["sqnr_db"] == pytest.approx(exact[key]["sqnr_db"], abs=1e-6)


class WithoutGradients(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).detach()


@pytest.mark.slow
def test_a_metric_is_called_with_each_row_alone(branches):
    sim, batches = branches
    with torch.no_grad():
        exact = sim.unwrap()(batches[0])

    def closeness(given):
        assert given is sim
        return -float((given(batches[0]) - exact).abs().max())

    report = qsdk.sensitivity(sim, batches, metric=closeness, progress=False)
    assert report.summary["reference"] == pytest.approx(0.0, abs=1e-6)
    assert report.summary["drop"] == pytest.approx(-closeness(sim), abs=1e-6)
    drops = [row["drop"] for row in report.rows]
    assert drops == sorted(drops, reverse=True)
    with door_of(sim).quantizing_only({"last:weight", "last:bias"}):
        alone = -closeness(sim)
    assert by_row(report)["last", "weights"]["drop"] == pytest.approx(alone, abs=1e-6)


@pytest.mark.slow
def test_nothing_of_the_users_changes(branches):
    sim, batches = branches
    for parameter in sim.model.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    before, flags = sim(batches[0]), [p.requires_grad for p in sim.model.parameters()]
    sim.model.train()
    qsdk.sensitivity(sim, batches, progress=False)
    assert torch.equal(sim(batches[0]), before)
    assert [p.requires_grad for p in sim.model.parameters()] == flags
    assert all(p.grad is None for p in sim.model.parameters())
    assert sim.model.training


@pytest.mark.slow
def test_a_metric_that_fails_leaves_the_sim(branches):
    sim, batches = branches
    before = sim(batches[0])

    def failing(given):
        raise RuntimeError("no labels")

    with pytest.raises(RuntimeError, match="no labels"):
        qsdk.sensitivity(sim, batches, metric=failing, progress=False)
    assert torch.equal(sim(batches[0]), before)


@pytest.mark.slow
def test_masks_of_infinity_do_not_spoil_the_estimate():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(8, 6, 16)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(x, src_mask=torch.full((6, 6), float("-inf")).triu(1))

    sim = calibrated(Masked().eval(), [x], qsdk.w8a8())
    estimated = by_row(qsdk.sensitivity(sim, [x], progress=False))
    exact = by_row(qsdk.sensitivity(sim, [x], exact=True, progress=False))
    assert all(np.isfinite(row["sqnr_db"]) for row in estimated.values())
    pairs = np.array([(estimated[key]["sqnr_db"], row["sqnr_db"]) for key, row in exact.items()])
    assert np.corrcoef(ranks(pairs[:, 0]), ranks(pairs[:, 1]))[0, 1] > 0.9


@pytest.mark.parametrize(
    ("data", "options", "error", "words"),
    [
        ([], {}, qsdk.DataError, "at least one batch"),
        (torch.zeros(2, 12), {}, qsdk.DataError, "wrap one batch in a list"),
        ([torch.zeros(2, 12)], {"metric": 3}, qsdk.ConfigError, "no function"),
        ([torch.zeros(2, 12)], {"metric": lambda sim: float("nan")}, qsdk.ConfigError, "NaN"),
    ],
)
def test_wrong_arguments_are_named(branches, data, options, error, words):
    with pytest.raises(error, match=words):
        qsdk.sensitivity(branches[0], data, progress=False, **options)


@pytest.mark.slow
def test_an_uncalibrated_sim_is_refused():
    model, x = nn.Linear(4, 2), torch.randn(2, 4)
    with pytest.raises(qsdk.CalibrationError, match="no encoding"):
        qsdk.sensitivity(qsdk.quantize(model, x), [x], progress=False)


def test_a_runtime_adds_the_milliseconds_of_each_layer(branches):
    sim, batches = branches
    plain, timed = (qsdk.sensitivity(sim, batches, progress=False, runtime=name) for name in (None, "onnxruntime"))
    assert [{**row, "ms": None} for row in plain.rows] == [{**row, "ms": None} for row in timed.rows]
    times = {row["layer"]: row["ms"] for row in timed.rows if row["kind"] == "weights"}
    assert all(times[layer] > 0 for layer in ("first", "shared", "gate", "last"))
    with pytest.raises(qsdk.ConfigError, match="the time of an emulation says nothing"):
        qsdk.sensitivity(sim, batches, progress=False, runtime="qnn")


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x):
        return self.layer(x).argmax(1)


def test_outputs_without_floats_are_refused():
    x = torch.randn(8, 12)
    with pytest.raises(qsdk.DataError, match="forward= that returns the logits"):
        qsdk.sensitivity(calibrated(Classes().eval(), [x], qsdk.w8a8()), [x], progress=False)


@pytest.mark.slow
def test_a_batch_without_rows_tells_nothing_and_spoils_nothing(branches):
    sim, batches = branches
    whole = by_row(qsdk.sensitivity(sim, batches[:1], exact=True, progress=False))
    found = by_row(qsdk.sensitivity(sim, [batches[0][:0], batches[0]], exact=True, progress=False))
    assert {key: row["sqnr_db"] for key, row in found.items()} == {key: row["sqnr_db"] for key, row in whole.items()}


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 4, 3)

    def forward(self, x):
        y = torch.cat([nn.functional.max_pool2d(layer(x).relu(), 2) for layer in (self.left, self.right)], 1)
        return self.last(y).flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("config", [qsdk.w8a8(), qsdk.weight_only("int4")])
def test_a_pool_of_a_quantized_file_counts_once_whatever_the_config(tmp_path, config):
    torch.manual_seed(0)
    x = torch.randn(8, 3, 12, 12)
    apart = qsdk.w8a8().override("*", op_type="Concat", tie=False)
    qsdk.export(calibrated(Pools().eval(), [x], apart), tmp_path / "model.onnx")
    found = []
    for wanted in (None, config):
        sim = qsdk.quantize(tmp_path / "model.onnx", None, wanted)
        states = {row["site"]: row["state"] for row in sim.coverage().rows}
        assert [states[f"max_pool2d.{n}:output"] for n in (0, 1)] == ["tied", "tied"]
        rows = by_row(qsdk.sensitivity(sim, [x.numpy()], progress=False))
        found.append({key[0]: row["sqnr_db"] for key, row in rows.items() if key[1] == "activations"})
    assert found[0] == found[1]
