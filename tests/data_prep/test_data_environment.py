"""The small environment that prepares data has every package that preparation imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = {"_distutils_hack", "cloudpickle", "scipy", "torch"}
"""What is imported only where it is installed."""
WALK = """
import importlib, pkgutil, sys, data_prep
for module in pkgutil.walk_packages(data_prep.__path__, "data_prep."):
    if module.name != "data_prep.__main__":
        importlib.import_module(module.name)
print(*{name.partition(".")[0] for name in sys.modules})
"""


def test_the_data_environment_has_what_preparation_imports():
    names = set()
    for path in (ROOT / "data_prep").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add((node.module or "").partition(".")[0])
    walked = subprocess.run(
        [sys.executable, "-c", WALK], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    names |= set(walked.split())
    setup = (ROOT / "trainer/shell/setup.sh").read_text()
    listed = set()
    for words in re.findall(r"(?:hub|rows|tokens|desk)=['\"]([a-z0-9|$-]+)['\"]", setup):
        listed |= set(words.split("|"))
    needed = set()
    for name, distributions in packages_distributions().items():
        if name in names and name not in OPTIONAL:
            needed |= {one.lower().replace("_", "-") for one in distributions}
    assert {"numpy", "pillow", "pyarrow", "rich", "huggingface-hub", "transformers"} <= needed
    assert sorted(needed - listed) == [], "what trainer/shell/setup.sh leaves out of the environment `data`"
