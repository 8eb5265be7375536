"""A file says for which runtime it is written, and parity compares it with that form."""

import json
from typing import get_args

import onnx
import pytest
import torch

import qsdk
from onnx_backend.parity import written
from onnx_backend.proto.model_io import drop_properties, set_properties
from onnx_backend.runtimes.registry import RUNTIMES
from qsdk.core.config.for_dialect import Dialect, RuntimeName, TimedRuntime
from qsdk.core.config.target import shipped_targets

KEY = "qsdk.written_for"
DIALECTS = ("onnxruntime", "onnx", "openvino", "qnn", "tensorrt")


def exported(path, dialect):
    x = torch.randn(4, 6)
    config = qsdk.w8a8().for_dialect(dialect)
    sim = qsdk.quantize(torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), x, config)
    qsdk.calibrate(sim, [x], progress=False)
    qsdk.export(sim, path, dialect=dialect)
    return sim, [x]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_parity_lowers_a_sim_once_in_the_form_that_the_file_notes(dialect, tmp_path, monkeypatch):
    sim, data = exported(tmp_path / "model.onnx", dialect)
    noted = {entry.key: entry.value for entry in onnx.load(tmp_path / "model.onnx").metadata_props}[KEY]
    versions = {"onnxruntime": "1.32", "openvino": "2026.4", "qnn": "2.7"}
    facts = {"dialect": dialect, "version": versions.get(dialect), "prefer": "speed"}
    assert json.loads(noted) == {name: fact for name, fact in facts.items() if fact}

    lowered = []
    lower = written.lower
    monkeypatch.setattr(
        written, "lower", lambda *args, **options: lowered.append(options["dialect"].name) or lower(*args, **options)
    )
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", data)
    assert lowered == [dialect]
    assert report.summary["passed"]
    assert "nodes written in another way" not in report.summary


@pytest.mark.parametrize("dialect", ["onnx", "qnn"])
def test_a_file_that_notes_no_form_is_compared_with_the_nearest(dialect, tmp_path):
    sim, data = exported(tmp_path / "model.onnx", dialect)
    model = onnx.load(tmp_path / "model.onnx")
    drop_properties(model, [KEY])
    report = qsdk.check_parity(sim, model, data)
    assert report.summary["passed"]
    assert "nodes written in another way" not in report.summary


@pytest.mark.parametrize("text", ['{"dialect": "abacus", "prefer": "speed"}', "7", "{"])
def test_a_file_of_an_unknown_form_is_refused(text, tmp_path):
    sim, data = exported(tmp_path / "model.onnx", "onnxruntime")
    model = onnx.load(tmp_path / "model.onnx")
    set_properties(model, {KEY: text})
    with pytest.raises(qsdk.FileFormatError, match=r"does not know; update qsdk, or export the file again"):
        qsdk.check_parity(sim, model, data)


def test_the_names_that_users_choose_from_are_those_of_the_one_list():
    assert get_args(Dialect) == tuple(RUNTIMES)
    assert get_args(RuntimeName) == tuple(name for name, one in RUNTIMES.items() if one.open is not None)
    assert get_args(TimedRuntime) == tuple(name for name, one in RUNTIMES.items() if one.time is not None)
    assert {*RUNTIMES, "compressed-tensors"} <= set(shipped_targets())
