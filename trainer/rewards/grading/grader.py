r"""Decides whether an answer is the reference answer, by pure functions of strings.

The reference answer comes with the request; nothing is looked up by the text of a prompt. It is read as
one kind (`kinds.py`), and the answer is read as that kind, by what `licences.py` allows for it; nothing
else is tried. `decide_fast` decides what needs no evaluation, `decide` all. Its time is bounded for all
input that is known, but it belongs in a process that can be killed.
"""

from __future__ import annotations

from trainer.algorithm.traces import Verdict
from trainer.data.schema import AnswerType
from trainer.rewards.grading import kinds, option_letters
from trainer.rewards.grading.expression import Rule, Undecided
from trainer.rewards.grading.extraction import MAX_BOX_CHARS, unbox
from trainer.rewards.grading.kinds import BadReferenceError, Kind, read_kind
from trainer.rewards.grading.licences import Comparison, NeedsEvaluation, is_spelled_alike
from trainer.rewards.grading.notation import common_notation
from trainer.rewards.grading.question import read_question, spelling
from trainer.rewards.grading.stated_answers import FORMS


def grade(
    completion: str, reference: str, answer_type: AnswerType, question: str = "", form: str = "block"
) -> Verdict:
    """Grades one whole completion.

    Args:
        completion: the model's text, reasoning included.
        reference: the content of the reference answer's box, with or without `$…$` and `\\boxed{…}`.
        answer_type: `classify(reference, question)`.
        question: it says in which form, order and unit it wants its answer.
        form: where the answer stands (`stated_answers.FORMS`).

    Returns:
        "correct", "wrong", "no_answer" (none in that form), or "error" (the reference answer cannot be
        read).
    """
    content, hedged = FORMS[form].answer(completion)
    if content is None:
        return "no_answer"
    return decide("" if hedged else content, reference, answer_type, question)


def decide(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict:
    """Grades the content of a box.

    "error" if the reference answer cannot be read, or cannot be told from the answer (`Undecided`).
    """
    return judge(content, reference, answer_type, question)[0] or "error"


def decide_fast(content: str, reference: str, answer_type: AnswerType, question: str = "") -> Verdict | None:
    """`decide` by the form of the strings alone, in microseconds; None where something must be evaluated."""
    return judge(content, reference, answer_type, question, evaluate=False)[0]


def judge(
    content: str, reference: str, answer_type: AnswerType, question: str = "", evaluate: bool = True
) -> tuple[Verdict | None, Rule | None]:
    """`decide` or `decide_fast`, and the rule that decided; None for an error."""
    rules: set[Rule] = set()
    try:
        same = _equal(reference, content, answer_type, question, evaluate, rules)
    except (BadReferenceError, Undecided):
        return "error", None
    except (NeedsEvaluation, RecursionError):
        if evaluate:
            raise
        return None, None
    # An answer of several parts rests on points, then exact values, then texts.
    weakest: Rule = "points" if "points" in rules else "exact" if "exact" in rules else "text"
    return "correct" if same else "wrong", weakest


def classify(reference: str, question: str = "") -> AnswerType:
    """The answer type that fits a reference answer."""
    try:
        kind = read_kind(unbox(reference), question)
    except BadReferenceError:
        return "math"
    match kind:
        case kinds.Letters():
            return "letter"
        case kinds.Number():
            return "number"
        case kinds.Words() | kinds.ValueRange() | kinds.Bound() | kinds.Exactly("code" | "day"):
            return "text"
    return "math"


def reference_error(reference: str, answer_type: AnswerType, question: str = "") -> str | None:
    """Why nothing can be graded against a reference answer, or None. Evaluates it, like `decide`.

    Besides being readable it must equal itself: what nothing can match is a data error too.
    """
    content = unbox(reference)
    if not content or not common_notation(content):
        return "empty reference answer"
    if len(content) > MAX_BOX_CHARS:
        return f"reference answer longer than {MAX_BOX_CHARS} characters"
    try:
        if not _equal(content, content, answer_type, question, True, set(), by_spelling=False):
            return f"reference answer {content[:80]!r} does not equal itself as {answer_type}"
    except Undecided:
        return f"reference answer {content[:80]!r} is too large to be told from its neighbors"
    except BadReferenceError:
        return f"unreadable reference answer {content[:80]!r} ({answer_type})"
    except RecursionError:
        return f"reference answer {content[:80]!r} is nested too deeply"
    return None


def _is_promised(kind: Kind, answer_type: AnswerType, reference: str) -> bool:
    """Whether a reference answer can have been meant as this type: what is a letter or a number to one
    question may be a name or a code to another."""
    if answer_type == "letter":
        return option_letters.option_letter(reference) is not None or isinstance(kind, kinds.Letters)
    if isinstance(kind, kinds.Exactly):
        return answer_type != "number" or kind.name in ("code", "day")
    of_number = (kinds.Number, kinds.ValueRange, kinds.Bound, kinds.Time, kinds.Ratio)
    return answer_type != "number" or isinstance(kind, of_number)


def _equal(
    reference: str,
    answer: str,
    answer_type: AnswerType,
    question: str,
    evaluate: bool,
    rules: set[Rule],
    by_spelling: bool = True,
) -> bool:
    """Whether two contents are one answer. Adds what decided to `rules`."""
    reference = unbox(reference)
    kind = read_kind(reference, question)
    if not _is_promised(kind, answer_type, reference):
        raise BadReferenceError(f"the reference answer {reference[:80]!r} is no {answer_type}")
    if not answer or len(answer) > MAX_BOX_CHARS:
        return False
    answer = unbox(answer)
    wanted = read_question(question)
    of_characters = isinstance(kind, (kinds.Letters, kinds.Words)) or getattr(kind, "name", "") == "code"
    copied = not of_characters and wanted.text != "" and wanted.shows(spelling(answer))
    if copied and not is_spelled_alike(kind, reference, answer, question):
        return False
    comparison = Comparison(question, f"{question} {reference}", wanted, evaluate, by_spelling, rules)
    return comparison.of_kind(kind, reference, answer)
