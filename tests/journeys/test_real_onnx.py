"""Real ONNX files from the registries through the whole road: open, plan, calibrate, export, run, parity."""

from pathlib import Path
from typing import Any

import fetch
import numpy as np
import onnxruntime as ort
import pytest
from real_models import MODELS

import qsdk
from onnx_backend.lower import insert
from onnx_backend.proto.model_io import load
from onnx_backend.proto.opsets import opset_of
from onnx_backend.runtime.compare_runs import float_session
from qsdk.core.planning.plan import Plan

pytestmark = pytest.mark.network
VAGUE = ("inside a module or function", "a stored tensor that no quantizer reads")


QUICK = ("silero-vad sequence", "silero-vad op15", "magika", "wespeaker features")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]


def plain(source: str | bytes) -> ort.InferenceSession:
    """A session at the default level."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_real_file_goes_the_whole_road(name: str, tmp_path: Path):
    real = MODELS[name]
    path = fetch.fetch(real.package) / real.path
    assert opset_of(load(path)) == real.opset
    rng = np.random.default_rng(0)
    batches = [real.feed(rng) for _ in range(3)]

    sim = qsdk.quantize(path, batches[0], qsdk.w8a8())
    coverage = sim.coverage()
    require_reasons(coverage.rows)
    assert coverage.summary["folded"] == real.folded
    assert coverage.summary["opened"].endswith("to 21: equal outputs on the example")
    original = plain(str(path))
    require_same_floats(sim, original, batches[0])

    qsdk.calibrate(sim, batches, progress=False)
    qsdk.export(sim, tmp_path / "model.onnx")
    assert [qsdk.validate(file).summary["errors"] for file in (path, tmp_path / "model.onnx")] == [0, 0]
    exported = plain(str(tmp_path / "model.onnx"))
    for left, right in (
        (original.get_inputs(), exported.get_inputs()),
        (original.get_outputs(), exported.get_outputs()),
    ):
        assert [value.name for value in left] == [value.name for value in right]
    outputs = exported.run(None, batches[0])
    assert len(outputs) == real.outputs
    assert [np.shape(v) for v in outputs] == [np.shape(v) for v in sim.run(batches[0])]
    assert all(np.isfinite(value).all() for value in outputs)
    report = qsdk.check_parity(sim, tmp_path / "model.onnx", batches[:1], progress=False)
    assert report.summary["passed"], str(report)


def require_reasons(rows: list[dict[str, Any]]) -> None:
    """Every tensor says why it is what it is, and no float one says so vaguely."""
    assert rows
    for row in rows:
        assert row["reason"], row
        if row["state"] == "float":
            assert not row["reason"].startswith(VAGUE), row


def require_same_floats(sim: Any, original: ort.InferenceSession, batch: dict[str, Any]) -> None:
    """Unquantized, the opened model gives what the file gives."""
    opened = float_session(insert(sim.traced().model, Plan({}), {})[0])
    for left, right in zip(opened.run(None, batch), original.run(None, batch), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-4 * max(1.0, float(np.abs(right).max())))


@pytest.mark.parametrize("name", ["silero-vad op18", "silero-vad op15"])
def test_what_control_flow_holds_is_listed(name: str):
    real = MODELS[name]
    sim = qsdk.quantize(fetch.fetch(real.package) / real.path, None, qsdk.w8a8())
    reasons = [row["reason"] for row in sim.coverage().rows]
    assert sum("bodies of control flow stay float" in reason for reason in reasons) >= 70
