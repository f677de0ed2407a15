"""Completions that one version of the weights begins and the next one ends. Runs inside scenarios.py; not a
test itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tests.learning.one_rank import OneRank, same, trace, trainable
from trainer.algorithm.traces import Prompt, Trace
from trainer.config import RunConfig

CUT = 6
"""Tokens of the first piece."""
ROWS = 4
UPDATES = 3
"""Between the two versions."""


def continued_completions(config: RunConfig, rank: int, port: int) -> dict[str, Any]:
    """How far engine and policy are apart on each piece, and whether what goes on is a function of what there
    was: the same call twice, in another order, and beside prompts that begin."""
    worker = OneRank(config).start(rank, port)
    prompts = [Prompt(row, row, 1000 + row, cut=CUT) for row in range(ROWS)]
    worker.sampler.load(0)
    begun = sample(worker, prompts)
    out: dict[str, Any] = {"begun": distances(worker, begun, 0)}
    worker.sampler.rest()
    answers = [trace(row, worker.prompt_ids(row), [5, 6, 7 + row]) for row in range(8)]
    for _ in range(UPDATES):
        worker.step(trainable(answers, [1.0] * 8), config.algorithm.micro_batch_tokens)

    worker.sampler.load(1)
    ending = [replace(prompt, cut=0) for prompt in prompts]
    ended = sample(worker, ending, begun)
    beginning = [Prompt(row, row, 2000 + row, cut=CUT) for row in range(ROWS, 2 * ROWS)]
    beside = sample(worker, [*beginning, *ending[::-1]], begun)
    again = sample(worker, ending, begun)
    out["repeated"] = alike(ended, again)
    whole = [one for one in beside if one.group < ROWS]
    out["tokens_beside"] = [t.tokens.tolist() for t in ended] == [t.tokens.tolist() for t in whole]
    out |= {"older": distances(worker, ended, 0), "newer": distances(worker, ended, 1)}
    out["segments"] = [list(one.segments) for one in ended]
    out["pieces"] = [[one.shared, len(one.completion), one.end] for one in ended]
    out["kept"] = all(
        same(was, replace(now, tokens=now.tokens[: len(was.tokens)], **first_piece(was, now)))
        for was, now in zip(cut(begun), cut(begun, ended), strict=True)
    )

    newest = np.concatenate([one.token_versions for one in ended]) == 1
    out["newest_tokens"] = int(newest.sum())
    return out


def sample(worker: OneRank, prompts: list[Prompt], begun: list[Trace] = ()) -> list[Trace]:
    """Completions of one call of the engine, with those that had ended before, by group and index."""
    config = worker.config
    going_on = cut(begun)
    groups = {one.group for one in begun} - {one.group for one in going_on}
    found = []
    for group in worker.engine.generate(
        [prompt for prompt in prompts if prompt.group not in groups],
        lambda prompt: worker.reader.request(config.train_split, prompt.row),
        samples_per_prompt=config.rollout.samples_per_prompt,
        temperature=1.0,
        max_tokens=config.rollout.max_tokens,
        begun=going_on,
    ):
        found += group
    again = {(one.group, one.index) for one in found}
    found += [one for one in begun if (one.group, one.index) not in again]
    return sorted(found, key=lambda one: (one.group, one.index))


def cut(begun: list[Trace], now: list[Trace] | None = None) -> list[Trace]:
    """Those of `now` that were cut when they were begun; now: as they were by default."""
    pairs = zip(begun, now or begun, strict=True)
    return [after for before, after in pairs if before.end == "cut"]


def first_piece(was: Trace, now: Trace) -> dict[str, Any]:
    """Fields of a whole completion that it had when it was cut."""
    count = len(was.learned)
    assert now.logprobs is not None
    return {
        "learned": now.learned[:count],
        "logprobs": now.logprobs[:count],
        "segments": now.segments[:1],
        "end": was.end,
        "text": was.text,
    }


def alike(one: list[Trace], other: list[Trace]) -> bool:
    return all(same(a, b) for a, b in zip(one, other, strict=True))


def distances(worker: OneRank, traces: list[Trace], version: int) -> list[float]:
    """Largest and mean |log-prob difference| of the engine of `version` and the policy as it stands."""
    (policy,) = worker.logprobs([traces])["old"]
    of_version = np.concatenate([one.token_versions for one in traces]) == version
    gap = np.abs(policy - np.concatenate([one.logprobs for one in traces]))[of_version]
    return [float(gap.max()), float(gap.mean())]
