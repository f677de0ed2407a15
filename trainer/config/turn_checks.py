"""What episodes of several turns cannot be combined with."""

from __future__ import annotations

from trainer.config.reward_checks import nearest_name
from trainer.config.schema import RunConfig
from trainer.config.turns import BUILT_IN


def refused_turns(c: RunConfig) -> list[tuple[bool, str]]:
    """Combinations that are not built, or mean nothing, and what to change."""
    environment = c.turns.environment
    needless = bool(c.turns.python) and not c.turns.own
    python = (
        needless,
        f"turns.python runs an environment of your own, and turns.environment is {environment}: leave"
        " turns.python empty",
    )
    if environment == "off":
        return [python]
    key = f"turns.environment is {environment}"
    unset = "set turns.environment to off"
    least, most = c.model.min_pixels, c.model.max_pixels
    path, _, name = environment.rpartition(":")
    named_file = path.endswith(".py") and name.isidentifier()
    return [
        python,
        (
            c.turns.own and not named_file,
            f"turns.environment is {environment!r}: {nearest_name(environment, BUILT_IN)}, or write"
            " path/to/file.py:NAME (a second try, a calculator and Python are among the examples)",
        ),
        (c.method != "grpo", f"{key} with method {c.method}, which samples no reply: {unset}"),
        (
            c.fleet.workers != "off",
            f"{key} with fleet.workers {c.fleet.workers}: workers sample one turn alone; set fleet.workers to"
            f" off, or {unset}",
        ),
        (
            c.teaches,
            f"{key} with algorithm.teacher, which was not tried together: leave algorithm.teacher empty, or"
            f" {unset}",
        ),
        (
            environment == "zoom" and not least <= c.turns.image_pixels <= most,
            f"turns.image_pixels {c.turns.image_pixels} is not between model.min_pixels {least} and"
            f" model.max_pixels {most}, so pictures would be resized once more: choose one that is",
        ),
    ]
