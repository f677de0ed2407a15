"""Commands of the engines: what `up`, `status`, `logs` and `down` run for each kind of target. Pure text, nothing runs."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class Commands:
    """How one launch is driven; each is a list of argument vectors, run in order."""

    up: list[list[str]]
    status: list[list[str]]
    logs: list[list[str]]
    down: list[list[str]]
    tool: str
    """Program that must be installed for it."""
    hint: str
    """How to install that program."""


def commands(record: RunRecord, files: list[str], env: dict[str, str]) -> Commands:
    """The commands for a launch. `files` are the rendered task files, main one first; `env` what is exported."""
    engine = record.target.partition("-")[0]
    match engine:
        case "local":
            return Commands(up=[["bash", files[0]]], status=[], logs=[["tail", "-n", "100", "-F", f"runs/{record.run_id}/launch.log"]],
                            down=[], tool="bash", hint="install bash")  # fmt: skip
    raise AssertionError(engine)
