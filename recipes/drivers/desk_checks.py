"""What a desk can tell of the data, reward functions, teacher and judge of a run before anything is rented.

What is on this machine is looked at in `--dry-run`, too; servers are asked only by a launch. What cannot be
told from here is said. The table of what is looked at: docs/rewards.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from recipes.platforms import programs
from recipes.recipe.resolved import ResolvedRecipe
from recipes.records import manifest
from trainer.config import ConfigError, RunConfig
from trainer.system.web_request import send_request

SERVER_S = 5.0
"""Longest wait for a server from the desk."""
JUDGE_KEY, REWARD_TOKEN = "SPOTRL_JUDGE_KEY", "SPOTRL_REWARD_TOKEN"


def check_from_desk(run: ResolvedRecipe) -> list[str]:
    """What could not be told from the files of this machine, as lines. Raises ConfigError for what is
    wrong with them."""
    if run.recipe.kind != "train":
        return []
    config = run.recipe.config
    _look_at_teacher(config)
    _look_at_rows(config)
    if config.method == "grpo" and (config.rewards.own or config.turns.own):
        return _call_own_code(config, run.target)
    return []


def ask_servers(config: RunConfig, env: Mapping[str, str]) -> list[str]:
    """What the judge and the reward server do not say to the desk, as lines. Raises ConfigError where they
    refuse the run's key or model.

    A server may be one that only the machines reach: that it is not reached from here ends nothing.
    """
    rewards = config.rewards
    notes = []
    if rewards.judge_url:
        base = urlsplit(rewards.judge_url)
        path = base.path.rstrip("/").removesuffix("/chat/completions") + "/models"
        status, reply = _get(urlunsplit(base._replace(path=path)), env.get(JUDGE_KEY, ""))
        if status in (401, 403):
            raise ConfigError(f"rewards.judge_url answers {status}: export the endpoint's key as {JUDGE_KEY}")
        try:
            names = [str(model["id"]) for model in json.loads(reply)["data"]]
        except (ValueError, KeyError, TypeError):
            names = []
        if names and rewards.judge_model not in names:
            raise ConfigError(
                f"rewards.judge_model {rewards.judge_model} is none of those that rewards.judge_url serves:"
                f" {', '.join(names[:5])}"
            )
        if not names:
            notes.append(
                f"the judge did not name its models to this machine ({reply}): the run asks it first"
            )
    if rewards.remote_url:
        base = urlsplit(rewards.remote_url)
        status, reply = _get(urlunsplit(base._replace(path="/health", query="")), env.get(REWARD_TOKEN, ""))
        if status != 200:
            notes.append(f"the reward server did not answer this machine ({reply}): the run waits for it")
    return notes


def _get(url: str, key: str) -> tuple[int, str]:
    """Status and body of a page; 0 and why, where nothing answers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return 200, send_request(url, headers=headers, timeout_s=SERVER_S).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, f"status {error.code}"
    except (OSError, ValueError) as error:
        return 0, " ".join(str(getattr(error, "reason", error)).split())


def _look_at_teacher(config: RunConfig) -> None:
    """Raises ConfigError where teacher and model are here and do not share a vocabulary."""
    sizes = [_vocabulary(config.algorithm.teacher), _vocabulary(config.model.path)]
    if all(sizes) and sizes[0] != sizes[1]:
        raise ConfigError(
            f"algorithm.teacher has a vocabulary of {sizes[0]} tokens and model.path one of {sizes[1]}: a"
            " teacher judges the tokens of its student, so take one of the same family"
        )


def _vocabulary(path: str) -> int:
    """Tokens of a model's folder on this machine; 0 where that is not known."""
    try:
        described = json.loads((Path(path).expanduser() / "config.json").read_text()) if path else {}
        size = described.get("vocab_size") or described.get("text_config", {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return 0
    return size if isinstance(size, int) else 0


def _look_at_rows(config: RunConfig) -> None:
    """Raises ConfigError where a split of the prepared rows is missing or too small, no row is short enough,
    or the judge would never be asked."""
    path = config.data.path
    manifest = _manifest(path)
    if manifest is None:
        return
    rows = _split(manifest, path, config.data.split, "data.split")
    used = min(rows, config.data.max_samples or rows)
    if used < config.rows_per_step:
        key = "sft.batch_size" if config.method == "sft" else "rollout.prompts_per_step"
        raise ConfigError(
            f"{path} has {used} rows to train on, less than the {config.rows_per_step} of one"
            f" step: prepare more, or lower {key}"
        )
    if config.evaluation.every_steps:
        where = config.evaluation_path
        held_out = manifest if where == path else _manifest(where)
        if held_out is not None:
            _split(held_out, where, config.evaluation.split, "evaluation.split")

    counts = manifest.get("statistics") or {}
    lengths = (counts.get("tokens") or {}).get("percentiles") or {}
    limit = config.data.prompt_max_tokens
    known = [float(value) for value in lengths.values() if isinstance(value, int | float)]
    if known and min(known) > limit:
        raise ConfigError(
            f"the prompts of {path} have {min(known):.0f} tokens and more, and"
            f" data.prompt_max_tokens is {limit}: raise it, or prepare smaller images"
        )
    types = counts.get("answer_types") or {}
    judged = [name.strip() for name in config.rewards.judge_types.split(",")]
    if config.rewards.judge_url and types and not set(judged) & set(types):
        raise ConfigError(
            f"rewards.judge_types is {config.rewards.judge_types}, and the rows of {path} are"
            f" {', '.join(types)}: the judge would never be asked"
        )


def _manifest(path: str) -> dict[str, Any] | None:
    """The manifest of prepared rows on this machine; None where there is none."""
    file = Path(path).expanduser() / "manifest.json"
    if not path or "://" in path or not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_text())
        if isinstance(manifest["rows"], dict):
            return manifest
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{file} is damaged: prepare the dataset again")


def _split(manifest: dict[str, Any], path: str, split: str, key: str) -> int:
    """Rows of a split. Raises ConfigError where there are none."""
    rows = manifest["rows"].get(split)
    if not isinstance(rows, int) or rows < 1:
        raise ConfigError(f"{path} has no rows in {key} {split!r}: it has {', '.join(manifest['rows'])}")
    return rows


def _call_own_code(config: RunConfig, target: str) -> list[str]:
    """Calls reward functions and environment on one row in processes of their own. Raises ConfigError."""
    needed = [(f"{key} {path}", path.rpartition(":")[0]) for key, path in manifest.own_code(config)]
    needed.append((f"turns.python {config.turns.python}", config.turns.python))
    for named, path in needed:
        file = Path(path).expanduser()
        if target != "local" and file.is_absolute() and not file.exists():
            return [f"{named} is not on this machine: the node is the first to call it"]
    request = {
        "rewards": asdict(config.rewards),
        "turns": asdict(config.turns),
        "data": config.data.path,
        "split": config.data.split,
    }
    if "://" in config.data.path or "$" in config.data.path:
        request["data"] = ""
    known = (Path(f".venvs/{name}/bin/python") for name in ("cpu", "test", "desk"))
    python = next((str(path) for path in known if path.exists()), sys.executable)
    command = [python, "-m", "trainer.rewards.trial"]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=os.environ)
    try:
        trial = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        reason = programs.last_line(done.stderr, "nothing")
        return [f"{needed[0][0]} could not be called on this machine: {reason}"]
    if trial["refused"]:
        raise ConfigError(trial["refused"])
    return trial["notes"]
