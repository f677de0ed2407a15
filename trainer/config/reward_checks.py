"""What can be checked of the `rewards` section without files or servers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from urllib.parse import parse_qsl, urlsplit

from trainer.config.rewards import Rewards
from trainer.system.errors import ConfigError

JUDGED = ("text", "math", "number", "letter")
HARMLESS = ("api-version", "version", "model")
"""Parameters that an address may have: everything else may be a secret."""


def check_rewards(rewards: Rewards) -> None:
    """Raises ConfigError, with the change to make."""
    graders = {
        "function": rewards.function,
        "functions": rewards.functions,
        "remote_url": rewards.remote_url,
        "judge_url": rewards.judge_url,
    }
    both = [name for name, value in graders.items() if value]
    if len(both) > 1:
        raise ConfigError(
            f"rewards.{both[0]} and rewards.{both[1]} are both set: unset one (a server has its own judge)"
        )
    for name in [name.strip() for name in rewards.judge_types.split(",")]:
        if name not in JUDGED:
            raise ConfigError(f"rewards.judge_types: {name!r} is none of {', '.join(JUDGED)}")
    if rewards.judge_url and not rewards.judge_model:
        raise ConfigError(
            "rewards.judge_url is set and rewards.judge_model is empty: name the model it serves"
        )
    if rewards.judge_model and not rewards.judge_url:
        raise ConfigError(
            "rewards.judge_model is set and rewards.judge_url is empty, so no judge is asked: set"
            " rewards.judge_url"
        )
    _check_address("remote_url", rewards.remote_url, "SPOTRL_REWARD_TOKEN")
    _check_address("judge_url", rewards.judge_url, "SPOTRL_JUDGE_KEY")
    _check_functions(rewards)


def _check_address(key: str, url: str, variable: str) -> None:
    """An address stands in the run's configuration, its report and its logs."""
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"rewards.{key}: write http://HOST:PORT/... or https://...")
    asked = parse_qsl(parts.query, keep_blank_values=True)
    unknown = [name for name, _ in asked if name not in HARMLESS]
    if "@" in parts.netloc or unknown or parts.fragment:
        what = f"the parameter {unknown[0]!r}" if unknown else "a password" if "@" in parts.netloc else "a #"
        raise ConfigError(
            f"rewards.{key} has {what}, and addresses stand in config.yaml, reports and logs: leave it out,"
            f" and put a token into {variable}, which is sent as a header"
        )


def _check_functions(rewards: Rewards) -> None:
    names = set()
    for number, function in enumerate(rewards.functions):
        if ":" not in function.path:
            raise ConfigError(
                f"rewards.functions[{number}].path is {function.path!r}: write path/to/file.py:function"
            )
        if not function.metric.isidentifier():
            raise ConfigError(
                f"rewards.functions[{number}].name is {function.metric!r}: use letters, digits and _"
            )
        if function.metric in names:
            raise ConfigError(
                f"two of rewards.functions have the metric reward/function_{function.metric}: give one a name"
            )
        if not abs(function.weight) < 1e30:
            raise ConfigError(f"rewards.functions[{number}].weight is {function.weight}: use a finite number")
        names.add(function.metric)


def nearest_name(name: str, known: Sequence[str]) -> str:
    """What a person may have meant, for a message."""
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
