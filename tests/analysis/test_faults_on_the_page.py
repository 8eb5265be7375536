"""Planted faults on the page of `qsdk.report` and in the rows of `qsdk.sensitivity`, of the file alone."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from compared_nets import exported, residual, transformer, with_stored

import qsdk

MAKERS = {"residual": residual, "transformer": transformer}
FAULTS = [
    ("residual", "2.1.relu1:output/scale", 0.25, "2.1.relu1"),
    ("residual", "5:weight/scale", 0.2, "5"),
    ("residual", "input:input/scale", 0.25, "input"),
    ("transformer", "0.act:output/scale", 0.25, "0.act"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the float file, the Q/DQ file and the input of each network."""
    home = tmp_path_factory.mktemp("faults")
    for name, make in MAKERS.items():
        module, x = make()
        onnx.save(exported(module, x), home / f"{name}.float.onnx")
        sim = qsdk.quantize(module, x)
        qsdk.calibrate(sim, [x], progress=False)
        qsdk.export(sim, home / f"{name}.onnx")
        np.save(home / f"{name}.npy", x.numpy())
    return home


def with_fault(folder: Path, network: str, tensor: str, factor: float) -> Path:
    path = folder / "faulty.onnx"
    onnx.save(
        with_stored(onnx.load(folder / f"{network}.onnx"), tensor, lambda scale: scale * np.float32(factor)), path
    )
    return path


def shares(report: qsdk.Report) -> dict[str, float]:
    return {row["layer"]: row["share"] for row in report.rows if row["share"] is not None}


@pytest.mark.parametrize(
    ("network", "tensor", "factor", "layer"),
    [fault if "weight" in fault[1] else pytest.param(*fault, marks=pytest.mark.slow) for fault in FAULTS],
)
def test_the_page_marks_the_layer_of_a_planted_fault(
    folder: Path, network: str, tensor: str, factor: float, layer: str
) -> None:
    data = [np.load(folder / f"{network}.npy")]
    options = {"data": data, "float_model": folder / f"{network}.float.onnx", "progress": False}
    sound = qsdk.report(folder / f"{network}.onnx", folder / "sound.html", **options)
    faulty = with_fault(folder, network, tensor, factor)
    found = qsdk.report(faulty, folder / "page.html", against=folder / f"{network}.onnx", **options)
    assert shares(found)[layer] == max(shares(found).values())
    assert shares(found)[layer] > max(0.8, shares(sound)[layer])
    assert found.summary["sqnr_db"] < sound.summary["sqnr_db"] - 10
    assert "one layer of" in found.summary["sentence"]
    assert layer in (folder / "page.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("network", "tensor", "factor", "layer"), [f for f in FAULTS if "weight" not in f[1]])
def test_sensitivity_of_the_file_alone_names_a_layer_that_a_planted_scale_clips(
    folder: Path, network: str, tensor: str, factor: float, layer: str
) -> None:
    """What a wrong scale of a weight costs is in its codes for good, so a file alone cannot show that."""
    data = [np.load(folder / f"{network}.npy")]
    report = qsdk.sensitivity(qsdk.quantize(with_fault(folder, network, tensor, factor)), data, progress=False)
    worst = report.rows[0]
    assert (worst["layer"], worst["kind"]) == (layer, "activations")
    assert worst["share"] > 0.8
    assert report.summary["rows_with_80_percent"] == 1
