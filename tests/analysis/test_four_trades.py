"""The page `docs/guides/journeys.md` runs as it stands: four trades, each from a model to what it ships."""

import re
import shlex
from pathlib import Path

import onnx
import pytest
import torch
from PIL import Image

from qsdk.cli import main
from qsdk.demo.data import MEAN, STD, load
from qsdk.demo.model import load_pretrained

pytestmark = pytest.mark.slow  # what each line does, the tests of its verb test

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "journeys.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"## ([^\n]*)\n.*?```(?:python|bash)\n(.*?)```", PAGE, flags=re.DOTALL))


def run(title: str) -> dict:
    names: dict = {}
    exec(compile(BLOCKS[title], title, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_is_short():
    assert len(BLOCKS) == 4
    for title, block in BLOCKS.items():
        lines = [line for line in block.replace("\\\n", "").splitlines() if line.strip()]
        assert len(lines) < (10 if "ONNX file" in title else 26), title


def test_who_quantizes_trained_networks(folder, capsys):
    names = run("You quantize trained networks")
    assert names["report"].summary["met"]
    assert names["report"].rows[0]["drop"] > 0.01 >= names["report"].summary["drop"]
    assert (folder / "model.html").stat().st_size > 10_000
    assert "passed: True" in capsys.readouterr().out


def test_who_trains(folder, capsys):
    run("You train")
    assert float(capsys.readouterr().out.split(":")[1]) < 0.5
    onnx.checker.check_model(onnx.load(folder / "trained.onnx"))


def test_who_deploys(folder, capsys):
    data = load()
    for number, (image, label) in enumerate(zip(data.test_images[:100], data.test_labels[:100], strict=True)):
        place = folder / "pictures" / str(int(label))
        place.mkdir(parents=True, exist_ok=True)
        pixels = ((image[0] * STD + MEAN) * 255).round().clip(0, 255).astype("uint8")
        Image.fromarray(pixels).save(place / f"{number:03}.png")
    shapes = ({0: torch.export.Dim("batch")},)
    example = torch.from_numpy(data.test_images[:2])
    torch.onnx.export(load_pretrained(), (example,), "float.onnx", dynamo=True, verbose=False, dynamic_shapes=shapes)
    (title,) = [title for title in BLOCKS if "ONNX file" in title]
    printed = {}
    for line in BLOCKS[title].replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line)
        assert program == "qsdk"
        code = main(arguments)
        assert code == 0, line
        printed[" ".join(arguments[:2])] = capsys.readouterr().out
    scores = [float(score) for score in re.findall(r"top1\D*(0\.\d+|1\.0*)", printed["evaluate integer.onnx"])]
    assert scores
    assert min(scores) > 0.85


def test_who_comes_from_another_toolkit():
    names = run("You come from another toolkit")
    assert names["again"].encodings == names["sim"].encodings
