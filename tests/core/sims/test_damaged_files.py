"""Saved sims and checkpoints that somebody damaged or made: refused by name, at once, with the remedy."""

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import qsdk
from qsdk import ConfigError, Encoding, FileFormatError, int8
from qsdk.algorithms.checkpoint import Checkpoint
from qsdk.core.layers.layer_problem import Solution
from qsdk.core.numerics.spec import PerTensor, Spec

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
DEEP = b"[" * 100_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    sim = qsdk.quantize(nn.Linear(6, 2), X, qsdk.w8a8())
    qsdk.calibrate(sim, [X], progress=False)
    path = tmp_path_factory.mktemp("saved") / "sim.qsdk"
    qsdk.save(sim, path)
    return path


def inner_archive(size: int) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(size))
    return stream.getvalue()


def rewritten(saved: Path, target: Path, changes: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(saved) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()} | changes
    with zipfile.ZipFile(target, "w", kind) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return target


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights.pt": b""}, r"weights\.pt in .* is damaged \(.+\); write it again with qsdk\.save"),
        ({"example.pt": b""}, r"example\.pt in .* is damaged \(.+\); write it again"),
        ({"weights.pt": b"PK\x03\x04 no archive"}, r"weights\.pt in .* is damaged"),
        ({"weights.pt": inner_archive(50_000_000)}, r"weights\.pt in .* and would unpack to 50,000,000, which no file"),
        ({"manifest.json": DEEP}, r"is no qsdk\.sim file"),
        ({"manifest.json": b'{"format": "another", "version": 1}'}, r"is no qsdk\.sim file"),
        ({"plan.json": DEEP}, r"is damaged \(.*recursion.*\); write it again with qsdk\.save"),
        ({"encodings.json": DEEP}, r"encodings\.json in .* is nested too deeply"),
        ({"plan.json": b"[]"}, r"is damaged"),
    ],
    ids=[
        "empty weights",
        "empty example",
        "no archive",
        "inner bomb",
        "manifest",
        "format",
        "plan",
        "encodings",
        "no plan",
    ],
)
def test_parts_of_a_saved_sim(saved: Path, tmp_path: Path, changes: dict[str, bytes], message: str):
    path = rewritten(saved, tmp_path / "sim.qsdk", changes)
    with pytest.raises(FileFormatError, match=message):
        qsdk.load(path, nn.Linear(6, 2))


@pytest.mark.slow
def test_an_archive_that_unpacks_to_gigabytes(saved: Path, tmp_path: Path):
    path = rewritten(saved, tmp_path / "sim.qsdk", {"more": bytes(200_000_000)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(FileFormatError, match=r"sim\.qsdk has .* bytes and would unpack to 200,0.*, which no file of"):
        qsdk.load(path, nn.Linear(6, 2))


@pytest.mark.parametrize(
    "read", [lambda p: qsdk.load(p), qsdk.load_config, lambda p: qsdk.save_encodings(p, "x", version=None)]
)
def test_a_pipe_and_a_folder_are_not_read(tmp_path: Path, read):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    with pytest.raises(FileFormatError, match="is no ordinary file, but a pipe or a device; "):
        read(pipe)
    with pytest.raises(FileFormatError, match="is a folder; "):
        read(tmp_path)


class Run:
    """One layer, as a checkpoint sees it."""

    site, spec = "fc:weight", Spec(int8, PerTensor())
    mean = mean_quantized = np.ones(3, np.float32)

    @property
    def layers(self):
        return [self]

    def weight(self, site: str):
        return np.zeros((2, 3), np.float32)

    def encoding(self, site: str) -> Encoding:
        return Encoding(int8, np.float32([0.5]), np.int32([0]), None, None)


def kept(folder: Path) -> Path:
    store = Checkpoint(folder, Run(), {"verb": "test"})
    found = Solution(Run().encoding("fc:weight"), torch.ones(2, 3), 1.0, 0.5, "", torch.zeros(2))
    store.keep([Run()], [found])
    return folder / "step-00000.npz"


def tampered(step: Path, **changes) -> None:
    with np.load(step) as file:
        held = dict(file)
    with step.open("wb") as file:
        np.savez(file, **(held | changes))


STEPS = {
    "empty": lambda step: step.write_bytes(b""),
    "cut short": lambda step: step.write_bytes(step.read_bytes()[:-40]),
    "no archive": lambda step: step.write_bytes(b"weights"),
    "other values": lambda step: tampered(step, **{"0.weight": np.zeros((2, 3), np.float32)}),
    "other facts": lambda step: tampered(step, facts=np.array('[{"site": "fc:weight", "dtype": "int4"}]')),
    "a folder": lambda step: (step.unlink(), step.mkdir()),
    "a pipe": lambda step: (step.unlink(), os.mkfifo(step)),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_tampered_step_of_a_checkpoint(tmp_path: Path, name: str):
    step = kept(tmp_path / "run")
    STEPS[name](step)
    store = Checkpoint(tmp_path / "run", Run(), {"verb": "test"})
    assert store.has_next()
    with pytest.raises(FileFormatError, match=r"step-00000\.npz is damaged \(.+\); delete it, and from this step on"):
        store.replay([Run()])


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"options": 1, "layers": 2}', b"\xff", DEEP], ids=range(6))
def test_a_tampered_run_of_a_checkpoint(tmp_path: Path, text: bytes):
    kept(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"run\.json is damaged, so nobody knows which run it is of; delete"):
        Checkpoint(tmp_path / "run", Run(), {"verb": "test"})


def test_a_file_in_the_place_of_a_checkpoint(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match="run is no folder; give a folder for checkpoints"):
        Checkpoint(tmp_path / "run", Run(), {"verb": "test"})
    with pytest.raises(ConfigError, match=r"cannot make the folder .*; give a folder for checkpoints"):
        Checkpoint(tmp_path / "run" / "inner", Run(), {"verb": "test"})


def test_an_untampered_step_comes_back(tmp_path: Path):
    kept(tmp_path / "run")
    store = Checkpoint(tmp_path / "run", Run(), {"verb": "test"})
    (found,) = store.replay([Run()])
    assert torch.equal(found.weight, torch.ones(2, 3))
