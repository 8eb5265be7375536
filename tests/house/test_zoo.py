"""The real models that other tests measure by are what they claim to be, and so is the way they are fetched."""

import dataclasses
import subprocess
import zipfile
from pathlib import Path

import fetch
import pytest
import zoo


@pytest.mark.slow
@pytest.mark.network
def test_mobilenet_v2_knows_imagenet():
    images, labels = zoo.imagenet_images()
    model = zoo.mobilenet_v2()
    assert images.shape == (20, 3, 224, 224)
    assert zoo.accuracy(model, images, labels) * len(labels) == pytest.approx(18)


@pytest.mark.slow
@pytest.mark.network
def test_digit_cnn_knows_mnist():
    images, labels = zoo.mnist(count=2000)
    assert images.shape == (2000, 1, 28, 28)
    assert zoo.accuracy(zoo.digit_cnn(), images, labels) >= 0.985


def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str, content: bytes | None = None) -> None:
    """Replaces pip by one that prints `output` and, given content, delivers a file."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if content is not None:
            folder = next(c.removeprefix("--dest=") for c in command if c.startswith("--dest="))
            (Path(folder) / "package-1.0-py3-none-any.whl").write_bytes(content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", output)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    monkeypatch.setattr(fetch, "CACHE", tmp_path / "cache")
    fetch._unpacked.cache_clear()


PLANTED = fetch.Package("pypi", "package", "1.0", "0" * 64)


@pytest.mark.parametrize(
    "output",
    [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError'",
        "Could not fetch URL: 403 Client Error: Forbidden - skipping",
        "Ignoring indexes: none",
    ],
)
def test_an_unreachable_registry_skips_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, output: str):
    answering(monkeypatch, tmp_path, output)
    with pytest.raises(pytest.skip.Exception, match=r"package 1\.0: the pypi registry cannot be reached"):
        fetch.fetch(PLANTED)


def test_a_silent_registry_skips(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    answering(monkeypatch, tmp_path, "")

    def run(command: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(command, 300)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(pytest.skip.Exception, match="no answer in 5 minutes"):
        fetch.fetch(PLANTED)


def test_a_version_the_registry_does_not_have_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    answering(monkeypatch, tmp_path, "ERROR: No matching distribution found for package==1.0")
    with pytest.raises(RuntimeError, match="gave no such file"):
        fetch.fetch(PLANTED)


def test_another_file_than_the_pinned_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    answering(monkeypatch, tmp_path, "", b"something else")
    with pytest.raises(ValueError, match=r"package 1\.0: sha256 of .* pinned is 0000"):
        fetch.fetch(PLANTED)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_broken_archive_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    content = b"PK\x03\x04 cut off"
    answering(monkeypatch, tmp_path, "", content)
    pinned = dataclasses.replace(PLANTED, sha256=fetch.hashlib.sha256(content).hexdigest())
    with pytest.raises(zipfile.BadZipFile):
        fetch.fetch(pinned)
    assert list((tmp_path / "cache").iterdir()) == []
