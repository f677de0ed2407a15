"""The yes that a person gives before a stranger's words are run."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from trainer.config import ConfigError
from trainer.system.terminal_text import terminal_line


class NotTrusted(ConfigError):
    """Words of somebody else that nobody said yes to."""


def ask_trust(origin: str, lines: Iterable[str], writer: str, what: str, trust: bool = False) -> None:
    """Shows what would be run, each line as one, and asks. Raises NotTrusted without a yes.

    writer: who wrote it. what: nothing of which is run without a yes. trust: the yes was given (`--trust`).
    """
    print(origin, file=sys.stderr)
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())]
        print(f"  {indent}{terminal_line(line)}", file=sys.stderr, flush=True)
    if trust:
        return
    question = f"{writer} wrote that. Run it with your keys? [y/N] "
    if not sys.stdin.isatty() or input(question).strip().lower() not in ("y", "yes"):
        raise NotTrusted(
            f"nothing of {what} was run: read the lines above, and give --trust if they are right"
        )
