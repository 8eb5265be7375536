"""The examples that read folders of pictures, run at their smallest."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from example_files import FOLDER, example

import qsdk


def test_a_folder_of_pictures_becomes_a_quantized_classifier(tmp_path: Path):
    module = example("image_classifier")
    out = tmp_path / "classifier.onnx"
    small = ["--demo-pictures", "400", "--epochs", "6", "--size", "16"]
    found = module.main(module.arguments([*small, "--out", str(out)]))
    assert out.exists()
    assert found["float"] > 0.5
    assert found["calibrated"] > found["float"] - 0.05


def test_a_folder_without_classes_is_refused(tmp_path: Path):
    module = example("image_classifier")
    with pytest.raises(SystemExit, match="a folder of pictures for each class"):
        module.main(module.arguments(["--pictures", str(tmp_path)]))


def small_detector(path: Path) -> None:
    """Scores [N, cells, 3] and boxes [N, cells, 4] of pictures of 32 x 32, with one score in five above a half."""
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.SiLU(), torch.nn.Conv2d(8, 7, 3, 2, 1))

    class Detector(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cells = self.body(x).flatten(2).transpose(1, 2)
            return torch.sigmoid(8 * cells[..., :3]), cells[..., 3:]

    torch.onnx.export(Detector().eval(), (torch.rand(1, 3, 32, 32),), path, dynamo=True, verbose=False)


@pytest.mark.slow
def test_a_detector_is_quantized_without_labels(tmp_path: Path):
    small_detector(tmp_path / "float.onnx")
    module = example("image_classifier")
    module.write_demo_pictures(tmp_path / "pictures", 12)
    words = [str(tmp_path / "float.onnx"), str(tmp_path / "pictures"), "--out", str(tmp_path / "out.onnx")]
    detector = example("onnx_detector")
    found = detector.main(detector.arguments([*words, "--wanted", "1.1", "--most", "2"]))
    first, *others = found.values()
    assert 0.5 < first < 1
    assert len(others) == 2
    assert others[-1] > first - 0.005  # a decision or two of a thousand fall either way at 8 bits
    dtypes = [row["dtype"] for row in qsdk.quantize(tmp_path / "out.onnx").coverage().rows]
    assert dtypes.count("uint16") >= 2
    assert len(detector.main(detector.arguments([*words, "--wanted", "0.5"]))) == 1
    assert (tmp_path / "out.onnx").exists()


def test_a_detector_needs_pictures(tmp_path: Path):
    small_detector(tmp_path / "float.onnx")
    detector = example("onnx_detector")
    with pytest.raises(SystemExit, match="has no pictures"):
        detector.main(detector.arguments([str(tmp_path / "float.onnx"), str(tmp_path)]))


def test_agreement_counts_what_both_find():
    score = example("onnx_detector").agreement
    assert score([[np.array([0.9, 0.1, 0.8])]], [[np.array([0.9, 0.7, 0.2])]], 0.5) == pytest.approx(1 / 3)
    assert score([[np.array([0.1])]], [[np.array([0.2])]], 0.5) == 1.0


def test_every_example_has_its_line_in_the_readme():
    text = (FOLDER / "README.md").read_text()
    names = [path.name for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "README.md").exists()]
    assert [name for name in names if f"]({name})" not in text] == []


@pytest.mark.parametrize(
    ("shape", "words", "message"),
    [
        ([2, 3, 32, 32], [], r"takes \[2, 3, 32, 32\]; this program gives \[1, 1 or 3 channels"),
        ([1, 32, 32, 3], [], r"takes \[1, 32, 32, 3\]; this program gives \[1, 1 or 3 channels"),
        (["n", 3, "h", "w"], [], "takes pictures of any size; say which with --size"),
        (["n", 3, "h", "w"], ["--size", "16"], "has no pictures"),
        (None, [], "there is no file"),
    ],
)
def test_a_detector_of_another_form_is_refused(
    tmp_path: Path, shape: list[int | str] | None, words: list[str], message: str
):
    if shape is not None:
        x, y = (onnx.helper.make_tensor_value_info(name, 1, shape) for name in "xy")
        graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
        onnx.save(onnx.helper.make_model(graph), tmp_path / "float.onnx")
    detector = example("onnx_detector")
    with pytest.raises(SystemExit, match=message):
        detector.main(detector.arguments([str(tmp_path / "float.onnx"), str(tmp_path), *words]))
