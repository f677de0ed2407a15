"""Task families of reasoning-gym, whose answers are checked by the family's own `score_answer`.

A row of such a family has the answer type `task`. What the grader compares with is its task as JSON:
{"family": name, "entry": what the family made}. The package is installed when first needed; its verifiers
parse the answers of models by sympy, so they run in grader processes only.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from trainer.system.packages import ROOT, package_folder

REQUIREMENTS = ROOT / "requirements" / "tasks.txt"
CORRECT = 0.999
"""Scores from here on count as correct; less is partial credit."""

NONSENSE = "I do not know"


def family_packages() -> Path:
    """Folder of the package and of what it needs; fetched if it is missing. Raises ConfigError."""
    return package_folder(REQUIREMENTS, "reasoning-gym (100 MB)")


def load_families(folder: Path) -> Any:
    """The package of that folder, which takes two seconds to import."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a package that it needs compares numbers by `is`
        import reasoning_gym.factory  # ty: ignore[import-not-found]
    return reasoning_gym.factory


@cache
def _family(name: str) -> Any:
    registered = load_families(family_packages()).DATASETS
    if name not in registered:
        raise KeyError(f"reasoning-gym has no family {name!r}")
    made_by, configured_by = registered[name]
    return made_by(configured_by())


def score_answer(answer: str, task: str) -> float:
    """What the family gives an answer, from 0 to 1; 0 where its verifier fails on it. task: JSON."""
    read = json.loads(task)
    family = _family(read["family"])
    try:
        value = float(family.score_answer(answer, read["entry"]))
    except Exception:  # some of them read numbers without a check
        return 0.0
    return value if math.isfinite(value) else 0.0


def task_fault(task: str) -> str | None:
    """Why nothing can be graded against a task, or None.

    What answers nothing must not be correct, and its own answer must be, if it states one.
    """
    answer = json.loads(task)["entry"]["answer"]
    if answer is not None and (value := score_answer(answer, task)) < CORRECT:
        return f"its family gives its own answer {answer[:80]!r} {value:g} of 1"
    if score_answer(NONSENSE, task) >= CORRECT:
        return f"its family takes {NONSENSE!r} for correct"
    return None
