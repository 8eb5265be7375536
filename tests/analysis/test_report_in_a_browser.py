"""The page of `qsdk.report` in a real browser: its script runs without errors, finds, filters and sorts layers."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import qsdk

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    sim = qsdk.quantize(model.eval(), x, qsdk.w4a8())
    qsdk.calibrate(sim, [x], progress=False)
    path = tmp_path_factory.mktemp("page") / "page.html"
    qsdk.report(sim, path, data=[x], progress=False)
    return path


def shown_in(path: Path, view: str, profile: Path, *options: str) -> str:
    """Returns the page as the browser has it after its script ran; a message on the console is a failure."""
    assert BROWSER is not None
    always = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}"]
    always += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    command = [BROWSER, *always, *options, f"{path.as_uri()}{view}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert 'data-ready="yes"' in done.stdout
    return done.stdout


def layers_in(dom: str) -> list[dict[str, str]]:
    """Returns the attributes of the layers, as they stand on the page."""
    found = re.findall(r"<details ([^>]*)>", dom)
    return [dict(re.findall(r'([\w-]+)="([^"]*)"', text)) for text in found]


def test_all_layers_are_shown_in_the_order_of_the_network(page: Path, tmp_path: Path):
    dom = shown_in(page, "", tmp_path)
    layers = layers_in(dom)
    assert [layer["data-order"] for layer in layers] == ["0", "1", "2", "3", "4"]
    assert not any("hidden" in layer for layer in layers)
    assert "5 of 5 layers" in dom


def test_a_view_searches_and_sorts(page: Path, tmp_path: Path):
    dom = shown_in(page, "#search=gemm+int4&sort=share", tmp_path)
    layers = layers_in(dom)
    assert "3 of 5 layers" in dom
    assert {layer["data-order"] for layer in layers if "hidden" not in layer} == {"1", "3", "4"}
    shares = [float(layer.get("data-share", 0)) for layer in layers]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("kind", ["noisy", "weights"])
def test_a_view_filters_by_kind(page: Path, tmp_path: Path, kind: str):
    layers = layers_in(shown_in(page, f"#kind={kind}", tmp_path))
    for layer in layers:
        assert ("hidden" not in layer) == (kind in layer["data-tags"].split())
    assert 0 < sum("hidden" in layer for layer in layers) < len(layers)


def test_a_comparison_shows_the_layers_that_differ(page: Path, tmp_path: Path):
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    sims = [
        qsdk.quantize(model.eval(), x, config) for config in (qsdk.w4a8(), qsdk.w4a8().override("2", weight="int8"))
    ]
    for sim in sims:
        qsdk.calibrate(sim, [x], progress=False)
    qsdk.report(sims[0], tmp_path / "both.html", against=sims[1], progress=False)
    dom = shown_in(tmp_path / "both.html", "#kind=differs", tmp_path)
    assert "1 of 4 layers" in dom
    assert [layer["data-order"] for layer in layers_in(dom) if "hidden" not in layer] == ["3"]


MEASURE = """<script>
const parts = [...document.querySelectorAll("body, .scroll, .panel, summary, .cards")];
document.body.dataset.cut = parts.filter(part => part.scrollWidth > part.clientWidth + 1).length;
const heads = [...document.querySelectorAll(".scroll td:not(:empty):not(:first-child)")];
document.body.dataset.named = heads.every(td => getComputedStyle(td, "::before").content === `"${td.dataset.head}"`);
</script></body>"""


@pytest.mark.parametrize("width", [500, 1200])  # pixels; the browser opens no narrower window
def test_nothing_is_cut_where_timed_models_stand_beside_each_other(tmp_path: Path, width: int):
    torch.manual_seed(0)
    x, layers = torch.randn(64, 8), [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)]
    sims = [qsdk.quantize(torch.nn.Sequential(*layers).eval(), x, config) for config in (qsdk.w4a8(), qsdk.w8a8())]
    for sim in sims:
        qsdk.calibrate(sim, [x], progress=False)
    path = tmp_path / "both.html"
    qsdk.report(sims[0], path, data=[x], against=sims[1], profile=True, progress=False)
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", MEASURE), encoding="utf-8")
    dom = shown_in(path, "", tmp_path, f"--window-size={width},900")
    assert 'data-cut="0"' in dom
    assert f'data-named="{str(width == 500).lower()}"' in dom  # each value has its head where columns have none


def test_the_address_of_a_layer_opens_it(page: Path, tmp_path: Path):
    layers = layers_in(shown_in(page, "#layer-2", tmp_path))
    assert "open" in next(layer for layer in layers if layer["id"] == "layer-2")
