"""What math-verify's own test pairs and this grader disagree about, as `benchmarks/rewards_published.py`
found it."""

import json
from pathlib import Path

from trainer import config
from trainer.rewards.grading import grader
from trainer.rewards.scorer import Scorer

PUBLISHED = json.loads((Path(__file__).parents[2] / "benchmarks" / "rewards_published.json").read_text())


def test_every_disagreement_is_explained():
    disagreements = PUBLISHED["disagreements"]
    assert PUBLISHED["agree"] + len(disagreements) == PUBLISHED["graded"] >= 200
    assert sum(PUBLISHED["reasons"].values()) == len(disagreements)
    assert [d["test"] for d in disagreements if len(d["why"]) < 20 or "UNEXPLAINED" in d["why"]] == []


def test_recorded_disagreements_are_those_of_this_grader():
    rows = [d for d in PUBLISHED["disagreements"] if len(d["reference"]) < 120 and len(d["answer"]) < 120]
    assert len(rows) >= 15
    texts = [
        f"<answer>{d['answer']}</answer>"
        if "\\boxed{" in d["answer"]
        else f"<answer>\\boxed{{{d['answer']}}}</answer>"
        for d in rows
    ]
    references = [d["reference"] for d in rows]
    with Scorer(config.Rewards(max_timeout_rate=1.0, max_error_rate=1.0)) as scorer:
        outcomes = scorer.score(texts, references, [grader.classify(r) for r in references])
    assert [o.verdict for o in outcomes] == [d["we_say"] for d in rows]
