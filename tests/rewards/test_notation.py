import random
import re
from pathlib import Path

from trainer.rewards.grading import notation

TABLES = [Path(__file__).parent / name for name in ("cases.tsv", "held_out.tsv")]


def test_rules_are_skipped_only_where_they_would_change_nothing(monkeypatch):
    contents = {
        field for table in TABLES for line in table.read_text().splitlines() for field in line.split("\t")
    }
    draw = random.Random(0)
    pieces = re.findall(r"\\[a-zA-Z]+|.", " ".join(sorted(contents)))
    contents |= {"".join(draw.choices(pieces, k=draw.randint(1, 12))) for _ in range(20_000)}
    clean = notation.common_notation.__wrapped__
    quick = {content: clean(content) for content in contents}
    monkeypatch.setattr(notation, "_COMPILED", [([""], *rule) for _, *rule in notation._COMPILED])
    monkeypatch.setattr(notation, "_PLAIN_NUMBER", re.compile("(?!)"))
    assert {content: clean(content) for content in contents} == quick
