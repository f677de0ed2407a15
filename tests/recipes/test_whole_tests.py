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
ALONE = "once more, alone: "
NAMED = "failed beside other tests and passed alone, mend them: test_load.py::test_a"


@pytest.mark.parametrize(
    ("files", "passes", "shown"),
    [
        ({"test_load.py": ONCE.replace("ONE", "a")}, True, (ALONE, NAMED)),
        ({"test_load.py": ONCE.replace("ONE", "a") + EVERY}, False, (ALONE,)),
        ({"test_load.py": "".join(ONCE.replace("ONE", name) for name in "abcd")}, False, ()),
        ({"test_load.py": "import nothing_of_this_name\n"}, False, ()),
        (dict.fromkeys(("a/test_same.py", "b/test_same.py"), "def test_it(): pass\n"), False, ("mismatch",)),
    ],
    ids=["once", "once and always", "many are no accident", "no import", "each alone would pass"],
)
def test_what_fails_beside_others_is_tried_alone(files, passes, shown, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    code = run_half(sys.executable, ["-q", "-n2"], env)
    out = capfd.readouterr().out
    assert (code == 0) == passes and all(words in out for words in shown), out
    assert (ALONE in out) == (ALONE in shown) and (NAMED in out) == (NAMED in shown), out
