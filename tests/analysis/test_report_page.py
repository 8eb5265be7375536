"""`qsdk.report`: what is on the page, for sims of both sides and for files, with and without data."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

import qsdk
from qsdk.demo.data import load
from qsdk.demo.model import load_pretrained
from qsdk.verbs.analysis.page import facts
from qsdk.verbs.analysis.page.page import Row, Side

VOID = {"meta", "input"}


class Page(HTMLParser):
    """The parts of a page that tests look at; a tag that is closed in the wrong place fails."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.layers: list[dict[str, str | None]] = []
        self.ids: list[str] = []
        self.pictures: list[str] = []
        self.words = ""
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        held = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if held.get("class") == "layer":
            self.layers.append(held)
        if tag == "svg":
            self.pictures.append(held["aria-label"])
        self.ids += [held["id"]] if "id" in held else []

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


@pytest.fixture(scope="module")
def batches():
    return list(torch.from_numpy(load().calibration_images[:64]).split(16))


def calibrated(model, example, batches, config):
    sim = qsdk.quantize(model, example, config)
    qsdk.calibrate(sim, batches, progress=False)
    return sim


@pytest.fixture(scope="module")
def sim(batches):
    return calibrated(load_pretrained(), batches[0], batches, qsdk.w4a8())


@pytest.fixture(scope="module")
def with_data(sim, batches, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    return qsdk.report(sim, path, data=iter(batches), progress=False), path


@pytest.fixture(scope="module")
def files(batches, tmp_path_factory):
    """A float file, and one with Q/DQ that was made from it."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 6, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(294, 5)).eval()
    qsdk.export(qsdk.quantize(network, batches[0], qsdk.w8a8().skip("*")), folder / "float.onnx")
    arrays = [batch.numpy() for batch in batches]
    qsdk.export(calibrated(folder / "float.onnx", None, arrays, qsdk.w4a8()), folder / "w4.onnx", prefer="size")
    return folder, arrays


@pytest.mark.slow
def test_the_page_of_a_sim_shows_every_layer_and_who_causes_the_noise(sim, with_data, batches):
    report, path = with_data
    page = Page(path)
    sensitivity = qsdk.sensitivity(sim, batches, progress=False)
    assert report.summary["sqnr_db"] == sensitivity.summary["sqnr_db"]
    assert {row["layer"] for row in report.rows} == {site.rpartition(":")[0] for site in sim.plan.decisions}
    assert len(page.layers) == report.summary["layers"] == len(report.rows)
    assert all(row["layer"] in page.words for row in report.rows)
    worst = max(report.rows, key=lambda row: row["share"] or 0)
    assert worst["share"] == pytest.approx(
        sum(row["share"] for row in sensitivity.rows if row["layer"] == worst["layer"])
    )
    (opened,) = [layer for layer in page.layers if "open" in layer]
    assert float(opened["data-share"]) == pytest.approx(worst["share"], rel=1e-4)
    sentence = report.summary["sentence"]
    assert re.fullmatch(
        rf"W4A8, a file 5\.\d times smaller than in float32, outputs {report.summary['sqnr_db']:.1f} dB above their "
        r"quantization noise \(SQNR\); \d of 29 layers cause 80 % of the noise\.",
        sentence,
    )
    assert sentence in page.words
    noisy = [layer for layer in page.layers if "noisy" in layer["data-tags"]]
    assert f"; {len(noisy)} of 29" in sentence
    assert 0.8 <= sum(float(layer["data-share"]) for layer in noisy) < 1


@pytest.mark.slow
def test_the_page_says_how_the_noise_was_found(with_data, files, tmp_path):
    assert re.search(r"The noise of the layers is estimated, on 1\d of 64 samples", Page(with_data[1]).words)
    folder, arrays = files
    report = qsdk.report(folder / "w4.onnx", tmp_path / "page.html", data=arrays, progress=False)
    measured = "The noise of each layer is measured with it alone quantized, on 64 of 64 samples."
    assert measured in Page(tmp_path / "page.html").words  # a small network and little data
    opened = qsdk.quantize(folder / "w4.onnx", None)
    exact = qsdk.sensitivity(opened, arrays, exact=True, progress=False)
    worst = max(report.rows, key=lambda row: row["share"] or 0.0)
    assert worst["share"] == pytest.approx(max(row["share"] for row in exact.rows))


def test_layers_are_in_the_order_of_the_network(with_data):
    names = [row["layer"] for row in with_data[0].rows]
    assert names[:3] == ["images", "stem.0", "stem.2"]
    assert names[-1] == "head"
    assert names.index("layer1.second.0") < names.index("layer1/add.0") < names.index("layer2.first.0")


def test_pictures_show_weights_scales_and_activations(sim, with_data):
    page = Page(with_data[1])
    for site, decision in sim.plan.decisions.items():
        drawn = decision.quantized and not decision.passes_through and decision.kind != "bias"
        assert (f"Histogram of {site}" in page.pictures) == drawn or decision.kind == "weight", site
        assert (f"Scales of {site}" in page.pictures) == (decision.kind == "weight")
        assert sim.explain(site) in page.words
    assert len(page.ids) == len(set(page.ids))


def test_the_page_needs_nothing_else(with_data):
    page = with_data[1].read_text(encoding="utf-8")
    assert "http" not in page.replace("http-equiv", "")
    assert not re.search(r"<(link|img|iframe|object|embed)|@import|\bsrc=|url\((?!#)", page)
    assert "default-src 'none'" in page
    assert not re.search(r"#0000[abAB]\d", page)  # the colours that stand for those of the style sheet


@pytest.mark.slow
def test_the_same_page_is_the_same_bytes(sim, with_data, batches, tmp_path):
    qsdk.report(sim, tmp_path / "again.html", data=batches, progress=False)
    assert (tmp_path / "again.html").read_bytes() == with_data[1].read_bytes()
    assert len(with_data[1].read_bytes()) < 400_000


@pytest.mark.slow
def test_a_page_without_data_is_coloured_by_dtype(sim, tmp_path):
    report = qsdk.report(sim, tmp_path / "page.html", progress=False)
    page = Page(tmp_path / "page.html")
    assert report.summary["sentence"].startswith("W4A8, a file 5.")
    assert report.summary["sqnr_db"] is None
    assert {row["share"] for row in report.rows} == {None}
    colours = {layer["style"] for layer in page.layers}
    assert colours == {"--c: var(--bits4)", "--c: var(--bits8)", "--c: var(--floats)"}
    assert any(name == "Histogram of head:weight" for name in page.pictures)
    assert not any("output" in name for name in page.pictures)
    assert "inside Conv+Relu" in page.words


def test_a_file_says_what_it_cannot_know_and_the_float_model_tells_it(files, tmp_path):
    folder, arrays = files
    alone = qsdk.report(folder / "w4.onnx", tmp_path / "alone.html", data=arrays, progress=False)
    assert "above the noise of their activations" in alone.summary["sentence"]
    page = Page(tmp_path / "alone.html")
    assert "Give the float model as well" in page.words
    assert "is dequantized in every run" in page.words
    float_model = folder / "float.onnx"
    found = qsdk.report(
        folder / "w4.onnx", tmp_path / "page.html", data=arrays, float_model=float_model, progress=False
    )
    sim = calibrated(float_model, None, arrays, qsdk.w4a8())
    expected = {
        row["layer"]: row["share"] for row in qsdk.report(sim, tmp_path / "sim.html", data=arrays, progress=False).rows
    }
    shares = {row["layer"]: row["share"] for row in found.rows}
    stem = next(layer for layer in shares if expected[layer] == max(v for v in expected.values() if v))
    assert shares[stem] == pytest.approx(expected[stem], rel=0.05)
    exact = np.concatenate([floats(float_model, x) for x in arrays])
    noise = np.concatenate([floats(folder / "w4.onnx", x) for x in arrays]) - exact
    assert found.summary["sqnr_db"] == pytest.approx(
        10 * np.log10(np.square(exact).sum() / np.square(noise).sum()), abs=0.1
    )


def floats(path, x):
    return qsdk.quantize(path, None, None if path.name == "w4.onnx" else qsdk.w8a8().skip("*")).run(x)[0]


def test_another_float_model_is_refused(files, tmp_path):
    folder, arrays = files
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 7))
    qsdk.export(qsdk.quantize(network, torch.from_numpy(arrays[0]), qsdk.w8a8().skip("*")), tmp_path / "other.onnx")
    options = {"data": arrays, "float_model": tmp_path / "other.onnx", "progress": False}
    with pytest.raises(qsdk.ModelError, match="float_model has other outputs than the quantized model"):
        qsdk.report(folder / "w4.onnx", tmp_path / "page.html", **options)
    assert not (tmp_path / "page.html").exists()


def test_two_models_stand_beside_each_other(files, tmp_path):
    folder, arrays = files
    raised = calibrated(folder / "float.onnx", None, arrays, qsdk.w4a8().override("*", op_type="Conv", weight="int8"))
    report = qsdk.report(folder / "w4.onnx", tmp_path / "page.html", against=raised, progress=False)
    page = Page(tmp_path / "page.html")
    assert report.summary["against"].startswith("W4A8")
    assert page.text.count('class="differs"') == 1
    assert re.search(
        r'<tr class="differs"><td [^<]+</td><td data-head="dtypes"><div>A int4</div><div>B int8</div></td>', page.text
    )


def picture(page: Page, label: str) -> str:
    return re.search(rf'<svg [^>]*aria-label="{re.escape(label)}">.*?</svg>', page.text, re.DOTALL)[0]


def numbers_at_the_axes(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.fixture(scope="module")
def beside(sim, batches, tmp_path_factory):
    """A page of two sims: the second has weights of 8 bits, and one layer float, with its BatchNorm not folded."""
    other = calibrated(load_pretrained(), batches[0], batches, qsdk.w8a8().skip("layer2.second*"))
    path = tmp_path_factory.mktemp("beside") / "page.html"
    qsdk.report(sim, path, data=batches, against=other, progress=False)
    return Page(path), other


@pytest.mark.slow
def test_each_layer_opens_to_the_pictures_of_both_models(sim, beside):
    page, other = beside
    drawn = [site for site, d in sim.plan.decisions.items() if d.kind == "weight" and other.encodings.get(site)]
    assert len(drawn) > 8
    for site in drawn:
        a, b = (picture(page, f"Histogram of {site} in {side}") for side in "AB")
        assert numbers_at_the_axes(a) == numbers_at_the_axes(b) != []
        assert a != b
        a, b = (picture(page, f"Scales of {site} in {side}") for side in "AB")
        assert numbers_at_the_axes(a) == numbers_at_the_axes(b) != []
    site = "stem.2:output"
    assert picture(page, f"Histogram of {site} in A")
    assert picture(page, f"Histogram of {site} in B")
    assert "Scales of layer2.second.0:weight in A" in page.pictures
    assert "Scales of layer2.second.0:weight in B" not in page.pictures
    assert "B layer2.second.0:weight: float" in page.words
    for one, side in ((sim, "A"), (other, "B")):
        scale = one.encodings["stem.0:weight"].scale.max()
        assert re.search(rf"<td[^>]*>{side}</td><td[^>]*>stem\.0:weight</td>.*?>{scale:.4g}</td>", page.text)
    assert f"<b>A</b> {sim.explain('stem.0:weight')}" in page.text
    assert f"<b>B</b> {other.explain('stem.0:weight')}" in page.text
    assert page.text.count(sim.explain("stem.2:output")) == 1  # the same in both
    assert len(page.ids) == len(set(page.ids))


def test_both_networks_stand_in_one_strip_with_one_scale(sim, beside):
    page, _ = beside
    above, below = re.findall(r'<nav class="strip[^>]*>(.*?)</nav>', page.text)
    assert above.count("<a ") + above.count("<i>") == below.count("<a ") + below.count("<i>") == len(page.layers) == 30
    assert (above.count("<i>"), below.count("<i>")) == (1, 0)  # the BatchNorm that the first has folded
    named = [re.search(r'title="([^:]*):', tag)[1] for tag in re.findall(r"<a [^>]*>", below)]
    assert named[named.index("layer2.second.0") + 1] == "layer2.second.1"
    heights = [[int(tall) for tall in re.findall(r"--tall: (\d+)%", one)] for one in (above, below)]
    assert max(heights[0]) == 100
    assert max(heights[1]) < 60  # 8 bits cause less noise than 4
    places = re.findall(r'href="#layer-(\d+)"', below)
    assert places == [layer["data-order"] for layer in page.layers]


@pytest.mark.slow
def test_layers_that_differ_are_marked_for_the_filter(files, tmp_path):
    folder, arrays = files
    raised = calibrated(folder / "float.onnx", None, arrays, qsdk.w4a8().override("*", op_type="Conv", weight="int8"))
    qsdk.report(folder / "w4.onnx", tmp_path / "page.html", against=raised, progress=False)
    page = Page(tmp_path / "page.html")
    assert '<option value="differs">' in page.text
    assert sum("differs" in layer["data-tags"].split() for layer in page.layers) == 1
    qsdk.report(folder / "w4.onnx", tmp_path / "alone.html", progress=False)
    assert "differs" not in re.sub(r"<style>.*?</style>", "", Page(tmp_path / "alone.html").text, flags=re.DOTALL)


HOSTILE = '<script>alert(\'&"1")</script>'


@pytest.mark.slow
def test_names_are_escaped_everywhere(tmp_path):
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(size=(4, 3)).astype(np.float32), "w")
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size]) for name, size in ((HOSTILE, 4), ("y", 3))
    )
    node = helper.make_node("MatMul", [HOSTILE, "w"], ["y"], name=f"{HOSTILE}node")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [weight]), opset_imports=[helper.make_opsetid("", 21)]
    )
    data = [rng.normal(size=(8, 4)).astype(np.float32)]
    sim = calibrated(model, None, data, qsdk.w8a8())
    qsdk.report(sim, tmp_path / "page.html", data=data, against=sim, progress=False)
    page = Page(tmp_path / "page.html")
    assert page.text.count("<script>") == 1
    assert f"{HOSTILE}node" in page.words
    assert {f"Histogram of {HOSTILE}node:weight in {side}" for side in "AB"} <= set(page.pictures)


def test_pictures_are_bounded_to_the_worst_layers(sim, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "DRAWN", 3)
    report = qsdk.report(sim, tmp_path / "page.html", data=batches, progress=False)
    page = Page(tmp_path / "page.html")
    worst = sorted(report.rows, key=lambda row: -(row["share"] or 0))[:3]
    shown = {re.sub(r"^(Histogram|Scales) of ", "", name).rpartition(":")[0] for name in page.pictures[1:]}
    assert shown == {row["layer"] for row in worst}
    assert "Pictures: of the 3 worst of 29 layers." in page.words
    assert len(page.layers) == 29


@pytest.mark.slow
def test_clipped_values_are_counted_and_marked(tmp_path):
    model, x = nn.Linear(4, 2), torch.linspace(-1, 1, 400).reshape(100, 4)
    sim = calibrated(model, x, [x / 2], qsdk.w8a8())
    report = qsdk.report(sim, tmp_path / "page.html", data=[x], progress=False)
    assert {row["layer"]: row["clipped"] for row in report.rows}["input"] == pytest.approx(0.5, abs=0.02)
    page = Page(tmp_path / "page.html")
    assert re.search(r'<span class="warn">(49|50)\.\d % clipped', page.text)
    assert [layer["data-tags"].split()[-1] for layer in page.layers] == ["clipped", "clipped"]


def test_of_two_models_the_worse_number_of_a_layer_sorts_it():
    layers = [
        facts.LayerFacts("l", (), share=0.2, sqnr_db=30.0, ms=1.0),
        facts.LayerFacts("l", (), 0.1, None, 20.0, 2.0),
    ]
    row = Row([Side(name, None, layer) for name, layer in zip("AB", layers, strict=True)])
    assert row.numbers == {"share": 0.2, "sqnr": 20.0, "ms": 2.0}


@pytest.mark.parametrize(("share", "sqnr_db", "noise"), [(0.5, 20.0, 0.005), (1.0, 0.0, 1.0), (0.5, None, 0.0)])
def test_the_noise_of_a_layer_is_its_share_of_that_at_the_outputs(share, sqnr_db, noise):
    side = Side("A", SimpleNamespace(sqnr_db=sqnr_db), facts.LayerFacts("l", (), share=share))
    assert side.noise == pytest.approx(noise)


def test_milliseconds_come_from_a_profile(sim, tmp_path):
    profile = qsdk.analysis.profile(sim, threads=1, repeats=2, progress=False)
    report = qsdk.report(sim, tmp_path / "page.html", profile=profile, progress=False)
    stem = sum(row["ms"] for row in profile.rows if row["layer"] == "stem.0")
    assert {row["layer"]: row["ms"] for row in report.rows}["stem.0"] == pytest.approx(stem)
    assert f"a run in {profile.summary['runtime']}" in Page(tmp_path / "page.html").words


@pytest.mark.slow
def test_the_bytes_of_a_layer_are_those_in_the_file(tmp_path):
    """Weights of 4 bits beside quantized activations are stored in 8 for ONNX Runtime."""
    x, model = torch.randn(4, 1, 8, 8), nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8))
    sim = calibrated(model, x, [x], qsdk.w4a8())
    for prefer, wanted in (("speed", [36 + 4 * 4, 144 * 8 + 4 * 8]), ("size", [36 // 2 + 4 * 4, 144 * 8 // 2 + 4 * 8])):
        qsdk.export(sim, tmp_path / "model.onnx", prefer=prefer, check=False)
        rows = qsdk.report(tmp_path / "model.onnx", tmp_path / "page.html", progress=False).rows
        assert [row["bytes"] for row in rows if row["bytes"]] == wanted


def test_nothing_quantized_is_a_page_too(files, tmp_path):
    report = qsdk.report(files[0] / "float.onnx", tmp_path / "page.html", data=files[1], progress=False)
    assert report.summary["sentence"] == "Nothing is quantized."
    assert "What stays float, and why" in Page(tmp_path / "page.html").words


@pytest.mark.slow
def test_what_is_wrong_is_said_and_the_page_that_was_there_stays(sim, batches, tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    with pytest.raises(qsdk.ConfigError, match="a sim holds its float model itself; leave out float_model="):
        qsdk.report(sim, path, float_model="float.onnx")
    with pytest.raises(qsdk.ConfigError, match="expected a sim, got ResidualNet"):
        qsdk.report(load_pretrained(), path)
    with pytest.raises(qsdk.CalibrationError, match="these sites have no encoding"):
        qsdk.report(qsdk.quantize(load_pretrained(), batches[0]), path)
    with pytest.raises(qsdk.DataError):
        qsdk.report(sim, path, data=[])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for module in [name for name in sys.modules if name.startswith("qsdk.verbs.analysis.page.")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(qsdk.ConfigError, match=r"need matplotlib; install it: pip install 'qsdk\[report\]'"):
        qsdk.report(sim, path)
    assert path.read_text() == "before"


@pytest.mark.slow
def test_a_model_in_float64_has_a_page(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double().eval(), torch.randn(8, 8).double()
    sim = qsdk.quantize(model, x, qsdk.w8a8().skip("2"))
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.report(sim, tmp_path / "page.html", data=[x], progress=False)
    assert "float64" in Page(tmp_path / "page.html").words


@pytest.mark.slow
def test_a_page_after_adaround_says_what_its_noise_leaves_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    batches = [torch.randn(64, 16)]
    sim = qsdk.quantize(model, batches[0], "w4a8")
    qsdk.calibrate(sim, batches, progress=False)
    before = qsdk.report(sim, tmp_path / "before.html", data=batches, progress=False)
    assert "above their quantization noise" in before.summary["sentence"]
    qsdk.adaround(sim, batches, progress=False)
    after = qsdk.report(sim, tmp_path / "after.html", data=batches, progress=False)
    assert "above their quantization noise" in after.summary["sentence"]
    assert "counted from the model as it was given" in (tmp_path / "after.html").read_text()
    qsdk.export(sim, tmp_path / "model.onnx")
    opened = qsdk.quantize(tmp_path / "model.onnx")  # which has no float values
    page = qsdk.report(opened, tmp_path / "opened.html", data=[batches[0].numpy()], progress=False)
    assert "above the noise of all but 2 weights that came rounded" in page.summary["sentence"]
    assert "compare with the model that you began with" in (tmp_path / "opened.html").read_text()
