"""Searches for replies that earn without the answer, to name before machines are rented what a policy would
find in hours.

Per row it tries spans of the question, constant replies, replies that name several values, and edits of the
reference answer. A reply that is the reference answer, but for its look, is left out.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config import Rewards
from trainer.data.dataset import Dataset
from trainer.data.schema import question_text
from trainer.rewards.completion_facts import facts_of_row, sample_completion
from trainer.rewards.grading.extraction import unbox
from trainer.rewards.grading.kinds import BadReferenceError, Letters, read_kind
from trainer.rewards.grading.licences import is_spelled_alike
from trainer.rewards.grading.option_letters import listed, option_letter, plain_words
from trainer.rewards.grading.question import spelling
from trainer.rewards.scorer import Scorer

MAX_SPAN_WORDS = 8
MAX_SPANS = 400
"""Most spans of one question that are tried, drawn by a seed where there are more."""
EDITS = 12
"""Random edits of each reference answer."""
BATCH = 512
CONSTANTS = (
    "", "?", "0", "1", "-1", "2", "x", "x = x", "0 = 0", "A", "B", "C", "D", "ABCD", "A, B, C, D", "yes",
    "no", "Yes or No", "true", "none", "all of the above", "\\emptyset", "\\mathbb{R}", "\\infty",
    "(-\\infty, \\infty)", "\\frac{0}{0}", "0, 1, 2, 3, 4, 5, 6, 7, 8, 9", "x \\ge x", "\\{\\}",
    "the answer", "1 \\pm 1000",
)  # fmt: skip
TEMPLATES = (
    "{0} or {1}",
    "{0}, {1}",
    "{1} = {0}",
    "{0} \\pm {1}",
    "\\{{{0}, {1}\\}}",
    "{1} \\ne {0}",
    "{0} / {1}",
)


@dataclass(frozen=True)
class TriedRow:
    """One row: what is asked, and what is right."""

    id: str
    question: str
    reference: str
    answer_type: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Payment:
    """A reply that earned something without the answer."""

    row: TriedRow
    trick: str
    """Span, constant, template or edit."""
    reply: str
    earned: float


def check_reward(dataset: Dataset, count: int, function: str = "") -> list[str]:
    """What the first rows of a dataset pay for without the answer (`report`).

    function: a reward function `FILE.py:NAME`; empty for the built-in grader.
    """
    rows = []
    for index in range(min(count, len(dataset))):
        row = dataset[index]
        about = question_text(row.messages), row.answer, row.answer_type, facts_of_row(row)
        rows.append(TriedRow(row.id, *about))
    config = Rewards(function=function, max_timeout_rate=1.0, max_error_rate=1.0)
    with Scorer(config) as scorer:
        return report(rows, find_payments(scorer, rows))


def find_payments(scorer: Scorer, rows: Sequence[TriedRow], seed: int = 0) -> list[Payment]:
    """Every reply of every trick that earns something, in the order of the rows."""
    tries = list(_tries(rows, random.Random(seed)))
    paid: list[Payment] = []
    for start in range(0, len(tries), BATCH):
        batch = tries[start : start + BATCH]
        tried, _, replies = zip(*batch, strict=True)
        columns = zip(*((r.reference, r.answer_type, r.question, r.facts) for r in tried), strict=True)
        outcomes = scorer.score(list(map(sample_completion, replies)), *map(list, columns))
        for (row, trick, reply), outcome in zip(batch, outcomes, strict=True):
            if outcome.accuracy > 0:
                paid.append(Payment(row, trick, reply, outcome.accuracy))
    return paid


def _tries(rows: Sequence[TriedRow], draw: random.Random) -> Iterator[tuple[TriedRow, str, str]]:
    """(row, trick, reply) of all that is tried."""
    references = [unbox(row.reference) for row in rows]
    for row, reference in zip(rows, references, strict=True):
        other = draw.choice(references)
        replies = [("span", span) for span in spans(row.question, draw)]
        replies += [("constant", reply) for reply in CONSTANTS]
        replies += [("edit", edited) for edited in edits(reference, draw)]
        if len(other) > 1 and spelling(other) != spelling(reference):  # `C = 5` names 5
            replies += [("template", template.format(reference, other)) for template in TEMPLATES]
        for trick, reply in dict.fromkeys(replies):
            if trick == "template" or not is_reference(reply, reference, row.question):
                yield row, trick, reply


def spans(question: str, draw: random.Random) -> list[str]:
    """Runs of words of a question, and its mathematics between dollar signs."""
    words = question.split()
    runs = re.findall(r"\$([^$]{1,200})\$", question)
    for start in range(len(words)):
        for end in range(start + 1, min(start + MAX_SPAN_WORDS, len(words)) + 1):
            runs.append(" ".join(words[start:end]).strip(".,;:?!"))
    runs = list(dict.fromkeys(filter(None, runs)))
    return runs if len(runs) <= MAX_SPANS else draw.sample(runs, MAX_SPANS)


def edits(reference: str, draw: random.Random) -> list[str]:
    """A reference answer with a letter or digit changed or left out, or with its parts in another order."""
    edited = []
    at = [i for i, character in enumerate(reference) if character.isalnum()]
    for _ in range(EDITS if at else 0):
        i = draw.choice(at)
        changed = chr(ord(reference[i]) ^ 1) if reference[i] not in "zZ@" else "a"
        edited.append(reference[:i] + (changed if changed.isalnum() else "7") + reference[i + 1 :])
        if reference[i] != "0":  # `.5` is 0.5
            edited.append(reference[:i] + reference[i + 1 :])
    for separator in (", ", "-", ":"):
        parts = reference.split(separator)
        if len(parts) > 1:
            edited += [separator.join(parts[::-1]), parts[0], parts[-1]]
    return edited


def is_reference(reply: str, reference: str, question: str) -> bool:
    """Whether a reply is the reference answer, but for its look."""
    if plain_words(reply) == plain_words(reference) or spelling(reply) == spelling(reference):
        return True
    try:
        kind = read_kind(reference, question)
    except BadReferenceError:
        return False
    if isinstance(kind, Letters):
        named = option_letter(reply)
        return kind.letters == {named or listed(question).get(reply, "")}
    return is_spelled_alike(kind, reference, reply, question)


def report(rows: Sequence[TriedRow], payments: Sequence[Payment]) -> list[str]:
    """What was found, in lines: how many rows pay for which trick, and examples."""
    lines = [f"{len(rows)} rows; {len({p.row.id for p in payments})} pay for a reply that is not the answer"]
    tricks = Counter((payment.trick, payment.row.id) for payment in payments)
    for trick in ("span", "constant", "template", "edit"):
        paying = [row_id for kind, row_id in tricks if kind == trick]
        lines.append(f"  {trick:<9} {len(paying)} rows")
        examples = [payment for payment in payments if payment.trick == trick][:5]
        for payment in examples:
            lines.append(
                f"    {payment.row.id}: {payment.reply[:60]!r} earns {payment.earned:g}"
                f" where {payment.row.reference[:60]!r} is right"
            )
    constant = Counter(payment.reply for payment in payments if payment.trick == "constant")
    for reply, count in constant.most_common(3):
        if count > 1:
            lines.append(f"  the reply {reply!r} earns on {count} of {len(rows)} rows")
    return lines
