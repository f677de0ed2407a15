"""The metrics' names, units and meanings: the table of docs/metrics.md, which is the only one."""

import re
from collections.abc import Iterable

from tests.conftest import ROOT

ROW = re.compile(r"^\| `([^`]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)
NAMES = {row[1]: (row[2], row[3]) for row in ROW.finditer((ROOT / "docs/metrics.md").read_text())}
PREFIXES = ("staleness/age_", "reward/function_", "turns/calls_", "eval/accuracy_", "fleet/sampled_")
"""Names that end in what the data, or a driver, calls them."""


def unknown_names(names: Iterable[str]) -> list[str]:
    """Those of `names` that the table lacks, sorted.

    A user's reward function may add its own; the trainer may not.
    """
    return sorted(name for name in set(names) - set(NAMES) if not name.startswith(PREFIXES))
