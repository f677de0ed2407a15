"""A file of lines that another process appends to."""

from __future__ import annotations

from trainer.config.growing_file import GrowingFile


def test_complete_lines_come_once(tmp_path):
    path = tmp_path / "file"
    growing = GrowingFile(path)
    assert growing.read() == b""
    path.write_bytes(b"one\ntw")
    assert growing.read() == b"one\n" and growing.read() == b""
    with path.open("ab") as file:
        file.write(b"o\nthree\nfo")
    assert growing.read() == b"two\nthree\n" and not growing.begun_anew
    assert growing.rest() == b"fo" and growing.rest() == b"" and growing.read() == b""


def test_a_file_that_is_written_anew_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\n")
    growing = GrowingFile(path)
    growing.read()
    other = tmp_path / "other"
    other.write_bytes(b"one\nthree and more\n")  # not shorter, but another file
    other.replace(path)
    assert growing.read() == b"one\nthree and more\n" and growing.begun_anew
    path.write_bytes(b"x\n")
    assert growing.read() == b"x\n" and growing.begun_anew
    assert growing.read() == b"" and not growing.begun_anew


def test_what_was_there_before_can_be_passed_over(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"earlier\n")
    growing = GrowingFile(path, start=8)
    with path.open("ab") as file:
        file.write(b"new\n")
    assert growing.read() == b"new\n"
