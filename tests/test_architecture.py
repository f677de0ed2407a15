"""The packages and the imports between them, as pyproject.toml states them."""

import subprocess
import sys
from pathlib import Path

from benchmarks.readability import names_that_stand_twice

ROOT = Path(__file__).parents[1]


def test_imports_keep_the_contracts():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_file_is_longer_than_500_lines():
    files = [
        p
        for top in ("trainer", "recipes", "data_prep", "examples", "tests")
        for p in (ROOT / top).rglob("*.py")
    ]
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert not {name: n for name, n in lines.items() if n > 500}
    vague = {"utils", "helpers", "common", "misc"}
    assert not [p for p in files if p.stem in vague or p.parent.name in vague]


def test_the_drawing_is_that_of_the_code():
    sys.path.insert(0, str(ROOT / "docs"))
    from draw_architecture import PAGE, drawn  # ty: ignore[unresolved-import]

    assert PAGE.read_text() == drawn(PAGE.read_text()), "run python docs/draw_architecture.py"


def test_no_two_classes_share_a_name():
    assert names_that_stand_twice(ROOT) == [], "rename one of each"
