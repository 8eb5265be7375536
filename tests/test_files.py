"""Files appear whole or not at all."""

import errno
import stat
import tempfile
from pathlib import Path

import pytest

from qsdk.core.errors import ExportError
from qsdk.core.files import write_atomically, write_bytes, write_text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_file_is_written_and_nothing_else(tmp_path: Path):
    write_bytes(tmp_path / "model.onnx", b"\x00data")
    write_text(str(tmp_path / "notes.txt"), "näive\n")
    assert contents(tmp_path) == {"model.onnx": b"\x00data", "notes.txt": "näive\n".encode()}


def test_a_file_is_replaced(tmp_path: Path):
    write_text(tmp_path / "a", "a much longer first text")
    write_text(tmp_path / "a", "short")
    assert contents(tmp_path) == {"a": b"short"}


def test_a_written_file_can_be_read_by_others(tmp_path: Path):
    write_text(tmp_path / "a", "x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_a_name_without_a_folder_is_in_the_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_text("a.txt", "x")
    assert contents(tmp_path) == {"a.txt": b"x"}


@pytest.mark.parametrize("raised", [ValueError("broken"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, raised: BaseException):
    (tmp_path / "a").write_bytes(b"old")

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise raised

    with pytest.raises(type(raised)):
        write_atomically(tmp_path / "a", write)
    assert contents(tmp_path) == {"a": b"old"}


def test_a_full_disk_is_an_export_error_and_leaves_the_old_file(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"old")

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ExportError, match=r"cannot write .*a: .*No space left on device; choose a folder with room"):
        write_atomically(tmp_path / "a", write)
    assert contents(tmp_path) == {"a": b"old"}


def test_the_target_is_old_until_the_writer_is_done(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"old")
    seen = []

    def write(temporary: Path) -> None:
        temporary.write_bytes(b"new")
        seen.append((temporary.parent, (tmp_path / "a").read_bytes()))

    write_atomically(tmp_path / "a", write)
    assert seen == [(tmp_path, b"old")]
    assert contents(tmp_path) == {"a": b"new"}


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(ExportError, match=r"cannot write .*a: No such file or directory; create the folder .*gone"):
        write_text(tmp_path / "gone" / "a", "x")
    assert contents(tmp_path) == {}


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(**_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with pytest.raises(ExportError, match=r"cannot write .*a: Permission denied; .* or choose a writable one"):
        write_text(tmp_path / "a", "x")


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(ExportError, match=r"cannot write .*: Not a directory"):
        write_text(tmp_path / "file" / "a", "x")


def test_a_directory_is_not_overwritten(tmp_path: Path):
    (tmp_path / "a").mkdir()
    with pytest.raises(ExportError, match="a is a directory; give the name of a file to write"):
        write_text(tmp_path / "a", "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]
