"""Writes the completions that a run was trained on as rows: text, verdict, rewards, advantage.

They come from the run's rollout log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer import config as configuration
from trainer.algorithm.advantages import RunningNorm
from trainer.algorithm.credit import reward_step
from trainer.checkpoint.rollout_archive import GradedStep
from trainer.checkpoint.rollout_log import logged_steps
from trainer.config import ConfigError, RunConfig
from trainer.config.run_folder import CONFIG, LAUNCH
from trainer.config.run_store import ROLLOUTS, RunStore
from trainer.observe.mirror import RunMirror
from trainer.observe.report_page import PULLED
from trainer.storage.seal import Seal
from trainer.storage.storage import Storage


def write(run: str, bucket: str, out: str, tokens: bool) -> dict[str, int]:
    """Writes one line of JSON per completion of `run`, an id or a folder, and returns counts.

    With `tokens`, lines have token ids and log-probabilities, too. Raises ConfigError if nothing of the
    run is found.
    """
    folder, url = _place(run, bucket)
    config = _config(folder, url)
    storage = Storage(RunStore(url).rollouts) if url else None
    counts = {"steps": 0, "completions": 0, "without advantage": 0}
    norm = RunningNorm()
    next_step = 1
    part = Path(f"{out}.{os.getpid()}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("w", encoding="utf-8") as file:
            for step, graded in logged_steps(folder / ROLLOUTS, storage, Seal.of_environment(config.run_id)):
                # Normalized rewards follow from all steps before. If one is missing, they are not known.
                whole = next_step == step
                next_step = step + 1 if whole else 0
                for line in rows(config, step, graded, norm if whole else None, tokens):
                    counts["completions"] += 1
                    counts["without advantage"] += line["advantage"] is None
                    file.write(json.dumps(line) + "\n")
                counts["steps"] += 1
        if not counts["steps"]:
            raise ConfigError(
                f"{run} has no rollout log here or in its bucket" + ("" if url else ": give --bucket")
            )
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return counts


def rows(
    config: RunConfig, step: int, graded: GradedStep, norm: RunningNorm | None, tokens: bool = False
) -> Iterator[dict[str, Any]]:
    """Rows of a step's completions.

    The advantage is that of the update. It is None for groups that the update left out, and if it followed
    from what the log does not hold: the KL in the reward, or normalized rewards without the steps before
    (`norm` None).
    """
    advantages = _advantages(config, graded, norm)
    for i, (trace, outcome) in enumerate(zip(graded.traces, graded.outcomes, strict=True)):
        line: dict[str, Any] = {
            "step": step,
            "row": trace.row,
            "group": trace.group,
            "index": trace.index,
            "completion": trace.text,
            "verdict": outcome.verdict,
            "accuracy": outcome.accuracy,
            "format": outcome.format,
            "reward": outcome.reward,
            "advantage": advantages.get(i),
            "tokens": len(trace.completion),
            "prompt_tokens": trace.shared,
            "finished": trace.finished,
            "weight_version": trace.versions[1],
        }
        if trace.dialog:
            line["dialog"] = list(trace.dialog)
        if tokens:
            line["prompt_token_ids"] = trace.prompt.tolist()
            line["token_ids"] = trace.completion.tolist()
            line["logprobs"] = None if trace.logprobs is None else trace.logprobs.tolist()
        yield line


def _advantages(config: RunConfig, graded: GradedStep, norm: RunningNorm | None) -> dict[int, float]:
    """Index of a completion -> its advantage, as far as it is known."""
    credit = reward_step(config, graded.traces, graded.outcomes)
    total = credit.rewards.total
    if config.algorithm.normalize_reward and norm is not None:
        total = norm.normalize(total)
    if config.kl_in_reward or (norm is None and config.algorithm.normalize_reward):
        return {}
    members = credit.members(config.rollout.prompts_per_step)
    advantages = credit.advantages(config, total, members, None)
    return dict(zip(members, advantages.values.tolist(), strict=True))


def _place(run: str, bucket: str) -> tuple[Path, str]:
    """(the run's folder here, its URL in the bucket or "")."""
    folder = Path(run) if Path(run).is_dir() else Path("runs") / run
    launched = folder / LAUNCH
    if not bucket and launched.is_file():
        bucket = json.loads(launched.read_text()).get("bucket", "")
    if not bucket and not folder.is_dir():
        raise ConfigError(
            f"no run at {run}: give the id or the folder of a run, and --bucket for one of another machine"
        )
    return folder, f"{bucket.rstrip('/')}/{folder.name}" if bucket else ""


def _config(folder: Path, url: str) -> RunConfig:
    pulled = folder / PULLED
    for path in (folder / CONFIG, pulled / CONFIG):
        if path.is_file():
            return configuration.load(path)
    if url:
        RunMirror(url, pulled).update()
    if not (pulled / CONFIG).is_file():
        raise ConfigError(f"{folder} has no config.yaml, and neither has the run's bucket")
    return configuration.load(pulled / CONFIG)
