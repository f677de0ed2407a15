"""Checks rows, and decides whether a row is kept or goes to quarantine with a reason that is counted."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from data_prep.ingest.images import FACTOR, ImageFacts, image_tokens
from data_prep.sources.row_source import Candidate
from trainer.data.schema import AnswerType, count_placeholders, question_text
from trainer.images.decoding import ImageLimits

_SPECIAL = re.compile(r"<\|[a-z0-9_]+\|>")
_MEDIA = re.compile(r"<(?:video|audio)(?:[ _:-]?\d{1,3})?>|\[(?:VIDEO|AUDIO)\]", re.IGNORECASE)
UNASKABLE = frozenset((
    "image_count", "image_missing", "image_refused", "image_ambiguous", "image_empty", "image_undecodable",
    "image_crashed", "image_ratio", "image_too_large", "no_question", "other_media", "special_token",
))  # fmt: skip
"""Reasons for which not even an evaluation set can keep a row."""


@dataclass(frozen=True)
class Settings:
    """Options of a preparation, all of which change the result and are saved in the manifest."""

    limits: ImageLimits = field(default_factory=ImageLimits)
    min_pixels: int = 4 * 28 * 28
    """Smallest area of the model's images (model.min_pixels), which decides the number of image tokens."""
    max_pixels: int = 1280 * 28 * 28
    max_tokens: int = 4096
    """Longest prompt, image tokens included."""
    tokenizer: str = ""
    """Local directory or hub id of the model whose tokenizer counts the text; empty: image tokens only."""
    validation: float = 0.02
    """Share of the rows for the validation split, where the source has no splits of its own; 0 for none."""
    split_seed: int = 0
    limit: int = 0
    """Number of rows of the source that are read; 0: all."""
    evaluation: bool = False
    """Keep all rows as published; what the checks find is counted. A row that cannot be asked at all is
    an error."""
    sft: bool = False
    """For supervised training: no reference answer is needed, and no system prompt of ours is added."""


@dataclass
class CheckedRow:
    """A candidate after its checks, without text or images: one for each row is in memory."""

    index: int
    source: str
    split: str
    answer_type: AnswerType
    images: tuple[str, ...]
    """sha256 of each image."""
    question: bytes
    """Hash of the normalized question."""
    answer: str
    tokens: int = 0
    reason: str = ""
    """Why the row is left out; empty if it is kept. The word before the colon is counted."""
    found: str = ""
    """The reason for which a row of an evaluation set would have been left out."""


class References:
    """Checks reference answers with the grader: by form, or by algebra in processes that are killed at
    a deadline."""

    def __init__(self, workers: int, deadline_s: float = 5.0) -> None:
        from trainer.config import Rewards as Config
        from trainer.rewards.scorer import Scorer

        self._scorer = Scorer(Config(workers=workers, deadline_s=deadline_s, max_error_rate=1.0))
        self._known: dict[tuple[str, str], tuple[AnswerType, str]] = {}

    def check(self, rows: list[Candidate]) -> list[tuple[AnswerType, str]]:
        """The grader's route for each row's answer, and why it is no reference (empty if it is one)."""
        from trainer.rewards.grading import grader

        answers = [(row.answer, question_text(row.messages)) for row in rows]
        algebra: list[tuple[str, str]] = []
        for pair in dict.fromkeys(answers):
            if pair in self._known:
                continue
            answer, question = pair
            kind = grader.classify(answer, question)
            if kind == "math":
                algebra.append(pair)
            else:
                error = grader.reference_error(answer, kind, question)
                self._known[pair] = kind, f"bad_answer: {error}" if error else ""
        if algebra:
            references, questions = zip(*algebra, strict=True)
            errors = self._scorer.reference_errors(references, ["math"] * len(algebra), questions)
            for pair, error in zip(algebra, errors, strict=True):
                self._known[pair] = "math", f"bad_answer: {error}" if error else ""
        return [self._known[pair] for pair in answers]

    def same(self, first: CheckedRow, second: CheckedRow) -> bool:
        """Whether two reference answers are equal for the grader, as `0.5` and `1/2` are."""
        if first.answer == second.answer:
            return True
        text = f"<think></think><answer>$\\boxed{{{second.answer}}}$</answer>"
        (outcome,) = self._scorer.score([text], [first.answer], [first.answer_type])
        return outcome.verdict == "correct"

    def close(self) -> None:
        self._scorer.close()


def image_error(paths: list[str], facts: list[ImageFacts | None | str]) -> str:
    """Why a row must be left out because of one of its images; empty if all are good."""
    for path, image in zip(paths, facts, strict=True):
        if image is None:
            return f"image_missing: no {path} in the source"
        if isinstance(image, str):
            return image
        if image.error:
            return image.error
    return ""


def judge(
    row: Candidate,
    reference: tuple[AnswerType, str],
    facts: list[ImageFacts | None | str],
    text_tokens: int,
    settings: Settings,
    image_side: int = FACTOR,
) -> CheckedRow:
    """Makes all checks that need only this row.

    Args:
        row: the candidate.
        reference: route and fault of the answer, from `References.check`.
        facts: facts of its images; None for a missing image, a reason for one that cannot be read.
        text_tokens: tokens of the rendered prompt, with one for each image; 0 without a tokenizer.
        settings: the limits.
        image_side: side in pixels of an image token (`tokens.image_token_side`).
    """
    kind, reason = ("text", "") if settings.sft else reference
    placeholders = count_placeholders(row.messages)
    if placeholders != len(row.images):
        reason = f"image_count: {placeholders} placeholders, {len(row.images)} images"
    elif not question_text(row.messages).strip():
        reason = "no_question: the user's turns hold no text"
    elif mark := _MEDIA.search(question_text(row.messages)):
        reason = f"other_media: {mark[0]} in the text, and only images are shown"
    elif token := special_token(row):
        reason = f"special_token: {token} in the text would be read as one of the model's own"
    reason = image_error(row.images, facts) or reason
    images = [image for image in facts if isinstance(image, ImageFacts)]
    tokens = text_tokens
    if not reason:
        for image in images:
            limits = settings.min_pixels, settings.max_pixels
            tokens += image_tokens(image.width, image.height, *limits, image_side)
        if text_tokens:  # these count one token for each image
            tokens -= len(images)
        if tokens > settings.max_tokens:
            reason = f"too_long: {tokens} tokens, more than {settings.max_tokens}"
    return CheckedRow(
        index=row.index,
        source=row.source,
        split=row.split,
        answer_type=kind,
        images=tuple(image.sha256 for image in images),
        question=question_hash(question_text(row.messages)),
        answer=row.answer,
        tokens=tokens,
        reason=reason,
    )


def special_token(row: Candidate) -> str:
    """A control token of Qwen's vocabulary written out in a row's text; empty if there is none."""
    texts = [row.solution]
    for message in row.messages:
        content = message["content"]
        if isinstance(content, str):
            texts.append(content)
        else:
            texts += [part.get("text", "") for part in content]
    for text in texts:
        match = _SPECIAL.search(text)
        if match:
            return match[0]
    return ""


def question_hash(text: str) -> bytes:
    """A hash of 16 bytes that is equal for questions that count as the same."""
    return hashlib.sha256(normal_question(text).encode()).digest()[:16]


def normal_question(text: str) -> str:
    """Lower case with single spaces: what counts as the same question."""
    return re.sub(r"\s+", " ", text).strip().casefold()


def mark_repeats(rows: Iterable[CheckedRow], equal: Callable[[CheckedRow, CheckedRow], bool]) -> None:
    """Marks rows that ask the same question about the same images, within a split.

    With the same answer, the first stays and the others are `duplicate`; with different answers none
    can be trusted, and all are `conflicting_answers`.
    """
    groups: dict[tuple, list[CheckedRow]] = defaultdict(list)
    for row in rows:
        if not row.reason:
            groups[row.split, row.question, row.images].append(row)
    for same in groups.values():
        first = same[0]
        all_agree = all(equal(first, other) for other in same[1:])
        if not all_agree:
            answers = ", ".join(sorted({row.answer for row in same})[:5])
            numbers = ", ".join(str(row.index) for row in same[:5])
            for row in same:
                row.reason = f"conflicting_answers: {answers} (rows {numbers})"
        else:
            for row in same[1:]:
                row.reason = f"duplicate: of row {first.index}"
