"""Files appear whole or not at all."""

import errno
import os
import stat
from pathlib import Path

import pytest

from qsdk import ExportError
from qsdk.core.atomic_files import write_atomically, write_bytes, write_text, write_with_companions


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
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
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


def test_a_symbolic_link_keeps_pointing_where_it_did(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link.txt").symlink_to(tmp_path / "real" / "file.txt")
    write_text(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "real" / "file.txt").read_text() == "new"


def test_a_new_file_has_the_mode_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file.txt", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == 0o640


def test_companions_are_in_place_before_the_file_that_commits_them(tmp_path):
    write_with_companions(tmp_path / "model", b"1", {tmp_path / "beside": "one"})
    assert (tmp_path / "model").read_bytes() == b"1"
    assert (tmp_path / "beside").read_text() == "one"
    (tmp_path / "folder").mkdir()
    with pytest.raises(ExportError, match="folder is a directory"):
        write_with_companions(tmp_path / "folder", b"2", {tmp_path / "beside": "two"})
    assert (tmp_path / "beside").read_text() == "one"
    with pytest.raises(ExportError, match="missing"):
        write_with_companions(tmp_path / "model", b"2", {tmp_path / "missing" / "beside": "two"})
    assert (tmp_path / "model").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside", "folder", "model"]
