"""Grades the completions of a run, and says what of them a guard would name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.algorithm.traces import Outcome, Trace
from trainer.config import RunConfig
from trainer.data.dataset import Dataset
from trainer.data.schema import question_text
from trainer.observe.guards import shortened_completion
from trainer.rewards.completion_facts import facts_of_row
from trainer.rewards.scorer import Scorer
from trainer.rewards.unusable_rewards import describe_largest_reward, refuse_unusable
from trainer.turns.counts import names_of, usual_failure
from trainer.turns.environments import environment_of, tools_of


class CompletionGrader:
    """The run's scorer, asked with what the rows of completions say."""

    def __init__(self, config: RunConfig, scorer: Scorer, train_set: Dataset) -> None:
        self.config, self.scorer = config, scorer
        self._train_set = train_set
        self.suspects: dict[str, str] = {}
        """What the guards of rewards, tools and the engine would name of the last training completions, by
        guard."""

    def score(self, traces: Sequence[Trace], dataset: Dataset | None = None) -> list[Outcome]:
        """Grades completions against the reference answers of their rows, or as their environment scored
        them. dataset: that of the rows; None: the training split. Raises ConfigError, naming it, for a reward
        that is not a finite number."""
        dataset = dataset or self._train_set
        completions = [trace.text for trace in traces]
        environment = environment_of(self.config.turns)
        if environment is not None and environment.scores:
            outcomes = self.scorer.scored_elsewhere(completions, [trace.score for trace in traces])
        else:
            outcomes = self._score(traces, completions, dataset)
        refuse_unusable(self.config.rewards, traces, outcomes)
        if dataset is self._train_set:
            self.suspects = self._suspects(traces, outcomes)
        return outcomes

    def _score(self, traces: Sequence[Trace], completions: list[str], dataset: Dataset) -> list[Outcome]:
        # A row's completions are many, and reading it reads its images.
        by_number = {number: dataset[number] for number in dict.fromkeys(trace.row for trace in traces)}
        rows = [by_number[trace.row] for trace in traces]
        facts: list[dict[str, Any]] = [facts_of_row(row) for row in rows] if self.config.rewards.own else []
        if facts and self.scorer.wants_ids:
            for trace, of_row in zip(traces, facts, strict=True):
                of_row["completion_ids"] = trace.tokens[trace.learned].tolist()
        references = [row.answer for row in rows]
        questions = [question_text(row.messages) for row in rows]
        return self.scorer.score(completions, references, [row.answer_type for row in rows], questions, facts)

    def _suspects(self, traces: Sequence[Trace], outcomes: Sequence[Outcome]) -> dict[str, str]:
        unsound = [trace for trace in traces if not trace.sound]
        suspects = {"reward": describe_largest_reward(self.config.rewards, traces, outcomes)}
        named = ", ".join(names_of(tools_of(self.config.turns)))
        failure = usual_failure(traces)
        if failure:
            suspects["tools"] = f"{named or self.config.turns.environment}: {failure}"
        if unsound:
            completion = shortened_completion(unsound[0].text)
            suspects["engine"] = f"row {unsound[0].row}, completion {completion!r}"
        return suspects
