"""An export that is killed, or that another one overtakes, never leaves the mixture of two models."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from large_models import batches, external_stack, leftovers

import qsdk
from qsdk import FileFormatError
from qsdk.core.atomic_files import staging

WIDTH = 700
#: for each line that it reads, a child of its own exports two models of one float file to one path, and is killed after
#: as many seconds as the line says; prints how it ended
EXPORTER = """
import os
import signal
import sys
import time
import numpy as np
import qsdk

source, out, turns, order = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sims = []
for config in (qsdk.w8a8(), qsdk.w4a8()):
    sim = qsdk.quantize(source, None, config)
    qsdk.calibrate(sim, [np.ones((2, {width}), np.float32)], progress=False)
    sims.append(sim)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        for turn in range(turns):
            for sim in sims[::order]:
                qsdk.export(sim, out, external_data=True)
        os._exit(0)
    if float(line):
        time.sleep(float(line))
        os.kill(child, signal.SIGKILL)  # before it is waited for, its number is nobody else's
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Exporter:
    """A process whose children export."""

    def __init__(self, source: Path, out: Path, *, turns: int = 1, order: int = 1) -> None:
        code = EXPORTER.format(width=WIDTH)
        command = [sys.executable, "-W", "ignore", "-c", code, str(source), str(out), str(turns), str(order)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> "Exporter":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def start(self, killed_after: float = 0) -> None:
        """Let a child begin, and be killed after so many seconds, if any."""
        self.process.stdin.write(f"{killed_after}\n")
        self.process.stdin.flush()

    def wait(self) -> int:
        """Wait for the child; gives its status, 9 if it was killed."""
        return int(self.process.stdout.readline())


def outputs_of(path: Path) -> np.ndarray:
    return qsdk.quantize(path, None, None).run(batches(WIDTH)[0])[0]


@pytest.fixture
def source(tmp_path):
    return external_stack(tmp_path / "float.onnx", WIDTH)


@pytest.fixture
def whole(source, tmp_path):
    """What the two models give."""
    found = []
    for config in (qsdk.w8a8(), qsdk.w4a8()):
        sim = qsdk.quantize(source, None, config)
        qsdk.calibrate(sim, [np.ones((2, WIDTH), np.float32)], progress=False)
        found.append(sim.run(batches(WIDTH)[0])[0])
    return found


def read(path, whole, said, seen):
    """Note what was refused, or which of the two models stands there."""
    try:
        got = outputs_of(path)
    except FileFormatError as error:
        said.append(str(error))
    else:
        (which,) = (index for index, wanted in enumerate(whole) if np.array_equal(got, wanted))
        seen.add(which)


@pytest.mark.nightly
def test_a_killed_export_leaves_an_old_or_a_new_model_or_is_refused(source, whole, tmp_path):
    folder, rng, said, seen, statuses = tmp_path / "out", random.Random(0), [], set(), []
    folder.mkdir()
    path = folder / "m.onnx"
    with Exporter(source, path) as exporter:
        for _ in range(2):  # the first time, the process has yet to begin
            began = time.monotonic()
            exporter.start()
            assert exporter.wait() == 0
        length = time.monotonic() - began
        for _ in range(50):
            exporter.start(rng.uniform(0, length))
            statuses.append(exporter.wait())
            read(path, whole, said, seen)
    assert statuses.count(signal.SIGKILL) > 25
    assert seen == {0, 1}
    assert len(said) < 25
    assert all("was interrupted or one file was replaced" in text and "export again" in text for text in said)
    with staging(path):
        pass
    sim = qsdk.quantize(source, None, qsdk.w8a8())
    qsdk.calibrate(sim, [np.ones((2, WIDTH), np.float32)], progress=False)
    qsdk.export(sim, path, external_data=True)  # and the next one clears up
    assert not list(leftovers(folder))
    assert len(list(folder.iterdir())) == 3
    np.testing.assert_array_equal(outputs_of(path), whole[0])


@pytest.mark.nightly
def test_two_exports_at_once_leave_one_of_the_two(source, whole, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    with (
        Exporter(source, folder / "m.onnx", turns=5) as one,
        Exporter(source, folder / "m.onnx", turns=5, order=-1) as two,
    ):
        one.start(), two.start()
        assert [one.wait(), two.wait()] == [0, 0]
    got = outputs_of(folder / "m.onnx")
    assert sum(np.array_equal(got, wanted) for wanted in whole) == 1
    assert len(list(folder.iterdir())) == 3


def test_temporary_files_of_dead_processes_are_removed_and_those_of_living_ones_stay(tmp_path):
    token = "0123456789abcdef"
    dead, other = tmp_path / f".m.onnx.{token}.tmp", tmp_path / f".n.onnx.{token}.tmp"
    dead.write_bytes(b"half")
    other.write_bytes(b"half")
    with staging(tmp_path / "m.onnx") as living:
        mine = living.write(lambda path: path.write_bytes(b"whole") and None)
        assert not dead.exists()
        with staging(tmp_path / "m.onnx") as second:
            second.commit([(second.write(lambda path: path.write_bytes(b"second") and None), second.target)])
        assert mine.read_bytes() == b"whole"
        assert (tmp_path / "m.onnx").read_bytes() == b"second"
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", other.name}


@pytest.mark.slow
@pytest.mark.parametrize("stop", range(4))
def test_an_export_that_stops_between_two_renames(source, whole, tmp_path, monkeypatch, stop):
    folder = tmp_path / "out"
    folder.mkdir()
    path = folder / "m.onnx"
    sims = [qsdk.quantize(source, None, config) for config in (qsdk.w8a8(), qsdk.w4a8())]
    for sim in sims:
        qsdk.calibrate(sim, [np.ones((2, WIDTH), np.float32)], progress=False)
    qsdk.export(sims[0], path, external_data=True)
    done = []
    rename = Path.replace

    def killed(self, target):
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(rename(self, target))
        return done[-1]

    monkeypatch.setattr(Path, "replace", killed)
    if stop == 3:
        qsdk.export(sims[1], path, external_data=True)
    else:
        with pytest.raises(KeyboardInterrupt):
            qsdk.export(sims[1], path, external_data=True)
    if stop == 2:  # its encodings are there already
        with pytest.raises(FileFormatError, match="does not belong to"):
            outputs_of(path)
    else:
        np.testing.assert_array_equal(outputs_of(path), whole[1 if stop == 3 else 0])
    assert not list(leftovers(folder))
