"""`launch.py test`: what fails beside others is tried once more alone; what fails then has failed."""

import os
import sys

import pytest

from recipes.commands.training_environment import run_half

ONCE = """
from pathlib import Path
def test_ONE():
    seen = Path("ONE.seen")
    if not seen.exists():
        seen.touch()
        assert False
"""
EVERY = "def test_every(): assert False\n"
NAMED = "failed beside other tests and passed alone, mend them: test_load.py::test_a"


def half(capfd, *options: str) -> tuple[int, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    code = run_half(sys.executable, ["-q", *options], env)
    return code, capfd.readouterr().out


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


def test_one_that_passes_alone_is_named(folder, capfd):
    (folder / "test_load.py").write_text(ONCE.replace("ONE", "a"))
    code, out = half(capfd)
    assert code == 0 and "once more, alone: test_load.py::test_a" in out and NAMED in out, out
    code, out = half(capfd)
    assert code == 0 and "once more" not in out


def test_one_that_fails_again_has_failed(folder, capfd):
    (folder / "test_load.py").write_text(ONCE.replace("ONE", "a") + EVERY)
    code, out = half(capfd)
    assert code == 1 and "once more, alone: " in out and NAMED not in out, out


def test_many_are_no_accident(folder, capfd):
    (folder / "test_load.py").write_text("".join(ONCE.replace("ONE", one) for one in "abcd"))
    code, out = half(capfd)
    assert code == 1 and "once more" not in out


def test_a_file_that_cannot_be_imported_has_failed(folder, capfd):
    (folder / "test_load.py").write_text("import nothing_of_this_name\n")
    code, out = half(capfd)
    assert code != 0 and "once more" not in out


def test_files_that_cannot_be_collected_together_have_failed(folder, capfd):
    """Each alone would pass: they have one name."""
    for room in ("here", "there"):
        (folder / room).mkdir()
        (folder / room / "test_same.py").write_text("def test_it(): pass\n")
    code, out = half(capfd, "-n2")
    assert code != 0 and "import file mismatch" in out and "once more" not in out, out
