"""The page's own commands on rows of one's own, from an empty folder, in their order, to a run's launch."""

import json
import random
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image

from data_prep import commands as data_commands
from examples.demo import tiny_model
from recipes.commands.cli import main

PAGE = Path(__file__).parents[2] / "docs/data.md"
ELSEWHERE = re.compile(r"geometry3k|mathv60k|virl39k|generated|RUN|runs/ID|s3://|evaluate")
"""What needs the hub, a bucket, or a run that has ended."""


def commands() -> list[list[str]]:
    """What the first block of the page does with `mine.jsonl` and what is made of it."""
    block = PAGE.read_text().split("```bash\n")[1].split("```")[0]
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [words for words in lines if "mine" in " ".join(words) and not ELSEWHERE.search(" ".join(words))]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one file and its images, and nothing else."""
    draw = random.Random(0)
    (tmp_path / "photos").mkdir()
    with (tmp_path / "mine.jsonl").open("w") as file:
        for i in range(400):
            a, b = draw.randint(0, 99), draw.randint(0, 99)
            marks = Image.frombytes("RGB", (8, 8), draw.randbytes(192))
            marks.resize((56 + i % 30, 56), Image.Resampling.NEAREST).save(tmp_path / f"photos/{i}.png")
            row = {"question": f"<image>What is {a} + {b} in row {i}?", "answer": str(a + b)}
            file.write(json.dumps(row | {"image": f"photos/{i}.png"}) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_begins_with_what_a_person_does_with_their_rows():
    verbs = [words[2:4] if words[2] == "data" else words[2:3] for words in commands()]
    assert verbs == [
        ["data", "prepare"],
        ["data", "prepare"],
        ["data", "show"],
        ["data", "show"],
        ["data", "verify"],
        ["up"],
    ]


def test_its_commands_run_in_their_order_from_an_empty_folder(folder, capsys):
    tiny_model.build(folder / "MODEL", seed=0)
    for words in commands():
        asked = words[2:]
        if asked[0] == "up":
            asked = [*asked[:2], "--dry-run", *asked[2:]]
        code = data_commands.main(asked[1:]) if asked[0] == "data" else main(asked)
        said = capsys.readouterr()
        assert code == 0, f"{shlex.join(words)}\n{said.out}\n{said.err}"
        if asked[0] == "up":
            assert f"path: {folder}/data/mine" in said.out or "data/mine" in said.out
    assert (folder / "data/mine/manifest.json").exists()
    rows = json.loads((folder / "data/mine/manifest.json").read_text())["rows"]
    assert rows["train"] + rows["validation"] == 400 and rows["validation"] > 0
