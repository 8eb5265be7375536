"""Files for targets that a .toml file describes: right in ONNX Runtime, and judged by the target's facts."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import qsdk
from qsdk.core.config.target import load_target
from qsdk.core.errors import ExportError

#: the targets that have integers of activations, and no code of their own
INTEGER = ("axera", "litert", "stm32", "tidl", "xint8", "xnnpack")
CHIP = """
name = "abacus"
activations = ["int8"]
activations_instead = { uint8 = "int8" }
weights = ["int8"]
integer_ops = ["Conv", "Relu"]
opsets = [13, 17]
"""


class Net(nn.Module):
    """Two convolutions, a Concat, a Sigmoid in front of a Linear, and a Softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.first(x))
        z = torch.cat([y, self.second(y)], 1).mean((2, 3))
        return torch.softmax(self.head(torch.sigmoid(z)), -1)


def simulated(config: qsdk.QuantConfig) -> tuple[qsdk.QuantSim, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    sim = qsdk.quantize(Net().eval(), x, config)
    qsdk.calibrate(sim, [x], progress=False)
    return sim, x


def exported(dialect: str | Path, path: Path) -> tuple[qsdk.QuantSim, torch.Tensor, qsdk.Report]:
    sim, x = simulated(qsdk.w8a8().for_dialect(dialect))
    return sim, x, qsdk.export(sim, path, dialect=dialect)


def problems(path: Path, dialect: str | Path) -> list[str]:
    return [row["problem"] for row in qsdk.validate(path, dialect=dialect).rows if row["severity"] == "error"]


@pytest.mark.parametrize("dialect", INTEGER)
def test_a_file_for_a_shipped_target_is_right_in_an_ordinary_session_and_has_nothing_that_it_lacks(
    dialect: str, tmp_path: Path
):
    sim, x, report = exported(dialect, tmp_path / "model.onnx")
    assert "default_session" not in report.summary
    assert problems(tmp_path / "model.onnx", dialect) == []
    parity = qsdk.check_parity(sim, tmp_path / "model.onnx", [x], runtime="onnxruntime", progress=False)
    assert parity.summary["weights_max_lsb"] == 0
    assert parity.summary["activations_max_lsb"] <= 1
    opset = next(one.version for one in onnx.load(tmp_path / "model.onnx").opset_import if one.domain == "")
    assert opset == min(21, load_target(dialect).opsets[1])


@pytest.mark.parametrize(
    ("dialect", "said"),
    [
        ("xint8", "AMD Ryzen AI (XINT8) has no activations of uint8"),
        ("xint8", "the scales of AMD Ryzen AI (XINT8) are powers of two, and this one is not"),
        ("xint8", "AMD Ryzen AI (XINT8) has one scale per weight, and this one has 8"),
        ("xint8", "AMD Ryzen AI (XINT8) has zero points of 0 alone here"),
        ("xint8", "AMD Ryzen AI (XINT8) reads opset 13 to 17, and the model has 21"),
        ("xint8", "it has no zero point, from which AMD Ryzen AI (XINT8) takes the type of its codes"),
        (
            "litert",
            "LiteRT (8 bits) computes Softmax in the range 0 to 0.996094, and this pair has 0 to 1",
        ),
        ("coreml", "ONNX Runtime (CoreML) has no weights of int8"),
        ("webgpu", "ONNX Runtime (WebGPU) reads no int32 bias"),
    ],
)
def test_what_a_target_lacks_is_found_in_a_file_for_another(dialect: str, said: str, tmp_path: Path):
    sim, x = simulated(qsdk.w8a8())
    qsdk.export(sim, tmp_path / "model.onnx", dialect="onnx", shapes={"x": tuple(x.shape)})
    assert said in problems(tmp_path / "model.onnx", dialect)


def test_a_concat_of_unlike_grids_is_found(tmp_path: Path):
    sim, _ = simulated(qsdk.w8a8().override("*", op_type="Concat", tie=False))
    qsdk.export(sim, tmp_path / "model.onnx", dialect="onnx")
    said = "LiteRT (8 bits) computes Concat with one scale and zero point for its inputs and its result"
    assert said in problems(tmp_path / "model.onnx", "litert")


@pytest.mark.slow
def test_a_sim_for_another_runtime_is_not_written_for_a_target(tmp_path: Path):
    sim, _ = simulated(qsdk.w8a8())
    with pytest.raises(ExportError, match=r"the dialect xint8 cannot have this model as it is:(?s:.)*powers of two"):
        qsdk.export(sim, tmp_path / "model.onnx", dialect="xint8")
    assert not list(tmp_path.iterdir())


def test_a_chip_of_ones_own_needs_a_file_and_no_code(tmp_path: Path):
    chip = tmp_path / "chip.toml"
    chip.write_text(CHIP, "utf-8")
    sim, x, report = exported(chip, tmp_path / "model.onnx")
    assert problems(tmp_path / "model.onnx", chip) == []
    assert report.summary["opset"] == "17: the newest that abacus reads"
    states = {row["site"]: (row["state"], row["reason"]) for row in sim.coverage().rows}
    assert states["first:weight"][0] == states["second:output"][0] == "quantized"
    for site in ("head:weight", "head:output", "sigmoid.0:output"):
        assert states[site][0] == "float", site
    assert states["head:weight"][1] == "no integer kernel of the target reads or writes it (integer_ops)"
    # what parity lowers again is the form that the file notes, without the chip's own file
    chip.unlink()
    assert qsdk.check_parity(sim, tmp_path / "model.onnx", [x], progress=False).summary["passed"]
