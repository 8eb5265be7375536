"""The progress bars: what they say, that a notebook gets one without a warning, and a log a line now and then."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import qsdk
from qsdk import QuantSim, progress

DATA = [torch.randn(8, 6, generator=torch.Generator().manual_seed(n)) for n in range(3)]

# what tqdm, of several versions, looks at to find out whether it runs in a notebook
NOTEBOOK = """
import sys, types
shell = types.SimpleNamespace(config={"IPKernelApp": {}})
ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
ipython.get_ipython, ipython.display, display.display = (lambda: shell), display, print
kernel = types.ModuleType("ipykernel.zmqshell")
sys.modules |= {"IPython": ipython, "IPython.display": display, kernel.__name__: kernel}
"""
WIDGETS = "__version__ = '8.1.0'\nFloatProgress = HBox = HTML = Layout = object\n"


@pytest.fixture(autouse=True)
def in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "draws_over_itself", lambda: True)


def calibrated() -> QuantSim:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    sim = qsdk.quantize(model, DATA[0], qsdk.w4a8())
    qsdk.calibrate(sim, DATA, progress=False)
    return sim


@pytest.mark.spread(1)
@pytest.mark.parametrize("verb", ["seq_mse", "adaround", "gptq", "correct_bias"])
def test_a_bar_names_the_layer_that_is_solved_and_counts_them_all(verb: str, capsys: pytest.CaptureFixture[str]):
    getattr(qsdk, verb)(calibrated(), DATA)
    shown = capsys.readouterr().err
    assert f"{verb}: 0:weight:   0%|" in shown
    assert f"{verb}: 2:weight:  50%|" in shown
    assert "| 1/2 [" in shown


@pytest.mark.slow
def test_a_bar_names_the_block_that_is_tuned(capsys: pytest.CaptureFixture[str]):
    qsdk.tune_blocks(calibrated(), DATA, iterations=2)
    shown = capsys.readouterr().err
    assert "tune_blocks: 0:" in shown
    assert "tune_blocks: 2:  50%|" in shown


@pytest.mark.slow
def test_the_bar_of_a_search_shows_the_metric(capsys: pytest.CaptureFixture[str]):
    sim = calibrated()
    qsdk.mixed_precision(sim, DATA, lambda sim: 0.75, max_drop=0.5)
    assert "mixed_precision: metric 0.75" in capsys.readouterr().err


def test_the_bar_of_autoquant_names_its_step_and_counts_them(capsys: pytest.CaptureFixture[str]):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    calls: list[object] = []

    def metric(sim: object) -> float:
        calls.append(sim)
        return 1.0 if len(calls) == 1 else len(calls) / 1000  # that of float, and a little more with every step

    report = qsdk.autoquant(model, DATA[0], DATA, metric, max_drop=0.5, config=qsdk.w4a8())
    shown = capsys.readouterr().err
    assert "autoquant: the preset, min_max:   0%|" in shown
    assert "autoquant: seq_mse:  67%|" in shown  # 8 of 12: the preset, seven steps, of which some do not apply
    assert "autoquant: mixed_precision:  92%|" in shown
    assert f"metric={report.rows[0]['metric']:.3g}" in shown
    qsdk.autoquant(model, DATA[0], DATA, metric, max_drop=0.5, config=qsdk.w4a8(), progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_the_bar_of_to_integer_says_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    qsdk.export(calibrated(), tmp_path / "model.onnx")
    capsys.readouterr()
    qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx")
    shown = capsys.readouterr().err
    for number, part in enumerate(("convert", "run both models", "compare each operation", "write")):
        assert f"to_integer: {part}:{25 * number:4}%|" in shown
    qsdk.to_integer(tmp_path / "model.onnx", tmp_path / "integer.onnx", progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("side", ["PyTorch", "ONNX"])
def test_data_without_a_length_show_the_time_that_the_first_batches_take(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    sim, data = calibrated(), DATA
    if side == "ONNX":
        qsdk.export(sim, tmp_path / "model.onnx")
        sim, data = qsdk.quantize(tmp_path / "model.onnx"), [x.numpy() for x in DATA]
        capsys.readouterr()
    qsdk.calibrate(sim, (x for x in data), max_batches=2)
    assert "calibrate:   0%|          | 0/2 [" in capsys.readouterr().err


def test_data_that_end_early_are_no_error():
    report = qsdk.calibrate(calibrated(), iter(DATA), max_batches=50)
    assert report.summary["sites"] > 0


def test_a_log_gets_lines_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    assert not progress.draws_over_itself()
    sim = calibrated()
    qsdk.calibrate(sim, DATA * 20)
    qsdk.seq_mse(sim, DATA)
    assert capsys.readouterr().err == ""  # done before the first line
    monkeypatch.setattr(progress, "EVERY", 1e-9)
    with progress.progress_of("seq_mse", 3, show=True) as shown:
        for layer in ("first", "second", "third"):
            shown.now(layer)
            shown.done()
    lines = capsys.readouterr().err.splitlines(keepends=True)
    assert [line.partition(":")[2].partition(" [")[0].split() for line in lines] == [
        ["first:", "33%|███▎", "|", "1/3"],
        ["second:", "67%|██████▋", "|", "2/3"],
        ["third:", "100%|██████████|", "3/3"],
    ]
    assert all(line.endswith("]\n") and "\r" not in line for line in lines)


def in_a_notebook(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path.insert(0, {str(folder)!r})"
    # not as errors: tqdm catches what its own warnings raise
    command = [sys.executable, "-W", "always", "-c", f"{path}\n{NOTEBOOK}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_a_notebook_without_widgets_gets_a_bar_of_text_and_no_warning(tmp_path: Path):
    # `None` is what Python finds where the package is not installed
    hidden = "sys.modules['ipywidgets'] = None; import importlib.util as u; find = u.find_spec\n"
    hidden += "u.find_spec = lambda name, *more: None if name == 'ipywidgets' else find(name, *more)\n"
    theirs = in_a_notebook(f"{hidden}from tqdm.auto import tqdm", tmp_path)
    assert "TqdmWarning" in theirs.stderr  # so the stand-in for a notebook is one to tqdm
    ours = in_a_notebook(f"{hidden}from qsdk.progress import tqdm; print(tqdm.__module__)", tmp_path)
    assert (ours.stdout, ours.stderr) == ("tqdm.std\n", "")


@pytest.mark.slow
def test_a_notebook_with_widgets_gets_its_own_bar(tmp_path: Path):
    (tmp_path / "ipywidgets.py").write_text(WIDGETS)
    found = in_a_notebook("from qsdk.progress import tqdm; print([c.__module__ for c in tqdm.__mro__])", tmp_path)
    assert found.stderr == ""
    assert "tqdm.notebook" in found.stdout


@pytest.mark.slow
def test_a_terminal_gets_a_bar_of_text_with_or_without_widgets(tmp_path: Path):
    (tmp_path / "ipywidgets.py").write_text(WIDGETS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nfrom qsdk.progress import tqdm\n"
    code += "print([c.__module__ for c in tqdm.__mro__])"
    found = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert found.stderr == ""
    assert "tqdm.notebook" not in found.stdout
