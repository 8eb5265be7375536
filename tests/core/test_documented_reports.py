"""The reference says which keys the rows and summaries of reports have."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pages import DOCS
from torch import nn

import qsdk

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
WITH_DATA = (
    "sensitivity",
    "seq_mse",
    "adaround",
    "gptq",
    "correct_bias",
    "smooth_quant",
    "awq",
    "equalize",
)
Keys = tuple[set[str], set[str]]


def documented() -> dict[str, tuple[Keys, Keys]]:
    """Function -> the keys that are always there, and all keys, of rows and of the summary."""
    found = {}
    for line in (DOCS / "reference" / "reports.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `"):
            functions, *columns = line.strip("|").split("|")
            every = tuple(set(re.findall(r"`(\w+)`", column)) for column in columns)
            always = tuple(set(re.findall(r"(?<!\*)`(\w+)`", column)) for column in columns)
            found |= dict.fromkeys(re.findall(r"`([\w.]+)`", functions), (always, every))
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], qsdk.Report]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    sim, folder = qsdk.quantize(model, X, qsdk.w4a8()), tmp_path_factory.mktemp("reports")
    done = {"calibrate": qsdk.calibrate(sim, [X], progress=False), "sim.coverage": sim.coverage()}
    done["accumulators"] = qsdk.analysis.accumulators(sim)
    exported(sim, folder, done)
    done["tune_ranges"] = qsdk.train.tune_ranges(sim, [X], steps=2, progress=False)
    done["error_by_position"] = qsdk.analysis.error_by_position(
        lambda ids: torch.eye(4)[ids], lambda ids: -torch.eye(4)[ids], [0, 1, 2]
    )

    def report_of(name: str) -> qsdk.Report:
        if name in WITH_DATA and name not in done:
            done[name] = getattr(qsdk, name)(sim, [X], progress=False)
        return done[name]

    return report_of


def exported(sim: qsdk.QuantSim, folder: Path, done: dict[str, qsdk.Report]) -> None:
    path = folder / "model.onnx"
    done["export"] = qsdk.export(sim, path)
    done["check_parity"] = qsdk.check_parity(sim, path, [X], progress=False)
    done["profile"] = qsdk.analysis.profile(path, progress=False)
    done["report"] = qsdk.report(path, folder / "page.html", progress=False)
    done["validate"] = qsdk.validate(path)
    done["to_integer"] = qsdk.to_integer(path, folder / "integer.onnx", progress=False)
    qsdk.save_encodings(sim, folder / "encodings.json")
    done["load_encodings"] = qsdk.load_encodings(sim, folder / "encodings.json")


@pytest.mark.spread(13)
@pytest.mark.parametrize("name", documented())
def test_a_report_has_the_documented_keys(name: str, reports: Callable[[str], qsdk.Report]):
    (row_always, always), (row_every, every) = documented()[name]
    report = reports(name)
    assert always <= set(report.summary) <= every
    for row in report.rows:
        assert row_always <= set(row) <= row_every
