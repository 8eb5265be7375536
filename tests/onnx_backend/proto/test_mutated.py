"""Damaged files end in an error of ours or in the right values: never in another exception, a crash or a hang."""

import sys
import time

import mutated_models
import numpy as np
import open_mutated
import pytest
from mutated_models import bases, judged, mutations

from onnx_backend.lower import insert
from onnx_backend.opening.from_float import open_float
from qsdk import w8a8

GOOD = ("refused: ", "equal", "not run: ")


def verdicts(folder, count, seed):
    files = []
    for name, data in mutations(count, seed):
        (folder / f"{name}.onnx").write_bytes(data)
        files.append(folder / f"{name}.onnx")
    return judged(files)


def require_good(found):
    bad = {path.name: said for path, said in found.items() if not said.startswith(GOOD)}
    assert not bad, "\n".join(f"{name}: {said}" for name, said in bad.items())


@pytest.mark.slow
def test_a_few_damaged_files(tmp_path):
    found = verdicts(tmp_path, 48, seed=0)
    assert len(found) == 48
    require_good(found)
    equal = [said for said in found.values() if said.startswith("equal")]
    assert 5 <= len(equal) <= 40  # neither all harmless nor all refused


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_damaged_files(tmp_path, seed):
    require_good(verdicts(tmp_path, 500, seed))


@pytest.mark.slow
def test_undamaged_they_are_equal(tmp_path):
    for number, model in enumerate(bases()):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(model.SerializeToString())
        assert open_mutated.verdict(str(path)) == "equal"
        assert open_float(path, w8a8()).plan.decisions


def test_the_verdict_sees_a_difference_and_a_foreign_exception(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(bases()[0].SerializeToString())

    def changed(*args):
        model, rows = insert(*args)
        bias = next(tensor for tensor in model.graph.initializer if tensor.name == "b2")
        bias.raw_data = (np.frombuffer(bias.raw_data, np.float32) + 1).tobytes()
        return model, rows

    monkeypatch.setattr(open_mutated, "insert", changed)
    assert open_mutated.verdict(str(path)) == "differs: values"
    monkeypatch.setattr(open_mutated.qsdk, "quantize", lambda *args: {}["missing"])
    with pytest.raises(KeyError):
        open_mutated.verdict(str(path))


def test_the_judge_sees_a_crash_and_a_hang(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "for line in sys.stdin:\n"
        "    name = line.strip().split('/')[-1]\n"
        "    os.abort() if name == 'crash' else time.sleep(60) if name == 'hang' else print('\"equal\"', flush=True)\n"
    )
    monkeypatch.setattr(mutated_models, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr(mutated_models, "SECONDS", 2)
    started = time.monotonic()
    found = judged([tmp_path / name for name in ("fine", "crash", "hang", "fine too")], workers=1)
    assert {path.name: said.split(":")[0] for path, said in found.items()} == {
        "fine": "equal",
        "crash": "crash",
        "hang": "hang",
        "fine too": "equal",
    }
    assert time.monotonic() - started < 30
