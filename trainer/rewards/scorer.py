"""Grades batches of completions; one completion can neither hang a batch nor lose it.

Letters, numbers and words are graded by their form in the calling process, in microseconds. Whatever
must be evaluated, and every user function, runs in processes that can be killed (`process_pool.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from typing import Any, get_args

from trainer import config as configuration
from trainer.algorithm.traces import Outcome
from trainer.config.validation import check_rewards
from trainer.rewards.completion_facts import facts_of, function_specs
from trainer.rewards.grade import ErrorRateError, Grade, TimeoutRateError, grade_of
from trainer.rewards.grading import grader
from trainer.rewards.grading.expression import Rule
from trainer.rewards.grading.extraction import MAX_BOX_CHARS
from trainer.rewards.grading.stated_answers import FORMS
from trainer.rewards.judge import Case, Judge
from trainer.rewards.process_pool import ProcessPool
from trainer.rewards.remote import RewardClient

MAX_REMEMBERED = 100_000
"""Verdicts of evaluated expressions that are kept, so that equal answers of a group are evaluated once."""

MOST_TOLD = 5
"""Different failures of graders that are printed; the metrics count all of them."""
GRADER = "the built-in grader"
_COUNTED = ("timeout", "error", "no_answer")


Task = tuple[str, ...]
"""What a grader's process is given (`pool_worker.grade_task`)."""


class Scorer:
    """Grades completions against the reference answers of their rows.

    Several threads may use it. No process starts before the first completion that needs one, unless a
    user function must be checked.

    Raises:
        ConfigError: a user function cannot be loaded, or options are set that exclude each other.
    """

    def __init__(self, config: configuration.Rewards):
        check_rewards(config)
        self.config = config
        self._form = FORMS[config.answer]
        self._judge = Judge(config) if config.judge_url else None
        self._judged_types = [name.strip() for name in config.judge_types.split(",")]
        self._remote = RewardClient(config) if config.remote_url else None
        specs = function_specs(config.own)
        self._pool = ProcessPool(config.workers, config.deadline_s, specs, env=config.env)
        self._known: dict[Task, Grade] = {}
        self._last_shares: dict[str, float] = {}
        self._shown: set[str] = set()
        self.wants_ids = bool(config.own) and self._pool.check()
        """Whether a user's function wants the token ids of completions."""

    def score(
        self,
        texts: Sequence[str],
        references: Sequence[str],
        answer_types: Sequence[str],
        questions: Sequence[str] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Outcome]:
        """Grades a batch: `texts[i]` against `references[i]` as `answer_types[i]`. The order is kept.

        Args:
            texts: whole completions.
            references: contents of the boxes of the reference answers.
            answer_types: `grader.classify` of the reference answers.
            questions: their nouns count as units; without them only the units of the list do.
            rows: what a user's function may ask for besides (`trainer/rewards/completion_facts.py`).

        Raises:
            ValueError: the lists differ in length.
            TimeoutRateError, ErrorRateError: too many of these completions timed out, or ended in errors.
            ServerAway: a server that grades is away for longer than its client waits.
        """
        questions = questions or [""] * len(texts)
        if not len(texts) == len(references) == len(answer_types) == len(questions):
            raise ValueError(
                f"{len(texts)} texts, {len(references)} references, {len(answer_types)} types, "
                f"{len(questions)} questions: lengths must agree"
            )
        if self._remote is not None:
            graded = self._remote.grade(texts, references, answer_types, questions)
            return self._outcomes(texts, graded, 0, 0)
        graded: list[Grade | None] = [None] * len(texts)
        waiting: dict[Task, list[int]] = {}
        cases: dict[int, Case] = {}
        columns = zip(texts, references, answer_types, questions, strict=True)
        for i, (text, *about) in enumerate(columns):
            if self.config.own:
                task = ("user", text, facts_of(*about, rows[i] if rows else {}))
            else:
                content, hedged = self._form.answer(text)
                if self._judge and content and not hedged and about[1] in self._judged_types:
                    cases[i] = (content[:MAX_BOX_CHARS], about[0], about[2])
                graded[i] = self._decided(content, hedged, *about)
                task = ("grade", content or "", *about)
            if graded[i] is None:
                waiting.setdefault(task, []).append(i)
        self._evaluate(waiting, graded)

        done = list(filter(None, graded))
        judged = self._ask_judge(self._judge, cases, done) if self._judge is not None else 0
        return self._outcomes(texts, done, sum(map(len, waiting.values())), judged)

    def scored_elsewhere(self, texts: Sequence[str], scores: Sequence[float | None]) -> list[Outcome]:
        """Outcomes of episodes that their environment has scored instead of the graders; None: it failed to.

        Raises ErrorRateError.
        """
        graded = []
        for score in scores:
            if score is None:
                graded.append(
                    Grade("error", 0.0, "turns.environment: its score failed (see the ranks' logs)")
                )
            else:
                graded.append(Grade("correct" if score > 0 else "wrong", score))
        return self._outcomes(texts, graded, 0, 0)

    def _decided(
        self, content: str | None, hedged: bool, reference: str, answer_type: str, question: str
    ) -> Grade | None:
        """The grade where no process is needed, else None."""
        if content is None:
            return Grade("no_answer", 0.0)
        verdict, rule = grader.judge(
            "" if hedged else content,
            reference,
            answer_type,  # ty: ignore[invalid-argument-type]
            question,
            evaluate=False,
        )
        if verdict is None:
            return self._known.get((content, reference, answer_type, question))
        why = f"{GRADER} cannot read the reference answer {reference[:80]!r}" if verdict == "error" else ""
        return Grade(verdict, float(verdict == "correct"), why, rule=rule or "")

    def _evaluate(self, waiting: Mapping[Task, Sequence[int]], graded: list[Grade | None]) -> None:
        """Has tasks done by the processes, and fills in the grades of the completions that wait for each.

        Raises TimeoutRateError and ErrorRateError, as soon as their limits cannot be met any more.
        """
        tasks = {self._pool.submit(list(task)): task for task in waiting}
        try:
            for future in as_completed(tasks):
                task = tasks[future]
                grade = grade_of(future.result(), self._named)
                self._remember(task, grade)
                for i in waiting[task]:
                    graded[i] = grade
                if grade.verdict in ("timeout", "error"):
                    self._refuse_failures(list(filter(None, graded)), len(graded))
        finally:
            for future in tasks:
                future.cancel()

    def _remember(self, task: Task, grade: Grade) -> None:
        """Keeps the verdict of an expression, which equal answers have, too."""
        if task[0] != "grade" or grade.verdict not in ("correct", "wrong"):
            return
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[task[1:]] = grade

    @property
    def _named(self) -> str:
        """Who grades in the processes, for messages."""
        paths = " + ".join(function.path for function in self.config.own)
        return f"rewards.function {paths}" if paths else GRADER

    def _ask_judge(self, judge: Judge, cases: Mapping[int, Case], graded: list[Grade]) -> int:
        """Replaces the grades of the completions that the rules find wrong by the judge's. Returns their
        number."""
        wrong = {i: case for i, case in cases.items() if graded[i].verdict == "wrong"}
        for i, grade in zip(wrong, judge.grades(list(wrong.values())), strict=True):
            graded[i] = grade
        return len(wrong)

    def reference_errors(
        self, references: Sequence[str], answer_types: Sequence[str], questions: Sequence[str] | None = None
    ) -> list[str | None]:
        """`grader.reference_error` for each reference answer, under the deadline."""
        questions = questions or [""] * len(references)
        futures = []
        for task in zip(references, answer_types, questions, strict=True):
            futures.append(self._pool.submit(["reference", *task]))

        errors: list[str | None] = []
        for reference, future in zip(references, futures, strict=True):
            message = future.result()[0]
            if message in ("timeout", "error"):
                message = f"reference answer {reference[:80]!r}: reading it ended in {message}"
            errors.append(message)
        return errors

    def by_value(
        self, answers: Sequence[tuple[str | None, float]], answer_type: str, question: str = ""
    ) -> list[tuple[str | None, float]]:
        """Answers of one row with their accuracies; those of equal value are spelled as the first of them.

        Right answers are equal. Where a user function grades, each spelling is an answer of its own.
        """
        if self.config.own:
            return list(answers)
        spelled: dict[str | None, str | None] = {None: None}
        firsts: list[tuple[str, float]] = []
        for answer, accuracy in answers:
            if answer is None or answer in spelled:
                continue
            right = accuracy == 1.0
            for first, earned in firsts:
                if earned == accuracy and (right or self._same(first, answer, answer_type, question)):
                    spelled[answer] = first
                    break
            else:
                firsts.append((answer, accuracy))
                spelled[answer] = answer
        return [(spelled[answer], accuracy) for answer, accuracy in answers]

    def _same(self, first: str, second: str, answer_type: str, question: str) -> bool:
        task = (second, first, answer_type, question)
        verdict: str | None = grader.decide_fast(*task)  # ty: ignore[invalid-argument-type]
        if verdict is None and task in self._known:
            verdict = self._known[task].verdict
        if verdict is None:
            verdict = self._pool.submit(["grade", *task]).result()[0]
        return verdict == "correct"

    def stats(self) -> dict[str, float]:
        """Shares of the last batch by verdict, and counts since the start of restarts and the judge's
        requests."""
        stats = {**self._last_shares, "perf/grader_restarts": float(self._pool.restarts)}
        if self._judge is not None:
            stats["perf/judge_requests"] = self._judge.requests
            stats["perf/judge_remembered"] = self._judge.remembered
        return stats

    def resume(self, logged: Mapping[str, float]) -> None:
        """Continues the count of the judge's requests from the metrics of the step that a run resumes
        from."""
        if self._judge is not None:
            self._judge.requests = int(logged.get("perf/judge_requests", 0))

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _outcomes(
        self, texts: Sequence[str], graded: Sequence[Grade], evaluated: int, judged: int
    ) -> list[Outcome]:
        outcomes = []
        for text, grade in zip(texts, graded, strict=True):
            form = self._form.credit(text)
            reward = self.config.accuracy_weight * grade.accuracy + self.config.format_weight * form
            outcomes.append(Outcome(grade.verdict, grade.accuracy, form, reward, grade.rule))
        if outcomes:
            self._count(graded, evaluated, judged)
        return outcomes

    def _count(self, graded: Sequence[Grade], evaluated: int, judged: int) -> None:
        """Keeps the batch's shares. Raises as `_refuse_failures`."""
        counts = Counter(grade.verdict for grade in graded)
        rules = Counter(grade.rule for grade in graded)
        total = len(graded)
        shares = {f"reward/{verdict}_rate": counts[verdict] / total for verdict in _COUNTED}
        shares |= {f"reward/decided_{rule}": rules[rule] / total for rule in get_args(Rule)}
        shares["reward/algebra_fraction"] = evaluated / total
        if self._judge is not None:
            shares["reward/judged_fraction"] = judged / len(graded)
        for function in self.config.functions:
            gave = [grade.parts[function.metric] for grade in graded if function.metric in grade.parts]
            if gave:
                shares[f"reward/function_{function.metric}"] = sum(gave) / len(gave)
        self._last_shares = shares
        self._refuse_failures(graded, len(graded))

    def _refuse_failures(self, graded: Sequence[Grade], completions: int) -> None:
        """Raises where the graders themselves fail too often; else prints each kind of failure once. graded:
        those of the batch's completions so far."""
        limits = self.config
        for verdict, limit, kind in (
            ("timeout", limits.max_timeout_rate, TimeoutRateError),
            ("error", limits.max_error_rate, ErrorRateError),
        ):
            # A number that is not finite ends the run elsewhere, with its row (unusable_rewards.py).
            ended = [grade for grade in graded if grade.verdict == verdict]
            failed = [grade.why for grade in ended if math.isfinite(grade.accuracy)]
            self._tell(failed)
            if len(failed) > limit * completions:
                left = completions - len(graded)
                raise kind(_too_many(verdict, failed, completions, left, limit))

    def _tell(self, failed: Sequence[str]) -> None:
        """Prints each kind of failure once."""
        for why in failed:
            if why not in self._shown and len(self._shown) < MOST_TOLD:
                self._shown.add(why)
                print(f"warning: a completion was not graded, and earns nothing: {why}", flush=True)


def _too_many(verdict: str, failed: Sequence[str], completions: int, left: int, limit: float) -> str:
    """Why a run ends whose graders fail: how often, which one and how, and what to do.

    left: completions that were not graded any more.
    """
    (often, times), *others = Counter(failed).most_common()
    fate = "timed out in grading" if verdict == "timeout" else "could not be graded"
    more = f" ({times} times; {len(others)} other failures)" if others else ""
    unseen = f" ({left} are not graded)" if left else ""
    cure = "correct what fails"
    if verdict == "timeout" and not often.startswith("rewards.judge"):
        cure = "look at the samples, and raise rewards.deadline_s if the node is overloaded"
    elif verdict == "timeout":
        cure = "raise rewards.judge_timeout_s, or give the judge more machines"
    if verdict == "timeout" and often.startswith("rewards.remote_url"):
        cure = "look at the samples, and give the server more machines"
    return (
        f"{len(failed)} of {completions} completions {fate}{unseen},"
        f" more than rewards.max_{verdict}_rate {limit:g}: {often}{more}; {cure}."
        " Nothing was learned from this step"
    )
