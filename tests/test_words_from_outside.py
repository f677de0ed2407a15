"""Names and texts that a stranger wrote: a path stays in its folder, a terminal obeys nothing."""

import pytest

from trainer.system.contained_path import inside
from trainer.system.terminal_text import terminal_line, terminal_text

LEADS_OUT = ["../secret", "samples/../../secret", "/etc/hostname", "link/secret", "loop", "", ".", "..", "./"]


@pytest.mark.parametrize("name", [*LEADS_OUT, "a\0b", "x" * 5000, None, 7, ["a"], "\ud800"])
def test_a_name_that_leads_out_of_its_folder_or_is_none_is_no_path(tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "secret").write_text("key")
    (folder / "link").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    assert inside(folder, name) is None


def test_a_name_below_its_folder_is_a_path_whether_the_file_is_there_or_not(tmp_path):
    (tmp_path / "real").mkdir()
    folder = tmp_path / "run"
    folder.symlink_to(tmp_path / "real")  # the reader's own link to the folder
    assert inside(folder, "samples/a.png") == folder / "samples/a.png"
    assert inside(folder, ".hidden/..a") == folder / ".hidden/..a"


@pytest.mark.parametrize(("text", "plain"), [
    ("\x1b[31mred\x1b[0m", "red"), ("\x1b]0;title\x07done", "done"), ("a\x9b2Jb\x07\x08c", "a2Jbc"),
    ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"), ("10%\r20%\r\nend\ttab", "10%\n20%\nend\ttab"),
    ("abc\u202ecod.exe\u2066x", "abccod.exex"), ("half \ud83d", "half "), ("\x1bc\x1b(0lqk", "lqk"),
    ("é 中文 👍🏽 ✓ ‌", "é 中文 👍🏽 ✓ ‌"), ("\x1bPq#0;2;0;0;0\x1b\\x", "x"),
])  # fmt: skip
def test_a_terminal_is_given_no_command(text, plain):
    assert terminal_text(text) == plain
    terminal_text(text).encode()


def test_a_word_in_a_line_has_one_line():
    assert terminal_line("host\nfinished\x1b[1A\u2028x") == "host finished x"
    assert terminal_line(7) == "7"
