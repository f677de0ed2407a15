"""docs/algorithms.md names every published set with the options it has."""

import re
from pathlib import Path

import yaml

from trainer.config import Algorithm

TEXT = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()


def test_the_table_is_what_the_presets_set():
    default = Algorithm()
    table = TEXT.split("## Which paper")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", table, re.MULTILINE))
    assert list(rows) == list(Algorithm.PRESETS)
    for name, text in rows.items():
        shown = {"kl_coef": 0.0}
        for option in re.findall(r"`([^`]+)`", text):
            shown |= yaml.safe_load(option)
        assert {k: v for k, v in Algorithm.PRESETS[name].items() if v != getattr(default, k)} == shown, name


def test_every_key_in_the_text_exists():
    for key in re.findall(r"`(\w+): ", TEXT):
        assert hasattr(Algorithm(), key), key
